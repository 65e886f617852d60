from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest

from migrate.admission import AdmissionPolicy, AdmissionQueue, PoolState, RejectReason, Verdict, retry_after_s
from migrate.dispatch import DispatchRequest, WorkerView
from migrate.load import Role, WorkerLoad
from migrate.reservations import Reservations


def view(
    worker_id: str,
    role: Role,
    *,
    total: int = 100,
    live: int = 0,
    reserved: int = 0,
    pending: int = 0,
    rate: float = 1000.0,
) -> WorkerView:
    load = WorkerLoad(
        worker_id=worker_id,
        epoch=1,
        role=role,
        total_blocks=total,
        live_blocks=live,
        running_requests=0,
        waiting_requests=0,
        pending_prefill_tokens=pending,
        prefill_tokens_per_s=rate,
        steps=0,
    )
    return WorkerView(load, reserved_decode_blocks=reserved)


def request(
    request_id: str = "r", blocks: int = 10, max_blocks: int | None = None, turn_s: float = 0.0
) -> DispatchRequest:
    return DispatchRequest(request_id, 16 * blocks, 16 * blocks, blocks, (), max_blocks, turn_s)


def pools(*decode: WorkerView, inflight: int = 0, prefill: tuple[WorkerView, ...] | None = None) -> PoolState:
    return PoolState(prefill if prefill is not None else (view("p", "prefill"),), decode, inflight)


POLICY = AdmissionPolicy(max_inflight_requests=4, max_queued_requests=2)


@pytest.mark.parametrize(
    # Ten blocks of prompt and one to grow into, in a pool of 100.
    ("live", "reserved", "verdict"),
    [
        (0, 0, Verdict.ADMIT),
        (89, 0, Verdict.ADMIT),
        (90, 0, Verdict.QUEUE),
        (50, 39, Verdict.ADMIT),
        (50, 40, Verdict.QUEUE),
    ],
)
def test_a_request_starts_only_with_room_for_it_on_decode(live: int, reserved: int, verdict: Verdict) -> None:
    decision = POLICY.decide(request(), pools(view("d", "decode", live=live, reserved=reserved)))
    assert decision.verdict is verdict
    assert decision.decode_worker_id == ("d" if verdict is Verdict.ADMIT else None)


def test_room_on_any_decode_worker_will_do() -> None:
    decision = POLICY.decide(request(), pools(view("full", "decode", live=95), view("free", "decode", live=80)))
    assert (decision.verdict, decision.decode_worker_id) == (Verdict.ADMIT, "free")


@pytest.mark.parametrize(("overcommit", "live", "admitted"), [(0.5, 39, True), (0.5, 40, False), (1.5, 139, True)])
def test_overcommit_scales_what_may_be_promised(overcommit: float, live: int, admitted: bool) -> None:
    policy = AdmissionPolicy(4, 2, decode_overcommit=overcommit)
    decision = policy.decide(request(), pools(view("d", "decode", live=live)))
    assert (decision.verdict is Verdict.ADMIT) is admitted


def test_what_can_be_held_at_all_may_start_on_an_empty_worker() -> None:
    policy = AdmissionPolicy(4, 2, decode_overcommit=0.5)
    assert policy.decide(request(blocks=80), pools(view("d", "decode"))).verdict is Verdict.ADMIT
    assert policy.decide(request(blocks=80), pools(view("d", "decode", live=1))).verdict is Verdict.QUEUE


def test_the_limit_on_requests_in_flight_holds() -> None:
    assert POLICY.decide(request(), pools(view("d", "decode"), inflight=3)).verdict is Verdict.ADMIT
    assert POLICY.decide(request(), pools(view("d", "decode"), inflight=4)).verdict is Verdict.QUEUE


def test_nothing_overtakes_what_waits() -> None:
    assert POLICY.decide(request(), pools(view("d", "decode")), queued_requests=1).verdict is Verdict.QUEUE


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    decision = POLICY.decide(request(), pools(view("d", "decode"), inflight=4), queued_requests=2, queued_tokens=5000)
    assert (decision.verdict, decision.reason) == (Verdict.REJECT, RejectReason.QUEUE_FULL)
    assert decision.retry_after_s == pytest.approx((5000 + 160) / 1000.0)


def test_without_a_queue_what_cannot_start_is_refused() -> None:
    policy = AdmissionPolicy(1, 0)
    assert policy.decide(request(), pools(view("d", "decode"))).verdict is Verdict.ADMIT
    assert policy.decide(request(), pools(view("d", "decode"), inflight=1)).reason is RejectReason.QUEUE_FULL


