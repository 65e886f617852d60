"""What a directory promises, whether it is one or divided into shards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kv.extents import ExtentInfo
from kv.part_range import LaneRange
from kv.policy.policy_file import GroupTtl, PolicySpec
from tests.local_directory import LocalDirectory


@pytest.fixture(params=[1, 3], ids=["1 shard", "3 shards"])
def directory(request: pytest.FixtureRequest) -> Iterator[LocalDirectory]:
    made = LocalDirectory(request.param)
    yield made
    made.close()


def chain(text: str) -> list[bytes]:
    """One key per letter; a key stands for the whole prefix, as real ones do."""
    return [text[: end + 1].encode() for end in range(len(text))]


def extent(extent_id: str, text: str, first: int, *, store: str = "s", num_bytes: int = 10) -> ExtentInfo:
    """Blocks `first`.. of the chain `text`."""
    keys = tuple(chain(text)[first:])
    parent = chain(text)[first - 1] if first else None
    return ExtentInfo(extent_id, store, keys, first, (LaneRange(0, 1, 0, 1),), num_bytes, parent)


def put(directory: LocalDirectory, text: str, *extents: ExtentInfo, now_s: float = 0.0) -> None:
    ticket = directory.begin_put(chain(text), now_s, ttl_s=10.0)
    assert ticket.put_id is not None
    assert directory.commit_put(ticket.put_id, extents, now_s)


def test_blocks_are_visible_only_after_their_commit(directory: LocalDirectory) -> None:
    ticket = directory.begin_put(chain("abc"), 0.0, 10.0)
    assert ticket.missing == ((0, 3),)
    assert directory.match_blocks(chain("abc")) == 0
    assert ticket.put_id is not None
    assert directory.commit_put(ticket.put_id, [extent("1", "abc", 0)], 1.0)
    assert directory.match_blocks(chain("abc")) == 3
    assert directory.match_blocks(chain("abx")) == 2
    assert directory.match_blocks(chain("x")) == 0


def test_two_puts_of_the_same_blocks_do_not_overlap(directory: LocalDirectory) -> None:
    first = directory.begin_put(chain("ab"), 0.0, 10.0)
    second = directory.begin_put(chain("abc"), 0.0, 10.0)
    assert (second.missing, second.num_pending_blocks) == (((2, 3),), 2)
    third = directory.begin_put(chain("ab"), 0.0, 10.0)
    assert (third.put_id, third.missing, third.num_pending_blocks) == (None, (), 2)
    assert directory.has_pending(chain("ab"))
    assert first.put_id is not None
    directory.abort_put(first.put_id)
    assert not directory.has_pending(chain("ab"))
    assert directory.begin_put(chain("ab"), 0.0, 10.0).missing == ((0, 2),)


def test_holes_are_missing_ranges(directory: LocalDirectory) -> None:
    put(directory, "abcdef", extent("1", "abcdef", 4))
    put(directory, "ab", extent("2", "ab", 1))
    ticket = directory.begin_put(chain("abcdefg"), 0.0, 10.0)
    assert ticket.missing == ((0, 1), (2, 4), (6, 7))


def test_a_put_that_expired_is_refused_and_its_blocks_are_free_again(directory: LocalDirectory) -> None:
    ticket = directory.begin_put(chain("a"), 0.0, 10.0)
    assert ticket.put_id is not None
    assert not directory.commit_put(ticket.put_id, [extent("1", "a", 0)], 10.0)
    assert directory.match_blocks(chain("a")) == 0
    assert directory.begin_put(chain("a"), 10.0, 10.0).missing == ((0, 1),)


@pytest.mark.parametrize(
    "extents",
    [
        [extent("9", "xy", 0)],
        [extent("9", "zabc", 1)],
        [extent("9", "zab", 1), extent("8", "zab", 2)],
        [extent("1", "zab", 2)],
    ],
    ids=["other chain", "more than announced", "a block twice", "an id in use"],
)
def test_a_commit_that_does_not_fit_its_put_is_refused(directory: LocalDirectory, extents: list[ExtentInfo]) -> None:
    put(directory, "z", extent("1", "z", 0))
    ticket = directory.begin_put(chain("zab"), 0.0, 10.0)
    assert ticket.put_id is not None
    assert not directory.commit_put(ticket.put_id, extents, 0.0)
    assert directory.counters.puts_refused == 1
    assert directory.num_blocks == 1
    assert directory.num_puts == 0
    assert not directory.has_pending(chain("zab"))


def test_lookup_gives_joined_slices_of_a_forking_chain(directory: LocalDirectory) -> None:
    put(directory, "abcd", extent("1", "abcd", 0))
    put(directory, "abxy", extent("2", "abxy", 2, store="t"))
    found = directory.lookup(chain("abxyz"), 0.0, 5.0)
    assert found.num_blocks == 4
    assert [(s.extent_id, s.store_id, s.first, s.count) for s in found.slices] == [("1", "s", 0, 2), ("2", "t", 0, 2)]
    assert found.slices[1].parts[0].range.first_block == 2


def test_skipped_blocks_are_not_returned_and_need_not_be_there(directory: LocalDirectory) -> None:
    put(directory, "abcdef", extent("1", "abcd", 1), extent("2", "abcdef", 4))
    assert directory.match_blocks(chain("abcdef")) == 0
    found = directory.lookup(chain("abcdef"), 0.0, 5.0, skip_blocks=2)
    assert [(s.extent_id, s.first, s.count) for s in found.slices] == [("1", 1, 2), ("2", 0, 2)]
    assert found.num_blocks == 6
    nothing = directory.lookup(chain("abcdefg"), 0.0, 5.0, skip_blocks=6)
    assert (nothing.lease_id, nothing.slices, nothing.num_blocks) == (None, (), 6)
    with pytest.raises(ValueError, match="skip_blocks=2 is not allowed: give 0 to 1"):
        directory.lookup(chain("a"), 0.0, 5.0, skip_blocks=2)


def test_a_leased_extent_survives_pressure_until_its_lease_ends(directory: LocalDirectory) -> None:
    put(directory, "a", extent("1", "a", 0))
    put(directory, "b", extent("2", "b", 0))
    lease = directory.lookup(chain("a"), 0.0, 5.0).lease_id
    assert lease is not None
    assert directory.evict("s", "dram", 20, 1.0) == []
    assert directory.counters.evictions_refused == len(directory.shards)
    assert directory.renew([lease, 99], 4.0, 5.0) == [lease]
    assert directory.evict("s", "dram", 10, 8.0) == ["2"]
    assert directory.evict("s", "dram", 10, 8.0) == []
    assert directory.evict("s", "dram", 10, 9.0) == ["1"]
    assert directory.renew([lease], 9.0, 5.0) == []
    directory.release(lease)
    assert directory.bytes_by_store() == {}


def test_a_lease_that_ended_is_lost_even_before_it_was_swept(directory: LocalDirectory) -> None:
    put(directory, "a", extent("1", "a", 0))
    leases = [directory.lookup(chain("a"), 0.0, 5.0).lease_id for _ in range(600)]
    last = leases[-1]
    assert last is not None
    directory.sweep(5.0)
    assert directory.renew([last], 5.0, 60.0) == []


def test_a_clock_that_steps_back_ends_nothing_early_and_loses_nothing(directory: LocalDirectory) -> None:
    put(directory, "a", extent("1", "a", 0), now_s=100.0)
    lease = directory.lookup(chain("a"), 100.0, 5.0).lease_id
    assert lease is not None
    assert directory.evict("s", "dram", 10, 40.0) == []
    assert directory.renew([lease], 40.0, 5.0) == [lease]
    put(directory, "b", extent("2", "b", 0), now_s=40.0)
    assert directory.evict("s", "dram", 10, 104.9) == ["2"]
    assert directory.evict("s", "dram", 10, 104.9) == []
    assert directory.evict("s", "dram", 10, 105.0) == ["1"]


def test_the_least_recently_used_goes_first(directory: LocalDirectory) -> None:
    for second, name in enumerate("abc"):
        put(directory, name, extent(name, name, 0), now_s=float(second))
    lease = directory.lookup(chain("a"), 3.0, 5.0).lease_id
    assert lease is not None
    directory.release(lease)
    assert directory.evict("s", "dram", 11, 4.0) == ["b", "c"]


def test_deeper_extents_go_before_those_they_hang_on(directory: LocalDirectory) -> None:
    put(directory, "ab", extent("root", "ab", 0))
    put(directory, "abcdef", extent("middle", "abcd", 2), extent("leaf", "abcdef", 4))
    assert directory.evict("s", "dram", 1, 0.0) == ["leaf"]
    assert directory.evict("s", "dram", 20, 0.0) == ["middle", "root"]


def test_a_put_holds_the_prefix_that_it_extends(directory: LocalDirectory) -> None:
    put(directory, "a", extent("1", "a", 0))
    ticket = directory.begin_put(chain("ab"), 0.0, 10.0)
    assert directory.evict("s", "dram", 10, 0.0) == []
    assert ticket.put_id is not None
    directory.abort_put(ticket.put_id)
    assert directory.evict("s", "dram", 10, 0.0) == ["1"]


def test_a_broken_extent_is_a_miss_even_while_leased(directory: LocalDirectory) -> None:
    put(directory, "abc", extent("1", "ab", 0), extent("2", "abc", 2))
    lease = directory.lookup(chain("abc"), 0.0, 5.0).lease_id
    assert lease is not None
    directory.drop_extent("2")
    directory.drop_extent("2")
    assert directory.match_blocks(chain("abc")) == 2
    assert directory.counters.extents_broken == 1
    directory.release(lease)
    assert directory.begin_put(chain("abc"), 0.0, 5.0).missing == ((2, 3),)


def test_a_lost_store_takes_its_extents_along(directory: LocalDirectory) -> None:
    put(directory, "ab", extent("1", "a", 0, store="s"), extent("2", "ab", 1, store="t"))
    directory.drop_store("t")
    directory.drop_store("t")
    assert directory.match_blocks(chain("ab")) == 1
    assert directory.bytes_by_store() == {"s": {"dram": 10}}
    assert directory.extents_of("t", "dram", 9.0) == []
    assert directory.counters.lost == {"dram": 1, "disk": 0}


def test_puts_and_leases_are_not_taken_for_each_other(directory: LocalDirectory) -> None:
    put(directory, "a", extent("1", "a", 0))
    ticket = directory.begin_put(chain("ab"), 0.0, 10.0)
    lease = directory.lookup(chain("a"), 0.0, 10.0).lease_id
    assert ticket.put_id is not None
    assert lease is not None
    directory.release(ticket.put_id)
    directory.abort_put(lease)
    assert directory.renew([ticket.put_id], 0.0, 99.0) == []
    assert not directory.commit_put(lease, [], 0.0)
    assert (directory.num_puts, directory.num_leases) == (1, 1)


def test_leases_that_expire_together_end_bit_by_bit(directory: LocalDirectory) -> None:
    put(directory, "a", extent("1", "a", 0))
    for _ in range(1000):
        directory.lookup(chain("a"), 0.0, 5.0)
    directory.sweep(5.0)
    assert 0 < directory.num_leases < 1000
    # Room is made all the same: what has expired holds nothing.
    assert directory.evict("s", "dram", 10, 5.0) == ["1"]
    assert directory.num_leases == 0
    assert directory.counters.leases_expired == 1000
    assert not directory.sweep(5.0)


def test_released_leases_do_not_hide_expired_ones_from_an_eviction(directory: LocalDirectory) -> None:
    put(directory, "a", extent("1", "a", 0))
    for _ in range(600):
        lease = directory.lookup(chain("a"), 0.0, 5.0).lease_id
        assert lease is not None
        directory.release(lease)
    directory.lookup(chain("a"), 0.0, 5.5)
    assert directory.evict("s", "dram", 10, 6.0) == ["1"]


def test_a_time_to_live_can_be_given_to_what_is_here_and_taken_away(directory: LocalDirectory) -> None:
    put(directory, "a", extent("1", "a", 0))
    put(directory, "b", extent("2", "b", 0))
    assert directory.expire("s", 100.0, 9)["dram"] == []
    directory.set_policy(PolicySpec(groups=(GroupTtl("a", b"a", 5.0),)), 100.0)
    assert directory.expire("s", 105.0, 9)["dram"] == []
    assert directory.expire("s", 105.1, 9)["dram"] == ["1"]
    directory.set_policy(PolicySpec(eviction="lfu", default_ttl_s=5.0), 106.0)
    directory.set_policy(PolicySpec(), 107.0)
    assert directory.expire("s", 1000.0, 9)["dram"] == []
    assert directory.counters.expired == {"dram": 1, "disk": 0}
    assert directory.evict("s", "dram", 10, 1000.0) == ["2"]
    assert directory.counters.evicted == {"dram": 1, "disk": 0}


def test_blocks_of_one_extent_can_lie_on_chains_that_fork_within_it(directory: LocalDirectory) -> None:
    put(directory, "abcdef", extent("1", "abcdef", 0))
    for text in ("abx", "abcdex", "abcdefg", "abcxef"):
        found = directory.lookup(chain(text), 0.0, 5.0)
        common = 6 if text == "abcdefg" else next(i for i, letter in enumerate(text) if letter == "x")
        assert [(piece.first, piece.count) for piece in found.slices] == [(0, common)]
        assert found.num_blocks == common


def test_counters(directory: LocalDirectory) -> None:
    put(directory, "ab", extent("1", "ab", 0))
    found = directory.lookup(chain("abc"), 0.0, 5.0)
    directory.lookup(chain("x"), 0.0, 5.0)
    directory.lookup(chain("ab"), 0.0, 5.0, skip_blocks=1)
    directory.match_blocks(chain("ab"))
    counters = directory.counters
    assert found.lease_id is not None
    assert (counters.queries, counters.queried_blocks, counters.hit_blocks) == (3, 3 + 1 + 1, 2 + 0 + 1)
    assert (counters.leases_granted, counters.puts_committed) == (2, 1)
