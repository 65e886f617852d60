"""Times-to-live by group: a preference, changed live, and cheap when very much expires at once."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from kv.policy.lru import LruPolicy
from kv.policy.ttl import TtlPolicy


def test_unexpired_entries_go_too_but_later() -> None:
    policy = TtlPolicy(LruPolicy(), [10.0, None, 100.0])
    policy.insert(1, 1, 0.0)  # never expires
    policy.insert(2, 2, 0.0)  # expires after 100 s
    policy.insert(3, 0, 0.0)  # expires after 10 s
    assert list(policy.victims(5.0)) == [1, 2, 3]
    assert list(policy.victims(20.0)) == [3, 1, 2]
    assert list(policy.victims(200.0)) == [3, 2, 1]
    assert policy.expired(200.0, 10) == [3, 2]


def test_reuse_after_exactly_the_ttl_is_a_hit() -> None:
    # TTLs are chosen among such intervals. In floats the first use plus the interval may be less than the second use.
    assert 0.2 + (0.9 - 0.2) < 0.9
    for first_s, again_s in ((0.2, 0.9), (0.4, 1.7), (0.1, 0.3), (1e6 + 0.1, 1e6 + 0.7)):
        interval_s = again_s - first_s
        policy = TtlPolicy(LruPolicy(), [interval_s])
        policy.insert(1, 0, first_s)
        assert policy.expired(again_s, 1) == []
        assert list(policy.victims(again_s)) == [1]
        assert policy.expired(math.nextafter(again_s, math.inf), 1) == [1]


def test_a_use_starts_the_time_anew() -> None:
    policy = TtlPolicy(LruPolicy(), [10.0])
    policy.insert(1, 0, 0.0)
    policy.insert(2, 0, 0.0)
    policy.use(1, 9.0)
    assert policy.expired(11.0, 10) == [2]
    assert policy.expired(19.5, 10) == [2, 1]


def test_ttls_change_for_entries_that_are_here() -> None:
    policy = TtlPolicy(LruPolicy(), [None, 1000.0])
    for handle in range(6):
        policy.insert(handle, handle % 2, float(handle))
    assert policy.expired(100.0, 10) == []

    policy.set_ttls([97.0, 96.0])
    assert policy.ttls_s == (97.0, 96.0)
    assert policy.expired(100.0, 10) == [0, 1, 2, 3]  # deadlines 97, 97, 99, 99; 101 and 101 are to come
    policy.set_ttls([98.0, 94.0])
    assert policy.expired(100.0, 10) == [1, 3, 0, 5]  # deadlines 95, 97, 98, 99
    policy.set_ttls([None, 94.0])
    assert policy.expired(100.0, 10) == [1, 3, 5]
    policy.set_ttls([None])
    assert policy.expired(1e9, 10) == []
    policy.set_ttls([96.5])
    assert policy.expired(1e9, 10) == [0, 1, 2, 3, 4, 5]  # group 1 follows the rest when it has none of its own


def test_equal_ttls_keep_the_order_of_use_across_groups() -> None:
    # A chain whose root lies in the rest and whose end in group 1, used at once: the end first.
    policy = TtlPolicy(LruPolicy(), [5.0, 5.0])
    policy.insert(1, 0, 0.0)
    policy.insert(2, 1, 0.0)
    policy.use(2, 1.0)
    policy.use(1, 1.0)
    assert policy.expired(7.0, 10) == [2, 1]


def test_a_clock_that_was_set_back_stands_still() -> None:
    policy = TtlPolicy(LruPolicy(), [10.0])
    policy.insert(1, 0, 1000.0)
    policy.use(1, 0.0)  # counts as 1000
    policy.insert(2, 0, 5.0)
    assert policy.expired(20.0, 10) == []
    assert policy.expired(1010.0, 10) == []
    assert policy.expired(1010.5, 10) == [1, 2]
    assert policy.expired(0.0, 10) == [1, 2]


@pytest.mark.parametrize("ttls_s", [[], [0.0], [-1.0], [None, math.nan], [1.0, math.inf]])
def test_bad_ttls_change_nothing(ttls_s: list[float | None]) -> None:
    with pytest.raises(ValueError, match=r"TTLs|ttls_s"):
        TtlPolicy(LruPolicy(), ttls_s)
    policy = TtlPolicy(LruPolicy(), [2.0])
    policy.insert(1, 0, 0.0)
    with pytest.raises(ValueError, match=r"TTLs|ttls_s"):
        policy.set_ttls(ttls_s)
    assert policy.ttls_s == (2.0,)
    assert policy.expired(3.0, 1) == [1]


def test_misuse_is_refused() -> None:
    inner = LruPolicy()
    inner.insert(1, 0, 0.0)
    with pytest.raises(ValueError, match="give an empty one"):
        TtlPolicy(inner, [1.0])
    policy = TtlPolicy(LruPolicy(), [1.0])
    with pytest.raises(ValueError, match="group=-1 is not allowed"):
        policy.insert(1, -1, 0.0)
    assert len(policy) == 0


def counted(name: str) -> Any:
    operation = getattr(float, name)

    def count(self: CountingTime, other: float) -> Any:
        CountingTime.looks += 1
        return operation(self, other)

    return count


class CountingTime(float):
    """A time that counts how often anything is worked out from it or compared with it."""

    looks = 0
    __add__, __radd__, __sub__, __rsub__ = map(counted, ("__add__", "__radd__", "__sub__", "__rsub__"))
    __lt__, __le__, __gt__, __ge__, __eq__ = map(counted, ("__lt__", "__le__", "__gt__", "__ge__", "__eq__"))
    __hash__ = float.__hash__


@pytest.mark.parametrize("num_groups", [1, 8])
def test_a_storm_of_expiries_is_taken_in_small_pieces(num_groups: int) -> None:
    num_entries, limit = 100_000, 256
    policy = TtlPolicy(LruPolicy(), [10.0] * num_groups)
    for handle in range(num_entries):
        policy.insert(handle, handle % num_groups, CountingTime(1.0))

    # Worth something only if looks are seen at all: all entries are looked at for all victims.
    CountingTime.looks = 0
    assert sum(1 for _ in policy.victims(5.0)) == num_entries
    assert CountingTime.looks >= num_entries

    removed: list[int] = []
    for _ in range(20):
        CountingTime.looks = 0
        expired = policy.expired(20.0, limit)
        assert len(expired) == limit
        assert limit <= CountingTime.looks <= 4 * (limit + num_groups)
        for handle in expired:
            policy.remove(handle)
        removed += expired
    assert removed == list(range(20 * limit))
    assert len(policy) == num_entries - len(removed)

    CountingTime.looks = 0
    assert list(itertools.islice(policy.victims(20.0), 10)) == list(range(len(removed), len(removed) + 10))
    assert CountingTime.looks <= 4 * (10 + num_groups)


def test_nothing_expired_costs_a_look_a_group_once() -> None:
    policy = TtlPolicy(LruPolicy(), [10.0, None, 30.0])
    for handle in range(3000):
        policy.insert(handle, handle % 3, CountingTime(1.0))
    CountingTime.looks = 0
    assert policy.expired(5.0, 256) == []
    looks = CountingTime.looks
    assert looks <= 2 * 3
    assert policy.expired(6.0, 256) == []
    assert looks == CountingTime.looks
    assert policy.expired(11.5, 1) == [0]


def test_what_has_not_expired_is_not_looked_at_for_what_has() -> None:
    policy = TtlPolicy(LruPolicy(), [10.0, 10.0])
    for handle in range(3000):
        policy.insert(handle, handle % 2, CountingTime(1.0 if handle < 4 else 5.0))
    CountingTime.looks = 0
    assert policy.expired(12.0, 256) == [0, 1, 2, 3]
    assert CountingTime.looks <= 4 * (4 + 2)


def test_looking_in_vain_hides_nothing_that_expires_later() -> None:
    policy = TtlPolicy(LruPolicy(), [10.0, 2.0, None])
    assert policy.expired(0.0, 1) == []
    policy.insert(1, 0, 0.0)
    assert policy.expired(1.0, 1) == []
    policy.insert(2, 1, 3.0)  # expires before what was here
    assert policy.expired(4.0, 1) == []
    policy.use(2, 4.5)
    assert policy.expired(6.0, 2) == []
    assert policy.expired(7.0, 2) == [2]
    policy.remove(2)
    policy.insert(3, 2, 7.0)
    assert policy.expired(8.0, 2) == []
    assert policy.expired(11.0, 2) == [1]
    policy.remove(1)
    assert policy.expired(11.0, 2) == []
    policy.set_ttls([None, None, 1.0])
    assert policy.expired(11.0, 2) == [3]