@pytest.mark.parametrize(
    ("asked", "decode_total", "prefill_total", "message"),
    [
        (request(blocks=100), 100, 1000, "needs 101 KV blocks; the largest decode worker has 100"),
        (request(blocks=10, max_blocks=101), 100, 1000, "needs 101 KV blocks; the largest decode worker has 100"),
        (request(blocks=100), 1000, 99, "needs 100 KV blocks; the largest prefill worker has 99"),
    ],
)
def test_what_no_worker_can_ever_hold_is_refused_for_good(
    asked: DispatchRequest, decode_total: int, prefill_total: int, message: str
) -> None:
    state = pools(view("d", "decode", total=decode_total), prefill=(view("p", "prefill", total=prefill_total),))
    decision = POLICY.decide(asked, state)
    assert (decision.verdict, decision.reason) == (Verdict.REJECT, RejectReason.NEVER_FITS)
    assert message in decision.detail
    assert decision.retry_after_s is None


def test_a_prompt_that_just_fits_is_not_refused() -> None:
    state = pools(view("d", "decode"), prefill=(view("p", "prefill", total=99),))
    assert POLICY.decide(request(blocks=99), state).verdict is Verdict.ADMIT


@pytest.mark.parametrize("state", [pools(), pools(view("d", "decode"), prefill=())])
def test_an_empty_pool_is_waited_for(state: PoolState) -> None:
    assert POLICY.decide(request(), state).verdict is Verdict.QUEUE


