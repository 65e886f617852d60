"""From what is seen of the workers to orders: which moves to make now, what came of those before.

Pure: time and observations come in, orders go out, and whoever carries them out says how they ended. Where things lie
is what the workers say; nothing else is believed, so that a controller that starts anew needs no memory. It orders one
move of a worker at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from migrate.candidates import homeward_moves
from migrate.controller_settings import ControllerSettings
from migrate.fleet import Fleet
from migrate.move_history import Cause, Happened, MoveHistory, Order, Outcome
from migrate.moves import EndedMove, Move, share_a_module
from migrate.planner import Plan, plan
from migrate.verdict import Abilities, Reason, Situation, Verdict, judge_order

_ALL: Final = Abilities()


@dataclass(frozen=True, slots=True)
class Observation:
    """The fleet as it was at one moment."""

    fleet: Fleet
    asked_s: float
    """When the first worker was asked. Moves that ended later may be in it, or not."""
    not_planned: str = ""
    """Why no plan can be made of it, traffic or costs not having been measured yet; empty where one can."""
    busy: Mapping[str, str] = field(default_factory=dict)
    """Workers whose instance is being moved or repaired, by their own account, with what it is in words."""
    silent: frozenset[str] = frozenset()
    """Workers that are alive and have not told all that there is to know. The fleet has them as they were, or not."""


class MoveRefusedError(ValueError):
    """A move that cannot be made now. The message says why; `verdict` has the figures."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(f"{verdict.reason}: {verdict.detail}")
        self.verdict = verdict


