from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.engine.slab_plan import SlabUse, plan_runs

USES = st.lists(st.sampled_from(list(SlabUse)), min_size=1, max_size=12)


@given(USES, st.integers(1, 6))
def test_one_run_costs_what_the_cheapest_window_costs(uses: list[SlabUse], count: int) -> None:
    """Against every window, one by one."""
    windows = [uses[start : start + count] for start in range(len(uses) - count + 1)]
    usable = [window.count(SlabUse.MOVABLE) for window in windows if SlabUse.FIXED not in window]
    plan = plan_runs(uses, [count])
    if not usable or uses.count(SlabUse.FREE) < count:
        assert plan is None
    else:
        assert plan is not None
        assert len(plan.moves) == min(usable)


@given(USES, st.lists(st.integers(1, 4), max_size=3))
def test_carrying_out_a_plan_keeps_every_movable_slab(uses: list[SlabUse], counts: list[int]) -> None:
    plan = plan_runs(uses, counts)
    if plan is None:
        return
    taken = [slab for run in plan.runs for slab in run]
    assert [len(run) for run in plan.runs] == counts
    assert len(set(taken)) == len(taken)
    assert all(uses[slab] is not SlabUse.FIXED for slab in taken)
    assert plan.moves.keys() == {slab for slab in taken if uses[slab] is SlabUse.MOVABLE}
    assert all(uses[target] is SlabUse.FREE for target in plan.moves.values())
    assert len(set(plan.moves.values())) == len(plan.moves)
    assert not set(plan.moves.values()) & set(taken)
