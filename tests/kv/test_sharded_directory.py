"""What only a directory in shards has to get right: who is asked, who makes room, and what a lost shard takes along.

Chains that begin with a, b and c lie in shards 1, 2 and 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorUnavailableError

from kv.directory_client import Upkeep
from kv.extents import Copy, ExtentInfo
from kv.part_range import LaneRange
from kv.policy.policy_file import PolicySpec
from tests.local_directory import LocalDirectory


@pytest.fixture
def directory() -> Iterator[LocalDirectory]:
    made = LocalDirectory(3)
    yield made
    made.close()


def extent(name: str, key: str, num_bytes: int = 10) -> ExtentInfo:
    """One block, at the end of a chain in which each key is a letter longer than the one before."""
    parent = key[:-1].encode() or None
    return ExtentInfo(name, "s", (key.encode(),), len(key) - 1, (LaneRange(0, 1, 0, 1),), num_bytes, parent)


def adopt(directory: LocalDirectory, *extents: ExtentInfo, now_s: float = 0.0) -> None:
    assert directory.adopt([Copy(info, "dram", info.num_bytes) for info in extents], now_s) == []


def used(directory: LocalDirectory, key: bytes, now_s: float) -> None:
    lease_id = directory.lookup([key], now_s, 1.0).lease_id
    assert lease_id is not None
    directory.release(lease_id)


def calls(directory: LocalDirectory) -> list[list[str]]:
    made = [shard.calls for shard in directory.shards]
    for shard in directory.shards:
        shard.calls = []
    return made


def upkeep(directory: LocalDirectory) -> Upkeep:
    return directory.run(directory.client.keep_house("s"))


def test_one_shard_is_asked_of_one_chain(directory: LocalDirectory) -> None:
    ticket = directory.begin_put([b"a"], 0.0, 10.0)
    assert ticket.put_id is not None
    assert directory.commit_put(ticket.put_id, [extent("1", "a")], 0.0)
    found = directory.lookup([b"a", b"ab"], 0.0, 10.0)
    assert found.lease_id is not None
    assert directory.match_blocks([b"a"]) == 1
    assert directory.renew([found.lease_id], 0.0, 20.0) == [found.lease_id]
    directory.release(found.lease_id)
    assert directory.add_copy("1", "disk", 10, 0.0)
    directory.drop_extent("1")
    asked = ["begin_put", "commit_put", "lookup", "match_blocks", "renew", "release", "add_copy", "drop_extent"]
    assert calls(directory) == [[], asked, []]


def test_what_was_released_goes_with_the_next_lookup_in_its_shard(directory: LocalDirectory) -> None:
    adopt(directory, extent("1", "a"), extent("2", "b"))

    async def run() -> None:
        client = directory.client
        leases = [(await client.lookup([key.ljust(32, b"\0")], 10.0)).lease_id for key in (b"a", b"b")]
        for lease_id in leases:
            assert lease_id is not None
            client.release(lease_id)
        await client.lookup([b"a".ljust(32, b"\0")], 10.0)
        assert [each.num_leases for each in directory.directories()] == [0, 1, 1]  # the new one in the place of the old
        client.send_released()

    directory.run(run())
    assert [each.num_leases for each in directory.directories()] == [0, 1, 0]


def test_several_shards_give_together_what_none_has_alone(directory: LocalDirectory) -> None:
    adopt(directory, extent("1", "a"), extent("2", "b"), extent("3", "c"))
    assert directory.evict("s", "dram", 31, 1.0) == []
    assert directory.num_blocks == 3
    used(directory, b"a", 2.0)
    assert sorted(directory.evict("s", "dram", 20, 3.0)) == ["2", "3"]
    assert directory.evict("s", "dram", 20, 3.0) == []


def test_what_is_held_in_one_shard_is_not_made_up_for_by_too_little_in_others(directory: LocalDirectory) -> None:
    adopt(directory, extent("1", "a"), extent("2", "b"))
    lease_id = directory.lookup([b"b"], 0.0, 10.0).lease_id
    assert directory.evict("s", "dram", 11, 1.0) == []
    assert directory.num_blocks == 2
    assert directory.evict("s", "dram", 20, 11.0) != []
    assert lease_id is not None
    assert directory.num_blocks == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.booleans()), max_size=40))
def test_with_fresh_knowledge_the_oldest_of_all_shards_goes_with_one_call(steps: list[tuple[str, bool]]) -> None:
    directory = LocalDirectory(3)
    last_use: dict[str, float] = {}
    for second, (letter, evicts) in enumerate(steps):
        now_s = float(second)
        if evicts and last_use:
            directory.keep_house("s", now_s)
            calls(directory)
            oldest = min(last_use, key=last_use.__getitem__)
            assert directory.evict("s", "dram", 10, now_s) == [oldest]
            assert sorted(calls(directory)) == [[], [], ["evict"]]
            del last_use[oldest]
        elif letter in last_use:
            used(directory, letter.encode(), now_s)
            last_use[letter] = now_s
        else:
            adopt(directory, extent(letter, letter), now_s=now_s)
            last_use[letter] = now_s
    directory.close()


def test_a_lower_limit_takes_what_is_oldest_wherever_it_is(directory: LocalDirectory) -> None:
    # Shard 1 has only what is old, shard 2 what is new.
    old = [extent(f"old{number}", "a" * (number + 1)) for number in range(12)]
    new = [extent(f"new{number}", "b" * (number + 1)) for number in range(12)]
    adopt(directory, *old, now_s=0.0)
    adopt(directory, *new, now_s=5.0)
    directory.keep_house("s", 6.0)
    gone = directory.shrink("s", "dram", 110, 6.0)
    assert len(gone) == 11
    assert {name[:3] for name in gone} == {"old"}
    # All that can go, when that is less.
    assert len(directory.shrink("s", "dram", 1000, 7.0)) == 13
    assert directory.shrink("s", "dram", 1, 7.0) == []


def test_a_lost_shard_takes_only_its_chains_along(directory: LocalDirectory) -> None:
    directory.run(directory.client.enroll("s"))
    adopt(directory, extent("1", "a"), extent("2", "b"))
    leases = [directory.lookup([key], 0.0, 10.0).lease_id for key in (b"a", b"b")]
    directory.shards[1].is_dead = True

    with pytest.raises(ActorUnavailableError):
        directory.lookup([b"a"], 1.0, 10.0)
    with pytest.raises(ActorUnavailableError):
        directory.begin_put([b"a", b"ab"], 1.0, 10.0)
    assert directory.match_blocks([b"b"]) == 1
    # What may have been renewed is renewed again the next time.
    asked = [lease_id for lease_id in leases if lease_id is not None]
    assert directory.renew(asked, 1.0, 10.0) == asked
    directory.release(asked[1])
    # The others make room; what it alone knows of is nobody's to free.
    assert directory.evict("s", "dram", 10, 2.0) == ["2"]
    with pytest.raises(ActorUnavailableError):
        directory.evict("s", "dram", 10, 2.0)
    with pytest.raises(ActorUnavailableError):
        directory.run(directory.client.extent_ids_of("s", "dram"))
    assert directory.shrink("s", "dram", 10, 2.0) == []
    assert directory.adopt([Copy(extent("3", "c"), "dram", 10), Copy(extent("4", "ab"), "dram", 10)], 2.0) == []
    assert directory.match_blocks([b"c"]) == 1
    with pytest.raises(ActorUnavailableError):
        directory.adopt([Copy(extent("4", "ab"), "dram", 10)], 2.0)
    told = upkeep(directory)
    assert [type(failure) for failure in told.failures] == [ActorUnavailableError]
    assert told.new_ids == {}
    # It was only out of reach; but of something it was not told.
    directory.shards[1].is_dead = False
    assert upkeep(directory).new_ids.keys() == {1}


def test_a_shard_that_was_started_again_is_told_what_is_its_own(directory: LocalDirectory) -> None:
    assert directory.run(directory.client.enroll("s")) == []
    assert upkeep(directory).new_ids == {}
    mine = [Copy(extent("1", "a"), "dram", 10), Copy(extent("2", "b"), "dram", 10)]
    directory.adopt(mine, 0.0)
    directory.shards[1].restart()
    real = [Copy(directory.real(copy.info), copy.tier, copy.num_bytes) for copy in mine]

    told = upkeep(directory)
    assert told.new_ids.keys() == {1}
    calls(directory)
    assert directory.run(directory.client.relist(real, told)) == []
    assert calls(directory) == [[], ["adopt"], []]
    assert upkeep(directory).new_ids.keys() == {1}, "the store may not have told all of it yet"
    directory.client.has_relisted(told)
    assert upkeep(directory).new_ids == {}
    assert [directory.match_blocks([key]) for key in (b"a", b"b")] == [1, 1]


def test_a_store_that_no_shard_answers_is_told_so(directory: LocalDirectory) -> None:
    for shard in directory.shards:
        shard.is_dead = True
    assert len(directory.run(directory.client.enroll("s"))) == 3
    for work in (directory.client.keep_house("s"), directory.client.evict("s", "dram", 1)):
        with pytest.raises(ActorUnavailableError):
            directory.run(work)
    with pytest.raises(ActorUnavailableError):
        directory.run(directory.client.shrink("s", "dram", 1))
    # A shard that did not answer then knows nothing of the store.
    for shard in directory.shards:
        shard.is_dead = False
    assert upkeep(directory).new_ids.keys() == {0, 1, 2}


def test_what_has_expired_in_any_shard_goes(directory: LocalDirectory) -> None:
    directory.set_policy(PolicySpec(default_ttl_s=5.0), 0.0)
    adopt(directory, extent("1", "a"), extent("2", "b"))
    used(directory, b"b", 3.0)
    told = directory.run(directory.client.keep_house("s"), 6.0)
    assert [extent_id.split("-")[0] for extent_id in told.gone["dram"]] == ["1"]


def test_a_lost_store_is_forgotten_by_all_shards_and_sums_are_of_all(directory: LocalDirectory) -> None:
    adopt(directory, extent("1", "a"), extent("2", "b"), extent("3", "c"))
    assert directory.bytes_by_store() == {"s": {"dram": 30}}
    assert directory.counters.extents_adopted == 3
    directory.drop_store("s")
    assert directory.num_blocks == 0
    assert directory.counters.lost == {"dram": 3, "disk": 0}
