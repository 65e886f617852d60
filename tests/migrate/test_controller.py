"""The controller in a closed loop with workers that do what it orders, or do not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from migrate.controller import Controller, MoveRefusedError, Observation
from migrate.controller_settings import ControllerSettings
from migrate.move_history import Cause, Entry, MoveHistory, Order, Outcome, kind_of
from migrate.move_settings import MoveSettings
from migrate.moves import HeadMove, LayerMove, Move
from migrate.verdict import Abilities, Reason
from migrate.worker_figures import WorkerFigures
from tests.migrate.fleets import model, worker
from tests.migrate.simulated_fleet import Fate, SimulatedFleet

COST = model(switch_s=0.5)
PLANNER = MoveSettings(period_s=1, window_s=1, busy_from=0, cool_down_s=4, compute_weight=1, memory_weight=0)
SETTINGS = ControllerSettings(PLANNER, abandon_after_s=10)
BUSY, IDLE = {"prefill_tokens_per_s": 200.0}, {"prefill_tokens_per_s": 0.0}


def always(**loads: Mapping[str, float]) -> Callable[[float], Mapping[str, WorkerFigures]]:
    workers = {name: worker(name, **figures) for name, figures in loads.items()}
    return lambda _: workers


@dataclass
class Loop:
    """Periods go by; ends are told late, after the next observation was made, as it may be over a network."""

    fleet: SimulatedFleet
    controller: Controller = field(default_factory=lambda: Controller(SETTINGS))
    now_s: float = 100.0
    ordered: list[Order] = field(default_factory=list)
    """By the controller that there is."""

    def turn(self) -> list[Move]:
        """One period. Checks what must hold of every order; returns the moves that were ordered."""
        seen = self.fleet.observe(self.now_s)
        self.now_s += 0.2
        for ended, result in self.fleet.ended(self.now_s):
            if any(ended is order for order in self.ordered):
                self.controller.ended(ended.order_id, self.now_s, result)
        for order in self.controller.give_up(self.now_s):
            self.fleet.stop(order)
        taken = [entry.order.move for entry in self.controller.history.under_way]
        orders = self.controller.plan(seen, self.now_s)
        ends = [end for move in (*taken, *(o.move for o in orders)) for end in (move.source, move.destination)]
        assert len(ends) == len(set(ends))
        for order in orders:
            assert self.controller.abilities.objection(order.move) is None
            # Does not raise: it fits what the workers said.
            order.move.after(seen.fleet.placements[order.move.instance])
            refusal = self.fleet.begin(order, self.now_s)
            if refusal is not None:
                self.controller.ended(order.order_id, self.now_s, refusal)
            self.ordered.append(order)
        self.now_s += 0.8
        return [order.move for order in orders]

    def turns(self, count: int) -> list[Move]:
        return [move for _ in range(count) for move in self.turn()]

    def restart(self) -> None:
        """The controller is a new one. Nobody is told any more how the moves end that are under way."""
        self.controller, self.ordered = Controller(self.controller.settings, self.controller.abilities), []

    def see(self) -> Observation:
        return self.fleet.observe(self.now_s)

    @property
    def last(self) -> Entry:
        return self.controller.history.ended[-1]


def away(loop: Loop) -> dict[str, tuple[int, ...]]:
    """By instance: layers that are not at home."""
    return {
        home: tuple(n for n in range(placement.num_layers) if placement.layer_workers[n] != home)
        for home, placement in loop.fleet.placements.items()
    }


def test_layers_leave_a_busy_worker_and_come_home_when_it_rests() -> None:
    resting = 115.0
    loads = always(a=BUSY, b=IDLE), always(a=IDLE, b=IDLE)
    loop = Loop(SimulatedFleet(COST, lambda now_s: loads[now_s >= resting](now_s)))
    assert loop.turn() == [LayerMove("a", 2, 2, "a", "b")]
    assert loop.turns(5) == []
    assert away(loop) == {"a": (2, 3), "b": ()}
    assert loop.last.outcome is Outcome.DONE
    assert loop.last.order.cause is Cause.PLAN
    assert "the peak falls from 0.800 to 0.400" in loop.last.order.why
    loop.now_s = resting
    assert loop.turn() == [LayerMove("a", 2, 2, "b", "a")]
    loop.turns(3)
    assert away(loop) == {"a": (), "b": ()}


def test_a_move_that_fails_rests_for_a_cool_down_and_is_tried_again() -> None:
    fates: list[Fate] = ["fails", "done"]
    loop = Loop(SimulatedFleet(COST, always(a=BUSY, b=IDLE), lambda _: fates.pop(0)))
    begun = []
    for _ in range(9):
        begun += [(loop.now_s, move) for move in loop.turn()]
    (first_s, first), (second_s, second) = begun
    assert first == second
    assert second_s - first_s >= PLANNER.cool_down_s
    assert [entry.outcome for entry in loop.controller.history.ended] == [Outcome.FAILED, Outcome.DONE]
    assert loop.controller.history.ended[0].problem == "the link died"


def test_a_move_that_hangs_is_given_up_and_its_workers_are_free_once_they_stopped() -> None:
    fates: list[Fate] = ["hangs", "done"]
    loop = Loop(SimulatedFleet(COST, always(a=BUSY, b=IDLE), lambda _: fates.pop(0)))
    loop.turns(12)
    assert loop.last.outcome is Outcome.ABANDONED
    assert loop.last.ended_s is not None
    assert loop.last.ended_s - loop.last.order.begun_s == pytest.approx(SETTINGS.abandon_after_s, abs=1.01)
    assert "not ended within 10 s" in loop.last.problem
    loop.turns(6)
    assert loop.last.outcome is Outcome.DONE
    assert away(loop) == {"a": (2, 3), "b": ()}


def test_a_worker_that_does_not_stop_is_left_alone_for_a_cool_down_only() -> None:
    loop = Loop(SimulatedFleet(COST, always(a=BUSY, b=IDLE), lambda _: "stubborn"))
    loop.turns(11)
    given_up_s = loop.last.ended_s
    assert given_up_s is not None
    loop.turns(5)
    again = loop.ordered[-1]
    assert again.begun_s - given_up_s >= PLANNER.cool_down_s
    assert loop.last.problem == "a worker is in another move"


def test_what_was_given_up_and_is_done_after_all_is_seen_where_it_lies() -> None:
    fates: list[Fate] = ["late"]
    loop = Loop(SimulatedFleet(COST, always(a=BUSY, b=IDLE), lambda _: fates.pop(0), late_s=12))
    loop.turns(25)
    # Given up after 10 s, done after 12: the plan that follows knows it, and sees nothing to do.
    assert away(loop) == {"a": (2, 3), "b": ()}
    assert [entry.outcome for entry in loop.controller.history.ended] == [Outcome.ABANDONED]


def test_what_ended_after_the_workers_were_asked_is_not_planned_on() -> None:
    loop = Loop(SimulatedFleet(COST, always(a=BUSY, b=IDLE)))
    old = loop.see()
    (move,) = loop.turn()
    loop.now_s += 1
    for order, result in loop.fleet.ended(loop.now_s):
        loop.controller.ended(order.order_id, loop.now_s, result)
    with pytest.raises(MoveRefusedError, match="in flight"):
        loop.controller.order(move, old, loop.now_s)
    loop.now_s += 1
    with pytest.raises(MoveRefusedError, match="invalid"):
        loop.controller.order(move, loop.see(), loop.now_s)


def test_a_controller_that_starts_anew_goes_on_from_the_placements() -> None:
    loop = Loop(SimulatedFleet(COST, always(a=BUSY, b=IDLE)))
    loop.turns(6)
    loop.restart()
    assert loop.turns(6) == []
    loop.fleet.traffic = always(a=IDLE, b=IDLE)
    assert loop.turn() == [LayerMove("a", 2, 2, "b", "a")]


def test_one_that_starts_anew_in_mid_move_is_refused_by_the_workers() -> None:
    loop = Loop(SimulatedFleet(model(switch_s=3), always(a=BUSY, b=IDLE)))
    loop.turn()
    loop.restart()
    loop.turn()
    assert loop.last.problem == "a worker is in another move"
    loop.turns(12)
    # The first move is done, and there is nothing left to balance.
    assert away(loop) == {"a": (2, 3), "b": ()}
    assert [entry.outcome for entry in loop.controller.history.ended] == [Outcome.FAILED]


def test_nothing_is_planned_of_what_was_not_measured() -> None:
    loop = Loop(SimulatedFleet(COST, always(a=BUSY, b=IDLE)))
    seen = replace(loop.see(), not_planned="no period has passed yet")
    assert loop.controller.plan(seen, loop.now_s) == []
    with pytest.raises(ValueError, match="no period has passed yet"):
        loop.controller.dry_run(seen, loop.now_s)


def test_a_dry_run_changes_nothing() -> None:
    loop = Loop(SimulatedFleet(COST, always(a=BUSY, b=IDLE)))
    first = loop.controller.dry_run(loop.see(), loop.now_s)
    assert loop.controller.dry_run(loop.see(), loop.now_s) == first
    assert list(first.moves) == loop.turn()


def test_a_persons_order_is_checked_and_takes_its_workers() -> None:
    loop = Loop(SimulatedFleet(COST, always(a=IDLE, b=IDLE, c=IDLE)))
    order = loop.controller.order(LayerMove("a", 3, 1, "a", "b"), loop.see(), loop.now_s)
    assert order.cause is Cause.HAND
    for move, reason in (
        (LayerMove("a", 2, 1, "a", "c"), Reason.IN_FLIGHT),
        (LayerMove("c", 2, 1, "c", "b"), Reason.BUSY),
        (LayerMove("a", 0, 1, "a", "x"), Reason.UNKNOWN_WORKER),
        (LayerMove("c", 0, 4, "c", "a"), Reason.BUSY),
    ):
        with pytest.raises(MoveRefusedError) as refused:
            loop.controller.order(move, loop.see(), loop.now_s)
        assert refused.value.verdict.reason is reason
    assert loop.controller.history.under_way == (Entry(order),)


def test_a_worker_that_is_at_something_of_its_own_is_left_alone() -> None:
    # A move that a controller before this one ordered, or a repair.
    loop = Loop(SimulatedFleet(COST, always(a=BUSY, b=IDLE, c=BUSY, d=IDLE)))
    seen = replace(loop.see(), busy={"a": "layers come home"})
    assert {order.move.instance for order in loop.controller.plan(seen, loop.now_s)} == {"c"}
    with pytest.raises(MoveRefusedError, match="busy: 'a' is at this: layers come home; wait for its end"):
        loop.controller.order(LayerMove("a", 3, 1, "a", "b"), seen, loop.now_s)


def test_what_workers_cannot_do_is_neither_begun_nor_taken() -> None:
    # A narrow gap: 0.6 and 0.4. Heads would close it.
    loads = always(a={"prefill_tokens_per_s": 150.0}, b={"prefill_tokens_per_s": 100.0})
    loop = Loop(SimulatedFleet(model(attention=0.5), loads), Controller(SETTINGS, Abilities(heads=False)))
    assert loop.turn() == []
    made = loop.controller.dry_run(loop.see(), loop.now_s)
    assert {verdict.reason for verdict in made.verdicts} == {Reason.UNABLE}
    (move,) = Loop(SimulatedFleet(model(attention=0.5), loads)).turn()
    assert isinstance(move, HeadMove)
    with pytest.raises(MoveRefusedError, match="workers move whole layers only; move layers"):
        loop.controller.order(move, loop.see(), loop.now_s)


def test_everything_goes_home_when_somebody_says_so() -> None:
    loop = Loop(SimulatedFleet(COST, always(a=BUSY, b=IDLE, c=BUSY, d=IDLE)))
    loop.turns(6)
    assert sum(map(len, away(loop).values())) == 4
    loop.controller.settings = replace(SETTINGS, automatic=False)
    loop.controller.bring_home()
    moves = loop.turns(6)
    assert {move.destination for move in moves} == {"a", "c"}
    assert set(away(loop).values()) == {()}
    assert not loop.controller.is_bringing_home
    assert loop.last.order.cause is Cause.HOME
    assert loop.turns(6) == []


def test_home_is_not_done_while_a_worker_is_at_a_move_of_an_earlier_controller() -> None:
    loop = Loop(SimulatedFleet(COST, always(a=BUSY, b=IDLE)))
    loop.controller.settings = replace(SETTINGS, automatic=False)
    loop.controller.bring_home()
    seen = loop.see()
    loop.controller.plan(replace(seen, busy={"a": "moving layer 1"}), loop.now_s)
    assert loop.controller.is_bringing_home
    loop.controller.plan(seen, loop.now_s)
    assert not loop.controller.is_bringing_home


def test_home_is_not_done_while_a_worker_says_nothing() -> None:
    loop = Loop(SimulatedFleet(COST, always(a=BUSY, b=IDLE)))
    loop.controller.settings = replace(SETTINGS, automatic=False)
    loop.controller.bring_home()
    loop.controller.plan(replace(loop.see(), silent=frozenset("c")), loop.now_s)
    assert loop.controller.is_bringing_home
    loop.controller.plan(loop.see(), loop.now_s)
    assert not loop.controller.is_bringing_home


def test_nothing_else_is_ordered_while_everything_goes_home_and_anything_right_after() -> None:
    loop = Loop(SimulatedFleet(COST, always(a=BUSY, b=IDLE)))
    loop.controller.settings = replace(SETTINGS, automatic=False)
    out = LayerMove("a", 1, 1, "a", "b")
    # With everything at home it is brought home already, whether a period has passed since or not.
    loop.controller.bring_home()
    loop.controller.order(out, loop.see(), loop.now_s)
    assert not loop.controller.is_bringing_home
    loop.controller.bring_home()
    with pytest.raises(MoveRefusedError, match="everything is being brought home; wait"):
        loop.controller.order(LayerMove("b", 0, 1, "b", "a"), loop.see(), loop.now_s)
    assert loop.controller.is_bringing_home


def test_going_home_that_fails_is_tried_again_after_a_rest() -> None:
    loop = Loop(SimulatedFleet(COST, always(a=BUSY, b=IDLE)))
    loop.turns(6)
    loop.fleet.fate = lambda _: "fails"
    loop.controller.bring_home()
    assert len(loop.turns(10)) == 2
    loop.fleet.fate = lambda _: "done"
    loop.turns(6)
    assert set(away(loop).values()) == {()}


def test_settings_change_while_it_runs() -> None:
    loop = Loop(SimulatedFleet(COST, always(a=BUSY, b=IDLE)))
    loop.controller.settings = SETTINGS.changed({"delta_layers": 0.5, "delta_heads": 0.5})
    assert loop.turns(3) == []
    loop.controller.settings = SETTINGS.changed({"automatic": False})
    assert loop.turns(3) == []
    loop.controller.settings = SETTINGS
    assert len(loop.turn()) == 1


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"delta": 1}, "'delta' is no setting of moves; these are: abandon_after_s, automatic, "),
        ({"rho": "2"}, "rho is '2'; it must be a number"),
        ({"rho": True}, "rho is True; it must be a number"),
        ({"automatic": 1}, "automatic is 1; it must be true or false"),
        ({"abandon_after_s": 0}, "abandon_after_s is 0; it must be finite and above 0"),
        ({"compute_weight": 0.5}, "must add up to 1"),
        ({"period_s": math.nan}, "period_s is nan; it must be finite and above 0.0"),
    ],
)
def test_settings_without_sense_are_refused(given: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        SETTINGS.changed(given)


def test_settings_are_read_as_they_are_given() -> None:
    assert SETTINGS.changed({}) == SETTINGS
    assert ControllerSettings().changed(SETTINGS.flat()) == SETTINGS


LOADS = st.fixed_dictionaries(
    {
        "prefill_tokens_per_s": st.sampled_from([0.0, 0.0, 50.0, 200.0, 400.0]),
        "live_blocks": st.sampled_from([0, 0, 40, 90]),
    }
)


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    """Alternating loads; workers that come and go, in mid-move too; orders that end in every way."""
    names = draw(st.sampled_from(["ab", "abcd"]))
    phases = [
        {name: worker(name, **draw(LOADS)) for name in names if name in "ab" or draw(st.booleans())}
        for _ in range(draw(st.integers(1, 4)))
    ]
    every_s = draw(st.sampled_from([2.0, 5.0, 30.0]))
    fates = draw(st.lists(st.sampled_from(["done", "done", "fails", "hangs", "stubborn", "late"]), min_size=1))
    fleet = SimulatedFleet(
        model(switch_s=draw(st.sampled_from([0.0, 0.5, 3.0])), attention=draw(st.sampled_from([0.0, 0.5]))),
        lambda now_s: phases[int(now_s // every_s) % len(phases)],
        lambda order: fates[order.order_id % len(fates)],
        late_s=draw(st.sampled_from([11.0, 15.0])),
    )
    memory = draw(st.sampled_from([0.0, 0.5]))
    planner = replace(PLANNER, compute_weight=1 - memory, memory_weight=memory)
    abilities = Abilities(heads=draw(st.booleans()), onward=draw(st.booleans()))
    return Loop(fleet, Controller(replace(SETTINGS, planner=planner), abilities))


@settings(max_examples=25, deadline=None)
@given(loops(), st.lists(st.sampled_from(["turn", "turn", "turn", "home", "restart", "settings"]), max_size=40))
def test_whatever_happens_the_books_add_up(loop: Loop, happenings: list[str]) -> None:
    """`Loop.turn` checks the orders themselves."""
    for happening in happenings:
        if happening == "turn":
            loop.turn()
        elif happening == "home":
            loop.controller.bring_home()
        elif happening == "settings":
            loop.controller.settings = loop.controller.settings.changed({"cool_down_s": 1.0})
        else:
            loop.restart()
    history = loop.controller.history
    entries = [*history.ended, *history.under_way]
    assert sorted(entry.order.order_id for entry in entries) == [order.order_id for order in loop.ordered]
    assert all(entry.ended_s is None and entry.outcome is Outcome.UNDER_WAY for entry in history.under_way)
    assert [entry.ended_s for entry in history.ended] == sorted(entry.ended_s or 0.0 for entry in history.ended)
    assert history.counts == Counter((kind_of(entry.order.move), entry.outcome) for entry in history.ended)
    done = [entry for entry in history.ended if entry.outcome is Outcome.DONE]
    assert history.moved_bytes.total() == sum(entry.order.prediction.transfer_bytes for entry in done)
    assert history.held_s == pytest.approx(0.1 * len(done))
    assert all(bool(entry.problem) == (entry.outcome is not Outcome.DONE) for entry in history.ended)


def test_the_history_forgets_the_oldest_and_counts_on() -> None:
    loop = Loop(SimulatedFleet(COST, always(a=BUSY, b=IDLE)))
    (order,) = loop.controller.plan(loop.see(), loop.now_s)
    history = MoveHistory(size=2)
    for number in range(3):
        history.begin(replace(order, order_id=number))
        history.end(number, Outcome.FAILED, float(number), problem="no")
    assert [entry.order.order_id for entry in history.ended] == [1, 2]
    assert history.counts == {("layers", Outcome.FAILED): 3}
    with pytest.raises(KeyError):
        history.end(2, Outcome.DONE, 3.0)


@settings(max_examples=15, deadline=None)
@given(loops())
def test_nothing_moves_twice_within_a_cool_down(loop: Loop) -> None:
    loop.turns(30)
    ends: dict[tuple[str, int, int], float] = {}
    heads = loop.fleet.cost.sizes.num_kv_heads
    for entry in sorted(loop.controller.history.ended, key=lambda entry: entry.order.begun_s):
        move = entry.order.move
        for lane in product([move.instance], move.layers, move.heads if isinstance(move, HeadMove) else range(heads)):
            assert entry.order.begun_s - ends.get(lane, -math.inf) >= PLANNER.cool_down_s - 1e-9
            ends[lane] = entry.ended_s or 0.0


@settings(max_examples=15, deadline=None)
@given(loops(), st.integers(0, 15))
def test_when_traffic_ends_everything_is_home_in_the_end(loop: Loop, periods: int) -> None:
    loop.turns(periods)
    loop.fleet.fate = lambda _: "done"
    for begun in loop.fleet.begun:
        begun.fate, begun.ends_s = "fails", 0.0
    loop.fleet.traffic = always(a=IDLE, b=IDLE, c=IDLE, d=IDLE)
    loop.turns(60)
    assert set(away(loop).values()) == {()}
    assert all(placement.is_home for placement in loop.fleet.placements.values())
    assert loop.turns(3) == []
