"""How fast pages are copied beside a plain copy, and how much of it computing hides: `gpu_check --transfer`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from actors.engine.engine import Engine
from actors.engine.page_io import read_pages, write_pages
from kv.part_range import MAX_PART_BYTES
from load_tests.device_rates import median_time_s
from load_tests.gpu_answers import make_prompts
from load_tests.gpu_transfer import POOL_BLOCKS, Rig, request_for, run


@dataclass(frozen=True, slots=True)
class TransferRates:
    """Bytes per second: through staging, and of a plain copy between the device and pinned memory."""

    read: float
    write: float
    plain_read: float
    plain_write: float


@dataclass(frozen=True, slots=True)
class Overlap:
    """Medians of the seconds that prefill takes alone, transfers alone, and both at once."""

    compute_s: float
    transfer_s: float
    together_s: float

    @property
    def hidden_share(self) -> float:
        """Of the shorter of the two: how much of it the longer one hides. 0: as one after the other; 1: all (ours)."""
        saved_s = self.compute_s + self.transfer_s - self.together_s
        return saved_s / min(self.compute_s, self.transfer_s)


def measure_transfer_rates(rig: Rig, num_parts: int) -> TransferRates:
    """Parts of the usual size, each in blocks of its own."""
    pages = rig.loaded.arena.pages
    transfer = _Transfer(rig, rig.engine(), num_parts)
    pinned = rig.streams.pinned_bytes(transfer.num_bytes)
    plain = torch.empty(transfer.num_bytes, dtype=torch.uint8, device=pages.device)

    def rate(function: Callable[[], object]) -> float:
        return transfer.num_bytes / median_time_s(pages.device, function)

    return TransferRates(
        rate(transfer.read),
        rate(transfer.write),
        rate(lambda: pinned.copy_(plain, non_blocking=True)),
        rate(lambda: plain.copy_(pinned, non_blocking=True)),
    )


def measure_overlap(rig: Rig, num_parts: int, prompt_tokens: int, repeats: int) -> Overlap:
    """Takes turns: prefill, transfers both ways of about as long, and both at once."""
    engine = rig.engine()
    transfer = _Transfer(rig, engine, num_parts)
    seeds = iter(range(1000))

    def compute() -> None:
        prompts = make_prompts([prompt_tokens], rig.loaded.spec.vocab_size, seed=next(seeds))
        run(engine, [request_for("r", prompts[0], 1)])

    def seconds(function: Callable[[], object]) -> float:
        started_s = time.perf_counter()
        function()
        return time.perf_counter() - started_s

    def both_ways() -> None:
        transfer.write()
        transfer.read()

    compute()  # kernels are chosen
    both_ways()
    rounds = max(1, round(seconds(compute) / seconds(both_ways)))

    def transfers() -> None:
        for _ in range(rounds):
            both_ways()

    def together() -> None:
        with ThreadPoolExecutor(1) as pool:
            transferring = pool.submit(transfers)
            compute()
            transferring.result()

    times = [(seconds(compute), seconds(transfers), seconds(together)) for _ in range(repeats)]
    compute_s, transfer_s, together_s = (statistics.median(column) for column in zip(*times, strict=True))
    return Overlap(compute_s, transfer_s, together_s)


class _Transfer:
    """Parts of the usual size, in blocks that `engine` gives to nobody else."""

    def __init__(self, rig: Rig, engine: Engine, num_parts: int) -> None:
        block_bytes = rig.part(1).num_bytes(rig.loaded.layout)
        self._part = rig.part(max(1, min(MAX_PART_BYTES // block_bytes, POOL_BLOCKS // (2 * num_parts))))
        self._loaded = rig.loaded
        # Steps from here on have nothing to do with these blocks, and copies need not wait for them.
        self._mark = rig.loaded.copies.mark
        self._blocks = [engine.blocks.allocate(self._part.num_blocks) for _ in range(num_parts)]
        self._payloads = [rig.noise(self._part, seed) for seed in range(num_parts)]
        self.num_bytes = num_parts * self._part.num_bytes(rig.loaded.layout)

    def read(self) -> None:
        """All parts, into memory of the host."""
        for block_ids, payload in zip(self._blocks, self._payloads, strict=True):
            read_pages(self._loaded, self._part, block_ids, payload, self._mark)

    def write(self) -> None:
        """All parts, into their pages."""
        copied = None
        for block_ids, payload in zip(self._blocks, self._payloads, strict=True):
            copied = write_pages(self._loaded, self._part, block_ids, payload, self._mark)
        if copied is not None:
            copied.synchronize()
