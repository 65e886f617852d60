"""Workers, instances and where these lie, and what that makes of each worker's memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from migrate.cost_model import CostModel, MeasuredTimes
from migrate.moves import Move
from migrate.placement import Placement
from migrate.worker_figures import WorkerFigures


@dataclass(frozen=True, slots=True)
class Part:
    """What one worker has of one instance."""

    layers: frozenset[int] = frozenset()
    """Layers whose weights are here."""
    lanes: int = 0
    prefill_layers: float = 0.0
    """Prefill work done here, in whole layers: a layer without heads, or heads without a layer, are fractions."""
    decode_layers: float = 0.0
    """The same of decode work."""


NOTHING = Part()


def parts_of(placement: Placement, times: MeasuredTimes) -> dict[str, Part]:
    """What each worker has of an instance. Over all workers, `prefill_layers` and `decode_layers` are all layers."""
    layers: dict[str, set[int]] = {worker: set() for worker in placement.workers()}
    lanes: Counter[str] = Counter()
    for layer, (owner, heads) in enumerate(zip(placement.layer_workers, placement.lane_workers, strict=True)):
        layers[owner].add(layer)
        lanes.update(heads)

    def work(worker: str, attention_share: float) -> float:
        attention = lanes[worker] / placement.num_kv_heads
        return (1 - attention_share) * len(layers[worker]) + attention_share * attention

    return {
        worker: Part(
            frozenset(layers[worker]),
            lanes[worker],
            work(worker, times.prefill_attention_share),
            work(worker, times.decode_attention_share),
        )
        for worker in layers
    }


@dataclass(frozen=True, slots=True)
class Fleet:
    """All that is known of the workers: a value, from which predictions are made of others that moves lead to.

    Make it with `Fleet.of`. A placement may name a worker without figures, one that has died for instance: what lies
    there counts for nobody.
    """

    figures: Mapping[str, WorkerFigures]
    """By worker."""
    placements: Mapping[str, Placement]
    """By instance, that is, by its home worker's id."""
    model: CostModel
    parts: Mapping[str, Mapping[str, Part]]
    """By instance, then by worker."""

    @classmethod
    def of(cls, figures: Iterable[WorkerFigures], placements: Iterable[Placement], model: CostModel) -> Fleet:
        """Put together what each worker measured and where each instance lies.

        Raises:
            ValueError: two of one worker or instance, a worker whose instance has no placement, or a placement of
                another size than the model.
        """
        by_worker: dict[str, WorkerFigures] = {}
        for item in figures:
            if item.worker in by_worker:
                raise ValueError(f"figures of worker {item.worker!r} are given twice; give them once")
            by_worker[item.worker] = item
        by_home: dict[str, Placement] = {}
        for placement in placements:
            if placement.home in by_home:
                raise ValueError(f"placements of instance {placement.home!r} are given twice; give the latest")
            if (placement.num_layers, placement.num_kv_heads) != (model.sizes.num_layers, model.sizes.num_kv_heads):
                raise ValueError(
                    f"the placement of {placement.home!r} has {placement.num_layers} layers of "
                    f"{placement.num_kv_heads} KV heads, the model {model.sizes.num_layers} of "
                    f"{model.sizes.num_kv_heads}; they must be the same"
                )
            by_home[placement.home] = placement
        missing = sorted(by_worker.keys() - by_home.keys())
        if missing:
            raise ValueError(f"instances {missing} have no placement; give Placement.at_home where nothing has moved")
        parts = {home: parts_of(placement, model.times) for home, placement in by_home.items()}
        return cls(by_worker, by_home, model, parts)

    def moved(self, move: Move) -> Fleet:
        """The fleet once `move` is done, with the same traffic.

        Raises:
            ValueError: see `after` of the move.
        """
        return self.with_placement(move.after(self.placements[move.instance]))

    def with_placement(self, placement: Placement) -> Fleet:
        """The fleet with one instance placed differently."""
        return replace(
            self,
            placements={**self.placements, placement.home: placement},
            parts={**self.parts, placement.home: parts_of(placement, self.model.times)},
        )

    def part(self, instance: str, worker: str) -> Part:
        return self.parts[instance].get(worker, NOTHING)

    def stage_workers(self, instance: str) -> int:
        """On how many workers layers of the instance are: so many groups of requests are decoded in turn."""
        return sum(1 for part in self.parts[instance].values() if part.layers)

    def layers_with_weights(self, worker: str) -> frozenset[int]:
        """Layers whose weights `worker` has. Instances of one model share them."""
        return frozenset().union(*(self.part(instance, worker).layers for instance in self.parts))

    def kv_bytes(self, worker: str) -> int:
        """Memory of `worker` that is not weights. Below 0 where the weights do not fit."""
        weights = len(self.layers_with_weights(worker)) * self.model.sizes.layer_weight_bytes
        return self.figures[worker].memory_bytes - weights

    def live_bytes(self, worker: str) -> int:
        """KV of live requests on `worker`, its own and hosted."""
        pages = sum(item.live_blocks * self.part(item.worker, worker).lanes for item in self.figures.values())
        return pages * self.model.sizes.page_bytes

    def free_bytes(self, worker: str, headroom: float) -> int:
        """What `worker` could give to lanes and weights that come. Below 0 where it has less than it should keep.

        It keeps what it has granted to hosted lanes, and `headroom` times what its own live requests have.
        """
        pages = 0.0
        for item in self.figures.values():
            blocks = headroom * item.live_blocks if item.worker == worker else item.total_blocks
            pages += blocks * self.part(item.worker, worker).lanes
        return self.kv_bytes(worker) - int(pages * self.model.sizes.page_bytes)
