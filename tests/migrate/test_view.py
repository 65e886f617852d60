from __future__ import annotations

import pytest

from migrate.load import Role, WorkerLoad
from migrate.view import DispatchRequest, WorkerView


def load(role: Role = "prefill", **fields: int) -> WorkerLoad:
    base: dict[str, int] = {
        "total_blocks": 100,
        "live_blocks": 0,
        "running_requests": 0,
        "waiting_requests": 0,
        "pending_prefill_tokens": 0,
    }
    return WorkerLoad(worker_id="w", epoch=1, role=role, prefill_tokens_per_s=1000.0, steps=0, **(base | fields))


def request(num_blocks: int = 4, max_blocks: int | None = None) -> DispatchRequest:
    return DispatchRequest("r", 60, 64, num_blocks, (), max_blocks)


def test_own_work_is_counted_by_reservation_and_others_by_report() -> None:
    report = load(pending_prefill_tokens=900, from_this_ingress_prefill_tokens=400)
    view = WorkerView(report, reserved_prefill_tokens=700)
    assert view.pending_tokens == 500 + 700
    assert view.pending_s == pytest.approx(1.2)
    assert view.prefill_end_s(request()) == pytest.approx(1.26)


def test_own_requests_are_not_counted_twice() -> None:
    report = load(running_requests=3, waiting_requests=4, from_this_ingress_requests=2)
    assert WorkerView(report, reserved_prefill_requests=5).requests == 5 + 5


def test_a_report_that_owes_us_more_than_it_has_is_not_negative_load() -> None:
    report = load(pending_prefill_tokens=10, from_this_ingress_prefill_tokens=50, from_this_ingress_requests=3)
    assert (WorkerView(report).pending_tokens, WorkerView(report).requests) == (0, 0)


@pytest.mark.parametrize(
    # A prefill worker holds the prompt only. The others need one block more to start, and max_blocks to end.
    ("role", "total", "live", "has_room", "can_ever_hold"),
    [
        ("prefill", 4, 0, True, True),
        ("prefill", 4, 1, False, True),
        ("prefill", 3, 0, False, False),
        ("decode", 9, 4, True, True),
        ("decode", 9, 5, False, True),
        ("decode", 8, 0, True, False),
        ("monolithic", 9, 4, True, True),
        ("monolithic", 8, 0, True, False),
    ],
)
def test_room_now_and_room_ever(role: Role, total: int, live: int, has_room: bool, can_ever_hold: bool) -> None:
    view = WorkerView(load(role, total_blocks=total, live_blocks=live))
    assert view.has_room(request(4, 9)) is has_room
    assert view.can_ever_hold(request(4, 9)) is can_ever_hold


def test_promised_blocks_are_used_blocks() -> None:
    view = WorkerView(load("decode", total_blocks=10, live_blocks=3), reserved_decode_blocks=3)
    assert not view.has_room(request(4))
    assert WorkerView(view.load, reserved_decode_blocks=2).has_room(request(4))


def test_a_request_that_ends_in_its_last_prompt_block_needs_no_further_one() -> None:
    assert request(4, 4).decode_blocks == 4
    assert request(4, 9).decode_blocks == 5
    assert request(4).decode_blocks == request(4).lifetime_blocks == 5


@pytest.mark.parametrize(
    ("uncached", "prompt", "blocks", "max_blocks", "field"),
    [(65, 64, 4, None, "uncached"), (-1, 64, 4, None, "uncached"), (1, 1, 0, None, "num_"), (1, 64, 4, 3, "max_")],
)
def test_impossible_lengths_are_refused(
    uncached: int, prompt: int, blocks: int, max_blocks: int | None, field: str
) -> None:
    with pytest.raises(ValueError, match=field):
        DispatchRequest("r", uncached, prompt, blocks, (), max_blocks)
