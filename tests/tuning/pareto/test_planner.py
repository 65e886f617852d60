"""The plan as a pure function: driven by evaluations in closed form, told in any order."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.pareto.candidates import candidates
from tuning.pareto.evaluation import Evaluation
from tuning.pareto.front import pareto_front
from tuning.pareto.landscape import Landscape
from tuning.pareto.planner import Planner, PlannerSettings
from tuning.pareto.space import CategoricalAxis, Key, NumericAxis, Point, SearchSpace

SPACE = SearchSpace(
    (NumericAxis("dram_gib", (0, 512, 1024, 1536, 2048), 32), NumericAxis("ttl_s", (0, 600, 1200, 1800, 2400), 60))
)


def smooth(point: Point) -> Evaluation:
    hits = (1 - math.exp(-float(point["dram_gib"]) / 500)) * (1 - math.exp(-float(point["ttl_s"]) / 500))
    return Evaluation((2 - hits, 10 - hits + 0.003 * float(point["dram_gib"])))


def walk(
    evaluate: Callable[[Point], Evaluation],
    budget: int,
    space: SearchSpace = SPACE,
    settings: PlannerSettings | None = None,
) -> tuple[Planner, dict[Key, Evaluation]]:
    planner, known = Planner(space, settings), {}
    while len(known) < budget and (asked := planner.open_points(known)):
        known |= {key: evaluate(space.point(key)) for key in asked[: budget - len(known)]}
    return planner, known


def whole_rounds(count: int) -> dict[Key, Evaluation]:
    planner, known = Planner(SPACE), {}
    for _ in range(count):
        known |= {key: smooth(SPACE.point(key)) for key in planner.open_points(known)}
    return known


EXPECTED = whole_rounds(6)


@given(st.integers(0, 2**32), st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_results_in_any_order_give_the_same_points(seed: int, at_once: int) -> None:
    chance = random.Random(seed)
    planner, known, running = Planner(SPACE), {}, set()
    while len(known) < len(EXPECTED):
        asked = [key for key in planner.open_points(known) if key not in running]
        running |= set(asked[: at_once - len(running)])
        done = chance.choice(sorted(running))
        running.remove(done)
        known[done] = smooth(SPACE.point(done))
        if chance.random() < 0.1:  # another process goes on, and reads the results in another order
            planner, known = Planner(SPACE), dict(chance.sample(sorted(known.items(), key=str), len(known)))
    assert known.keys() == EXPECTED.keys()


def test_points_that_were_not_asked_for_change_nothing() -> None:
    _, expected = walk(smooth, 30)
    strangers = {(7, 7): smooth(SPACE.point((7, 7))), (1, 39): Evaluation((-5.0, -5.0))}
    planner, known = Planner(SPACE), dict(strangers)
    while len(known) < 30 + len(strangers) and (asked := planner.open_points(known)):
        known |= {key: smooth(SPACE.point(key)) for key in asked[: 30 + len(strangers) - len(known)]}
    assert list(known)[len(strangers) :] == list(expected)


def test_other_evaluations_make_another_plan() -> None:
    planner, known = walk(smooth, 30)
    changed = {key: Evaluation((1.0, 1.0)) for key in known}
    assert planner.open_points(changed) == Planner(SPACE).open_points(changed)


def test_a_cliff_behind_a_plateau_is_found() -> None:
    """Nothing is gained before 1,330 GiB together with 1,000 s; every coarse step before that is flat."""

    def cliff(point: Point) -> Evaluation:
        hit = float(point["dram_gib"]) >= 1330 and float(point["ttl_s"]) >= 1000
        return Evaluation((1.0 - 0.8 * hit, 10 - 2 * hit + 0.003 * float(point["dram_gib"])))

    _, known = walk(cliff, 40)
    front = [SPACE.point(key) for key in pareto_front(known)]
    assert [point["dram_gib"] for point in front] == [0, 1344]  # the first step behind the cliff, and nothing


def test_a_small_size_that_beats_both_ends_of_its_axis_is_found() -> None:
    """The cost falls by what 400 GiB save, then rises with the price: both ends of the axis cost more."""

    def dip(point: Point) -> Evaluation:
        saved = 2.0 * (float(point["dram_gib"]) >= 400) * (float(point["ttl_s"]) > 0)
        return Evaluation((5 - saved, 10 - saved + 0.003 * float(point["dram_gib"])))

    _, known = walk(dip, 40)
    assert [SPACE.point(key)["dram_gib"] for key in pareto_front(known)] == [416]


def line(gains: list[float]) -> Landscape:
    """Evaluated from the low end of an axis on, in a plane; each step costs more and gains what is given."""
    space = SearchSpace((NumericAxis("a", (0, 1, 2, 3, 4, 5), 1), NumericAxis("b", (0, 1), 1)))
    known, value = {(0, 0): Evaluation((10.0, 0.0))}, 10.0
    for position, gain in enumerate(gains, start=1):
        value -= gain
        known[position, 0] = Evaluation((value, float(position)))
    known[0, 1] = Evaluation((0.0, 10.0))  # sets the range: 10 in both objectives
    return Landscape(space, known)


def next_on_line(landscape: Landscape, position: int, tau: float) -> tuple[bool, str | None]:
    (found,) = [each for each in candidates(landscape, tau) if each.key == (position, 0)]
    return found.is_look, found.closed


def test_one_step_is_looked_at_beyond_a_plateau_and_no_more() -> None:
    assert next_on_line(line([1.0]), 2, tau=0.05) == (False, None)
    assert next_on_line(line([0.1]), 2, tau=0.05) == (True, None)
    is_look, closed = next_on_line(line([0.1, 0.2]), 3, tau=0.05)
    assert not is_look
    assert closed == "plateau: the last two steps along a gain 1.00% and 2.00%, tau is 5.00%"
    assert next_on_line(line([0.1, 0.2]), 3, tau=0.015) == (False, None)
    assert next_on_line(line([0.1, 4.0]), 3, tau=0.05) == (False, None)


def test_skipped_points_have_reasons() -> None:
    planner, known = walk(smooth, 30)
    skipped = planner.skipped(known)
    assert skipped.keys().isdisjoint(known)
    coarse = {(dram, ttl) for dram in (0, 16, 32, 48, 64) for ttl in (0, 10, 20, 30, 40)}
    assert coarse - known.keys() <= skipped.keys()
    assert all(skipped.values())


def test_reasons_name_no_amount_that_is_but_rounding() -> None:
    """Three objectives, one axis that plays no part: hypervolumes are differences of sums, of which little is left."""

    def indifferent(point: Point) -> Evaluation:
        dram = float(point["dram_gib"])
        return Evaluation((0.1 + math.exp(-dram / 300), -7000 - 50 * math.log1p(dram), 1.07 + 0.0003 * dram))

    planner, known = walk(indifferent, 60)
    amounts = [
        float(amount) for reason in planner.skipped(known).values() for amount in re.findall("best (.*) m", reason)
    ]
    assert amounts
    assert all(amount == 0 or amount >= 1e-9 for amount in amounts)


def test_objectives_without_a_range_do_no_harm() -> None:
    _, known = walk(lambda point: Evaluation((1.0, 5.0)), 60)
    assert len(known) <= 15  # the first round, and some looks beyond plateaus
    _, known = walk(lambda point: Evaluation((1.0, *smooth(point).objectives)), 40)
    assert len(known) == 40


def test_infeasible_points_attract_nothing_but_the_edge_does() -> None:
    """A limit on the first objective holds from 704 GiB on (at long times-to-live)."""

    def limited(point: Point) -> Evaluation:
        hits = 1 - math.exp(-float(point["dram_gib"]) / 500)
        limit = 1 - math.exp(-700 / 500)
        return Evaluation((2 - hits, float(point["dram_gib"])), (limit - hits,))

    planner, known = walk(limited, 40)
    infeasible = [key for key, each in known.items() if not each.is_feasible]
    front = pareto_front(known)
    assert min(SPACE.point(key)["dram_gib"] for key in front) == 704  # the first step that holds the limit
    # Below the limit: corners, and halvings towards the edge from the infeasible side.
    assert all(SPACE.point(key)["dram_gib"] in (0, 512, 608, 640, 672, 688) for key in infeasible)
    assert any("constraint 0 is broken" in reason for reason in planner.skipped(known).values())


def test_feasibility_is_reached_from_corners_that_all_break_something() -> None:
    """Little memory breaks the first limit, much memory the second; 960 to 1,088 GiB hold both."""

    def narrow(point: Point) -> Evaluation:
        dram_gib = float(point["dram_gib"])
        return Evaluation((2048 - dram_gib, dram_gib), (960 - dram_gib, dram_gib - 1088))

    space = SearchSpace((NumericAxis("dram_gib", (0, 700, 2100), 20), NumericAxis("ttl_s", (0, 600), 60)))
    _, known = walk(narrow, 40, space)
    assert any(each.is_feasible for each in known.values())


def test_limits_that_nothing_holds_end_the_search() -> None:
    def hopeless(point: Point) -> Evaluation:
        return Evaluation(smooth(point).objectives, (3 - float(point["dram_gib"]) / 2048,))

    _, known = walk(hopeless, 200)
    assert 0 < len(known) < 100


def test_a_failed_point_is_not_asked_for_again_and_ends_nothing() -> None:
    def broken(point: Point) -> Evaluation:
        return Evaluation((math.nan, 0.0)) if point["dram_gib"] == 1024 else smooth(point)

    planner, known = walk(broken, 40)
    assert len(known) == 40
    assert sum(each.failure is not None for each in known.values()) > 0
    assert not set(planner.open_points(known)) & known.keys()


def test_every_choice_is_tried_and_the_good_one_is_followed() -> None:
    space = SearchSpace((*SPACE.axes, CategoricalAxis("disk_class", ("slow", "fast", "useless"))))

    def classes(point: Point) -> Evaluation:
        first, second = smooth(point).objectives
        extra = {"slow": (0.0, 0.0), "fast": (-0.5, 0.3), "useless": (0.5, 0.5)}[str(point["disk_class"])]
        return Evaluation((first + extra[0], second + extra[1]))

    _, known = walk(classes, 60, space)
    by_class = [sum(key[2] == choice for key in known) for choice in range(3)]
    assert by_class[2] <= 4
    assert by_class[1] >= 10
    assert {key[2] for key in pareto_front(known)} == {0, 1}


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="tau=1"):
        PlannerSettings(tau=1.0)
    with pytest.raises(ValueError, match="round_points=0"):
        PlannerSettings(round_points=0)
