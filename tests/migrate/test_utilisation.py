from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from migrate.move_settings import MoveSettings
from migrate.utilisation import offered_per_s, utilisation
from migrate.worker_figures import WorkerFigures
from tests.migrate.fleets import at_home, fleet, load_by_lane, model, worker

SETTINGS = MoveSettings(compute_weight=0.75, memory_weight=0.25)


def test_work_and_live_blocks_make_the_load() -> None:
    # 100 tokens/s x 4 x 1 ms, and 40 x 4 x (2 ms / 2 + 1 ms), two rows in a step: 0.4 + 0.32; 25 of 100 blocks.
    load = utilisation(
        fleet(model(), worker("a", prefill_tokens_per_s=100, decode_tokens_per_s=40, live_blocks=25)), "a", SETTINGS
    )
    assert (load.compute, load.memory) == pytest.approx((0.72, 0.25))
    assert load.weighted == pytest.approx(0.75 * 0.72 + 0.25 * 0.25)
    assert load.scarcest == load.compute


@pytest.mark.parametrize(("ratio", "compute"), [(1, 1.0), (2, 0.6667), (4, 0.5), (100, 0.4167)])
def test_a_busy_decode_loop_with_one_request_has_room(ratio: float, compute: float) -> None:
    # One row takes 12 ms: the loop never rests, and gives 83.3 tokens/s, each of 4 + 8 ms. With tokens twice as far
    # apart two rows share the 8 ms, and eight at most.
    wanted = replace(SETTINGS, max_itl_ratio=ratio)
    alone = utilisation(fleet(model(), worker("a", running=1, decode_tokens_per_s=1 / 0.012)), "a", wanted)
    assert alone.compute == pytest.approx(compute, abs=1e-4)


def test_a_full_batch_leaves_no_room() -> None:
    # Eight rows in 40 ms.
    full = utilisation(fleet(model(), worker("a", running=8, decode_tokens_per_s=8 / 0.040)), "a", SETTINGS)
    assert full.compute == pytest.approx(1.0)


@settings(deadline=None)
@given(st.floats(0, 1), st.floats(1, 8), st.floats(1, 10))
def test_whatever_its_steps_are_made_of_a_loop_that_never_rests_is_known_within_a_factor(
    row_share: float, rows: float, ratio: float
) -> None:
    """All steps that were seen had so many rows and took 12 ms, so that nothing says how much of that each row did."""
    cost = model()
    times = replace(
        cost.times, step_s=0.003 * (1 - row_share), row_s=0.003 * row_share / rows, full_batch=256, known_rows=rows
    )
    busy = fleet(replace(cost, times=times), worker("a", running=rows, decode_tokens_per_s=rows / 0.012))
    load = utilisation(busy, "a", replace(SETTINGS, max_itl_ratio=ratio)).compute
    assert 1 / ratio - 1e-9 <= load <= 1 + 1e-9


def test_what_waits_for_its_prompt_will_want_tokens() -> None:
    # a computes 100 tokens/s, and 1,500 wait: 150 in all. b decodes 40 tokens/s of them, and would 60: 60 x 4 x 2 ms.
    # No more than the two of them could let through, however much waits: 80 x 4 x 2 ms.
    for pending, compute in ((0, 0.32), (1500, 0.48), (60_000, 0.64)):
        a = worker("a", prefill_tokens_per_s=100, prefilled_tokens_per_s=100, pending_prefill_tokens=pending)
        both = fleet(model(), a, worker("b", decode_tokens_per_s=40))
        assert utilisation(both, "b", SETTINGS).compute == pytest.approx(compute)


def test_a_split_batch_costs_more() -> None:
    # 100 tokens/s: 1.33 rows share a step, since 100 x (8 + 4 x 1.33) ms are as many; 2.67 if it takes twice as long.
    # In two groups each token has 2 / 1.33 + 1 ms a layer, three layers and one.
    cost = model()
    split = fleet(
        cost,
        worker("a", decode_tokens_per_s=100),
        worker("b"),
        placed=(at_home("a", cost).with_layers_moved(3, 1, "b"),),
    )
    assert utilisation(split, "a", SETTINGS).compute == pytest.approx(0.75)
    assert utilisation(split, "b", SETTINGS).compute == pytest.approx(0.25)


