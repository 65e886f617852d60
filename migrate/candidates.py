"""Which moves between two workers are worth a prediction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final, TypeVar

from migrate.fleet import Fleet
from migrate.moves import HeadMove, LayerMove, Move
from migrate.placement import Placement

M = TypeVar("M", LayerMove, HeadMove)

MAX_SIZES: Final = 8
"""How many numbers of heads, and of layers to move them in, are tried: 40 layers with 40 heads would otherwise be 1,560
candidates."""


def layer_moves(fleet: Fleet, source: str, destination: str) -> Iterator[LayerMove]:
    """Runs of layers that `source` has, its own and hosted, of every length that leaves the placement valid.

    Each run is at an end of those that `source` has, and beside those of the instance that `destination` has already.
    Of two ends it is the one of which `destination` has more weights, or else the last layers: otherwise the two are
    the same. Layers with heads on a third worker are left out: they would have to come from there. Home keeps one
    layer at least.
    """
    present = fleet.layers_with_weights(destination)
    for instance, placement in sorted(fleet.placements.items()):
        ends = {source, destination}
        movable = [layer for layer in placement.layers_on(source) if ends.issuperset(placement.lane_workers[layer])]
        for run in _runs(movable):
            for count in range(1, len(run) + 1):
                moves = [LayerMove(instance, first, count, source, destination) for first in _starts(run, count)]
                moves.sort(key=lambda move: len(present.intersection(move.layers)), reverse=True)
                yield from _first_valid(moves, placement)


def head_moves(fleet: Fleet, source: str, destination: str) -> Iterator[HeadMove]:
    """Runs of KV heads that `source` has, in its own layers or in layers of `destination`, in sets of layers.

    Heads leave the worker with their weights, or come back to it, and that worker is their home: one that hosts layers
    runs them whole. A set is of layers whose heads lie alike; of those
    the last ones are taken, since it makes no difference which. A model with one KV head has one candidate, which is
    refused, so that the plan says why there are no others.
    """
    for instance, placement in sorted(fleet.placements.items()):
        alike: defaultdict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(list)
        for layer, where in enumerate(zip(placement.layer_workers, placement.lane_workers, strict=True)):
            alike[where].append(layer)
        for (owner, lanes), layers in alike.items():
            if owner not in (source, destination) or owner != placement.home:
                continue
            held = [head for head, worker in enumerate(lanes) if worker == source]
            if placement.num_kv_heads == 1:
                if held:
                    yield HeadMove(instance, tuple(layers), (0,), source, destination)
                continue
            for num_layers in sizes(len(layers)):
                for run in _runs(held):
                    for count in sizes(len(run)):
                        moves = (
                            HeadMove(instance, tuple(layers[-num_layers:]), heads, source, destination)
                            for first in _starts(run, count)
                            if (heads := tuple(range(first, first + count)))
                        )
                        yield from _first_valid(moves, placement)


def homeward_moves(placement: Placement, host: str) -> Iterator[Sequence[Move]]:
    """What `host` has of an instance that is at home elsewhere: for each part, moves that send it home, all of it first
    and then less. Layers go to the home worker, heads to the worker with their weights."""
    home = placement.home
    for run in _runs(placement.layers_on(host)):
        yield [LayerMove(home, run[-1] + 1 - count, count, host, home) for count in reversed(sizes(len(run)))]
    alike: defaultdict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for layer, owner in enumerate(placement.layer_workers):
        held = placement.local_heads(layer, host)
        if held and owner != host:
            alike[owner, held].append(layer)
    for (owner, held), layers in alike.items():
        yield [HeadMove(home, tuple(layers[-count:]), held, host, owner) for count in reversed(sizes(len(layers)))]


def sizes(most: int) -> list[int]:
    """At most `MAX_SIZES` sizes from 1 to `most`, evenly apart, ascending, `most` among them."""
    return sorted({-(-most * part // MAX_SIZES) for part in range(1, MAX_SIZES + 1)})


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Ascending numbers, divided where one is missing."""
    return [[number for _, number in run] for _, run in groupby(enumerate(numbers), key=lambda item: item[1] - item[0])]


def _starts(run: Sequence[int], count: int) -> list[int]:
    """Where `count` numbers at the end, or at the start, of a run begin."""
    return sorted({run[-1] + 1 - count, run[0]}, reverse=True)


def _first_valid(moves: Iterable[M], placement: Placement) -> Iterator[M]:
    for move in moves:
        try:
            move.after(placement)
        except ValueError:
            continue
        yield move
        return
