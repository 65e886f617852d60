"""What a person is told who orders a move."""

from __future__ import annotations

import pytest

from migrate.move_settings import MoveSettings
from migrate.moves import HeadMove, LayerMove, Move
from migrate.verdict import Reason, Situation, judge_order
from tests.migrate.fleets import at_home, fleet, model, worker

COST = model()
IDLE = fleet(COST, worker("a"), worker("b", live_blocks=100), worker("c"))


@pytest.mark.parametrize(
    ("move", "reason", "says"),
    [
        (LayerMove("a", 0, 1, "a", "x"), Reason.UNKNOWN_WORKER, "destination 'x' is not a worker"),
        (LayerMove("a", 0, 1, "x", "b"), Reason.UNKNOWN_WORKER, "source 'x' is not a worker"),
        (HeadMove("x", (0,), (1,), "a", "b"), Reason.UNKNOWN_WORKER, "instance 'x' is not a worker"),
        (LayerMove("a", 3, 2, "a", "c"), Reason.INVALID, "layers 0 to 3"),
        (LayerMove("a", 0, 4, "a", "c"), Reason.INVALID, "leave it one"),
        (LayerMove("a", 0, 1, "c", "a"), Reason.INVALID, "not on 'c'"),
        (HeadMove("a", (0,), (3, 4), "a", "c"), Reason.INVALID, "KV heads 0 to 3"),
        (HeadMove("a", (0, 4), (3,), "a", "c"), Reason.INVALID, "layers 0 to 3"),
        (HeadMove("a", (0,), (0, 1, 2, 3), "a", "c"), Reason.INVALID, "leave it a head"),
        (LayerMove("a", 0, 1, "a", "b"), Reason.NO_ROOM, "are needed"),
    ],
)
def test_an_impossible_order_is_refused_with_the_reason(move: Move, reason: Reason, says: str) -> None:
    verdict = judge_order(Situation(IDLE), MoveSettings(), move)
    assert (verdict.reason, verdict.accepted) == (reason, False)
    assert says in verdict.detail


def test_heads_of_a_layer_elsewhere_cannot_come_home_without_it() -> None:
    away = fleet(COST, worker("a"), worker("b"), worker("c"), placed=(at_home("a", COST).with_layers_moved(2, 2, "c"),))
    verdict = judge_order(Situation(away), MoveSettings(), HeadMove("a", (2, 3), (1, 2), "c", "a"))
    assert verdict.reason is Reason.INVALID
    assert "layers [2, 3] of 'a' are not at home and would have KV heads on another worker" in verdict.detail
    assert judge_order(Situation(away), MoveSettings(), LayerMove("a", 2, 2, "c", "a")).accepted


@pytest.mark.parametrize(
    ("under_way", "reason", "says"),
    [
        (HeadMove("a", (3,), (0,), "a", "c"), Reason.IN_FLIGHT, "what this one moves"),
        (LayerMove("a", 0, 1, "a", "c"), Reason.IN_FLIGHT, "one move at a time"),
        (LayerMove("c", 0, 1, "c", "b"), Reason.BUSY, "'c' is in another move"),
    ],
)
def test_an_order_waits_for_moves_in_its_way(under_way: Move, reason: Reason, says: str) -> None:
    verdict = judge_order(Situation(IDLE, under_way=(under_way,)), MoveSettings(), LayerMove("a", 3, 1, "a", "c"))
    assert verdict.reason is reason
    assert says in verdict.detail


def test_an_order_need_not_pay() -> None:
    verdict = judge_order(Situation(IDLE), MoveSettings(), LayerMove("a", 3, 1, "a", "c"))
    assert verdict.accepted
    assert verdict.prediction is not None
    # Nothing to copy, and room for one block of four lanes at least.
    assert (verdict.prediction.transfer_bytes, verdict.prediction.needed_bytes) == (0, 40)


def test_heads_of_a_model_with_one_are_refused() -> None:
    one = model(heads=1)
    verdict = judge_order(
        Situation(fleet(one, worker("a"), worker("b"))), MoveSettings(), HeadMove("a", (0,), (0,), "a", "b")
    )
    assert verdict.reason is Reason.ONE_KV_HEAD


def test_an_instance_with_parts_on_a_dead_worker_is_not_moved() -> None:
    broken = Situation(fleet(COST, worker("a"), worker("c"), placed=(at_home("a", COST).with_layers_moved(2, 2, "b"),)))
    verdict = judge_order(broken, MoveSettings(), LayerMove("a", 0, 1, "a", "c"))
    assert verdict.reason is Reason.UNKNOWN_WORKER
    assert "repaired" in verdict.detail


def test_tokens_of_a_third_worker_that_hosts_the_instance_too_are_judged() -> None:
    # c has a layer of a. What goes from a to b lets more of a's prompts through, and c hosts more of them.
    workers = (worker("a", prefill_tokens_per_s=600, prefill_step_tokens=16), worker("b"))
    c = worker("c", running=1, decode_tokens_per_s=80)
    placed = at_home("a", COST).with_layers_moved(3, 1, "c")
    verdict = judge_order(
        Situation(fleet(COST, *workers, c, placed=(placed,))), MoveSettings(), LayerMove("a", 1, 2, "a", "b")
    )
    assert verdict.prediction is not None
    assert verdict.prediction.itl_after_s["c"] > verdict.prediction.itl_before_s["c"] > 0
