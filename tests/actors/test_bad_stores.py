"""Whatever is wrong with what is stored, a request gets the right tokens, a counter says what was wrong, and nothing
that looks right is left of it (real workers over stores that are broken on purpose, no Serve)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray
import xxhash
from ray.exceptions import RayActorError

from actors.addresses import StoreAddress, WorkerAddress, address_of
from actors.engine.config import EngineConfig
from actors.engine.device_event import DeviceEvent
from actors.messages import WorkerFacts
from actors.model_source import resolve_model
from actors.page_writer import PageWriter
from actors.worker import Worker
from actors.worker_settings import WorkerSettings
from kv.directory_actor import DirectoryActor
from kv.disk.extent_file import verify_file
from kv.disk.preamble import START
from kv.disk.settings import DiskSettings
from kv.keys import block_keys
from kv.node_store import NodeStore
from kv.part_range import PartRange
from migrate.load import Role
from migrate.roster import Member
from tests import store_cell
from tests.engine_driver import greedy, make_prompt
from tests.flow_client import FlowAnswer, FlowClient
from tests.kv.disk.extents_to_write import mounted_disk
from tests.reference import assert_greedy, load_reference
from tests.store_cell import MIB, eventually, get, look_up, stats_of, visible_blocks

pytestmark = pytest.mark.cluster

MODEL = "random/llama-8x8"
BLOCK = 16
BLOCK_BYTES = BLOCK * 8 * 8 * 8 * 2 * 4
"""Layers, heads, numbers a head, K and V, float32."""
LAYER_GROUPS = 3
"""Seven blocks are enough for so many parts."""
PREFILL_TOKENS_PER_S = 0.1
"""As a worker so slow that it takes everything from the store, and begins to compute with the first layers."""
ENGINE = EngineConfig(dtype="float32", block_tokens=BLOCK, kv_cache_blocks=400, max_batch_tokens=128)
LEASE_S = 0.2
"""So short that a reader which waits for its turn outlives it, and that it is not renewed in time."""
LENGTH = 7 * BLOCK + 3
HIT = 7 * BLOCK


class HeldWorker(Worker):
    """A worker whose engine can be stopped between two steps."""

    async def hold(self) -> None:
        self.released = threading.Event()
        self._thread.call(lambda _: self.released.wait())

    async def let_go(self) -> None:
        self.released.set()

    async def fetch_behind_the_engine(self) -> None:
        """From now on all but the first layers of a fetch wait until a step is running, for ten seconds at most: on a
        machine that is slow enough no step begins early."""
        write = PageWriter.write

        async def write_late(writer: PageWriter, part: PartRange, *rest: Any) -> DeviceEvent | None:
            until_s = time.monotonic() + 10.0
            while part.first_layer > 0 and self._thread.stalled_s() == 0 and time.monotonic() < until_s:
                await asyncio.sleep(0.001)
            return await write(writer, part, *rest)

        PageWriter.write = write_late  # type: ignore[method-assign]


@dataclass
class Cell:
    """Two prefill workers and a decode worker, for one store after the other."""

    members: tuple[Member, ...]
    reference: Any
    directory: Any
    store: Any = None

    def start_store(self, disk: DiskSettings | None = None, dram_bytes: int = 64 * MIB) -> Any:
        """In the place of the last one, which is closed as it is at the end of an app. The directory forgets that."""
        self.stop_store()
        store_class: Any = NodeStore
        self.store = store_class.remote("node", [self.directory], dram_bytes, disk=disk, layer_groups=LAYER_GROUPS)
        address = StoreAddress((self.directory,), {"node": self.store}, "node")
        get([address_of(member).actor.use_store.remote(address) for member in self.members])
        if disk is not None:
            eventually(lambda: stats_of(self.store).disk is None or stats_of(self.store).disk.is_scanned)
        return self.store

    def stop_store(self) -> None:
        if self.store is not None:
            with contextlib.suppress(RayActorError):  # a test has killed it
                get(self.store.close.remote(30.0))
            ray.kill(self.store)
        self.store = None

    def prefill(self, worker: int) -> Any:
        return address_of([m for m in self.members if m.role == "prefill"][worker]).actor

    def run(self, worker: int, prompts: Sequence[tuple[int, ...]]) -> list[FlowAnswer]:
        """All at once over one prefill worker, checked against transformers."""
        prefill = [member for member in self.members if member.role == "prefill"]
        members = (prefill[worker], *(member for member in self.members if member.role == "decode"))
        client = FlowClient(members, "static", self.directory, self.store)
        answers = client.run(prompts, greedy(8), together=True)
        assert_greedy(self.reference, prompts, [answer.tokens for answer in answers])
        assert {answer.finish_reason for answer in answers} == {"length"}
        return answers

    def store_prompts(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Worker 0 computes them one after the other; each is an extent of its own."""
        for prompt in prompts:
            (answer,) = self.run(0, [prompt])
            assert answer.cached_tokens == 0
        self.wait_free()

    def wait_free(self) -> None:
        def is_free() -> bool:
            stats = [get(address_of(member).actor.stats.remote()) for member in self.members]
            return not any(each[name] for each in stats for name in ("live_blocks", "tracked_requests"))

        eventually(is_free)

    def misses(self) -> dict[str, int]:
        """Of the reader."""
        misses: dict[str, int] = get(self.prefill(1).stats.remote())["store_misses"]
        return misses

    def early_starts(self) -> int:
        return int(get(self.prefill(1).stats.remote()).get("early_starts", 0))

    def keys(self, prompt: Sequence[int]) -> list[bytes]:
        return block_keys(prompt, BLOCK, address_of(self.members[0]).facts.fingerprint, b"")

    def count(self, name: str) -> int:
        """Of the directory's counters."""
        return int(get(self.directory.stats.remote())[name])

    def disk_evictions(self) -> int:
        return int(get(self.directory.stats.remote())["evicted"]["disk"])

    def lost_extents(self) -> int:
        """That were in DRAM."""
        return int(get(self.directory.stats.remote())["lost"]["dram"])

    def visible(self, prompt: Sequence[int]) -> int:
        """Blocks of a prompt that are stored."""
        return visible_blocks(self.directory, self.keys(prompt))

    def file_of(self, folder: Path, prompt: Sequence[int]) -> Path:
        found = look_up(self.directory, self.keys(prompt), LEASE_S)
        (piece,) = found.slices
        get(self.directory.release.remote([found.lease_id]))
        (path,) = folder.glob(f"??/{piece.extent_id.rsplit('/', 1)[1]}.kv")
        return path


