from __future__ import annotations

import pickle
import random

import pytest

from migrate.dispatch import (
    DispatchRequest,
    LoadAware,
    NoWorkerError,
    PowerOfTwo,
    PrefixAware,
    RoundRobin,
    WorkerView,
    choose_decode,
    make_policy,
)
from migrate.load import Role, WorkerLoad


def view(
    worker_id: str,
    *,
    role: Role = "prefill",
    pending: int = 0,
    rate: float = 1000.0,
    running: int = 0,
    live: int = 0,
    total: int = 1000,
    reserved_blocks: int = 0,
    epoch: int = 1,
) -> WorkerView:
    load = WorkerLoad(
        worker_id=worker_id,
        epoch=epoch,
        role=role,
        total_blocks=total,
        live_blocks=live,
        running_requests=running,
        waiting_requests=0,
        pending_prefill_tokens=pending,
        prefill_tokens_per_s=rate,
        steps=0,
    )
    return WorkerView(load, reserved_decode_blocks=reserved_blocks)


def request(*keys: bytes, tokens: int = 100, blocks: int = 10, max_blocks: int | None = None) -> DispatchRequest:
    return DispatchRequest("r", tokens, 200, blocks, keys, max_blocks)


def test_load_aware_compares_seconds_not_tokens() -> None:
    # a: (500 + 100) / 1000 = 0.6 s; b: (900 + 100) / 2000 = 0.5 s.
    assert LoadAware().choose(request(), [view("a", pending=500), view("b", pending=900, rate=2000.0)]) == "b"


def test_load_aware_counts_the_request_itself() -> None:
    # Idle but slow: 100 / 100 = 1 s. Busy but fast: (500 + 100) / 1000 = 0.6 s.
    assert LoadAware().choose(request(), [view("idle", rate=100.0), view("busy", pending=500)]) == "busy"


def test_load_aware_ties_go_to_the_fewest_requests_and_then_in_turn() -> None:
    policy = LoadAware()
    workers = [view("a", running=1), view("b"), view("c"), view("d")]
    assert [policy.choose(request(), workers) for _ in range(6)] == ["b", "c", "d", "b", "c", "d"]


def test_noise_in_measured_rates_does_not_fix_the_choice() -> None:
    workers = [view("a", rate=1000.0), view("b", rate=1010.0), view("c", rate=990.0)]
    assert [LoadAware(seed).choose(request(), workers) for seed in range(3)] == ["a", "b", "c"]
    assert [LoadAware(seed, tie_tolerance=0.0).choose(request(), workers) for seed in range(3)] == ["b", "b", "b"]


def test_round_robin_takes_turns_while_workers_come_and_go() -> None:
    policy = RoundRobin()
    abc, abd = [view(w) for w in "abc"], [view(w) for w in "abd"]
    assert [policy.choose(request(), abc) for _ in range(4)] == ["a", "b", "c", "a"]
    assert [policy.choose(request(), abd) for _ in range(4)] == ["b", "d", "a", "b"]


def test_power_of_two_takes_the_better_of_two_drawn() -> None:
    """Of three workers in strict order the best wins whenever it is drawn: 2 in 3; the worst never wins."""
    policy = PowerOfTwo(7)
    workers = [view("good"), view("fair", pending=1000), view("bad", pending=9000)]
    chosen = [policy.choose(request(), workers) for _ in range(600)]
    assert "bad" not in chosen
    assert chosen.count("good") / 600 == pytest.approx(2 / 3, abs=0.08)


def test_power_of_two_repeats_for_a_seed_and_differs_between_seeds() -> None:
    def run(seed: int) -> list[str]:
        policy = PowerOfTwo(seed)
        return [policy.choose(request(), [view(w) for w in "abcd"]) for _ in range(50)]

    assert run(3) == run(3)
    assert run(3) != run(4)


def chain(prefix: str, length: int) -> tuple[bytes, ...]:
    return tuple(f"{prefix}{i}".encode() for i in range(length))


