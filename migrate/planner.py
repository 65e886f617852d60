"""Which modules should move now: a pure function of loads, placements and what is under way.

BanaServe's Algorithm 1 lowers the peak utilisation by moving layers or attention heads; its details are not known, so
the rule here is ours. docs/migration-planner.md has it in words and formulas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from migrate.candidates import head_moves, homeward_moves, layer_moves
from migrate.move_settings import MoveSettings
from migrate.moves import Move
from migrate.placement import Placement
from migrate.prediction import Prediction
from migrate.utilisation import Utilisation, utilisation
from migrate.verdict import SAME, Reason, Situation, Verdict, judge


@dataclass(frozen=True, slots=True)
class Plan:
    """What to begin now, and why nothing else."""

    moves: tuple[Move, ...]
    """To begin, all at once: no two have a worker or an instance in common, nor one with what is under way."""
    verdicts: tuple[Verdict, ...]
    """Of every candidate that was considered, those of `moves` among them."""
    utilisation: Mapping[str, Utilisation]
    """Of each worker, before `moves`."""
    mean: float
    """Mean U over all workers."""


def plan(situation: Situation, settings: MoveSettings) -> Plan:
    """Plan moves from loaded workers to less loaded ones, and of hosted modules home.

    The most loaded worker comes first, and its first choice is the least loaded one. Where nothing is accepted the
    next pair has its turn, so that a worker that cannot be helped keeps no other from being helped.
    """
    loads = {worker: utilisation(situation.fleet, worker, settings) for worker in sorted(situation.fleet.figures)}
    mean = sum(load.weighted for load in loads.values()) / max(1, len(loads))
    verdicts: list[Verdict] = []
    by_load = sorted(loads, key=lambda worker: loads[worker].weighted)
    for source in reversed(by_load):
        for destination in by_load:
            if _in_a_move(situation, source, destination):
                continue
            candidates = _candidates(situation, loads, mean, source, destination, settings)
            judged = _choose_homeward_first([judge(situation, settings, move) for move in candidates], settings)
            verdicts += judged
            situation = _begun(situation, judged)
    for instance, placement in sorted(situation.fleet.placements.items()):
        for host in sorted(placement.workers() - {instance}):
            for part in homeward_moves(placement, host):
                judged = list(_send_home(situation, settings, part))
                verdicts += judged
                situation = _begun(situation, judged)
    accepted = tuple(verdict.move for verdict in verdicts if verdict.accepted)
    return Plan(accepted, tuple(verdicts), loads, mean)


def choose(verdicts: Sequence[Verdict], settings: MoveSettings) -> list[Verdict]:
    """Leave at most one of the verdicts on moves from one worker to another accepted.

    Those that make the destination the new peak fall out. The lowest peak is the best; of equals one that goes home,
    then one with fewer bytes. It stays accepted if it lowers the peak by `min_gain`, and what it gains until the
    horizon is worth its cost.
    """
    judged = [_unless_new_peak(verdict) for verdict in verdicts]
    kept = [(verdict, verdict.prediction) for verdict in judged if verdict.accepted and verdict.prediction is not None]
    if not kept:
        return judged
    best, predicted = min(kept, key=lambda item: _rank(*item))
    for index, verdict in enumerate(judged):
        if verdict is best:
            judged[index] = _if_worth_it(verdict, predicted, settings)
        elif verdict.accepted:
            judged[index] = verdict.refused(
                Reason.NOT_BEST, f"{best.move} leaves a peak of {predicted.peak_after:.3f}, with fewer bytes if equal"
            )
    return judged


def _choose_homeward_first(verdicts: Sequence[Verdict], settings: MoveSettings) -> list[Verdict]:
    """`choose`, but if something of the destination's own instance can go home, and that is worth its cost, then the
    best of this (ours): while two workers run layers of each other's instance, every token of either crosses the link
    and waits for the other's prompts."""
    homeward = [verdict for verdict in verdicts if verdict.move.destination == verdict.move.instance]
    first = choose(homeward, settings)
    best = next((verdict for verdict in first if verdict.accepted), None)
    if best is None:
        return choose(verdicts, settings)
    others = (verdict for verdict in verdicts if verdict.move.destination != verdict.move.instance)
    detail = f"{best.move} comes first, since that goes home"
    return first + [verdict.refused(Reason.NOT_BEST, detail) if verdict.accepted else verdict for verdict in others]