@pytest.fixture(scope="module")
def cell(ray_cluster: None) -> Iterator[Cell]:
    actor: Any = ray.remote(num_cpus=0)(HeldWorker)
    roles: tuple[Role, ...] = ("prefill", "prefill", "decode")
    settings = WorkerSettings(
        MODEL, "prefill", ENGINE, 1, lease_s=LEASE_S, fetch_timeout_s=30.0, prefill_tokens_per_s=PREFILL_TOKENS_PER_S
    )
    started = [
        (role, actor.remote(f"{role}-{number}", replace(settings, role=role))) for number, role in enumerate(roles)
    ]
    members = []
    for number, (role, handle) in enumerate(started):
        facts: WorkerFacts = ray.get(handle.facts.remote(), timeout=300)
        members.append(
            Member(
                f"{role}-{number}", 0, role, "node", facts.fingerprint, BLOCK, facts.total_blocks,
                facts.max_context_tokens, WorkerAddress(handle, facts),
            )
        )  # fmt: skip
    directory_class: Any = DirectoryActor
    cell = Cell(tuple(members), load_reference(resolve_model(MODEL).path), directory_class.remote())
    try:
        yield cell
    finally:
        cell.stop_store()
        for handle in (cell.directory, *(handle for _, handle in started)):
            ray.kill(handle)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def prompts_of(seed: int, count: int, length: int = LENGTH) -> list[tuple[int, ...]]:
    return [make_prompt(length, 100 * seed + number, vocab=250) for number in range(count)]


