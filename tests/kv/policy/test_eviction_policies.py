"""What every eviction policy promises, and each of them against the brute-force reference."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv.policy.interface import EvictionPolicy
from kv.policy.lfu import LfuPolicy
from kv.policy.lru import LruPolicy
from kv.policy.ttl import TtlPolicy
from tests.kv.policy.reference_policy import IMPLEMENTATIONS


@pytest.mark.parametrize("kind", IMPLEMENTATIONS)
class TestContract:
    @pytest.fixture
    def policy(self, kind: str) -> EvictionPolicy:
        return IMPLEMENTATIONS[kind][0]()

    def test_a_new_policy_is_empty(self, policy: EvictionPolicy) -> None:
        assert len(policy) == 0
        assert list(policy.victims(0.0)) == []
        assert policy.expired(0.0, 10) == []

    def test_victims_are_all_entries_once(self, policy: EvictionPolicy) -> None:
        for handle in range(50):
            policy.insert(handle, handle % 3, float(handle % 7))
        for handle in range(0, 50, 4):
            policy.use(handle, 8.0)
        for handle in range(0, 50, 5):
            policy.remove(handle)

        left = [handle for handle in range(50) if handle % 5]
        for now_s in (8.0, 8.35, 9.0, 1e9):
            assert sorted(policy.victims(now_s)) == left
        assert len(policy) == len(left)

    def test_used_longest_ago_goes_first(self, policy: EvictionPolicy) -> None:
        for handle in (3, 1, 2):
            policy.insert(handle, 0, 0.0)
        assert list(policy.victims(0.0)) == [3, 1, 2]
        for handle in (1, 3, 2):
            policy.use(handle, 1.0)
        assert list(policy.victims(1.0)) == [1, 3, 2]
        assert list(policy.victims(1e9)) == [1, 3, 2]

    def test_iterating_changes_nothing(self, policy: EvictionPolicy) -> None:
        for handle in range(9):
            policy.insert(handle, handle % 3, handle / 10)
        policy.use(4, 1.0)
        before = list(policy.victims(1.0))
        list(itertools.islice(policy.victims(1.0), 3))
        assert list(policy.victims(1.0)) == before
        assert policy.expired(1.0, 9) == policy.expired(1.0, 9)
        assert len(policy) == 9

    def test_expired_entries_stay_until_removed(self, policy: EvictionPolicy) -> None:
        for handle in range(9):
            policy.insert(handle, handle % 3, 0.0)
        expired = policy.expired(1e9, 100)
        assert policy.expired(1e9, 100) == expired
        for limit in range(len(expired) + 2):
            assert policy.expired(1e9, limit) == expired[:limit]
        assert list(policy.victims(1e9))[: len(expired)] == expired
        for handle in expired[:2]:
            policy.remove(handle)
        assert policy.expired(1e9, 100) == expired[2:]

    def test_a_handle_may_come_back(self, policy: EvictionPolicy) -> None:
        policy.insert(1, 0, 0.0)
        policy.use(1, 0.0)
        policy.insert(2, 0, 0.0)
        policy.remove(1)
        policy.insert(1, 2, 0.0)
        assert list(policy.victims(0.0)) == [2, 1]  # neither its uses nor its place came back with it

    def test_unknown_handles(self, policy: EvictionPolicy) -> None:
        policy.insert(1, 0, 0.0)
        with pytest.raises(KeyError):
            policy.use(2, 0.0)
        with pytest.raises(KeyError):
            policy.remove(2)
        policy.remove(1)
        with pytest.raises(KeyError):
            policy.remove(1)
        assert len(policy) == 0
        assert list(policy.victims(0.0)) == []

    def test_a_handle_that_is_here_is_refused(self, policy: EvictionPolicy) -> None:
        policy.insert(1, 2, 0.0)
        policy.insert(2, 2, 0.0)
        with pytest.raises(ValueError, match="handle 1 is here already"):
            policy.insert(1, 1, 5.0)
        assert len(policy) == 2
        assert list(policy.victims(0.0)) == [1, 2]

    def test_a_clock_that_steps_back_loses_nothing(self, policy: EvictionPolicy) -> None:
        policy.insert(1, 0, 1e6)
        policy.insert(2, 0, 1.0)
        policy.use(1, 0.5)
        policy.insert(3, 0, -3.0)
        policy.use(2, 0.25)
        policy.use(3, 0.125)
        assert list(policy.victims(0.0)) == [1, 2, 3]
        assert policy.expired(0.0, 10) == []
        policy.remove(2)
        assert list(policy.victims(-1e6)) == [1, 3]


# Steps that are no dyadic fractions, so that a TTL is met, missed and rounded past; and steps back.
STEPS_S = [0.0, 0.1, 0.2, 0.3, 1.0, 3.7, 4.0, -0.3, -2.0]


class PolicyMachine(RuleBasedStateMachine):
    @initialize(kind=st.sampled_from(sorted(IMPLEMENTATIONS)))
    def begin(self, kind: str) -> None:
        make_policy, make_reference = IMPLEMENTATIONS[kind]
        self.policy = make_policy()
        self.reference = make_reference()
        self.now_s = 0.0
        self.next_handle = 0

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(self.reference.handles()))

    @rule(step_s=st.sampled_from(STEPS_S))
    def let_time_pass(self, step_s: float) -> None:
        self.now_s += step_s

    @rule(group=st.integers(0, 4))
    def insert(self, group: int) -> None:
        self.policy.insert(self.next_handle, group, self.now_s)
        self.reference.insert(self.next_handle, group, self.now_s)
        self.next_handle += 1

    @precondition(lambda self: self.reference.entries)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        handle = self.pick(data)
        self.policy.use(handle, self.now_s)
        self.reference.use(handle, self.now_s)

    @precondition(lambda self: self.reference.entries)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        handle = self.pick(data)
        self.policy.remove(handle)
        self.reference.remove(handle)

    @rule(limit=st.integers(0, 4))
    def remove_expired(self, limit: int) -> None:
        expired = self.policy.expired(self.now_s, limit)
        assert expired == self.reference.expired(self.now_s)[:limit]
        for handle in expired:
            self.policy.remove(handle)
            self.reference.remove(handle)

    @precondition(lambda self: isinstance(self.policy, TtlPolicy))
    @rule(ttls_s=st.lists(st.sampled_from([None, 0.1, 0.3, 1.0, 4.0]), min_size=1, max_size=5))
    def set_ttls(self, ttls_s: list[float | None]) -> None:
        self.policy.set_ttls(ttls_s)
        self.reference.ttls_s = list(ttls_s)

    @rule(ahead_s=st.sampled_from(STEPS_S))
    def look_at_another_time(self, ahead_s: float) -> None:
        assert list(self.policy.victims(self.now_s + ahead_s)) == self.reference.victims(self.now_s + ahead_s)

    @invariant()
    def agrees_with_the_reference(self) -> None:
        if not hasattr(self, "policy"):
            return
        assert len(self.policy) == len(self.reference.entries)
        assert list(self.policy.victims(self.now_s)) == self.reference.victims(self.now_s)
        assert self.policy.expired(self.now_s, 100) == self.reference.expired(self.now_s)


TestAgainstTheReference = PolicyMachine.TestCase
TestAgainstTheReference.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_lru_forgets_how_often_and_lfu_does_not() -> None:
    lru, lfu = LruPolicy(), LfuPolicy()
    for policy in (lru, lfu):
        policy.insert(1, 0, 0.0)
        policy.insert(2, 0, 0.0)
        policy.insert(3, 0, 0.0)
        for handle in (1, 1, 1, 2, 2, 3):
            policy.use(handle, 1.0)
    assert list(lru.victims(1.0)) == [1, 2, 3]
    assert list(lfu.victims(1.0)) == [3, 2, 1]


@pytest.mark.parametrize("kind", IMPLEMENTATIONS)
def test_memory_does_not_grow_with_use(kind: str) -> None:
    policy = IMPLEMENTATIONS[kind][0]()
    for handle in range(5):
        policy.insert(handle, 0, 0.0)

    def use_all(times: int) -> None:
        for now_s in range(times):
            for handle in range(5):
                policy.use(handle, float(now_s))

    use_all(100)
    tracemalloc.start()
    try:
        use_all(1000)
        grown_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert grown_bytes < 20_000  # 4 bytes a use