def _candidates(
    situation: Situation,
    loads: Mapping[str, Utilisation],
    mean: float,
    source: str,
    destination: str,
    settings: MoveSettings,
) -> Iterator[Move]:
    """Layers when the gap is wide, heads when it is narrow, both when it is wide and memory alone is the trouble,
    nothing when it is small or the source has enough of what the two differ in.

    No layers of the source's own as long as it has some of the destination's: those go home first, or every token of
    either would wait for the other's prompts. Nor heads where the two share the layers already: what is left of a gap
    then is not worth two more trips in each layer of steps that travel anyway."""
    fleet, high, low = situation.fleet, loads[source], loads[destination]
    if high.scarcest < settings.busy_from:
        return iter(())
    gap = min(max(high.weighted - mean, mean - low.weighted), high.weighted - low.weighted)
    wide = gap > settings.delta_layers
    memory_alone = settings.compute_weight * (high.compute - low.compute) <= settings.delta_heads
    # Compute is alike then, and where memory is not scarce either a move would gain nothing.
    if gap <= settings.delta_heads or (memory_alone and high.memory < settings.busy_from):
        return iter(())
    layers: Iterator[Move] = layer_moves(fleet, source, destination)
    if fleet.part(destination, source).layers:
        layers = (move for move in layers if move.instance != source)
    if wide and not memory_alone:
        return layers
    if wide:
        return chain(head_moves(fleet, source, destination), layers)
    if not memory_alone and fleet.part(source, destination).layers:
        return iter(())
    return head_moves(fleet, source, destination)


def _send_home(situation: Situation, settings: MoveSettings, part: Sequence[Move]) -> Iterator[Verdict]:
    """Judge sending one hosted part home, all of it at first, then as much as can be moved."""
    host, destination, instance = part[0].source, part[0].destination, part[0].instance
    fleet = situation.fleet
    if _in_a_move(situation, host, destination) or not fleet.figures.keys() >= {host, destination, instance}:
        return
    later = fleet.with_placement(without(fleet.placements[instance], host))
    loads = {worker: utilisation(later, worker, settings) for worker in fleet.figures}
    after = {worker: load.weighted for worker, load in loads.items()}
    allowed = max(after[host], min(after.values()) + settings.delta_home)
    has_enough = loads[destination].scarcest < settings.busy_from - settings.delta_layers
    for move in part:
        verdict = judge(situation, settings, move)
        if not verdict.accepted:
            yield verdict
            continue
        if after[destination] > allowed + SAME and not has_enough:
            yield verdict.refused(
                Reason.HOME_LOADED,
                f"with all that {host!r} hosts of {instance!r}, {destination!r} would have a U of "
                f"{after[destination]:.3f}; allowed are {allowed:.3f}",
            )
        else:
            yield replace(verdict, detail=f"{destination!r} has room for its own: a U of {after[destination]:.3f}")
        return


def without(placement: Placement, host: str) -> Placement:
    """The placement with nothing on `host`: its layers at home, its heads where their weights are."""
    layers = tuple(placement.home if owner == host else owner for owner in placement.layer_workers)
    lanes = tuple(
        tuple(owner if worker == host else worker for worker in workers)
        for owner, workers in zip(layers, placement.lane_workers, strict=True)
    )
    return replace(placement, layer_workers=layers, lane_workers=lanes)


def _unless_new_peak(verdict: Verdict) -> Verdict:
    if not verdict.accepted or verdict.prediction is None:
        return verdict
    source = verdict.prediction.after[verdict.move.source].weighted
    destination = verdict.prediction.after[verdict.move.destination].weighted
    if destination <= source + SAME:
        return verdict
    return verdict.refused(
        Reason.NEW_PEAK,
        f"{verdict.move.destination!r} would have a U of {destination:.3f}, above the {source:.3f} of "
        f"{verdict.move.source!r}",
    )


def _rank(verdict: Verdict, predicted: Prediction) -> tuple[int, bool, int]:
    return (
        round(predicted.peak_after / SAME),
        verdict.move.destination != verdict.move.instance,
        predicted.transfer_bytes,
    )


def _if_worth_it(verdict: Verdict, predicted: Prediction, settings: MoveSettings) -> Verdict:
    # While copies wait nothing is gained yet, and nothing lost either.
    moving_s = predicted.transfer_s - predicted.waiting_s
    gain = predicted.peak_before - predicted.peak_after
    gain_s = gain * (settings.horizon_s - predicted.waiting_s)
    cost_s = settings.rho * moving_s
    detail = (
        f"the peak falls from {predicted.peak_before:.3f} to {predicted.peak_after:.3f}, worth {gain_s:.3g} s; "
        f"{moving_s:.3g} s of moving count as {cost_s:.3g} s, after {predicted.waiting_s:.3g} s of waiting"
    )
    if gain < settings.min_gain - SAME:
        return verdict.refused(Reason.LITTLE_GAIN, f"{detail}; it must fall by {settings.min_gain:g} at least")
    return replace(verdict, reason=Reason.ACCEPTED if gain_s > cost_s else Reason.LITTLE_GAIN, detail=detail)


def _in_a_move(situation: Situation, *workers: str) -> bool:
    taken = {end for move in situation.under_way for end in (move.source, move.destination)}
    return not (taken | situation.busy.keys()).isdisjoint(workers)


def _begun(situation: Situation, judged: Sequence[Verdict]) -> Situation:
    accepted = tuple(verdict.move for verdict in judged if verdict.accepted)
    return replace(situation, under_way=situation.under_way + accepted)
