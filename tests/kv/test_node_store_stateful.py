"""The running store (actors, folder, readers) against a model, whatever happens to it.

What the store keeps is its own business. That it is what was put, stays while it is leased, and is counted to the byte
in every tier is not. The model is what was put, who holds what, and which files were damaged.

What hypothesis draws must not depend on what the store happens to have: rules pick by numbers, and do nothing where
there is nothing to pick.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import ray
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from ray.exceptions import RayActorError

from kv.disk.extent_file import read_index
from kv.extents import Lookup, TailReceipt
from kv.keys import block_keys
from kv.policy.admission import DiskAdmission
from kv.policy.policy_file import PolicySpec
from kv.pull_plan import plan_tail
from tests.running_store import DISK_BYTES, DRAM_BYTES, RunningStore, extent_at
from tests.store_cell import (
    FINGERPRINT,
    LAYOUT,
    MIB,
    WIDE_LAYOUT,
    claim,
    crash,
    eventually,
    fetch,
    get,
    start_pull,
    values_of,
)

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

T = TypeVar("T")

LONG_S = 600.0
TAIL_TOKENS = 5
FORK_TOKENS = 3 * LAYOUT.block_tokens


def chain_along(path: str, num_blocks: int) -> list[bytes]:
    """A path in a binary tree with a fork after every third block, so that prefixes are shared. Twelve blocks take
    768 KiB and a bit, all that there are nearly 6 MiB."""
    tokens = [ord(turn) for turn in path for _ in range(FORK_TOKENS)]
    return block_keys(tokens, LAYOUT.block_tokens, FINGERPRINT, b"")[:num_blocks]


chains = st.builds(chain_along, st.text("ab", min_size=4, max_size=4), st.integers(1, 12))
picks = st.integers(0, 1000)


def picked(items: list[T], pick: int) -> list[T]:
    """One of them, if there is any."""
    return [items[pick % len(items)]] if items else []


@dataclass(eq=False)
class Leased:
    keys: list[bytes]
    found: Lookup
    holds: bool = True
    """Not after a crash of the store: what it finds again on its disk is listed anew."""

    @property
    def extent_ids(self) -> set[str]:
        return {piece.extent_id for piece in self.found.slices}


class StoreMachine(RuleBasedStateMachine):
    def __init__(self, running: RunningStore, worker: Any) -> None:
        super().__init__()
        running.start()
        self.running, self.worker = running, worker
        self.setup, self.store, self.directory = running.setup, running.store, running.directory
        self.put_chains: list[list[bytes]] = []
        self.leases: list[Leased] = []
        self.tails: list[TailReceipt] = []
        self.damaged: set[str] = set()
        """Extents whose file was changed."""
        self.limits = (DRAM_BYTES, DISK_BYTES)
        self.folder_bytes = 0
        self.num_crashes = 0

    # The model

    def held(self) -> set[str]:
        """Extents that must not go, unless they are damaged."""
        return {extent_id for lease in self.leases if lease.holds for extent_id in lease.extent_ids}

    def tail_bytes(self) -> int:
        planned = plan_tail(WIDE_LAYOUT, FINGERPRINT, TAIL_TOKENS)
        assert planned is not None
        return len(self.tails) * planned.num_bytes

    def num_leases(self) -> int:
        num_leases: int = self.setup.directory_stats()["num_leases"]
        return num_leases

    # What always holds

    def note_folder(self) -> None:
        """At any moment: the folder is within its limit, or what was too much when that was lowered gets no more."""
        folder_bytes = sum(self.running.files().values())
        assert folder_bytes <= max(self.limits[1], self.folder_bytes)
        self.folder_bytes = folder_bytes

    @invariant()
    def all_agree(self) -> None:
        self.note_folder()
        eventually(self.is_counted_and_listed)
        assert self.held() - self.damaged <= self.running.in_dram() | self.running.on_disk().keys()
        eventually(self.is_within_limits)
        self.note_folder()  # after what was written meanwhile

    def is_counted_and_listed(self) -> bool:
        """What the store says, what it has, and what the directory says of it are the same."""
        stats, disk = self.running.stats()
        dram_bytes, disk_bytes = self.running.listed_bytes()
        in_dram, on_disk = self.running.in_dram(), self.running.on_disk()
        return (
            (disk.is_scanned, disk.num_queued_extents) == (True, 0)
            and self.running.listed() == (in_dram, on_disk.keys())
            and dram_bytes + self.tail_bytes() == stats.used_bytes
            and disk_bytes == sum(on_disk.values()) == disk.used_bytes
            and (stats.num_extents, stats.num_tails, disk.num_extents) == (len(in_dram), len(self.tails), len(on_disk))
            and (stats.limit_bytes, disk.limit_bytes) == self.limits
            and self.num_leases() == len(self.leases)
        )

    def is_within_limits(self) -> bool:
        """A tier is over a limit that was lowered only with what cannot go."""
        (stats, disk), (in_dram, on_disk) = self.running.stats(), self.running.listed()
        return (stats.used_bytes <= self.limits[0] or in_dram <= self.held()) and (
            disk.used_bytes <= self.limits[1] or on_disk <= self.held()
        )

    # What happens

    def start_puts(self, several: list[list[bytes]]) -> list[Any]:
        self.put_chains += several
        return [
            start_pull(self.store, self.worker, keys, export_id=f"request {number}")
            for number, keys in enumerate(several)
        ]

    def lease(self, keys: list[bytes], lease_s: float, skip_blocks: int = 0) -> Leased:
        found = self.setup.lookup(keys, lease_s, min(skip_blocks, len(keys)))
        assert set(keys[: found.num_blocks]) <= {key for put in self.put_chains for key in put}
        return Leased(keys, found)

    def read(self, leased: Leased) -> None:
        """What comes is right (or `fetch` raises), and what is held and whole comes."""
        num_blocks, misses = fetch(self.setup, {"s": self.store}, leased.keys, leased.found)
        assert (num_blocks < leased.found.num_blocks) == (misses != [])
        assert misses == [] or not leased.holds or leased.extent_ids & self.damaged

    def keep(self, leased: Leased) -> None:
        self.leases += [leased] if leased.found.slices else []

    @rule(several=st.lists(chains, min_size=1, max_size=3), leases=st.booleans())
    def put(self, several: list[list[bytes]], leases: bool) -> None:
        pulls = waiting = self.start_puts(several)
        while waiting:
            self.note_folder()
            waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0.02)[1]
        receipts = get(pulls)
        assert {refusal for receipt in receipts for refusal in receipt.refusals} <= {"capacity", "timeout"}
        if len(several) == 1 and receipts[0].refusals == () and self.num_crashes == 0:
            assert self.setup.visible(several[0]) == len(several[0])
        if leases:
            self.keep(self.lease(several[0], LONG_S))

    @precondition(lambda self: self.put_chains)
    @rule(data=st.data(), skip_blocks=st.integers(0, 5))
    def look_up(self, data: st.DataObject, skip_blocks: int) -> None:
        self.keep(self.lease(data.draw(st.sampled_from(self.put_chains)), LONG_S, skip_blocks))

    @rule(pick=picks, releases=st.booleans())
    def read_what_is_leased(self, pick: int, releases: bool) -> None:
        for leased in picked(self.leases, pick):
            if releases:
                self.leases.remove(leased)
                self.read(leased)
            else:
                self.read(replace(leased, found=replace(leased.found, lease_id=None)))

    @rule(pick=picks)
    def release(self, pick: int) -> None:
        for leased in picked(self.leases, pick):
            self.leases.remove(leased)
            get(self.directory.release.remote([leased.found.lease_id]))

    @precondition(lambda self: self.put_chains)
    @rule(data=st.data(), others=st.lists(chains, max_size=2))
    def read_after_a_lease_has_expired(self, data: st.DataObject, others: list[list[bytes]]) -> None:
        leased = self.lease(data.draw(st.sampled_from(self.put_chains)), lease_s=0.05)
        eventually(lambda: self.num_leases() == len(self.leases))
        get(self.start_puts(others))
        self.read(replace(leased, holds=False))

    @rule(
        dram_bytes=st.sampled_from([0, MIB // 3, MIB, 3 * MIB]),
        disk_bytes=st.sampled_from([0, MIB // 2, MIB, 4 * MIB]),
    )
    def set_limits(self, dram_bytes: int, disk_bytes: int) -> None:
        get(self.store.set_limits.remote(dram_bytes, disk_bytes))
        self.limits = (dram_bytes, disk_bytes)

    @rule()
    def empty_dram(self) -> None:
        """What nobody holds there is on disk only, or nowhere, and DRAM has room."""
        get(self.store.set_limits.remote(0, None))
        get(self.store.set_limits.remote(self.limits[0], None))

    @rule()
    def all_outlives_its_time(self) -> None:
        get(self.directory.set_policy.remote(PolicySpec(default_ttl_s=0.01)))
        eventually(lambda: set.union(*self.running.listed()) <= self.held())
        get(self.directory.set_policy.remote(PolicySpec()))

    @rule()
    def flush(self) -> None:
        assert get(self.store.flush.remote(30.0))
        assert self.running.stats()[1].num_queued_extents == 0

    @rule()
    def keep_a_tail(self) -> None:
        receipt = get(start_pull(self.store, self.worker, [], TAIL_TOKENS, WIDE_LAYOUT, "tail"))
        assert (receipt.tail is None) == (receipt.refusals != ())
        self.tails += [] if receipt.tail is None else [receipt.tail]

    @rule(pick=picks)
    def claim_a_tail(self, pick: int) -> None:
        for tail in picked(self.tails, pick):
            self.tails.remove(tail)
            parts, misses = claim({"s": self.store}, tail, TAIL_TOKENS, WIDE_LAYOUT)
            assert misses == []
            wanted = values_of(WIDE_LAYOUT, b"tail")[..., :TAIL_TOKENS, :]
            np.testing.assert_array_equal(parts[0].payload[0, ..., :TAIL_TOKENS, :], wanted)

    @rule(pick=picks, where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def damage(self, pick: int, where: float, bit: int) -> None:
        for path in picked(sorted(self.running.folder.glob("??/*.kv")), pick):
            self.damaged.add(extent_at(path))
            offset = int(where * path.stat().st_size)
            with path.open("r+b") as file:
                file.seek(offset)
                byte = file.read(1)[0]
                file.seek(offset)
                file.write(bytes([byte ^ 1 << bit]))

    @precondition(lambda self: self.num_crashes < 2)
    @rule(under_way=st.lists(chains, max_size=2))
    def crash_the_store(self, under_way: list[list[bytes]]) -> None:
        """DRAM is lost, and what lies on the disk is found again."""
        self.num_crashes += 1
        before = self.running.on_disk()
        pulls = self.start_puts(under_way)
        crash(self.store)
        for pull in pulls:
            try:
                get(pull)
            except RayActorError:
                continue
        self.limits = (DRAM_BYTES, DISK_BYTES)  # it knows no others
        self.tails.clear()
        for leased in self.leases:
            leased.holds = False
        eventually(self.is_counted_and_listed)
        assert self.running.in_dram() == set()
        found = {key for path in self.running.files() for key in read_index(path).keys}
        assert self.running.visible({key for put in self.put_chains for key in put}) == found
        if not under_way and sum(before.values()) <= DISK_BYTES:
            assert before.keys() - self.damaged <= self.running.on_disk().keys()

    @precondition(lambda self: self.put_chains and self.num_crashes < 2)
    @rule(data=st.data(), under_way=st.lists(chains, max_size=2), afterwards=st.lists(chains, max_size=2))
    def crash_the_directory(
        self, data: st.DataObject, under_way: list[list[bytes]], afterwards: list[list[bytes]]
    ) -> None:
        """Holds are forgotten; what the store has is listed again, except what was put a second time meanwhile."""
        self.num_crashes += 1
        read = self.lease(data.draw(st.sampled_from(self.put_chains)), LONG_S)
        part_ids = [part.part_id for piece in read.found.slices for part in piece.parts]
        pulls = self.start_puts(under_way)
        crash(self.directory, lambda: get(self.store.prefetch.remote(part_ids)))
        self.leases.clear()
        get([*pulls, *self.start_puts(afterwards)])

    def teardown(self) -> None:
        """Without any room, what is held stays; when nobody holds anything, all of it goes."""
        self.set_limits(0, 0)
        self.all_agree()
        for leased in self.leases:
            get(self.directory.release.remote([leased.found.lease_id]))
        for tail in self.tails:
            get(self.store.discard_tail.remote(tail.tail_id))
        self.leases.clear()
        self.tails.clear()
        self.all_agree()
        stats, disk = self.running.stats()
        assert (stats.used_bytes, disk.used_bytes, self.running.files()) == (0, 0, {})
        eventually(lambda: self.setup.directory_stats()["num_puts"] == 0)
        assert self.setup.directory_stats()["num_blocks"] == 0
        self.running.is_empty = True


@pytest.fixture(params=list(DiskAdmission))
def running(request: pytest.FixtureRequest, ray_cluster: None, tmp_path: Path) -> Iterator[RunningStore]:
    made = RunningStore(tmp_path, request.param)
    yield made
    made.stop()


def test_whatever_happens_to_it(running: RunningStore, worker: Any) -> None:
    run_state_machine_as_test(
        lambda: StoreMachine(running, worker),
        settings=settings(
            max_examples=6,
            stateful_step_count=20,
            deadline=None,
            # Nothing is shrunk: processes do not do the same twice, and a failure takes half a minute.
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