def on_disk(folder: Path, limit_bytes: int = 64 * MIB, **more: Any) -> DiskSettings:
    return DiskSettings(str(folder), limit_bytes, **more)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1000] ^= 8
    path.write_bytes(content)


def of_a_later_version(path: Path) -> None:
    """With a checksum that is right."""
    content = path.read_bytes()
    magic, version, length = START.unpack(content[: START.size])
    body = START.pack(magic, version + 1, length) + content[START.size : START.size + length]
    digest = xxhash.xxh3_128_digest(body)
    path.write_bytes(body + digest + content[len(body) + len(digest) :])


def with_a_part_of_a_later_version(path: Path) -> None:
    content = bytearray(path.read_bytes())
    at = content.index(b"EQPZPART") + 8
    content[at : at + 4] = struct.pack("<I", 2)
    path.write_bytes(content)


def anything(path: Path) -> None:
    path.write_bytes(os.urandom(len(path.read_bytes())))


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def remove(path: Path) -> None:
    path.unlink()


FLIPS = 5
"""Prompts of which only the last layers are wrong: one alone may well get the right tokens all the same."""
DAMAGES: list[Callable[[Path], None]] = [
    *[flip_a_bit] * FLIPS, cut, empty, of_a_later_version, with_a_part_of_a_later_version, anything, a_folder, remove
]  # fmt: skip


