"""What holds for every dispatch policy. A new policy joins by its name in `POLICIES`."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrate.dispatch import POLICIES, DispatchPolicy, DispatchRequest, NoWorkerError, WorkerView, make_policy
from migrate.load import Role, WorkerLoad
from migrate.reservations import Reservations

RATE = 1000.0


@pytest.fixture(params=list(POLICIES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def view(worker_id: str, live_blocks: int = 0, role: Role = "prefill", total_blocks: int = 1000) -> WorkerView:
    return WorkerView(
        WorkerLoad(
            worker_id=worker_id,
            epoch=1,
            role=role,
            total_blocks=total_blocks,
            live_blocks=live_blocks,
            running_requests=0,
            waiting_requests=0,
            pending_prefill_tokens=0,
            prefill_tokens_per_s=RATE,
            steps=0,
        )
    )


HOT = tuple(f"hot-{i}".encode() for i in range(24))


def request(request_id: str, keys: tuple[bytes, ...] = HOT, uncached_tokens: int = 400) -> DispatchRequest:
    return DispatchRequest(request_id, uncached_tokens, 512, 32, keys)


def test_no_worker_is_an_error_that_names_the_request(name: str) -> None:
    with pytest.raises(NoWorkerError, match=r"r1.*no prefill worker"):
        make_policy(name).choose(request("r1"), [])


def test_a_decode_worker_is_no_candidate(name: str) -> None:
    policy = make_policy(name)
    workers = [view("d0", role="decode"), view("p0")]
    assert {policy.choose(request(f"r{i}"), workers) for i in range(5)} == {"p0"}
    with pytest.raises(NoWorkerError):
        policy.choose(request("r"), workers[:1])


def test_a_worker_that_is_too_small_is_never_chosen(name: str) -> None:
    policy = make_policy(name)
    workers = [view("small", total_blocks=31), view("large", live_blocks=990)]
    assert {policy.choose(request(f"r{i}"), workers) for i in range(5)} == {"large"}
    with pytest.raises(NoWorkerError, match=r"32 KV blocks.*has 31"):
        policy.choose(request("r"), workers[:1])


def test_full_then_cleared_then_dead(name: str) -> None:
    policy = make_policy(name)
    ids = itertools.count()

    def chosen(workers: list[WorkerView]) -> set[str]:
        return {policy.choose(request(f"r{next(ids)}", (b"key-%d" % next(ids),)), workers) for _ in range(40)}

    assert chosen([view("a"), view("b")]) == {"a", "b"}
    assert chosen([view("a", live_blocks=990), view("b")]) == {"b"}
    assert "a" in chosen([view("a"), view("b")])
    assert chosen([view("b")]) == {"b"}


def test_a_dead_worker_is_left_in_spite_of_its_prefix(name: str) -> None:
    policy = make_policy(name)
    first = policy.choose(request("r0"), [view("a"), view("b"), view("c")])
    others = [view(worker) for worker in "abc" if worker != first]
    for i in range(30):
        assert policy.choose(request(f"r{i + 1}"), others) != first


def test_when_all_are_full_one_is_chosen_all_the_same(name: str) -> None:
    workers = [view("a", live_blocks=1000), view("b", live_blocks=1000)]
    assert make_policy(name).choose(request("r"), workers) in {"a", "b"}


@given(data=st.data(), seed=st.integers(0, 1000))
@pytest.mark.parametrize("policy_name", list(POLICIES))
def test_the_choice_is_listed_has_room_if_any_has_and_repeats(policy_name: str, data: st.DataObject, seed: int) -> None:
    rounds = data.draw(
        st.lists(
            st.lists(
                st.tuples(st.sampled_from("abcdef"), st.sampled_from([0, 500, 990]), st.sampled_from([20, 1000])),
                min_size=1,
                max_size=5,
                unique_by=lambda worker: worker[0],
            ),
            min_size=1,
            max_size=8,
        )
    )
    keys = [HOT, HOT[:3], (b"cold",), ()]
    policy, twin = make_policy(policy_name, seed=seed), make_policy(policy_name, seed=seed)
    for i, workers in enumerate(rounds):
        views = [view(worker, live, total_blocks=total) for worker, live, total in workers]
        asked = request(f"r{i}", keys[i % 4])
        able = {v.worker_id for v in views if v.load.total_blocks >= 32}
        roomy = {v.worker_id for v in views if v.load.live_blocks + 32 <= v.load.total_blocks}
        try:
            chosen = policy.choose(asked, views)
        except NoWorkerError:
            assert not able
            with pytest.raises(NoWorkerError):
                twin.choose(asked, views)
            continue
        assert chosen in (roomy or able)
        # The order in which the workers are listed plays no part.
        assert twin.choose(asked, list(reversed(views))) == chosen


@dataclass
class Worker:
    """A prefill worker that computes `RATE` tokens a second, first come first served."""

    worker_id: str
    queue: deque[tuple[str, float]] = field(default_factory=deque)
    assigned_tokens: int = 0

    def work(self, seconds: float) -> list[str]:
        """Advance; return the requests whose first token came."""
        done = []
        tokens = seconds * RATE
        while self.queue and tokens > 0:
            request_id, left = self.queue.popleft()
            if left > tokens:
                self.queue.appendleft((request_id, left - tokens))
            else:
                done.append(request_id)
            tokens -= left
        return done

    def report(self) -> WorkerLoad:
        """All requests are the one ingress's own, so what it counts are its reservations."""
        pending = round(sum(left for _, left in self.queue))
        return WorkerLoad(
            worker_id=self.worker_id,
            epoch=1,
            role="prefill",
            total_blocks=100_000,
            live_blocks=32 * len(self.queue),
            running_requests=min(1, len(self.queue)),
            waiting_requests=max(0, len(self.queue) - 1),
            pending_prefill_tokens=pending,
            prefill_tokens_per_s=RATE,
            steps=0,
            from_this_ingress_prefill_tokens=pending,
            from_this_ingress_requests=len(self.queue),
        )