def test_prefix_aware_follows_the_longest_prefix() -> None:
    policy = PrefixAware()
    workers = [view(w) for w in "abc"]
    first = policy.choose(request(*chain("x", 8)), workers)
    second = policy.choose(request(*chain("y", 8)), workers)
    assert first != second  # no match: the worker with the fewest remembered keys
    assert policy.choose(request(*chain("x", 8), b"new"), workers) == first
    assert policy.choose(request(*chain("y", 8), b"new"), workers) == second


def test_prefix_aware_counts_by_prefix_not_by_membership() -> None:
    policy = PrefixAware()
    # `a` has three of the four blocks but not the first, `b` has the first only.
    assert policy.choose(request(b"0", b"2", b"3", b"4"), [view("a"), view("b", live=1000)]) == "a"
    assert policy.choose(request(b"1"), [view("a", live=1000), view("b")]) == "b"
    assert policy.choose(request(b"1", b"2", b"3", b"4"), [view("a"), view("b")]) == "b"


def test_prefix_aware_balances_first_when_counts_differ_too_much() -> None:
    policy = PrefixAware(imbalance_threshold=10)
    keys = chain("x", 8)
    assert policy.choose(request(*keys), [view("a"), view("b", live=1000)]) == "a"
    assert policy.choose(request(*keys), [view("a", running=10), view("b")]) == "a"
    # Fewest requests, although `a` would be done sooner.
    assert policy.choose(request(*keys), [view("a", running=11), view("b", pending=500)]) == "b"


def test_prefix_aware_ignores_a_match_below_the_rate() -> None:
    policy = PrefixAware(match_rate_threshold=0.5)
    assert policy.choose(request(*chain("x", 4)), [view("a"), view("b", live=1000)]) == "a"
    assert policy.choose(request(*chain("x", 4), *chain("y", 5)), [view("a"), view("b")]) == "b"  # 4 of 9
    policy = PrefixAware(match_rate_threshold=0.5)
    assert policy.choose(request(*chain("x", 4)), [view("a"), view("b", live=1000)]) == "a"
    assert policy.choose(request(*chain("x", 4), *chain("y", 4)), [view("a"), view("b")]) == "a"  # 4 of 8


def test_prefix_aware_without_full_blocks_goes_by_load() -> None:
    policy = PrefixAware()
    policy.choose(request(*chain("x", 4)), [view("a"), view("b", live=1000)])
    # By filling it would be b.
    assert policy.choose(request(), [view("a"), view("b", pending=500)]) == "a"


def test_prefix_aware_forgets_a_worker_that_restarted() -> None:
    policy = PrefixAware()
    keys = chain("x", 4)
    assert policy.choose(request(*keys), [view("a"), view("b", live=1000)]) == "a"
    assert policy.choose(request(*keys), [view("a"), view("b", pending=500)]) == "a"
    # Both are empty now, so load decides.
    assert policy.choose(request(*keys), [view("a", epoch=2, pending=500), view("b")]) == "b"


def test_prefix_aware_memory_is_bounded_and_keeps_the_first_blocks_longest() -> None:
    policy = PrefixAware(max_keys_per_worker=6)
    workers = [view("a")]
    policy.choose(request(*chain("x", 4)), workers)
    policy.choose(request(*chain("y", 4)), workers)  # x2 and x3 are forgotten, x0 and x1 are not
    both = [view("a", pending=300), view("b")]
    assert policy.choose(request(*chain("x", 4)), both) == "a"
    policy = PrefixAware(max_keys_per_worker=6)
    policy.choose(request(*chain("x", 4)), workers)
    policy.choose(request(*chain("y", 6)), workers)  # all of x is forgotten
    assert policy.choose(request(*chain("x", 4)), both) == "b"


def test_prefix_aware_forgets_the_least_recently_used_first() -> None:
    policy = PrefixAware(max_keys_per_worker=6)
    for keys in (chain("x", 4), chain("y", 2), chain("x", 4), chain("z", 2)):
        policy.choose(request(*keys), [view("a")])
    both = [view("a", pending=300), view("b")]
    assert policy.choose(request(*chain("x", 4)), both) == "a"
    assert policy.choose(request(*chain("y", 2)), both) == "b"


