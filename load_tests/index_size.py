"""How much memory the directory's index takes: filled by puts in a process of its own, whose growth is looked at."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]

from kv.directory import Directory
from load_tests.block_forest import BlockForest


@dataclass(frozen=True, slots=True)
class IndexSize:
    """Growth of the process's RSS."""

    num_blocks: int
    num_extents: int
    extent_blocks: int
    dram_bytes: int
    """With all extents in DRAM."""
    both_bytes: int
    """With all of them on disk too."""

    @property
    def bytes_per_block(self) -> float:
        """With both copies."""
        return self.both_bytes / self.num_blocks


def measure_index(num_blocks: int, extent_blocks: int) -> IndexSize:
    """The index of so many blocks in extents of `extent_blocks` blocks each, measured in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(_measure, num_blocks, extent_blocks).result()


def _measure(num_blocks: int, extent_blocks: int) -> IndexSize:
    gc.disable()  # it would look at everything again and again, and there is nothing for it to free
    directory = Directory()
    forest = BlockForest(seed=1, extent_blocks=(extent_blocks, extent_blocks))
    before_bytes = _own_bytes()
    extents: list[tuple[str, int]] = []
    now_s = 0.0
    for chain in forest.chains(num_blocks):
        now_s += 0.01
        # As they come to the directory's process: in one message for each call, equal strings in it shared.
        keys = pickle.loads(pickle.dumps(chain.keys, protocol=5))
        infos = pickle.loads(pickle.dumps(chain.extents, protocol=5))
        ticket = directory.begin_put(keys, now_s, 60.0)
        if ticket.put_id is None or not directory.commit_put(ticket.put_id, infos, now_s):
            raise RuntimeError(f"the directory refused a put: {directory.counters}")
        extents += [(info.extent_id, info.num_bytes) for info in infos]
    if directory.num_blocks != num_blocks:
        raise RuntimeError(f"{directory.num_blocks} of {num_blocks} blocks are visible")
    del chain, keys, infos, ticket
    # The ids belong to the index anyway; the list of them does not.
    list_bytes = extents.__sizeof__() + sum(item.__sizeof__() + item[1].__sizeof__() for item in extents)
    dram_bytes = _own_bytes() - before_bytes - list_bytes
    for extent_id, num_bytes in extents:
        directory.add_copy(extent_id, "disk", num_bytes, now_s)
    return IndexSize(num_blocks, len(extents), extent_blocks, dram_bytes, _own_bytes() - before_bytes - list_bytes)


def _own_bytes() -> int:
    return int(psutil.Process().memory_info().rss)
