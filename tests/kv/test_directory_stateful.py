"""The directory, whole and in shards, against a model that keeps everything in plain dicts and searches them by brute
force."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv.extents import Copy, ExtentInfo
from kv.part_range import LaneRange
from kv.policy.policy_file import PolicySpec
from kv.tiers import TIERS, Tier
from tests.local_directory import LocalDirectory

STORES = ["s", "t"]
TTL_S = 20.0
# A chain is a path in a tree, so that prefixes are shared and chains fork.
# Its roots lie in different shards.
chains = st.tuples(st.sampled_from("012"), st.lists(st.sampled_from("01"), max_size=5)).map(
    lambda path: [(path[0] + "".join(path[1][:end])).encode() for end in range(len(path[1]) + 1)]
)
durations = st.sampled_from([1.0, 3.0, 10.0])


@dataclass
class ModelCopy:
    num_bytes: int
    stamp: int
    used_s: float


@dataclass
class ModelExtent:
    info: ExtentInfo
    first_block: int
    copies: dict[Tier, ModelCopy]


@dataclass
class ModelHold:
    expires_s: float
    extent_ids: set[str]


@dataclass
class ModelPut(ModelHold):
    chain: list[bytes]
    missing: list[bytes]


class DirectoryMachine(RuleBasedStateMachine):
    num_shards = 1

    def __init__(self) -> None:
        super().__init__()
        self.directory = LocalDirectory(self.num_shards, PolicySpec(default_ttl_s=TTL_S))
        self.now_s = 0.0
        self.clock = 0
        self.extents: dict[str, ModelExtent] = {}
        self.leases: dict[int, ModelHold] = {}
        self.puts: dict[int, ModelPut] = {}
        self.seen_ids = [0]
        self.names = 0

    # The model

    def owner(self, key: bytes) -> ModelExtent | None:
        return next((extent for extent in self.extents.values() if key in extent.info.keys), None)

    def pending(self) -> set[bytes]:
        return {key for put in self.puts.values() for key in put.missing}

    def held(self) -> set[str]:
        return {e for hold in [*self.leases.values(), *self.puts.values()] for e in hold.extent_ids}

    def touch(self, chain: list[bytes]) -> None:
        self.clock += 1
        for key in chain:
            extent = self.owner(key)
            for copy in extent.copies.values() if extent is not None else ():
                copy.stamp, copy.used_s = self.clock, self.now_s

    def visible_end(self, chain: list[bytes], start: int) -> int:
        return next((i for i in range(start, len(chain)) if self.owner(chain[i]) is None), len(chain))

    def shard(self, extent: ModelExtent) -> int:
        root = extent.info.keys[0][:1].ljust(4, b"\0")
        return int.from_bytes(root, "big") % self.num_shards

    def by_age(self, store_id: str, tier: Tier) -> list[ModelExtent]:
        """Shard by shard."""
        mine = [e for e in self.extents.values() if e.info.store_id == store_id and tier in e.copies]
        return sorted(mine, key=lambda extent: (self.shard(extent), extent.copies[tier].stamp, -extent.first_block))

    def add_copy_to_model(self, info: ExtentInfo, tier: Tier, num_bytes: int) -> None:
        self.clock += 1
        extent = self.extents.setdefault(info.extent_id, ModelExtent(info, info.first_block, {}))
        extent.copies[tier] = ModelCopy(num_bytes, self.clock, self.now_s)

    def remove_copies_of_model(self, extent_ids: list[str], tier: Tier) -> None:
        for extent_id in extent_ids:
            del self.extents[extent_id].copies[tier]
            if not self.extents[extent_id].copies:
                del self.extents[extent_id]

    # What happens

    @rule(seconds=durations)
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.directory.sweep(self.now_s)
        self.leases = {i: hold for i, hold in self.leases.items() if hold.expires_s > self.now_s}
        self.puts = {i: hold for i, hold in self.puts.items() if hold.expires_s > self.now_s}

    @rule(chain=chains, ttl_s=durations)
    def begin_put(self, chain: list[bytes], ttl_s: float) -> None:
        ticket = self.directory.begin_put(chain, self.now_s, ttl_s)
        pending = self.pending()
        missing = [i for i, key in enumerate(chain) if self.owner(key) is None and key not in pending]
        assert [i for start, stop in ticket.missing for i in range(start, stop)] == missing
        assert all(a[1] < b[0] for a, b in zip(ticket.missing, ticket.missing[1:], strict=False))
        assert ticket.num_pending_blocks == len(pending.intersection(chain))
        self.touch(chain)
        assert (ticket.put_id is None) == (not missing)
        if ticket.put_id is not None:
            owners = {extent.info.extent_id for key in chain if (extent := self.owner(key))}
            self.puts[ticket.put_id] = ModelPut(self.now_s + ttl_s, owners, chain, [chain[i] for i in missing])
            self.seen_ids.append(ticket.put_id)

    @precondition(lambda self: self.puts)
    @rule(data=st.data(), store_id=st.sampled_from(STORES))
    def commit_put(self, data: st.DataObject, store_id: str) -> None:
        put_id = data.draw(st.sampled_from(sorted(self.puts)))
        put = self.puts.pop(put_id)
        infos = []
        current: list[bytes] = []
        for index, key in enumerate(put.missing):
            fate = data.draw(st.sampled_from(["join", "cut", "leave out"]))
            joins_up = current and put.chain.index(key) == put.chain.index(current[-1]) + 1
            if current and (fate != "join" or not joins_up):
                infos.append(self.new_extent(store_id, put.chain, current))
                current = []
            if fate != "leave out":
                current.append(key)
            if index == len(put.missing) - 1 and current:
                infos.append(self.new_extent(store_id, put.chain, current))
        assert self.directory.commit_put(put_id, infos, self.now_s)
        for info in infos:
            self.add_copy_to_model(info, "dram", info.num_bytes)
        self.touch(put.chain)

    def new_extent(self, store_id: str, chain: list[bytes], keys: list[bytes]) -> ExtentInfo:
        self.names += 1
        first = chain.index(keys[0])
        lanes = (LaneRange(0, 1, 0, 1), LaneRange(1, 1, 0, 1))
        parent = chain[first - 1] if first else None
        return ExtentInfo(f"e{self.names}", store_id, tuple(keys), first, lanes, 10 * len(keys), parent)

    @rule(data=st.data())
    def abort_put(self, data: st.DataObject) -> None:
        put_id = data.draw(st.sampled_from(self.seen_ids))
        self.directory.abort_put(put_id)
        self.puts.pop(put_id, None)

    @rule(data=st.data())
    def commit_without_a_put(self, data: st.DataObject) -> None:
        put_id = data.draw(st.sampled_from(self.seen_ids))
        if put_id not in self.puts:
            assert not self.directory.commit_put(put_id, [], self.now_s)

    @rule(chain=chains, lease_s=durations, data=st.data())
    def lookup(self, chain: list[bytes], lease_s: float, data: st.DataObject) -> None:
        skip = data.draw(st.integers(0, len(chain)))
        found = self.directory.lookup(chain, self.now_s, lease_s, skip)
        end = self.visible_end(chain, skip)
        assert found.num_blocks == end
        blocks = [
            key
            for piece in found.slices
            for key in self.extents[piece.extent_id].info.keys[piece.first : piece.first + piece.count]
        ]
        assert blocks == chain[skip:end]
        for piece in found.slices:
            owner = self.extents[piece.extent_id]
            assert piece.parts == owner.info.parts
            assert piece.tier == ("dram" if "dram" in owner.copies else "disk")
        self.touch(chain[:end])
        assert (found.lease_id is None) == (not found.slices)
        if found.lease_id is not None:
            self.leases[found.lease_id] = ModelHold(self.now_s + lease_s, {piece.extent_id for piece in found.slices})
            self.seen_ids.append(found.lease_id)

    @rule(chain=chains)
    def match(self, chain: list[bytes]) -> None:
        assert self.directory.match_blocks(chain) == self.visible_end(chain, 0)

    @rule(data=st.data(), lease_s=durations)
    def renew(self, data: st.DataObject, lease_s: float) -> None:
        lease_ids = data.draw(st.lists(st.sampled_from(self.seen_ids), max_size=3, unique=True))
        renewed = self.directory.renew(lease_ids, self.now_s, lease_s)
        assert renewed == [lease_id for lease_id in lease_ids if lease_id in self.leases]
        for lease_id in set(lease_ids) & self.leases.keys():
            self.leases[lease_id].expires_s = max(self.leases[lease_id].expires_s, self.now_s + lease_s)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(self.seen_ids))
        self.directory.release(lease_id)
        self.leases.pop(lease_id, None)

    @rule(chain=chains, store_id=st.sampled_from(STORES), tier=st.sampled_from(TIERS), data=st.data())
    def adopt(self, chain: list[bytes], store_id: str, tier: Tier, data: st.DataObject) -> None:
        first = data.draw(st.integers(0, len(chain) - 1))
        info = self.new_extent(store_id, chain, chain[first:])
        taken = self.pending() | {key for extent in self.extents.values() for key in extent.info.keys}
        refused = self.directory.adopt([Copy(info, tier, 16 * len(info.keys))], self.now_s)
        assert refused == ([info.extent_id] if taken.intersection(info.keys) else [])
        if not refused:
            self.add_copy_to_model(info, tier, 16 * len(info.keys))

    @precondition(lambda self: self.extents)
    @rule(tier=st.sampled_from(TIERS), data=st.data())
    def add_copy(self, tier: Tier, data: st.DataObject) -> None:
        extent = self.extents[data.draw(st.sampled_from(sorted(self.extents)))]
        assert self.directory.add_copy(extent.info.extent_id, tier, 16, self.now_s)
        if tier not in extent.copies:
            self.add_copy_to_model(extent.info, tier, 16)

    @precondition(lambda self: self.extents)
    @rule(tier=st.sampled_from(TIERS), data=st.data())
    def adopt_what_is_listed(self, tier: Tier, data: st.DataObject) -> None:
        extent = self.extents[data.draw(st.sampled_from(sorted(self.extents)))]
        assert self.directory.adopt([Copy(extent.info, tier, 16)], self.now_s) == []
        if tier not in extent.copies:
            self.add_copy_to_model(extent.info, tier, 16)

    @rule(tier=st.sampled_from(TIERS))
    def add_copy_of_an_unknown_extent(self, tier: Tier) -> None:
        assert not self.directory.add_copy("never heard of", tier, 16, self.now_s)

    @rule(store_id=st.sampled_from(STORES), tier=st.sampled_from(TIERS), need_bytes=st.integers(0, 80))
    def evict(self, store_id: str, tier: Tier, need_bytes: int) -> None:
        held = self.held()
        free = [each for each in self.by_age(store_id, tier) if each.info.extent_id not in held]
        evicted = self.directory.evict(store_id, tier, need_bytes, self.now_s)
        sizes = [self.extents[extent_id].copies[tier].num_bytes for extent_id in evicted]
        if sum(each.copies[tier].num_bytes for each in free) < need_bytes:
            assert evicted == []
        elif need_bytes > 0:
            assert sum(sizes[:-1]) < need_bytes <= sum(sizes)
        for shard in range(self.num_shards):
            in_order = [each.info.extent_id for each in free if self.shard(each) == shard]
            gone = [extent_id for extent_id in evicted if self.shard(self.extents[extent_id]) == shard]
            assert gone == in_order[: len(gone)]
        self.remove_copies_of_model(evicted, tier)

    @rule(store_id=st.sampled_from(STORES), limit=st.integers(1, 3))
    def expire(self, store_id: str, limit: int) -> None:
        held = self.held()
        overdue: dict[Tier, list[str]] = {tier: [] for tier in TIERS}
        for tier in TIERS:
            for shard in range(self.num_shards):
                overdue[tier] += [
                    extent.info.extent_id
                    for extent in self.by_age(store_id, tier)
                    if self.shard(extent) == shard
                    and extent.copies[tier].used_s + TTL_S < self.now_s
                    and extent.info.extent_id not in held
                ][:limit]
        assert self.directory.expire(store_id, self.now_s, limit) == overdue
        for tier, extent_ids in overdue.items():
            self.remove_copies_of_model(extent_ids, tier)

    @rule(ttl_s=st.just(TTL_S))
    def set_policy(self, ttl_s: float) -> None:
        """The order stays; everything counts as used now."""
        self.directory.set_policy(PolicySpec(default_ttl_s=ttl_s), self.now_s)
        for extent in self.extents.values():
            for copy in extent.copies.values():
                copy.used_s = self.now_s

    @rule(store_id=st.sampled_from(STORES))
    def drop_store(self, store_id: str) -> None:
        self.directory.drop_store(store_id)
        self.extents = {i: extent for i, extent in self.extents.items() if extent.info.store_id != store_id}

    @precondition(lambda self: self.extents)
    @rule(data=st.data())
    def drop_extent(self, data: st.DataObject) -> None:
        extent_id = data.draw(st.sampled_from(sorted(self.extents)))
        self.directory.drop_extent(extent_id)
        del self.extents[extent_id]

    # What always holds

    @invariant()
    def bytes_are_the_sum_over_copies(self) -> None:
        sums: dict[str, dict[Tier, int]] = {}
        for extent in self.extents.values():
            for tier, copy in extent.copies.items():
                of_store = sums.setdefault(extent.info.store_id, {})
                of_store[tier] = of_store.get(tier, 0) + copy.num_bytes
        assert self.directory.bytes_by_store() == sums

    @invariant()
    def extents_are_those_of_the_model_in_order_of_use(self) -> None:
        for store_id in STORES:
            for tier in TIERS:
                listed = self.directory.extents_of(store_id, tier, self.now_s)
                assert listed == [extent.info for extent in self.by_age(store_id, tier)]
        assert self.directory.num_blocks == sum(len(extent.info.keys) for extent in self.extents.values())

    @invariant()
    def holds_are_those_of_the_model(self) -> None:
        assert self.directory.num_leases == len(self.leases)
        assert self.directory.num_puts == len(self.puts)
        assert self.directory.has_pending([b"0", b"1"]) == bool(self.pending() & {b"0", b"1"})

    def teardown(self) -> None:
        # After everything has expired nothing is held: all of it can go.
        self.now_s += 1000.0
        self.directory.sweep(self.now_s)
        assert (self.directory.num_leases, self.directory.num_puts) == (0, 0)
        for store_id, tiers in self.directory.bytes_by_store().items():
            for tier, num_bytes in tiers.items():
                self.directory.evict(store_id, tier, num_bytes, self.now_s)
        assert self.directory.num_blocks == 0
        self.directory.close()


class ShardedMachine(DirectoryMachine):
    num_shards = 3


TestDirectory = DirectoryMachine.TestCase
TestDirectory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestShardedDirectory = ShardedMachine.TestCase
TestShardedDirectory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
