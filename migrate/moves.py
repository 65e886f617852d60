"""What can move between two workers: a run of an instance's layers, or some KV heads of some layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from migrate.placement import Placement


@dataclass(frozen=True, slots=True)
class LayerMove:
    """Move `count` layers of an instance from `first_layer` on, weights and KV, from one worker to another.

    Raises:
        ValueError: no layer, a negative one, or both ends the same worker.
    """

    instance: str
    """Worker id of the instance's home."""
    first_layer: int
    count: int
    source: str
    destination: str

    def __post_init__(self) -> None:
        _check_ends(self.source, self.destination)
        if self.first_layer < 0 or self.count < 1:
            raise ValueError(
                f"layers from {self.first_layer} on, {self.count} of them, were to move; give a first layer of at "
                "least 0 and at least one layer"
            )

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.count)

    def after(self, placement: Placement) -> Placement:
        """The instance's placement once this is done. Heads of these layers that lie elsewhere come along.

        Raises:
            ValueError: another instance's placement, layers that do not exist or are not on `source`, none left at
                home, or a result that is no valid placement.
        """
        _check_instance(self.instance, placement)
        _check_layers(self.layers, placement)
        elsewhere = [layer for layer in self.layers if placement.layer_workers[layer] != self.source]
        if elsewhere:
            raise ValueError(
                f"layers {elsewhere} of {self.instance!r} are not on {self.source!r}; it has "
                f"{list(placement.layers_on(self.source))}: move some of these"
            )
        after = placement.with_layers_moved(self.first_layer, self.count, self.destination)
        if not after.layers_on(placement.home):
            raise ValueError(f"no layer of {self.instance!r} would be left at home; leave it one at least")
        return after

    def __str__(self) -> str:
        last = self.layers[-1]
        what = f"layer {last}" if self.count == 1 else f"layers {self.first_layer} to {last}"
        return f"{what} of {self.instance!r} from {self.source!r} to {self.destination!r}"


@dataclass(frozen=True, slots=True)
class HeadMove:
    """Move the KV of a run of KV heads, with their query heads, in each of some layers. Weights stay.

    Raises:
        ValueError: no layer or no head, layers or heads that are not in ascending order, heads that are not a
            contiguous run, or both ends the same worker.
    """

    instance: str
    layers: tuple[int, ...]
    """Ascending."""
    heads: tuple[int, ...]
    """Contiguous and ascending."""
    source: str
    destination: str

    def __post_init__(self) -> None:
        _check_ends(self.source, self.destination)
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ValueError(f"heads of the layers {list(self.layers)} were to move; give at least one, ascending")
        if not self.heads or self.heads != tuple(range(self.heads[0], self.heads[0] + len(self.heads))):
            raise ValueError(f"heads {list(self.heads)} were to move; give a contiguous ascending run, at least one")

    def after(self, placement: Placement) -> Placement:
        """The instance's placement once this is done.

        Raises:
            ValueError: another instance's placement, a model with one KV head, lanes that do not exist or are not on
                `source`, or a result that is no valid placement.
        """
        _check_instance(self.instance, placement)
        _check_layers(self.layers, placement)
        # Checks the heads, before they are looked for at the source.
        after = placement.with_heads_moved(self.layers, self.heads, self.destination)
        for layer in self.layers:
            held = placement.local_heads(layer, self.source)
            if not set(self.heads) <= set(held):
                raise ValueError(
                    f"heads {list(self.heads)} of layer {layer} of {self.instance!r} are not all on {self.source!r}; "
                    f"it has {list(held)}: move some of these"
                )
        return after

    def __str__(self) -> str:
        heads = f"head {self.heads[0]}" if len(self.heads) == 1 else f"heads {self.heads[0]} to {self.heads[-1]}"
        return (
            f"{heads} of {len(self.layers)} layers from {self.layers[0]} on of {self.instance!r} from "
            f"{self.source!r} to {self.destination!r}"
        )


Move = LayerMove | HeadMove


@dataclass(frozen=True, slots=True)
class EndedMove:
    """A move that is over, done or given up."""

    move: Move
    ended_s: float
    """On the clock that `now_s` of the planner is read from."""


def share_a_module(one: Move, other: Move) -> bool:
    """Whether some lane, or the weights that it needs, would be moved by both."""
    if one.instance != other.instance or not set(one.layers) & set(other.layers):
        return False
    if isinstance(one, HeadMove) and isinstance(other, HeadMove):
        return bool(set(one.heads) & set(other.heads))
    return True


def share_a_worker(one: Move, other: Move) -> str | None:
    """A worker that is an end of both."""
    return min({one.source, one.destination} & {other.source, other.destination}, default=None)


def _check_ends(source: str, destination: str) -> None:
    if source == destination:
        raise ValueError(f"source and destination are both {source!r}; they must be two workers")


def _check_instance(instance: str, placement: Placement) -> None:
    if placement.home != instance:
        raise ValueError(f"a move of {instance!r} was applied to the placement of {placement.home!r}")


def _check_layers(layers: Iterable[int], placement: Placement) -> None:
    unknown = [layer for layer in layers if layer >= placement.num_layers]
    if unknown:
        raise ValueError(f"layers {unknown} do not exist; the instance has layers 0 to {placement.num_layers - 1}")
