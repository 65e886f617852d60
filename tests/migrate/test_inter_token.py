"""Predicted inter-token latencies, worked out by hand. A decode step takes 2 ms and 1 ms a row in each of 4 layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from migrate.fleet import Fleet
from migrate.inter_token import inter_token_s, undisturbed_s
from migrate.worker_share import busy_with_others, turn_s
from tests.migrate.fleets import at_home, fleet, model, worker

HORIZON_S = 30.0
COST = model()
LAST_TWO = at_home("a", COST).with_layers_moved(2, 2, "b")


def latency_ms(fleet: Fleet, instance: str = "a") -> float:
    return 1000 * inter_token_s(fleet, instance, HORIZON_S)


def test_at_home_it_is_one_step() -> None:
    alone = fleet(COST, worker("a", running=4, decode_tokens_per_s=100))
    assert latency_ms(alone) == pytest.approx(4 * 6)
    assert undisturbed_s(alone, "a") == pytest.approx(0.024)
    assert latency_ms(fleet(COST, worker("a"))) == 0
    assert undisturbed_s(fleet(COST, worker("a")), "a") == 0


def test_output_head_and_sampling_are_part_of_a_step() -> None:
    cost = replace(COST, times=replace(COST.times, head_step_s=0.003, head_row_s=0.001))
    alone = fleet(cost, worker("a", running=4))
    assert latency_ms(alone) == pytest.approx(24 + 3 + 4)
    assert undisturbed_s(alone, "a") == pytest.approx(0.031)


def test_two_workers_take_turns_at_two_groups() -> None:
    # Groups of two: 4 ms a layer, 16 ms through four; both groups through two layers as well. Two rows of 8 bytes go
    # there and back at 100,000 bytes/s: 0.32 ms.
    assert latency_ms(fleet(COST, worker("a", running=4), worker("b"), placed=(LAST_TWO,))) == pytest.approx(16.32)


def test_the_slower_worker_sets_the_pace() -> None:
    # Two groups through three layers at home: 24 ms, more than the 16 ms of one through all four.
    placed = at_home("a", COST).with_layers_moved(3, 1, "b")
    assert latency_ms(fleet(COST, worker("a", running=4), worker("b"), placed=(placed,))) == pytest.approx(24)


def test_one_request_is_no_two_groups() -> None:
    assert latency_ms(fleet(COST, worker("a", running=1), worker("b"), placed=(LAST_TWO,))) == pytest.approx(12.16)


def test_each_host_is_a_way_there_and_back() -> None:
    # Three groups of one row: 12 ms. Two hosts: four trips of 2 ms and 8 bytes at 100,000 bytes/s. That is more than
    # the 18 ms of three groups through the two layers at home.
    placed = at_home("a", COST).with_layers_moved(2, 1, "b").with_layers_moved(3, 1, "c")
    workers = [worker("a", running=3), worker("b"), worker("c")]
    assert latency_ms(fleet(model(latency_s=0.002), *workers, placed=(placed,))) == pytest.approx(12 + 4 * 2.08)


def test_a_hosted_layer_waits_for_the_step_of_its_host() -> None:
    # b computes 50 tokens/s x 4 ms, a fifth of its time, in steps of 25 tokens x 4 ms: 20 ms more.
    b = worker("b", prefill_tokens_per_s=50, prefill_step_tokens=25)
    split = fleet(COST, worker("a", running=4), b, placed=(LAST_TWO,))
    assert busy_with_others(split, "a", "b", HORIZON_S) == pytest.approx(0.2)
    # A group's pass takes 16 + 20 ms, and both have had their turn at b after 2 x (8 + 20).
    assert latency_ms(split) == pytest.approx(56)


@pytest.mark.parametrize(("tokens_per_s", "wait_ms"), [(50, 12 / 9), (250, 12), (5000, 12)])
def test_home_waits_for_hosted_work_but_one_slice_at_most(tokens_per_s: float, wait_ms: float) -> None:
    # b decodes one request in 12 ms. It hosts two layers of a: 2 ms a token, in chunks of 6 tokens. A tenth of its time
    # makes 12 x 0.1 / 0.9. Of 5,000 tokens/s a computes 500, which keep b busy all the time.
    a, b = worker("a", prefill_tokens_per_s=tokens_per_s, prefill_step_tokens=6), worker("b", running=1)
    split = fleet(COST, a, b, placed=(LAST_TWO,))
    assert latency_ms(split, "b") == pytest.approx(12 + wait_ms)


@pytest.mark.parametrize(("pending", "wait_ms"), [(0, 12 / 19), (6, 12 / 19), (7, 6)])
def test_a_backlog_is_worked_off_as_fast_as_can_be(pending: float, wait_ms: float) -> None:
    # b hosts one layer: of 50 tokens/s 0.05 of its time, 12 x 0.05 / 0.95. With more waiting than one step takes, a
    # computes a token in each 3 ms, and b has 1 ms of that.
    a = worker("a", prefill_tokens_per_s=50, pending_prefill_tokens=pending, prefill_step_tokens=6)
    placed = at_home("a", COST).with_layers_moved(3, 1, "b")
    offered = fleet(
        COST, replace(a, prefill_tokens_per_s=50 - pending / HORIZON_S), worker("b", running=1), placed=(placed,)
    )
    assert latency_ms(offered, "b") == pytest.approx(12 + wait_ms)


def test_a_decoding_guest_is_busy_at_the_batch_it_has() -> None:
    # a's two requests, in two groups of one, take 2 x 3 ms of b for each; 83.3 steps/s each way: 50 tokens/s x 6 ms.
    split = fleet(COST, worker("a", running=2, decode_tokens_per_s=50), worker("b", running=1), placed=(LAST_TWO,))
    assert busy_with_others(split, "b", "b", HORIZON_S) == pytest.approx(0.3)


def test_heads_elsewhere_are_waited_for_where_they_take_longer() -> None:
    # Half of a layer's 6 ms is attention, half of that two of four heads. At home 3 + 1.5 ms; there too 1.5 ms, and for
    # 4 rows x 2 heads x (4 + 2 + 2) bytes there and x 4 bytes back 0.64 + 0.32 ms, and twice the latency.
    cost = model(attention=0.5, latency_s=0.001)
    placed = at_home("a", cost).with_heads_moved(range(4), [2, 3], "b")
    assert latency_ms(fleet(cost, worker("a", running=4), worker("b"), placed=(placed,))) == pytest.approx(
        4 * (3 + 1.5 + 0.96 + 2)
    )
    # One of four heads there: it takes 0.75 + 0.48 ms, the three at home 2.25 ms. Nobody waits for it.
    cost = model(attention=0.5)
    placed = at_home("a", cost).with_heads_moved(range(4), [3], "b")
    assert latency_ms(fleet(cost, worker("a", running=4), worker("b"), placed=(placed,))) == pytest.approx(
        4 * (3 + 2.25)
    )


def test_a_busy_host_attends_to_heads_half_as_fast() -> None:
    # b is busy all the time: 4 x (3 + 2 x 1.5 + 0.96) ms.
    cost = model(attention=0.5)
    placed = at_home("a", cost).with_heads_moved(range(4), [2, 3], "b")
    b = worker("b", prefill_tokens_per_s=1000)
    assert latency_ms(fleet(cost, worker("a", running=4), b, placed=(placed,))) == pytest.approx(4 * 6.96)


def test_a_call_waits_for_a_step_as_often_as_there_is_one() -> None:
    # Chunks of 50 tokens through four layers: 200 ms, one after the other while prompts wait. Half as many: 100 ms.
    assert turn_s(fleet(COST, worker("a")), "a", HORIZON_S) == 0
    waiting = worker("a", prefill_tokens_per_s=250, pending_prefill_tokens=1000, prefill_step_tokens=50)
    assert turn_s(fleet(COST, waiting), "a", HORIZON_S) == pytest.approx(0.2)
    half = worker("a", prefill_tokens_per_s=125, prefill_step_tokens=50)
    assert turn_s(fleet(COST, half), "a", HORIZON_S) == pytest.approx(0.1)
    # A host of two of four layers is at a stage of 100 ms half of the time, or all of it while prompts wait.
    assert turn_s(fleet(COST, half, worker("b"), placed=(LAST_TWO,)), "b", HORIZON_S) == pytest.approx(0.25 * 0.1)
    assert turn_s(fleet(COST, waiting, worker("b"), placed=(LAST_TWO,)), "b", HORIZON_S) == pytest.approx(0.1)
    # One that decodes beside it, 24 ms a step and 30 of them a second, is at one of the two, never at both.
    decoding = worker("b", running=4, decode_tokens_per_s=120)
    shares, steps_s = (1.0, 0.72), (0.1, 0.024)
    expected = sum(share * step_s for share, step_s in zip(shares, steps_s, strict=True)) / 1.72
    assert turn_s(fleet(COST, waiting, decoding, placed=(LAST_TWO,)), "b", HORIZON_S) == pytest.approx(expected)