def test_heads_take_their_attention_and_kv_along() -> None:
    # Half of 0.4 is attention; two heads in each of two layers are a quarter of it, and of the KV. Each layer takes
    # 0.25 ms of a token here and there, and there 0.24 ms more for 24 bytes, for which a waits: 100 x 2 x 0.24 ms.
    cost = model(attention=0.5)
    placed = at_home("a", cost).with_heads_moved([0, 1], [0, 1], "b")
    heads = fleet(cost, worker("a", prefill_tokens_per_s=100, live_blocks=40), worker("b"), placed=(placed,))
    assert utilisation(heads, "a", SETTINGS).compute == pytest.approx(0.35 + 0.048)
    assert utilisation(heads, "b", SETTINGS).compute == pytest.approx(0.05)
    assert utilisation(heads, "a", SETTINGS).memory == pytest.approx(0.3)
    assert utilisation(heads, "b", SETTINGS).memory == pytest.approx(0.1)


def test_heads_elsewhere_are_waited_for_once_a_step() -> None:
    # One row every 12 ms wants two in a step with tokens twice as far apart: 41.7 steps/s. In each of three layers
    # these wait for 2 x 1 ms and 2 rows x 12 bytes, 0.24 ms; nothing is attention. Prompts in chunks of 50 add 2
    # chunks/s, each of which waits 3 x (2 + 6) ms.
    cost = model(latency_s=0.001)
    placed = at_home("a", cost).with_heads_moved([0, 1, 2], [3], "b")
    figures = {"running": 1, "decode_tokens_per_s": 1 / 0.012}
    for prompts, chunks_wait in ({}, 0.0), ({"prefill_tokens_per_s": 100, "prefill_step_tokens": 50}, 2 * 0.024):
        home = fleet(cost, worker("a", **figures, **prompts), worker("b"))
        away = fleet(cost, worker("a", **figures, **prompts), worker("b"), placed=(placed,))
        waiting = utilisation(away, "a", SETTINGS).compute - utilisation(home, "a", SETTINGS).compute
        assert waiting == pytest.approx(3 * 0.00224 / 0.024 + chunks_wait)
        assert utilisation(away, "b", SETTINGS).compute == 0


@settings(deadline=None)
@given(st.data())
def test_the_load_is_the_sum_over_layers_and_lanes(data: st.DataObject) -> None:
    cost = model(attention=data.draw(st.floats(0, 1)))
    rates = st.floats(0, 300)
    workers = [
        worker(
            name,
            prefill_tokens_per_s=data.draw(rates),
            decode_tokens_per_s=data.draw(rates),
            pending_prefill_tokens=data.draw(rates),
            pending_decode_tokens=data.draw(rates),
            live_blocks=data.draw(st.integers(0, 100)),
        )
        for name in "abc"
    ]
    first, count = data.draw(st.sampled_from([(0, 1), (1, 2), (2, 2)]))
    layer = data.draw(st.integers(0, 3))
    placed = (
        at_home("a", cost).with_layers_moved(first, count, "b").with_heads_moved([layer], [0, 1], "c"),
        at_home("b", cost).with_heads_moved(range(layer + 1), [3], "a"),
    )
    all_of_it = fleet(cost, *workers, placed=placed)
    for name in "abc":
        assert utilisation(all_of_it, name, SETTINGS).weighted == pytest.approx(load_by_lane(all_of_it, name, SETTINGS))


def test_no_traffic_and_no_memory_is_no_load() -> None:
    # The weights take all of the memory.
    load = utilisation(fleet(model(), worker("a", memory_bytes=4000)), "a", SETTINGS)
    assert (load.compute, load.memory, load.weighted) == (0, 0, 0)
    full = utilisation(fleet(model(), worker("a", memory_bytes=4000, live_blocks=1)), "a", SETTINGS)
    assert math.isfinite(full.weighted)
    assert full.memory > 1


def test_what_arrived_is_what_was_done_and_what_is_left_over() -> None:
    assert offered_per_s(done=900, pending_before=100, pending_after=300, period_s=2) == 550
    assert offered_per_s(done=0, pending_before=0, pending_after=0, period_s=2) == 0
    # Requests that were aborted while they waited.
    assert offered_per_s(done=10, pending_before=500, pending_after=0, period_s=2) == 0
    with pytest.raises(ValueError, match="period_s"):
        offered_per_s(1, 0, 0, 0)


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ({"running": -1.0}, "running"),
        ({"decode_tokens_per_s": math.nan}, "decode_tokens_per_s"),
        ({"live_blocks": 101}, "101 live and 0 cached blocks of 100"),
        ({"live_blocks": 60, "cached_blocks": 41}, "60 live and 41 cached blocks of 100"),
    ],
)
def test_impossible_figures_are_refused(figures: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        WorkerFigures("a", **{"memory_bytes": 1, "total_blocks": 100, **figures})  # type: ignore[arg-type]
