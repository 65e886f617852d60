"""Whether a move may begin, and why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from migrate.fleet import Fleet
from migrate.inter_token import undisturbed_s
from migrate.move_settings import MoveSettings
from migrate.moves import EndedMove, HeadMove, Move, share_a_module, share_a_worker
from migrate.offered_work import offered, reached_rows
from migrate.prediction import Prediction, predict

SAME: Final = 1e-9
"""Predicted figures this close, relative to 1, are equal: they are sums taken in different orders."""


class Reason(StrEnum):
    """Why a move was accepted or refused."""

    ACCEPTED = "accepted"
    UNKNOWN_WORKER = "unknown worker"
    SILENT = "does not answer"
    ONE_KV_HEAD = "one KV head"
    INVALID = "invalid"
    UNABLE = "workers cannot"
    IN_FLIGHT = "in flight"
    BUSY = "busy"
    COOLING = "cooling down"
    UNSETTLED = "not settled"
    NO_ROOM = "no room"
    OVER_BUDGET = "over the latency budget"
    NEW_PEAK = "new peak"
    SLOW_TOKENS = "inter-token latency"
    NOT_BEST = "not the best"
    LITTLE_GAIN = "too little gain"
    HOME_LOADED = "home is loaded"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one candidate."""

    move: Move
    reason: Reason
    detail: str
    """The reason in words, with the figures."""
    prediction: Prediction | None
    """None where the move is not possible in the first place."""

    @property
    def accepted(self) -> bool:
        return self.reason is Reason.ACCEPTED

    def refused(self, reason: Reason, detail: str) -> Verdict:
        return replace(self, reason=reason, detail=detail)


@dataclass(frozen=True, slots=True)
class Abilities:
    """Which moves the workers can make."""

    heads: bool = True
    onward: bool = True
    """From one host to another."""

    def objection(self, move: Move) -> str | None:
        """Why they cannot make `move`, and what to do; None where they can."""
        if isinstance(move, HeadMove) and not self.heads:
            return "workers move whole layers only; move layers"
        if move.instance not in (move.source, move.destination) and not self.onward:
            return "workers move what is hosted to its home only; move it there first"
        return None


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a plan is made from, beside the settings."""

    fleet: Fleet
    under_way: tuple[Move, ...] = ()
    """Moves that have begun and not ended. The fleet's placements do not have them yet."""
    recent: tuple[EndedMove, ...] = ()
    """Moves that have ended, done or given up: those of the last `cool_down_s` and the last `window_s` at least."""
    now_s: float = 0.0
    busy: Mapping[str, str] = field(default_factory=dict)
    """Workers whose instance is being moved or repaired, whoever wanted that; with what it is, in words."""
    abilities: Abilities = Abilities()
    silent: frozenset[str] = frozenset()
    """Workers that are alive and have not answered. The fleet has them as they were, or not at all."""


def judge_order(situation: Situation, settings: MoveSettings, move: Move) -> Verdict:
    """Whether `move` can be made at all: what a person who orders it is told. Whether it pays is not asked."""
    fleet = situation.fleet
    problem = _unknown(situation, move) or _in_the_way(situation, move) or _impossible(situation, move)
    if problem is not None:
        return Verdict(move, *problem, prediction=None)
    predicted = predict(fleet, move, settings)
    verdict = Verdict(move, Reason.ACCEPTED, f"{move} can be made", predicted)
    if predicted.needed_bytes > predicted.free_bytes:
        return verdict.refused(
            Reason.NO_ROOM,
            f"{move.destination!r} has {predicted.free_bytes} bytes free and {predicted.needed_bytes} are needed for "
            f"{predicted.weight_bytes} bytes of weights and {settings.memory_headroom:g} times the live blocks; move "
            "less, or elsewhere",
        )
    return verdict


def judge(situation: Situation, settings: MoveSettings, move: Move) -> Verdict:
    """Whether `move` can be made now without harm: in time, and without slowing anybody down too much."""
    verdict = judge_order(situation, settings, move)
    predicted = verdict.prediction
    if not verdict.accepted or predicted is None:
        return verdict
    for ended in situation.recent:
        since_s = situation.now_s - ended.ended_s
        if since_s < settings.cool_down_s and share_a_module(move, ended.move):
            return verdict.refused(
                Reason.COOLING,
                f"{ended.move} ended {since_s:.3g} s ago; the next may begin {settings.cool_down_s:g} s after",
            )
        if since_s < settings.window_s and share_a_worker(move, ended.move):
            return verdict.refused(
                Reason.UNSETTLED,
                f"{ended.move} ended {since_s:.3g} s ago, and traffic is that of the last {settings.window_s:g} s; "
                "what it has changed is known when these have passed",
            )
    if predicted.transfer_s > settings.latency_budget_s:
        return verdict.refused(
            Reason.OVER_BUDGET,
            f"moving {predicted.transfer_bytes} bytes takes {predicted.transfer_s:.3g} s; allowed are "
            f"{settings.latency_budget_s:g} s",
        )
    for home, after_s in predicted.itl_after_s.items():
        before_s = predicted.itl_before_s[home]
        allowed_s, why = _allowed_gap_s(situation.fleet, settings, move, predicted, home)
        if after_s > before_s and after_s > allowed_s * (1 + SAME):
            return verdict.refused(
                Reason.SLOW_TOKENS,
                f"tokens of {home!r} would be {1e3 * after_s:.4g} ms apart, now {1e3 * before_s:.4g} ms; allowed are "
                f"{1e3 * allowed_s:.4g} ms, {why}",
            )
    return verdict