@pytest.mark.parametrize("when", ["before the start", "while the store runs"])
def test_files_that_are_not_what_was_written_are_misses(cell: Cell, folder: Path, when: str) -> None:
    prompts = prompts_of(1 + len(when), len(DAMAGES) + 1)
    cell.start_store(on_disk(folder))
    cell.store_prompts(prompts)
    assert get(cell.store.flush.remote(30.0))
    paths = [cell.file_of(folder, prompt) for prompt in prompts]
    if when == "before the start":
        cell.stop_store()
    else:
        cell.start_store(on_disk(folder))
        assert stats_of(cell.store).disk.num_found_extents == len(prompts)
    for damage, path in zip(DAMAGES, paths, strict=False):
        damage(path)
    if when == "before the start":
        cell.start_store(on_disk(folder))
    before, begun = cell.misses(), cell.early_starts()
    get(cell.prefill(1).fetch_behind_the_engine.remote())

    answers = cell.run(1, prompts)
    assert [answer.cached_tokens for answer in answers] == [0] * len(DAMAGES) + [HIT]
    cell.wait_free()
    disk = stats_of(cell.store).disk
    # On a machine that is busy enough the store may wait too long for the directory.
    refusals = {label: count for label, count in disk.refusals.items() if label != "timeout"}
    if when == "before the start":
        # What was removed was never there; a flipped bit in the payload is found by the reader.
        assert disk.num_unusable_files == len(DAMAGES) - FLIPS - 1
        assert refusals == {}
        assert missed(before, cell.misses()) == {"part_checksum": FLIPS}
    else:
        # The folder stays, since only files are removed. What is wrong inside a part is found by the reader.
        assert refusals == {
            "part_truncated": 2, "part_version": 1, "part_magic": 1, "part_type": 1, "part_gone": 1, "disk_remove": 1
        }  # fmt: skip
        assert missed(before, cell.misses()) == {
            "part_checksum": FLIPS, "part_version": 1, "part_gone": len(DAMAGES) - FLIPS - 1
        }  # fmt: skip

    # The flipped bits lie in the last layers, and computing had begun with the first ones.
    assert cell.early_starts() - begun == FLIPS + 1
    # It was stored anew, and nothing that is broken is left.
    assert get(cell.store.flush.remote(30.0))
    assert [cell.visible(prompt) for prompt in prompts] == [HIT // BLOCK] * len(prompts)
    for path in folder.glob("??/*.kv"):
        if not path.is_dir():
            verify_file(path)
    assert [path for path in paths if path.is_file()] == paths[-1:]


def missed(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    counts = {label: now[label] - before.get(label, 0) for label in now}
    return {label: count for label, count in counts.items() if count}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not read the files")
def test_files_that_must_not_be_read_are_misses_and_stay(cell: Cell, folder: Path) -> None:
    *prompts, another = prompts_of(30, 3)
    cell.start_store(on_disk(folder))
    cell.store_prompts(prompts)
    store = cell.start_store(on_disk(folder))
    cell.run(1, [another])  # whatever the process has to import is imported
    before = cell.misses()
    get(store.__ray_call__.remote(lambda _: os.seteuid(65534)))
    (answer,) = cell.run(1, prompts[:1])
    get(store.__ray_call__.remote(lambda _: os.seteuid(0)))
    assert missed(before, cell.misses()) == {"unavailable": 1}
    assert answer.cached_tokens == 0
    assert stats_of(store).disk.refusals["part_unreadable"] >= 1
    (answer,) = cell.run(1, prompts[1:])
    assert answer.cached_tokens == HIT
    # What could not be read is there still.
    assert get(store.flush.remote(30.0))
    assert stats_of(store).disk.num_extents == 3
    assert cell.visible(prompts[0]) == HIT // BLOCK


def test_another_models_files_are_never_hit_and_make_room(cell: Cell, folder: Path) -> None:
    store = cell.start_store(on_disk(folder))
    other: Any = ray.remote(num_cpus=0)(store_cell.Worker).remote()
    for name in "ab":
        store_cell.pull(store, other, store_cell.chain(name, 12))
    ray.kill(other)
    assert get(store.flush.remote(30.0))
    foreign_bytes = stats_of(store).disk.used_bytes
    foreign_files = set(folder.glob("??/*.kv"))
    assert foreign_bytes > 2 * 12 * store_cell.LAYOUT.block_bytes

    prompts = prompts_of(31, 2)
    file_bytes = HIT // BLOCK * BLOCK_BYTES + (1 + 2 * LAYER_GROUPS) * 4096  # at most
    store = cell.start_store(on_disk(folder, foreign_bytes + file_bytes))
    evicted = cell.disk_evictions()
    assert (stats_of(store).disk.used_bytes, stats_of(store).disk.num_found_extents) == (foreign_bytes, 2)
    answers = cell.run(0, prompts)
    assert [answer.cached_tokens for answer in answers] == [0, 0]
    cell.wait_free()
    assert get(store.flush.remote(30.0))
    # One of them had to go for the second prompt, and nobody's hits were theirs.
    left = set(folder.glob("??/*.kv"))
    assert len(left & foreign_files) == 1
    assert len(left - foreign_files) == 2
    assert stats_of(store).disk.used_bytes <= foreign_bytes + file_bytes
    assert cell.disk_evictions() - evicted == 1
    assert [answer.cached_tokens for answer in cell.run(1, prompts)] == [HIT] * 2


def test_a_disk_that_gets_full_while_it_is_written(cell: Cell, tmp_path: Path) -> None:
    prompts = prompts_of(32, 4, length=20 * BLOCK + 1)
    num_bytes = 20 * BLOCK_BYTES + (1 + 2 * LAYER_GROUPS) * 4096
    with mounted_disk(tmp_path / "small", f"size={num_bytes * 3 // 2}") as disk:
        store = cell.start_store(on_disk(disk / "kv"))
        cell.store_prompts(prompts[:2])
        eventually(lambda: stats_of(store).disk.num_queued_extents == 0)
        cell.store_prompts(prompts[2:])
        assert get(store.flush.remote(30.0))
        stats = stats_of(store)
        assert (stats.disk.num_extents, stats.num_extents) == (1, 4)
        assert stats.disk.refusals["disk_full"] >= 1
        # All of it is in DRAM; what is on disk is whole.
        assert [answer.cached_tokens for answer in cell.run(1, prompts)] == [20 * BLOCK] * 4
        (file,) = [path for path in (disk / "kv").glob("??/*") if path.is_file()]
        verify_file(file)
        assert stats_of(store).disk.used_bytes <= num_bytes * 3 // 2
        get(store.set_limits.remote(0, None))
        eventually(lambda: stats_of(store).num_extents == 0)  # what was read a moment ago is held for a while
        assert sorted(cell.visible(prompt) for prompt in prompts) == [0, 0, 0, 20]
        cell.stop_store()


def test_a_folder_that_is_none_costs_the_disk_alone(cell: Cell, folder: Path) -> None:
    folder.write_text("not a folder")
    store = cell.start_store(on_disk(folder))
    prompts = prompts_of(33, 2)
    cell.store_prompts(prompts)
    assert [answer.cached_tokens for answer in cell.run(1, prompts)] == [HIT] * 2
    assert (stats_of(store).disk, stats_of(store).refusals.keys()) == (None, {"disk_unavailable"})


def test_a_clock_that_stepped_back_between_two_runs(cell: Cell, folder: Path) -> None:
    """Files seem to be of a time to come."""
    prompts = prompts_of(34, 3)
    cell.start_store(on_disk(folder))
    cell.store_prompts(prompts)
    cell.stop_store()
    for path in folder.glob("??/*.kv"):
        os.utime(path, (2**33, 2**33))
    store = cell.start_store(on_disk(folder))
    assert [answer.cached_tokens for answer in cell.run(1, prompts)] == [HIT] * 3
    # And they are not kept for ever because of that.
    eventually(lambda: cell.count("num_leases") == 0)
    get(store.set_limits.remote(0, 0))
    assert (stats_of(store).disk.num_extents, list(folder.glob("??/*.kv"))) == (0, [])


@contextlib.contextmanager
def found_but_not_fetched(cell: Cell, prompts: Sequence[tuple[int, ...]]) -> Iterator[Future[list[FlowAnswer]]]:
    """Prefill worker 1 has looked the prompts up, and does not go on before it is let go."""
    granted = cell.count("leases_granted")
    get(cell.prefill(1).hold.remote())
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(cell.run, 1, prompts)
        eventually(lambda: cell.count("leases_granted") > granted)
        yield answer


def test_a_reader_that_is_slower_than_its_lease(cell: Cell) -> None:
    store = cell.start_store()
    prompts = prompts_of(35, 1)
    cell.store_prompts(prompts)
    before, expired = cell.misses(), cell.count("leases_expired")
    with found_but_not_fetched(cell, prompts) as answer:
        eventually(lambda: cell.count("num_leases") == 0)
        assert cell.count("leases_expired") > expired
        # Nobody holds it any more, so it goes.
        get(store.set_limits.remote(0, None))
        assert stats_of(store).num_extents == 0
        get(store.set_limits.remote(64 * MIB, None))
        get(cell.prefill(1).let_go.remote())
        (answered,) = answer.result()
    assert answered.cached_tokens == 0
    assert missed(before, cell.misses()) == {"part_gone": 1}
    cell.wait_free()
    assert cell.visible(prompts[0]) == HIT // BLOCK


def test_a_store_that_dies_while_it_is_read(cell: Cell) -> None:
    """The owner of all objects is gone between a look-up and the fetch."""
    store = cell.start_store()
    prompts = prompts_of(36, 1)
    cell.store_prompts(prompts)
    before, lost = cell.misses(), cell.lost_extents()
    with found_but_not_fetched(cell, prompts) as answer:
        ray.kill(store)
        get(cell.prefill(1).let_go.remote())
        (answered,) = answer.result()
    assert answered.cached_tokens == 0
    now = missed(before, cell.misses())
    assert now["actor_died"] >= 1
    # The directory was told.
    eventually(lambda: cell.visible(prompts[0]) == 0)
    assert cell.lost_extents() - lost == 1