class Controller:
    """Plans once a period, takes orders of people, and keeps book of both. `abilities` are the workers'."""

    def __init__(self, settings: ControllerSettings, abilities: Abilities = _ALL) -> None:
        self.settings = settings
        """May be replaced at any time; holds from then on."""
        self.history = MoveHistory()
        self.is_bringing_home = False
        """Somebody wanted everything home, and it is not yet. Nothing else is planned meanwhile."""
        self.abilities = abilities
        self._num_orders = 0
        self._doubtful: dict[int, tuple[Move, float]] = {}
        """Moves that were given up, with the time: by order id. Their workers may still be at it."""

    def plan(self, seen: Observation, now_s: float) -> list[Order]:
        """The moves to begin now. To be called once every `period_s`."""
        if self.is_bringing_home:
            return self._plan_homeward(seen, now_s)
        if seen.not_planned or not self.settings.automatic:
            return []
        made = plan(self._situation(seen, now_s), self.settings.planner)
        accepted = [verdict for verdict in made.verdicts if verdict.accepted]
        return [self._begin(verdict, Cause.PLAN, verdict.detail, now_s) for verdict in accepted]

    def dry_run(self, seen: Observation, now_s: float) -> Plan:
        """What is planned of this when nobody has switched it off. Nothing is begun.

        Raises:
            ValueError: no plan can be made of what was seen.
        """
        if seen.not_planned:
            raise ValueError(seen.not_planned)
        return plan(self._situation(seen, now_s), self.settings.planner)

    def order(self, move: Move, seen: Observation, now_s: float) -> Order:
        """A person's order. Whether it pays is not asked, nor how lately something of it has moved. While everything is
        being brought home nothing else can be ordered: it would be sent home at once.

        Raises:
            MoveRefusedError: it cannot be made.
        """
        situation = self._situation(seen, now_s)
        verdict = judge_order(situation, self.settings.planner, move)
        if self.is_bringing_home:
            self.is_bringing_home = not _is_all_home(situation)
            if self.is_bringing_home and move.destination != move.instance:
                detail = "everything is being brought home; wait until nothing is away any more"
                raise MoveRefusedError(verdict.refused(Reason.BUSY, detail))
        if not verdict.accepted:
            raise MoveRefusedError(verdict)
        return self._begin(verdict, Cause.HAND, "somebody ordered it", now_s)

    def bring_home(self) -> None:
        """From the next plan on everything is sent home, piece by piece, before anything else is planned."""
        self.is_bringing_home = True

    def ended(self, order_id: int, now_s: float, result: Happened | str) -> None:
        """An order's end: what it took, or why nothing came of it.

        One that was given up before stays given up, but its workers are free again.
        """
        self._doubtful.pop(order_id, None)
        if all(entry.order.order_id != order_id for entry in self.history.under_way):
            return
        if isinstance(result, str):
            self.history.end(order_id, Outcome.FAILED, now_s, problem=result)
        else:
            self.history.end(order_id, Outcome.DONE, now_s, happened=result)

    def give_up(self, now_s: float) -> list[Order]:
        """Orders that have taken too long, which count as ended now: whoever carries them out is to stop.

        Their workers are left alone until they have stopped, but for no longer than a cool-down: whether they still
        move anything is then theirs to say, by refusing another move.
        """
        limit_s = self.settings.abandon_after_s
        given_up = [entry.order for entry in self.history.under_way if now_s - entry.order.begun_s >= limit_s]
        for order in given_up:
            problem = f"it has not ended within {limit_s:g} s"
            self.history.end(order.order_id, Outcome.ABANDONED, now_s, problem=problem)
            self._doubtful[order.order_id] = order.move, now_s
        return given_up

    def _situation(self, seen: Observation, now_s: float) -> Situation:
        cool_down_s = self.settings.planner.cool_down_s
        for order_id, (_, since_s) in list(self._doubtful.items()):
            if now_s - since_s >= cool_down_s:
                del self._doubtful[order_id]
        under_way = [entry.order.move for entry in self.history.under_way]
        under_way += [move for move, _ in self._doubtful.values()]
        recent = []
        for entry in self.history.ended:
            assert entry.ended_s is not None
            # What lies where was asked before this was over: the answer may be of before, or of after.
            if entry.ended_s >= seen.asked_s:
                under_way.append(entry.order.move)
            if now_s - entry.ended_s < max(cool_down_s, self.settings.planner.window_s):
                recent.append(EndedMove(entry.order.move, entry.ended_s))
        return Situation(seen.fleet, tuple(under_way), tuple(recent), now_s, seen.busy, self.abilities, seen.silent)

    def _plan_homeward(self, seen: Observation, now_s: float) -> list[Order]:
        """One move for each worker that is free. What failed lately has a rest, so that no worker is asked in
        vain all the time."""
        situation, orders = self._situation(seen, now_s), []
        failed = [
            EndedMove(entry.order.move, entry.ended_s or 0.0)
            for entry in self.history.ended
            if entry.outcome is not Outcome.DONE
        ]
        failed = [ended for ended in failed if ended in situation.recent]
        for placement in seen.fleet.placements.values():
            for host in sorted(placement.workers() - {placement.home}):
                for part in homeward_moves(placement, host):
                    for move in part:
                        verdict = judge_order(situation, self.settings.planner, move)
                        if verdict.accepted and not any(share_a_module(move, ended.move) for ended in failed):
                            orders.append(self._begin(verdict, Cause.HOME, "everything goes home", now_s))
                            situation = replace(situation, under_way=(*situation.under_way, move))
                            break
                        if verdict.reason is not Reason.NO_ROOM:
                            break  # less of it would be refused too
        self.is_bringing_home = not _is_all_home(situation)
        return orders

    def _begin(self, verdict: Verdict, cause: Cause, why: str, now_s: float) -> Order:
        assert verdict.prediction is not None
        self._num_orders += 1
        order = Order(self._num_orders, verdict.move, cause, why, now_s, verdict.prediction)
        self.history.begin(order)
        return order


def _is_all_home(situation: Situation) -> bool:
    """And stays so: a worker may be at a move that an earlier controller ordered. Of a silent one nobody knows."""
    return not (situation.under_way or situation.busy or situation.silent) and all(
        placement.is_home for placement in situation.fleet.placements.values()
    )
