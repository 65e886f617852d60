"""Which moves are ordered, one after the other, so that workers host for each other again and again.

In each round every instance sends something to the next worker, the last one's to the first, and when all have, each
takes it back. What is sent differs from round to round: layers or KV heads, few or many, from either end.

Pure: no clock, no I/O.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from migrate.moves import HeadMove, LayerMove, Move

_SHARES = (0.0, 0.25, 0.5, 0.75)
"""Of an instance's layers; at least one goes, and at least one stays."""


def rounds(workers: Sequence[str], num_layers: int, num_kv_heads: int) -> Iterator[tuple[list[Move], list[Move]]]:
    """Round after round: the moves out, and the moves back. A model with one KV head, which cannot be split, moves
    layers only.

    Raises:
        ValueError: fewer than two workers, or fewer than two layers.
    """
    if len(workers) < 2 or num_layers < 2:
        raise ValueError(f"{len(workers)} workers and {num_layers} layers; at least two of each are needed to move any")
    ends = list(zip(workers, [*workers[1:], workers[0]], strict=True))
    for number in itertools.count():
        yield (
            [
                _move(number + place, home, home, host, num_layers, num_kv_heads)
                for place, (home, host) in enumerate(ends)
            ],
            [
                _move(number + place, home, host, home, num_layers, num_kv_heads)
                for place, (home, host) in enumerate(ends)
            ],
        )


def there_and_back(workers: Sequence[str], num_layers: int, num_kv_heads: int, count: int) -> list[Move]:
    """`count` moves in order, after which everything is at home. In the last round fewer instances may move.

    Raises:
        ValueError: a count that is odd or not above 0, or as `rounds`.
    """
    if count < 2 or count % 2:
        raise ValueError(f"{count} moves there and back; give an even number, at least 2")
    moves: list[Move] = []
    for out, back in rounds(workers, num_layers, num_kv_heads):
        left = min(len(out), (count - len(moves)) // 2)
        moves += out[:left] + back[:left]
        if len(moves) == count:
            return moves
    raise AssertionError("rounds do not end")


def _move(number: int, instance: str, source: str, destination: str, num_layers: int, num_kv_heads: int) -> Move:
    size, is_low_end = number // 2 % len(_SHARES), number // 2 % 3 != 1
    count = min(num_layers - 1, max(1, round(_SHARES[size] * num_layers)))
    first = 0 if is_low_end else num_layers - count
    if number % 2 == 0 or num_kv_heads == 1:
        return LayerMove(instance, first, count, source, destination)
    num_heads = 1 + number // 2 % (num_kv_heads - 1)
    first_head = 0 if is_low_end else num_kv_heads - num_heads
    heads = tuple(range(first_head, first_head + num_heads))
    return HeadMove(instance, tuple(range(first, first + count)), heads, source, destination)