def test_prefix_aware_memory_does_not_grow_with_restarts_or_prompts() -> None:
    policy = PrefixAware(max_keys_per_worker=50)
    sizes = []
    for i in range(300):
        policy.choose(request(*chain(f"{i:06d}-", 25)), [view(f"w{i:06d}"), view("stays")])
        sizes.append(len(pickle.dumps(policy)))
    assert max(sizes[150:]) <= max(sizes[:150])


def test_make_policy_passes_settings_on() -> None:
    policy = make_policy("prefix_aware", imbalance_threshold=0, match_rate_threshold=1, seed=1)
    assert isinstance(policy, PrefixAware)
    keys = chain("x", 4)
    assert policy.choose(request(*keys), [view("a"), view("b", live=1000)]) == "a"
    assert policy.choose(request(*keys), [view("a", running=1), view("b")]) == "b"


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("least_loaded", {}, "least_loaded.*load_aware, round_robin, power_of_two, prefix_aware"),
        ("round_robin", {"imbalance_threshold": 3}, "no setting 'imbalance_threshold'.*seed"),
        ("prefix_aware", {"imbalanced_threshold": 3}, "imbalanced_threshold.*imbalance_threshold"),
        ("prefix_aware", {"imbalance_threshold": -1}, "imbalance_threshold is -1"),
        ("prefix_aware", {"imbalance_threshold": "10"}, "imbalance_threshold is '10'; it must be int"),
        ("prefix_aware", {"match_rate_threshold": 1.5}, "match_rate_threshold is 1.5"),
        ("prefix_aware", {"match_rate_threshold": True}, "match_rate_threshold is True; it must be int or float"),
        ("prefix_aware", {"max_keys_per_worker": 0}, "max_keys_per_worker is 0"),
        ("load_aware", {"tie_tolerance": float("nan")}, "tie_tolerance is nan"),
        ("load_aware", {"seed": 1.5}, "seed is 1.5; it must be int"),
    ],
)
def test_make_policy_refuses_what_it_does_not_know(name: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy(name, **settings)


def test_decode_goes_where_the_least_share_is_used() -> None:
    workers = [view("a", role="decode", live=600), view("b", role="decode", live=500)]
    assert choose_decode(request(), workers) == "b"
    workers = [view("a", role="decode", live=600), view("b", role="decode", live=500, reserved_blocks=200)]
    assert choose_decode(request(), workers) == "a"


def test_decode_counts_the_request_against_small_workers() -> None:
    # Half of 100 and 60 % of 1000 are used; with 61 blocks more the small one would be over its size.
    workers = [view("small", role="decode", live=50, total=100), view("large", role="decode", live=600)]
    assert choose_decode(request(blocks=60), workers) == "large"


def test_decode_ties_go_to_the_fewest_running_and_then_in_turn() -> None:
    workers = [view("a", role="decode", running=5), view("b", role="decode"), view("c", role="decode")]
    assert [choose_decode(request(), workers, turn=turn) for turn in range(4)] == ["b", "c", "b", "c"]


def test_decode_goes_only_where_the_request_can_end() -> None:
    workers = [view("small", role="decode", total=40), view("large", role="decode", live=990)]
    assert choose_decode(request(max_blocks=41), workers) == "large"
    with pytest.raises(NoWorkerError, match=r"41 KV blocks.*largest decode worker has 40"):
        choose_decode(request(max_blocks=41), workers[:1])


def test_decode_needs_a_worker_of_that_role() -> None:
    with pytest.raises(NoWorkerError, match="no decode worker"):
        choose_decode(request(), [view("p", role="prefill")])
    assert choose_decode(request(), [view("p", role="prefill"), view("m", role="monolithic")]) == "m"


def test_decode_choice_does_not_depend_on_the_order_listed() -> None:
    rng = random.Random(0)
    for turn in range(50):
        workers = [view(w, role="decode", live=rng.choice([0, 10])) for w in "abcdef"]
        shuffled = rng.sample(workers, len(workers))
        assert choose_decode(request(), workers, turn=turn) == choose_decode(request(), shuffled, turn=turn)
