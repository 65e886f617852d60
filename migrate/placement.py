"""Where the layers and KV heads of one model instance are: a value that changes by being replaced.

A *lane* is (layer, KV head): the KV of that head, with the query heads it serves. Weights are placed by layer, KV by
lane. Moving layers takes weights and KV along; moving heads takes the KV of some heads and leaves the weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

Lane = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Placement:
    """A map from each layer's weights, and each lane, to a worker id.

    Always true of a placement, however it was made:

    - each layer's weights are on one worker, and so is each lane;
    - a worker other than home has the weights of one contiguous run of layers, because every further run would cost
      each token two more trips over a link;
    - in each layer, a worker without its weights has one contiguous run of heads, which is a slice of q, k and v;
    - in each layer, one lane at least is on the worker with the weights, which thus never only waits for others.

    Raises:
        ValueError: one of these does not hold, or a size is below one.
    """

    home: str
    """Worker of the instance that owns it: it holds the embedding and the output head, and coordinates moves."""
    layer_workers: tuple[str, ...]
    """[layer] -> worker with the layer's weights."""
    lane_workers: tuple[tuple[str, ...], ...]
    """[layer][KV head] -> worker with the lane's KV."""
    version: int = 0
    """Grows by one with every move. Work that carries another version is stale."""

    @classmethod
    def at_home(cls, home: str, num_layers: int, num_kv_heads: int) -> Placement:
        """Everything on `home`, version 0."""
        return cls(home, (home,) * num_layers, ((home,) * num_kv_heads,) * num_layers)

    def __post_init__(self) -> None:
        if not self.layer_workers or len(self.lane_workers) != len(self.layer_workers):
            raise ValueError(
                f"{len(self.layer_workers)} layers have a worker for their weights and {len(self.lane_workers)} have "
                "lanes; both must be the number of layers, 1 or more"
            )
        widths = {len(lanes) for lanes in self.lane_workers}
        if len(widths) != 1 or 0 in widths:
            raise ValueError(f"layers have {sorted(widths)} KV heads; all must have the same number, 1 or more")
        for worker in set(self.layer_workers) - {self.home}:
            self._check_run("layers", worker, self.layers_on(worker), "move the layers between them too")
        for layer, (owner, lanes) in enumerate(zip(self.layer_workers, self.lane_workers, strict=True)):
            if owner not in lanes:
                raise ValueError(
                    f"layer {layer} has its weights on {owner!r} but no lane there: leave it a head, or move the layer"
                )
            for worker in set(lanes) - {owner}:
                self._check_run(
                    f"heads of layer {layer}", worker, self.local_heads(layer, worker), "move adjacent heads"
                )

    @property
    def num_layers(self) -> int:
        return len(self.layer_workers)

    @property
    def num_kv_heads(self) -> int:
        return len(self.lane_workers[0])

    @property
    def is_home(self) -> bool:
        """Whether everything is on the home worker."""
        return self.workers() == {self.home}

    @property
    def torn_layers(self) -> tuple[int, ...]:
        """Layers that are not at home and have KV heads on another worker. No engine runs them so: heads go from home
        to one worker."""
        alike = zip(self.layer_workers, self.lane_workers, strict=True)
        return tuple(n for n, (owner, lanes) in enumerate(alike) if owner != self.home and set(lanes) != {owner})

    def workers(self) -> frozenset[str]:
        """Ids of all workers that have a part of the instance; home is always one."""
        return frozenset({self.home}.union(self.layer_workers, *self.lane_workers))

    def layers_on(self, worker: str) -> tuple[int, ...]:
        """Layers whose weights are on `worker`, ascending."""
        return tuple(layer for layer, owner in enumerate(self.layer_workers) if owner == worker)

    def lanes_on(self, worker: str) -> tuple[Lane, ...]:
        """(layer, KV head) of the lanes whose KV is on `worker`, ascending."""
        return tuple((layer, head) for layer in range(self.num_layers) for head in self.local_heads(layer, worker))

    def local_heads(self, layer: int, worker: str) -> tuple[int, ...]:
        """KV heads of `layer` whose KV is on `worker`, ascending."""
        return tuple(head for head, owner in enumerate(self.lane_workers[layer]) if owner == worker)

    def with_layers_moved(self, first: int, count: int, to: str) -> Placement:
        """Move `count` layers from `first` on: their weights and all their lanes, wherever these are, go to `to`.

        Raises:
            ValueError: layers that do not exist, nothing to move, or a result that is no valid placement.
        """
        if count < 1 or first < 0 or first + count > self.num_layers:
            raise ValueError(
                f"layers from {first} on, {count} of them, were to move; the instance has layers 0 to "
                f"{self.num_layers - 1}, and at least one must move"
            )
        moved = range(first, first + count)
        layer_workers = tuple(to if layer in moved else owner for layer, owner in enumerate(self.layer_workers))
        lane_workers = tuple(
            (to,) * self.num_kv_heads if layer in moved else lanes for layer, lanes in enumerate(self.lane_workers)
        )
        return self._replaced(layer_workers, lane_workers, to)

    def with_heads_moved(self, layers: Iterable[int], heads: Sequence[int], to: str) -> Placement:
        """Move the lanes of the KV heads `heads` in each of `layers` to `to`; weights stay.

        `to` may be where the weights are: that is how heads come back.

        Args:
            layers: any layers, in any order.
            heads: a contiguous ascending run of KV heads, each with all of its query heads.

        Raises:
            ValueError: a model with one KV head, layers or heads that do not exist, heads that are not contiguous,
                nothing to move, or a result that is no valid placement.
        """
        if self.num_kv_heads == 1:
            raise ValueError(
                "the model has one KV head, and a KV head is not divided between workers; move layers instead"
            )
        chosen = frozenset(layers)
        if not chosen or not chosen <= set(range(self.num_layers)):
            raise ValueError(
                f"layers {sorted(chosen)} were to move heads; allowed are some of 0 to {self.num_layers - 1}"
            )
        if not heads or list(heads) != list(range(heads[0], heads[0] + len(heads))):
            raise ValueError(
                f"heads {list(heads)} were to move; allowed is a contiguous ascending run, at least one head"
            )
        if heads[0] < 0 or heads[-1] >= self.num_kv_heads:
            raise ValueError(f"heads {list(heads)} were to move; the model has KV heads 0 to {self.num_kv_heads - 1}")
        lane_workers = tuple(
            tuple(to if layer in chosen and head in heads else owner for head, owner in enumerate(lanes))
            for layer, lanes in enumerate(self.lane_workers)
        )
        return self._replaced(self.layer_workers, lane_workers, to)

    def with_all_home_from(self, workers: Collection[str]) -> Placement:
        """Whatever lies on one of `workers` goes home: they are lost.

        Raises:
            ValueError: nothing does.
        """

        def whose(owner: str) -> str:
            return self.home if owner in workers else owner

        lane_workers = tuple(tuple(whose(owner) for owner in lanes) for lanes in self.lane_workers)
        return self._replaced(tuple(whose(owner) for owner in self.layer_workers), lane_workers, self.home)

    def _replaced(
        self, layer_workers: tuple[str, ...], lane_workers: tuple[tuple[str, ...], ...], to: str
    ) -> Placement:
        if layer_workers == self.layer_workers and lane_workers == self.lane_workers:
            raise ValueError(f"all that was to move is on {to!r} already; a move must change the placement")
        return replace(self, layer_workers=layer_workers, lane_workers=lane_workers, version=self.version + 1)

    @staticmethod
    def _check_run(what: str, worker: str, indices: Sequence[int], advice: str) -> None:
        if indices[-1] - indices[0] + 1 != len(indices):
            raise ValueError(f"{worker!r} has the {what} {list(indices)}; allowed is one contiguous run: {advice}")