def _allowed_gap_s(
    fleet: Fleet, settings: MoveSettings, move: Move, predicted: Prediction, home: str
) -> tuple[float, str]:
    """How far apart a move may put the tokens of `home`'s instance, and why not further (ours).

    A decode loop gives as many tokens in a second as it has requests in a batch, over the time between two tokens. So
    modules of one leave it only where that gets no longer, unless it is memory that it is short of, or prompts are what
    most of its time goes to; and what others bring to it leaves time for all tokens that are wanted, with a full batch.
    """
    before_s, times = predicted.itl_before_s[home], fleet.model.times
    prompts_per_s, tokens_per_s = offered(fleet, home, settings.horizon_s)
    token_s = times.decode_token_s(reached_rows(fleet, home, settings), fleet.stage_workers(home))
    memory = predicted.before[move.source].memory
    if (
        home == move.instance != move.destination
        and tokens_per_s * token_s > prompts_per_s * times.prefill_token_s
        and not (memory > 0 and memory >= settings.busy_from)
    ):
        return before_s, "or the worker would lose the time that it is to gain"
    # Against what it would be with everything at home too: several moves must not each double it.
    allowed_s, full_batch = settings.max_itl_ratio * min(before_s, undisturbed_s(fleet, home)), times.full_batch
    if allowed_s * tokens_per_s > full_batch:
        return max(before_s, full_batch / tokens_per_s), f"for {tokens_per_s:.4g} tokens/s of {full_batch} at a time"
    return allowed_s, f"{settings.max_itl_ratio:g} times what it was"


def _unknown(situation: Situation, move: Move) -> tuple[Reason, str] | None:
    fleet, silent = situation.fleet, situation.silent
    known = ", ".join(sorted(fleet.figures.keys() | silent))
    for role, worker in (("instance", move.instance), ("source", move.source), ("destination", move.destination)):
        if worker in silent:
            return Reason.SILENT, f"{role} {worker!r} has not answered lately; wait until it does"
        if worker not in fleet.figures:
            return Reason.UNKNOWN_WORKER, f"{role} {worker!r} is not a worker that is alive; these are: {known}"
    lost = sorted(fleet.placements[move.instance].workers() - fleet.figures.keys())
    if quiet := sorted(silent & (fleet.placements[move.instance].workers() | set(lost))):
        return (
            Reason.SILENT,
            f"{move.instance!r} has parts on {quiet}, which have not answered lately; wait until they do",
        )
    if lost:
        return (
            Reason.UNKNOWN_WORKER,
            f"{move.instance!r} has parts on {lost}, not alive: its placement must be repaired",
        )
    return None


def _in_the_way(situation: Situation, move: Move) -> tuple[Reason, str] | None:
    for other in situation.under_way:
        if move.instance == other.instance:
            what = "what this one moves" if share_a_module(move, other) else "and an instance has one move at a time"
            return Reason.IN_FLIGHT, f"{other} is under way, {what}; wait for its end"
    for worker in (move.instance, move.source, move.destination):
        if worker in situation.busy:
            return Reason.BUSY, f"{worker!r} is at this: {situation.busy[worker]}; wait for its end"
    for other in situation.under_way:
        shared = share_a_worker(move, other)
        if shared:
            return Reason.BUSY, f"{shared!r} is in another move: {other}; a worker is in one move at a time"
    return None


def _impossible(situation: Situation, move: Move) -> tuple[Reason, str] | None:
    fleet = situation.fleet
    try:
        torn = move.after(fleet.placements[move.instance]).torn_layers
    except ValueError as error:
        one_head = isinstance(move, HeadMove) and fleet.model.sizes.num_kv_heads == 1
        return Reason.ONE_KV_HEAD if one_head else Reason.INVALID, str(error)
    if torn:
        return (
            Reason.INVALID,
            f"layers {list(torn)} of {move.instance!r} are not at home and would have KV heads on another worker; only "
            "layers at home may: bring the layers home with all their heads",
        )
    objection = situation.abilities.objection(move)
    return None if objection is None else (Reason.UNABLE, objection)
