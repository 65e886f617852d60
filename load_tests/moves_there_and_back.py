"""Which moves are ordered, one after the other, so that workers host for each other again and again.

In each round every instance, or each that is to, sends something to the next worker, the last one's to the first, and
when all have, each takes it back. What is sent differs from round to round: layers or KV heads, few or many, from
either end.

Pure: no clock, no I/O.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from migrate.moves import HeadMove, LayerMove, Move

_SHARES = (0.0, 0.25, 0.5, 0.75)
"""Of an instance's layers; at least one goes, and at least one stays."""


@dataclass(frozen=True, slots=True)
class Movable:
    """What may move. Without `instances` something of each worker's, and up to `most_layers` layers of an instance.

    Raises:
        ValueError: fewer than two workers or layers, no instance that is a worker's, or no layer that may move.
    """

    workers: tuple[str, ...]
    num_layers: int
    num_kv_heads: int
    """A model with one, which cannot be split, moves layers only."""
    instances: tuple[str, ...] | None = None
    most_layers: int | None = None

    def __post_init__(self) -> None:
        if len(self.workers) < 2 or self.num_layers < 2:
            raise ValueError(
                f"{len(self.workers)} workers and {self.num_layers} layers; at least two of each are needed to move any"
            )
        if self.instances is not None and not (self.instances and set(self.instances) <= set(self.workers)):
            raise ValueError(f"of {list(self.instances)} something is to move; the workers are {list(self.workers)}")
        if self.most_layers is not None and self.most_layers < 1:
            raise ValueError(f"up to {self.most_layers} layers are to move; give at least 1")

    @property
    def ends(self) -> list[tuple[str, str]]:
        """Home and host of each that moves something."""
        ends = zip(self.workers, [*self.workers[1:], self.workers[0]], strict=True)
        return [(home, host) for home, host in ends if self.instances is None or home in self.instances]


def rounds(movable: Movable) -> Iterator[tuple[list[Move], list[Move]]]:
    """Round after round: the moves out, and the moves back."""
    for number in itertools.count():
        yield (
            [_move(number + place, home, home, host, movable) for place, (home, host) in enumerate(movable.ends)],
            [_move(number + place, home, host, home, movable) for place, (home, host) in enumerate(movable.ends)],
        )


def there_and_back(movable: Movable, count: int) -> list[Move]:
    """`count` moves in order, after which everything is at home. In the last round fewer instances may move.

    Raises:
        ValueError: a count that is odd or not above 0.
    """
    if count < 2 or count % 2:
        raise ValueError(f"{count} moves there and back; give an even number, at least 2")
    moves: list[Move] = []
    for out, back in rounds(movable):
        left = min(len(out), (count - len(moves)) // 2)
        moves += out[:left] + back[:left]
        if len(moves) == count:
            return moves
    raise AssertionError("rounds do not end")


def _move(number: int, instance: str, source: str, destination: str, movable: Movable) -> Move:
    num_layers, num_kv_heads = movable.num_layers, movable.num_kv_heads
    size, is_low_end = number // 2 % len(_SHARES), number // 2 % 3 != 1
    count = min(num_layers - 1, movable.most_layers or num_layers, max(1, round(_SHARES[size] * num_layers)))
    first = 0 if is_low_end else num_layers - count
    if number % 2 == 0 or num_kv_heads == 1:
        return LayerMove(instance, first, count, source, destination)
    num_heads = 1 + number // 2 % (num_kv_heads - 1)
    first_head = 0 if is_low_end else num_kv_heads - num_heads
    heads = tuple(range(first_head, first_head + num_heads))
    return HeadMove(instance, tuple(range(first, first + count)), heads, source, destination)