def gap(workers: Iterable[Worker]) -> int:
    open_requests = [len(worker.queue) for worker in workers]
    return max(open_requests) - min(open_requests)


def serve_skewed_trace(policy: DispatchPolicy, seed: int) -> tuple[dict[str, int], int]:
    """Serve 600 requests, four in five of them with the same hot prefix, at 90 % of what five workers can do.

    Returns: tokens assigned by worker; the largest gap between the most and the fewest open requests that any choice
    made, gaps that were as wide before it not counted.
    """
    rng = random.Random(seed)
    workers = {f"w{i}": Worker(f"w{i}") for i in range(5)}
    reservations = Reservations(ttl_s=1e9)
    widest = 0
    now_s = 0.0
    for i in range(600):
        gap_s = rng.expovariate(0.9 * 5 * RATE / 381)
        now_s += gap_s
        for worker in workers.values():
            for done in worker.work(gap_s):
                reservations.release(done)
        keys = (*HOT, b"tail-%d" % i) if rng.random() < 0.8 else tuple(b"cold-%d-%d" % (i, j) for j in range(25))
        asked = request(f"r{i}", keys, rng.randint(250, 512))
        before = gap(workers.values())
        chosen = policy.choose(asked, [reservations.view(worker.report()) for worker in workers.values()])
        reservations.reserve(asked.request_id, now_s=now_s, prefill_worker=chosen, prefill_tokens=asked.uncached_tokens)
        workers[chosen].queue.append((asked.request_id, float(asked.uncached_tokens)))
        workers[chosen].assigned_tokens += asked.uncached_tokens
        if gap(workers.values()) > before:
            widest = max(widest, gap(workers.values()))
    return {worker.worker_id: worker.assigned_tokens for worker in workers.values()}, widest


@pytest.mark.parametrize("seed", range(3))
def test_a_skewed_prefix_trace_starves_nobody(name: str, seed: int) -> None:
    tokens, _ = serve_skewed_trace(make_policy(name, seed=seed), seed)
    mean = sum(tokens.values()) / len(tokens)
    assert max(tokens.values()) <= 1.4 * mean
    assert min(tokens.values()) >= 0.6 * mean


def test_the_skewed_trace_does_starve_without_balance() -> None:
    """The trace above can tell: affinity that is never overruled breaks both bounds."""
    tokens, _ = serve_skewed_trace(make_policy("prefix_aware", imbalance_threshold=10**9), 0)
    mean = sum(tokens.values()) / len(tokens)
    assert max(tokens.values()) > 2 * mean
    assert min(tokens.values()) < 0.5 * mean


@pytest.mark.parametrize("threshold", [0, 3, 10])
def test_prefix_affinity_never_widens_the_gap_past_its_threshold(threshold: int) -> None:
    _, widest = serve_skewed_trace(make_policy("prefix_aware", imbalance_threshold=threshold), 1)
    assert widest == threshold + 1


@pytest.mark.parametrize("burst", [5, 40, 43])
def test_a_burst_spreads_evenly_thanks_to_reservations(name: str, burst: int) -> None:
    """All requests come between two reports: every report says idle, only the reservations differ."""
    policy = make_policy(name, **({"imbalance_threshold": 0} if name == "prefix_aware" else {}))
    reservations = Reservations(ttl_s=1e9)
    loads = [Worker(f"w{i}").report() for i in range(5)]
    chosen: Counter[str] = Counter()
    for i in range(burst):
        worker = policy.choose(request(f"r{i}"), [reservations.view(load) for load in loads])
        reservations.reserve(f"r{i}", now_s=0.0, prefill_worker=worker, prefill_tokens=400)
        chosen[worker] += 1
    counts = [chosen[load.worker_id] for load in loads]
    # Two choices at random are even only up to a few requests (Mitzenmacher: log log n), never exactly.
    assert max(counts) - min(counts) <= (4 if name == "power_of_two" else 1)


def test_several_ingresses_that_start_together_do_not_herd(name: str) -> None:
    """Each sees the same idle workers and nothing of the others' reservations."""
    workers = [view(f"w{i}") for i in range(4)]
    firsts = Counter(make_policy(name, seed=seed).choose(request("r"), workers) for seed in range(40))
    assert set(firsts) == {"w0", "w1", "w2", "w3"}
    assert max(firsts.values()) <= 20