def test_retry_is_the_later_of_prefill_and_completions_within_bounds() -> None:
    p = (view("p", "prefill", pending=3000), view("q", "prefill", pending=1000, rate=3000.0))
    state = PoolState(p, (), 0)
    assert retry_after_s(state, 5, 4000) == pytest.approx(8000 / 4000)
    assert retry_after_s(replace(state, completions_per_s=0.5), 5, 4000) == pytest.approx(6 / 0.5)
    assert retry_after_s(state, 0, 0) == 1.0
    assert retry_after_s(replace(state, completions_per_s=1e-9), 5, 0) == 60.0
    assert retry_after_s(PoolState((), (), 0), 0, 0) == 60.0


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ((0, 1), "max_inflight"),
        ((1, -1), "max_queued"),
        ((1, 1, 0.0), "overcommit"),
        ((1, 1, float("nan")), "overcommit"),
    ],
)
def test_impossible_limits_are_refused(limits: tuple[int, int], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        AdmissionPolicy(*limits)


FULL = pools(view("d", "decode", live=100))


def test_the_queue_is_first_come_first_served_and_bounded() -> None:
    queue = AdmissionQueue(AdmissionPolicy(10, 3))
    verdicts = [queue.offer(request(f"r{i}"), FULL).verdict for i in range(4)]
    assert verdicts == [Verdict.QUEUE] * 3 + [Verdict.REJECT]
    assert len(queue) == 3
    ready = queue.admit_ready(pools(view("d", "decode", live=70)))
    assert [(r.request_id, worker) for r, worker in ready.admitted] == [("r0", "d"), ("r1", "d")]
    assert [r.request_id for r, _ in queue.admit_ready(pools(view("d", "decode"))).admitted] == ["r2"]
    assert len(queue) == 0


def test_requests_admitted_together_are_spread_and_counted() -> None:
    queue = AdmissionQueue(AdmissionPolicy(100, 100))
    for i in range(30):
        queue.offer(request(f"r{i}"), FULL)
    ready = queue.admit_ready(pools(view("d", "decode"), view("e", "decode")))
    # Nine of eleven blocks each fit in 100.
    workers = [worker for _, worker in ready.admitted]
    assert (workers.count("d"), workers.count("e")) == (9, 9)
    assert [r.request_id for r, _ in ready.admitted] == [f"r{i}" for i in range(18)]


def test_requests_admitted_together_keep_to_the_limit_in_flight() -> None:
    queue = AdmissionQueue(AdmissionPolicy(5, 100))
    for i in range(10):
        queue.offer(request(f"r{i}", blocks=1), FULL)
    assert len(queue.admit_ready(pools(view("d", "decode"), inflight=2)).admitted) == 3


def test_a_large_request_is_not_starved_by_small_ones_behind_it() -> None:
    queue = AdmissionQueue(AdmissionPolicy(100, 100))
    queue.offer(request("large", blocks=80), FULL)
    for i in range(20):
        queue.offer(request(f"small{i}", blocks=1), FULL)
    for live in range(100, 19, -10):
        ready = queue.admit_ready(pools(view("d", "decode", live=live)))
        assert not ready.admitted
    ready = queue.admit_ready(pools(view("d", "decode", live=10)))
    assert [r.request_id for r, _ in ready.admitted][:2] == ["large", "small0"]


def test_cancelled_requests_are_gone_and_make_place() -> None:
    queue = AdmissionQueue(AdmissionPolicy(10, 2))
    queue.offer(request("a"), FULL)
    queue.offer(request("b"), FULL)
    assert "a" in queue
    assert queue.cancel("a")
    assert not queue.cancel("a")
    assert "a" not in queue
    assert queue.offer(request("c"), FULL).verdict is Verdict.QUEUE
    ready = queue.admit_ready(pools(view("d", "decode")))
    assert [r.request_id for r, _ in ready.admitted] == ["b", "c"]
    assert not queue.cancel("b")


def test_an_abort_storm_leaves_nothing_behind() -> None:
    queue = AdmissionQueue(AdmissionPolicy(10, 200))
    for i in range(200):
        assert queue.offer(request(f"r{i}"), FULL).verdict is Verdict.QUEUE
    assert all(queue.cancel(f"r{i}") for i in reversed(range(200)))
    assert queue.offer(request("next"), pools(view("d", "decode"))).verdict is Verdict.ADMIT
    # Nor do the tokens of what was cancelled lengthen the time to come back.
    full = AdmissionQueue(AdmissionPolicy(10, 1))
    for i in range(50):
        full.offer(request(f"r{i}", blocks=99), FULL)
        full.cancel(f"r{i}")
    full.offer(request("waits"), FULL)
    assert full.offer(request("refused"), FULL).retry_after_s == 1.0


def test_a_head_that_can_never_start_any_more_is_refused_and_blocks_nobody() -> None:
    queue = AdmissionQueue(AdmissionPolicy(10, 10))
    queue.offer(request("large", blocks=500), pools(view("big", "decode", total=1000, live=1000), prefill=(P_BIG,)))
    queue.offer(request("small"), pools(view("big", "decode", total=1000, live=1000), prefill=(P_BIG,)))
    ready = queue.admit_ready(pools(view("d", "decode"), prefill=(P_BIG,)))
    assert [(r.request_id, d.reason) for r, d in ready.refused] == [("large", RejectReason.NEVER_FITS)]
    assert [r.request_id for r, _ in ready.admitted] == ["small"]


P_BIG = view("p", "prefill", total=1000)


def test_what_has_begun_waits_where_others_are_refused() -> None:
    assert POLICY.decide(request(), FULL, queued_requests=2).verdict is Verdict.REJECT
    assert POLICY.decide(request(), FULL, queued_requests=2, begun=True).verdict is Verdict.QUEUE
    never = POLICY.decide(request(blocks=101), FULL, begun=True)
    assert never.reason is RejectReason.NEVER_FITS


def test_those_that_wait_are_admitted_in_their_turns() -> None:
    queue = AdmissionQueue(AdmissionPolicy(100, 100))
    for name, turn_s in (("later", 9.0), ("usual", 5.0), ("sooner", 1.0), ("usual, too", 5.0)):
        assert queue.offer(request(name, turn_s=turn_s), FULL).verdict is Verdict.QUEUE
    ready = queue.admit_ready(pools(view("d", "decode")))
    assert [r.request_id for r, _ in ready.admitted] == ["sooner", "usual", "usual, too", "later"]


def test_an_earlier_turn_starts_past_those_that_wait_and_the_same_turn_does_not() -> None:
    queue = AdmissionQueue(AdmissionPolicy(100, 100))
    queue.offer(request("large", blocks=80, turn_s=5.0), FULL)
    room = pools(view("d", "decode", live=50))
    assert queue.offer(request("behind", turn_s=5.0), room).verdict is Verdict.QUEUE
    assert queue.offer(request("ahead", turn_s=4.0), room).verdict is Verdict.ADMIT
    # Without room it waits, at the head.
    assert queue.offer(request("head", turn_s=4.0), FULL).verdict is Verdict.QUEUE
    ready = queue.admit_ready(pools(view("d", "decode", live=8)))
    assert [r.request_id for r, _ in ready.admitted] == ["head", "large"]


def test_a_full_queue_refuses_whoever_comes_whatever_its_turn() -> None:
    queue = AdmissionQueue(AdmissionPolicy(10, 1))
    queue.offer(request("waits", turn_s=100.0), FULL)
    assert queue.offer(request("sooner", turn_s=0.0), FULL).reason is RejectReason.QUEUE_FULL
    assert queue.offer(request("begun", turn_s=0.0), FULL, begun=True).verdict is Verdict.QUEUE


def test_what_has_begun_came_before_and_goes_before_in_its_own_order() -> None:
    queue = AdmissionQueue(AdmissionPolicy(10, 2))
    for name in ("first", "second"):
        assert queue.offer(request(name, turn_s=1.0), FULL).verdict is Verdict.QUEUE
    for name in ("choice 1", "choice 2", "choice 3"):
        assert queue.offer(request(name), FULL, begun=True).verdict is Verdict.QUEUE
    assert queue.offer(request("third", turn_s=1.0), FULL).verdict is Verdict.REJECT
    # Room for one does not let it in past those that have begun and wait, but past the others.
    one = pools(view("d", "decode", live=80))
    assert queue.offer(request("choice 4"), one, begun=True).verdict is Verdict.QUEUE
    assert queue.cancel("choice 2")
    assert "choice 3" in queue
    assert len(queue) == 5
    assert [r.request_id for r, _ in queue.admit_ready(one).admitted] == ["choice 1"]
    ready = queue.admit_ready(pools(view("d", "decode")))
    assert [r.request_id for r, _ in ready.admitted] == ["choice 3", "choice 4", "first", "second"]
    queue.offer(request("fourth", turn_s=1.0), FULL)
    assert queue.offer(request("choice 5"), one, begun=True).verdict is Verdict.ADMIT


def test_an_id_that_waits_cannot_be_offered_again() -> None:
    queue = AdmissionQueue(AdmissionPolicy(10, 10))
    queue.offer(request("r"), FULL)
    with pytest.raises(ValueError, match="'r' waits already"):
        queue.offer(request("r"), FULL)


@dataclass
class Decode:
    """A decode worker whose requests end after a number of ticks."""

    total: int
    live: dict[str, tuple[int, int]] = field(default_factory=dict)

    def blocks(self) -> int:
        return sum(blocks for blocks, _ in self.live.values())


@pytest.mark.parametrize("seed", range(5))
def test_a_full_decode_pool_does_not_fill_prefill(seed: int) -> None:
    """Requests come faster than decode ends them. Prefill takes one tick and hands over at once.

    Whatever comes, the KV that is live on decode or on its way there fits into decode, so nothing lies finished on
    prefill; order is kept; and after the storm all that was let in has started.
    """
    rng = random.Random(seed)
    decode = {"d0": Decode(60), "d1": Decode(100)}
    queue = AdmissionQueue(AdmissionPolicy(1000, 40))
    reservations = Reservations(1e9)
    on_prefill: deque[tuple[DispatchRequest, str]] = deque()
    let_in: list[str] = []
    started: list[str] = []
    refused = 0

    def state() -> PoolState:
        views = [view(name, "decode", total=worker.total, live=worker.blocks()) for name, worker in decode.items()]
        inflight = len(on_prefill) + sum(len(worker.live) for worker in decode.values())
        return PoolState((view("p", "prefill"),), [reservations.view(v.load) for v in views], inflight)

    def start(asked: DispatchRequest, worker: str) -> None:
        started.append(asked.request_id)
        on_prefill.append((asked, worker))
        reservations.reserve(asked.request_id, now_s=0.0, decode_worker=worker, decode_blocks=asked.decode_blocks)

    for tick in range(2000):
        while on_prefill:
            asked, worker = on_prefill.popleft()
            decode[worker].live[asked.request_id] = (asked.decode_blocks, tick + rng.randint(5, 20))
            reservations.release_decode(asked.request_id)
        for target in decode.values():
            target.live = {i: (blocks, end) for i, (blocks, end) in target.live.items() if end > tick}
        ready = queue.admit_ready(state())
        assert not ready.refused
        for asked, worker in ready.admitted:
            start(asked, worker)
        for i in range(rng.randint(0, 3) if tick < 200 else 0):
            asked = request(f"{tick}-{i}", blocks=rng.choice([1, 5, 20, 90]))
            decision = queue.offer(asked, state())
            if decision.verdict is Verdict.REJECT:
                refused += 1
            else:
                let_in.append(asked.request_id)
            if decision.decode_worker_id is not None:
                start(asked, decision.decode_worker_id)
        for v in state().decode:
            assert v.used_blocks <= v.load.total_blocks
    assert started == let_in
    assert len(queue) == 0
    assert refused > 50, "the storm was none"
    assert len(started) > 50
