"""The node store, the directory actor and the reader's half together, on a real Ray cluster."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import ray
from numpy.typing import NDArray

from kv.directory_client import DirectoryClient
from kv.extents import PullReceipt
from kv.fetch import fetch_parts
from kv.layout import KvLayout
from kv.node_store import NodeStore
from tests.store_cell import (
    FINGERPRINT,
    LAYOUT,
    MIB,
    WIDE_LAYOUT,
    Setup,
    chain,
    claim,
    crash,
    eventually,
    fetch,
    get,
    pull,
    start_pull,
    stats_of,
    values_of,
)

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]


def no_miss(label: str, num_blocks: int) -> None:
    pytest.fail(f"{label} after {num_blocks} blocks")


def assert_nothing_pending(setup: Setup, store: Any) -> None:
    eventually(lambda: setup.directory_stats()["num_puts"] == 0)
    stats = stats_of(store)
    assert stats.used_bytes == setup.directory_stats()["bytes_by_store"].get("s", {}).get("dram", 0)


def test_what_a_worker_had_is_what_a_reader_gets(setup: Setup, worker: Any) -> None:
    store = setup.store()
    keys = chain("a", 30)
    assert pull(store, worker, keys) == PullReceipt(30, None)
    # 30 blocks of 64 KiB in parts of at most 800 KiB: three extents of one part each.
    found = setup.lookup(keys)
    assert [piece.count for piece in found.slices] == [10, 10, 10]
    assert fetch(setup, {"s": store}, keys, found) == (30, [])
    assert fetch(setup, {"s": store}, keys, setup.lookup(keys, skip_blocks=13)) == (30, [])
    fork = keys[:25] + chain("b", 30)[25:]
    assert fetch(setup, {"s": store}, fork, setup.lookup(fork)) == (25, [])
    eventually(lambda: setup.directory_stats()["num_leases"] == 0)


def test_parts_of_a_block_are_put_together(setup: Setup, worker: Any) -> None:
    # One block is 4 MiB here, so every block is an extent of several parts.
    layout = replace(LAYOUT, num_layers=16, head_dim=1024)
    store = setup.store()
    keys = chain("a", 2, layout)
    assert pull(store, worker, keys, layout=layout) == PullReceipt(2, None)
    found = setup.lookup(keys)
    assert [len(piece.parts) for piece in found.slices] == [6, 6]

    async def run() -> tuple[list[list[NDArray[Any]]], list[int]]:
        blocks: list[list[NDArray[Any]]] = [[], []]
        num_layers = []
        directory = DirectoryClient([setup.directory])
        async for got in fetch_parts(
            directory, {"s": store}, found, keys, layout, FINGERPRINT, timeout_s=30.0, on_miss=no_miss
        ):
            blocks[got.first_block].append(got.part.payload[0])
            num_layers.append(got.num_layers)
        return blocks, num_layers

    blocks, num_layers = asyncio.run(run())
    for key, layers in zip(keys, blocks, strict=True):
        np.testing.assert_array_equal(np.concatenate(layers), values_of(layout, key))
    # The first layers of both blocks come first, so that computing can begin.
    stops = [part.range.first_layer + part.range.num_layers for part in found.slices[0].parts]
    assert num_layers == [layer for start, stop in pairwise([0, *stops]) for layer in (start, stop)]


def test_groups_of_layers_are_stored_apart_and_read_together(setup: Setup, worker: Any) -> None:
    store = setup.store(layer_groups=2)
    keys = chain("a", 8)
    assert pull(store, worker, keys) == PullReceipt(8, None)
    found = setup.lookup(keys)
    assert [[part.range.num_layers for part in piece.parts] for piece in found.slices] == [[2, 2]]
    assert fetch(setup, {"s": store}, keys, found) == (8, [])


def test_only_missing_blocks_are_exported(setup: Setup, worker: Any) -> None:
    store, before = setup.store(), get(worker.num_exported_blocks.remote())
    keys = chain("a", 20)
    assert pull(store, worker, keys[:12]).num_stored_blocks == 12
    assert pull(store, worker, keys).num_stored_blocks == 8
    assert pull(store, worker, keys) == PullReceipt(0, None)
    assert get(worker.num_exported_blocks.remote()) == before + 20
    assert fetch(setup, {"s": store}, keys, setup.lookup(keys)) == (20, [])


def test_parts_outlive_the_worker(setup: Setup) -> None:
    store, worker = setup.store(), setup.worker()
    keys = chain("a", 24)
    pull(store, worker, keys)
    ray.kill(worker)
    assert fetch(setup, {"s": store}, keys, setup.lookup(keys)) == (24, [])


def object_store_bytes() -> float:
    return float(600 * MIB - cast(Any, ray).available_resources().get("object_store_memory", 0.0))


def private_bytes(actor: Any) -> int:
    """Memory of its own: what it maps of the object store is not in it."""
    pid = get(actor.__ray_call__.remote(lambda _: os.getpid()))
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def test_parts_live_in_the_object_store_and_not_in_their_owner(setup: Setup, worker: Any) -> None:
    store = setup.store(256 * MIB)
    pull(store, worker, chain("warm up", 12))
    private_before, shared_before = private_bytes(store), object_store_bytes()
    for name in "abcd":
        assert pull(store, worker, chain(name, 384)).num_stored_blocks == 384
    eventually(lambda: object_store_bytes() - shared_before > 90 * MIB)
    assert private_bytes(store) - private_before < 20 * MIB
    get(store.drop.remote([piece.extent_id for piece in setup.lookup(chain("a", 384)).slices]))
    eventually(lambda: object_store_bytes() - shared_before < 80 * MIB)


def test_over_the_limit_the_least_recently_used_goes_and_the_leased_stays(setup: Setup, worker: Any) -> None:
    store = setup.store(3 * MIB)
    a, b, c, d = (chain(name, 12) for name in "abcd")
    for keys in (a, b, c):
        assert pull(store, worker, keys).num_stored_blocks == 12
    leased = setup.lookup(a)
    assert pull(store, worker, d).num_stored_blocks == 12
    assert [setup.visible(keys) for keys in (a, b, c, d)] == [12, 0, 12, 12]
    assert pull(store, worker, b).num_stored_blocks == 12
    assert [setup.visible(keys) for keys in (a, b, c, d)] == [12, 12, 0, 12]
    assert fetch(setup, {"s": store}, a, leased) == (12, [])
    assert stats_of(store).used_bytes <= 3 * MIB
    assert setup.directory_stats()["evicted"]["dram"] == 2


def test_when_all_is_leased_a_pull_is_refused(setup: Setup, worker: Any) -> None:
    store = setup.store(2 * MIB)
    a, b = chain("a", 24), chain("b", 24)
    pull(store, worker, a)
    leased = setup.lookup(a)
    assert pull(store, worker, b, tail_tokens=3).refusals == ("capacity",)
    assert [setup.visible(keys) for keys in (a, b)] == [24, 0]
    assert stats_of(store).refusals == {"capacity": 1}
    assert_nothing_pending(setup, store)
    get(setup.directory.release.remote([leased.lease_id]))
    assert pull(store, worker, b) == PullReceipt(24, None)


def test_of_a_request_larger_than_the_store_the_beginning_is_kept(setup: Setup, worker: Any) -> None:
    store = setup.store(2 * MIB)
    keys = chain("a", 60)
    receipt = pull(store, worker, keys)
    assert 0 < receipt.num_stored_blocks < 60
    assert receipt.refusals == ("capacity",)
    assert setup.visible(keys) == receipt.num_stored_blocks
    assert fetch(setup, {"s": store}, keys, setup.lookup(keys)) == (receipt.num_stored_blocks, [])
    assert_nothing_pending(setup, store)


def test_pulls_at_once_stay_within_the_limit(setup: Setup) -> None:
    store = setup.store(4 * MIB)
    workers = [setup.worker() for _ in range(3)]
    chains = [chain(f"{turn} {number}", 24) for turn in range(4) for number in range(3)]
    pulls = [
        start_pull(store, workers[number % 3], keys, export_id=f"request {number}")
        for number, keys in enumerate(chains)
    ]
    used = []
    while pulls:
        used.append(stats_of(store).used_bytes)
        pulls = ray.wait(pulls, timeout=0)[1]
    assert max(used) <= 4 * MIB
    assert_nothing_pending(setup, store)
    kept = [keys for keys in chains if setup.visible(keys)]
    assert kept
    for keys in kept:
        assert fetch(setup, {"s": store}, keys, setup.lookup(keys)) == (setup.visible(keys), [])


def test_two_pulls_of_the_same_prefix_export_it_once_and_both_end_with_it_visible(setup: Setup, worker: Any) -> None:
    store, slow = setup.store(settle_timeout_s=60.0), setup.worker("waits")
    keys = chain("a", 24)
    first = start_pull(store, slow, keys[:12])
    eventually(lambda: setup.directory_stats()["num_puts"] == 1)
    second = start_pull(store, worker, keys)
    eventually(lambda: setup.directory_stats()["num_blocks"] == 12)
    assert ray.wait([second], timeout=0)[0] == []
    get(slow.open.remote())
    assert get(second).num_stored_blocks == 12
    assert setup.visible(keys) == 24
    assert get(first).num_stored_blocks == 12


def test_a_pull_does_not_wait_for_ever_for_another_ones_blocks(setup: Setup, worker: Any) -> None:
    store, slow = setup.store(settle_timeout_s=0.05), setup.worker("waits")
    keys = chain("a", 24)
    first = start_pull(store, slow, keys[:12])
    eventually(lambda: setup.directory_stats()["num_puts"] == 1)
    assert pull(store, worker, keys).num_stored_blocks == 12
    assert ray.wait([first], timeout=0)[0] == []


@pytest.mark.parametrize(
    ("defect", "refusal"),
    [
        ("raises", "raised"),
        ("dies", "actor_died"),
        ("waits", "timeout"),
        ("gives nothing", "part_type"),
        ("gives too few", "raised"),
    ],
)
def test_a_worker_that_fails_is_a_refusal_and_leaves_nothing_behind(
    setup: Setup, worker: Any, defect: str, refusal: str
) -> None:
    store, faulty = setup.store(pull_timeout_s=3.0), setup.worker(defect)
    keys = chain("a", 24)
    receipt = pull(store, faulty, keys, tail_tokens=5)
    assert receipt.num_stored_blocks == 0
    assert set(receipt.refusals) == {refusal}
    assert stats_of(store).refusals[refusal] == len(receipt.refusals)
    assert_nothing_pending(setup, store)
    assert pull(store, worker, keys) == PullReceipt(24, None)


def test_a_damaged_part_is_not_stored_but_those_before_it_are(setup: Setup) -> None:
    store, worker = setup.store(), setup.worker("flips a bit of the last part")
    keys = chain("a", 30)
    assert pull(store, worker, keys) == PullReceipt(20, None, ("part_checksum",))
    assert setup.visible(keys) == 20
    assert_nothing_pending(setup, store)
    assert pull(store, worker, chain("b", 8), tail_tokens=3) == PullReceipt(8, None, ("part_checksum",))


def test_keys_that_do_not_fit_the_tokens_are_a_refusal(setup: Setup, worker: Any) -> None:
    store = setup.store()
    keys = chain("a", 3)
    receipt = get(store.pull.remote(worker, "request", keys, 2 * LAYOUT.block_tokens, LAYOUT, FINGERPRINT))
    assert receipt == PullReceipt(0, None, ("keys",))


def test_a_small_tail_comes_with_the_receipt(setup: Setup, worker: Any) -> None:
    store = setup.store()
    keys = chain("a", 2)
    tail = pull(store, worker, keys, tail_tokens=5).tail
    assert tail is not None
    assert tail.tail_id is None
    assert stats_of(store).num_tails == 0
    parts, misses = claim({}, tail, 37, LAYOUT)
    assert misses == []
    wanted = values_of(LAYOUT, b"request")
    wanted[..., 5:, :] = 0
    np.testing.assert_array_equal(parts[0].payload, [wanted])
    assert claim({}, tail, 38, LAYOUT) == (None, ["part_tokens"])
    assert claim({}, tail, 21, LAYOUT) == (None, ["part_range"])
    assert claim({}, replace(tail, ranges=tail.ranges * 2), 37, LAYOUT) == (None, ["part_lanes"])


def test_a_large_tail_waits_in_the_store_and_is_claimed_once(setup: Setup) -> None:
    store, worker = setup.store(), setup.worker()
    tail = pull(store, worker, [], tail_tokens=5, layout=WIDE_LAYOUT).tail
    assert tail is not None
    assert tail.inline is None
    assert (stats_of(store).num_tails, stats_of(store).used_bytes > WIDE_LAYOUT.block_bytes) == (1, True)
    ray.kill(worker)
    assert claim({}, tail, 5, WIDE_LAYOUT) == (None, ["unknown_store"])
    parts, misses = claim({"s": store}, tail, 5, WIDE_LAYOUT)
    assert misses == []
    np.testing.assert_array_equal(parts[0].payload[0, ..., :5, :], values_of(WIDE_LAYOUT, b"request")[..., :5, :])
    assert (stats_of(store).num_tails, stats_of(store).used_bytes) == (0, 0)
    assert claim({"s": store}, tail, 5, WIDE_LAYOUT) == (None, ["part_gone"])


def test_a_tail_in_several_parts(setup: Setup, worker: Any) -> None:
    layout = replace(LAYOUT, head_dim=1024)
    store = setup.store()
    tail = pull(store, worker, [], tail_tokens=5, layout=layout).tail
    assert tail is not None
    assert len(tail.ranges) == 2
    parts, _ = claim({"s": store}, tail, 5, layout)
    payload = np.concatenate([part.payload[0] for part in parts], axis=0)
    np.testing.assert_array_equal(payload[..., :5, :], values_of(layout, b"request")[..., :5, :])


def test_a_tail_is_freed_when_discarded_or_forgotten(setup: Setup, worker: Any) -> None:
    store = setup.store(tail_ttl_s=0.2)
    pull(store, worker, [], tail_tokens=5, layout=WIDE_LAYOUT)
    eventually(lambda: stats_of(store).num_expired_tails == 1)
    assert (stats_of(store).num_tails, stats_of(store).used_bytes) == (0, 0)

    patient = setup.store(store_id="t")
    tail = pull(patient, worker, [], tail_tokens=5, layout=WIDE_LAYOUT).tail
    assert tail is not None
    get(patient.discard_tail.remote(tail.tail_id))
    get(patient.discard_tail.remote(tail.tail_id))
    assert (stats_of(patient).num_tails, stats_of(patient).used_bytes) == (0, 0)


@pytest.mark.parametrize(("fault", "miss"), [("flips a bit", "part_checksum"), ("has lost them", "part_gone")])
def test_a_broken_extent_is_a_miss_and_is_dropped(setup: Setup, worker: Any, fault: str, miss: str) -> None:
    store = setup.store()
    keys = chain("a", 24)
    pull(store, worker, keys)
    unreliable = setup.unreliable(store, fault)
    good_blocks = 12 if fault == "flips a bit" else 0
    assert fetch(setup, {"s": unreliable}, keys, setup.lookup(keys)) == (good_blocks, [miss])
    eventually(lambda: setup.visible(keys) == good_blocks)
    eventually(lambda: get(unreliable.num_dropped.remote()) == 1)
    eventually(lambda: setup.directory_stats()["num_leases"] == 0)
    assert setup.directory_stats()["extents_broken"] == 1


def test_a_store_that_does_not_answer_is_a_miss_and_keeps_its_extents(setup: Setup, worker: Any) -> None:
    store = setup.store()
    keys = chain("a", 12)
    pull(store, worker, keys)
    silent = setup.unreliable(store, "hangs")
    assert fetch(setup, {"s": silent}, keys, setup.lookup(keys), timeout_s=0.3) == (0, ["timeout"])
    assert fetch(setup, {}, keys, setup.lookup(keys)) == (0, ["unknown_store"])
    assert fetch(setup, {"s": store}, keys, setup.lookup(keys)) == (12, [])
    eventually(lambda: setup.directory_stats()["num_leases"] == 0)


def test_blocks_of_a_dead_store_are_a_miss_and_are_forgotten(setup: Setup, worker: Any) -> None:
    store, other = setup.store(), setup.store(store_id="t")
    keys = chain("a", 36)
    pull(other, worker, keys[:12])
    pull(store, worker, keys)
    found = setup.lookup(keys)
    holder = setup.unreliable(store, "gives kept ones")
    get(holder.keep.remote([part.part_id for piece in found.slices[1:] for part in piece.parts]))
    ray.kill(store)

    def lost() -> bool:
        # What is on this node can be read until word of its owner's death has come.
        num_blocks, misses = fetch(setup, {"s": holder, "t": other}, keys, setup.lookup(keys))
        assert (num_blocks, misses) in [(36, []), (24, ["object_lost"]), (12, ["object_lost"])]
        return misses != []

    eventually(lost)
    assert fetch(setup, {"s": store, "t": other}, keys, found) == (12, ["actor_died"])
    eventually(lambda: list(setup.directory_stats()["bytes_by_store"]) == ["t"])
    assert setup.visible(keys) == 12


def test_another_models_reader_gets_nothing(setup: Setup, worker: Any) -> None:
    store = setup.store()
    keys = chain("a", 12)
    pull(store, worker, keys)
    misses: list[str] = []

    async def run(layout: KvLayout, fingerprint: bytes, wanted: list[bytes]) -> None:
        directory = DirectoryClient([setup.directory])
        found = await directory.lookup(keys, 60.0)
        async for _ in fetch_parts(
            directory,
            {"s": store},
            found,
            wanted,
            layout,
            fingerprint,
            timeout_s=30.0,
            on_miss=lambda label, _: misses.append(label),
        ):
            pytest.fail("a foreign part was handed out")

    asyncio.run(run(LAYOUT, b"another model", keys))
    assert misses == ["part_fingerprint"]
    eventually(lambda: setup.visible(keys) == 0)
    pull(store, worker, keys)
    asyncio.run(run(replace(LAYOUT, num_layers=5), FINGERPRINT, keys))
    eventually(lambda: setup.visible(keys) == 0)
    pull(store, worker, keys)
    asyncio.run(run(LAYOUT, FINGERPRINT, chain("b", 12)))
    assert misses == ["part_fingerprint", "part_lanes", "part_keys"]


def test_a_reader_must_know_the_keys_of_all_it_fetches(setup: Setup, worker: Any) -> None:
    store = setup.store()
    keys = chain("a", 12)
    pull(store, worker, keys)
    with pytest.raises(ValueError, match="11 keys were given for 12 blocks"):
        fetch(setup, {"s": store}, keys[:11], setup.lookup(keys))
    eventually(lambda: setup.directory_stats()["num_leases"] == 0)


def test_a_reader_that_stops_early_releases_its_lease(setup: Setup, worker: Any) -> None:
    store = setup.store()
    keys = chain("a", 36)
    pull(store, worker, keys)
    found = setup.lookup(keys)

    async def run() -> None:
        directory = DirectoryClient([setup.directory])
        async with aclosing(
            fetch_parts(directory, {"s": store}, found, keys, LAYOUT, FINGERPRINT, timeout_s=30.0, on_miss=no_miss)
        ) as blocks:
            async for got in blocks:
                assert got.first_block == 0
                break
        directory.send_released()

    asyncio.run(run())
    eventually(lambda: setup.directory_stats()["num_leases"] == 0)


def test_a_slow_reader_keeps_its_blocks_after_lease_and_extent_are_gone(setup: Setup, worker: Any) -> None:
    store = setup.store()
    keys = chain("a", 36)
    pull(store, worker, keys)
    found = setup.lookup(keys)
    ends: list[int] = []

    async def run() -> None:
        directory = DirectoryClient([setup.directory])
        async for got in fetch_parts(
            directory, {"s": store}, found, keys, LAYOUT, FINGERPRINT, timeout_s=30.0, on_miss=no_miss
        ):
            if not ends:
                await setup.directory.release.remote([found.lease_id])
                await store.drop.remote(await directory.evict("s", "dram", 36 * LAYOUT.block_bytes))
            wanted = [values_of(LAYOUT, key) for key in keys[got.first_block : got.first_block + got.num_blocks]]
            np.testing.assert_array_equal(got.part.payload, wanted)
            ends.append(got.first_block + got.num_blocks)

    asyncio.run(run())
    assert ends == [12, 24, 36]
    assert setup.visible(keys) == 0


def test_a_restarted_directory_is_told_what_the_store_has(setup: Setup, worker: Any) -> None:
    store = setup.store(2 * MIB)
    pull(store, worker, chain("a", 24))
    crash(setup.directory)
    eventually(lambda: setup.visible(chain("a", 24)) == 24)
    assert pull(store, worker, chain("b", 24)) == PullReceipt(24, None)
    assert setup.visible(chain("a", 24)) == 0
    assert stats_of(store).num_extents == 2
    assert_nothing_pending(setup, store)


def test_without_a_directory_a_pull_is_refused(setup: Setup, worker: Any) -> None:
    store = setup.store()
    ray.kill(setup.directory)
    receipt = pull(store, worker, chain("a", 12), tail_tokens=3)
    assert receipt == PullReceipt(0, None, ("actor_died",))
    assert stats_of(store).used_bytes == 0


def test_a_restarted_store_starts_empty(setup: Setup, worker: Any) -> None:
    store = setup.start(cast(Any, NodeStore).options(max_restarts=1), ("s", [setup.directory], 8 * MIB))
    keys = chain("a", 12)
    pull(store, worker, keys)
    crash(store)
    eventually(lambda: setup.visible(keys) == 0)
    assert pull(store, worker, keys) == PullReceipt(12, None)


def test_parts_that_are_not_there_have_no_reference(setup: Setup) -> None:
    assert get(setup.store().get_parts.remote(["s/x/0", "s/x/1"])) == [None, None]
