"""Copies between pages and host memory beside computing: what `gpu_check --transfer` checks."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from actors.engine.config import EngineConfig
from actors.engine.device_event import DeviceEvent
from actors.engine.device_streams import CudaStreams, Streams
from actors.engine.engine import Engine
from actors.engine.layer_arrival import LayerArrival
from actors.engine.loading import LoadedModel, load_model
from actors.engine.page_io import clear_pages, read_pages, write_pages
from actors.engine.request import EngineRequest, SamplingParams
from actors.engine.staging import StagedCopies
from kv.part_range import PartRange
from load_tests.deferred_streams import DeferredStreams
from load_tests.gpu_answers import Verdict, make_prompts
from load_tests.gpu_correctness import Check

POOL_BLOCKS = 512
_CHUNK_TOKENS = 256

Payload = np.ndarray[tuple[int, ...], np.dtype[np.int16 | np.float32]]


@dataclass(frozen=True, slots=True)
class Rig:
    """A model whose pages are copied through staging, and how its engines are set up."""

    loaded: LoadedModel
    config: EngineConfig
    streams: Streams

    def engine(self, *, cuda_graphs: bool = True) -> Engine:
        """A new one. One at a time has requests: they share the pages."""
        return Engine(self.loaded, replace(self.config, cuda_graphs=cuda_graphs))

    def part(self, num_blocks: int) -> PartRange:
        """All layers and heads of so many blocks."""
        layout = self.loaded.layout
        return PartRange(0, num_blocks, 0, layout.num_layers, 0, layout.num_kv_heads)

    def empty(self, part: PartRange) -> Payload:
        """Room for a part."""
        dtype = np.float32 if self.loaded.layout.dtype == "float32" else np.int16
        return np.empty(part.shape(self.loaded.layout), dtype)

    def noise(self, part: PartRange, seed: int) -> Payload:
        """Random bits for a part."""
        payload = self.empty(part)
        raw = np.random.default_rng(seed).integers(0, 256, payload.nbytes, np.uint8)
        payload.reshape(-1).view(np.uint8)[:] = raw
        return payload


def make_rig(folder: Path, device: torch.device, dtype: str) -> Rig:
    """On a CPU a stand-in takes the place of the device's streams."""
    config = EngineConfig(
        device=device.type, dtype=dtype, attention="torch", block_tokens=16, kv_cache_blocks=POOL_BLOCKS,
        max_batch_tokens=_CHUNK_TOKENS, early_export_bytes=1,
    )  # fmt: skip
    loaded = load_model(folder, config)
    if device.type == "cuda":
        return Rig(loaded, config, CudaStreams(device))
    streams = DeferredStreams(random.Random(0))
    copies = StagedCopies(loaded.arena.page_words, streams, slot_bytes=60 * loaded.layout.page_bytes)
    return Rig(replace(loaded, copies=copies), config, streams)


def check_transfers(rig: Rig, new_tokens: int) -> Iterator[Check]:
    """Yields a check at a time."""
    for name, check in (
        ("what goes into pages comes back", _check_round_trips),
        ("the same beside decoding", _check_beside_decoding),
        ("handed over and fetched while both ends compute", _check_hand_over),
    ):
        try:
            verdict = check(rig, new_tokens)
        except Exception as error:  # whatever it is, the others can still be checked
            verdict = Verdict(False, f"{type(error).__name__}: {error}")
        yield Check(name, "transfer", rig.config.dtype, verdict.passed, verdict.detail)


def _comes_back(
    rig: Rig, part: PartRange, block_ids: Sequence[int], seed: int, after: DeviceEvent | None = None
) -> bool:
    """Whether random bits are the same after a way through the blocks' pages."""
    sent, got = rig.noise(part, seed), rig.empty(part)
    copied = write_pages(rig.loaded, part, block_ids, sent, after)
    if copied is not None:
        copied.synchronize()
    read_pages(rig.loaded, part, block_ids, got, after)
    return sent.tobytes() == got.tobytes()


def _check_round_trips(rig: Rig, _: int) -> Verdict:
    layout, pool = rig.loaded.layout, rig.loaded.lanes.num_blocks
    order = random.Random(0).sample(range(pool), min(256, pool))
    some = len(order) // 3
    parts = [rig.part(count) for count in (1, 2, some, len(order))]
    parts += [replace(rig.part(some), first_layer=layer, num_layers=1) for layer in (0, layout.num_layers - 1)]
    parts += [replace(rig.part(some), first_head=head, num_heads=1) for head in (0, layout.num_kv_heads - 1)]
    trips = [_comes_back(rig, part, order[: part.num_blocks], seed) for seed, part in enumerate(parts)]
    largest = max(part.num_bytes(layout) for part in parts)
    return Verdict(all(trips), f"{sum(trips)} of {len(trips)} parts are the same, of up to {largest / 2**20:,.1f} MiB")


def _check_beside_decoding(rig: Rig, new_tokens: int) -> Verdict:
    """Round trips through some blocks, while others are computed."""
    prompts = make_prompts([40, 7, 90, 16], rig.loaded.spec.vocab_size, seed=1)
    requests = [request_for(f"r{index}", prompt, new_tokens) for index, prompt in enumerate(prompts)]
    alone = run(rig.engine(), requests)
    engine, has_ended, trips = rig.engine(), threading.Event(), list[bool]()
    block_ids, mark = engine.blocks.allocate(32), rig.loaded.copies.mark

    def go_to_and_fro() -> None:
        while not (has_ended.is_set() and trips):
            trips.append(_comes_back(rig, rig.part(32), block_ids, len(trips), mark))

    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(go_to_and_fro)
        try:
            beside = run(engine, requests)
        finally:
            has_ended.set()
        going.result()
    return Verdict(
        alone == beside and all(trips),
        f"{sum(trips)} of {len(trips)} parts are the same, the tokens {_are(alone == beside)}",
    )


def _check_hand_over(rig: Rig, new_tokens: int) -> Verdict:
    """What a prompt's chunks filled is read while the next chunks are computed. Then the other way: layers are written
    while the first of them are used already. Without graphs, so that every step has the same kernels either way."""
    length = min(1000, rig.loaded.spec.max_context_tokens - new_tokens)
    (prompt,) = make_prompts([length], rig.loaded.spec.vocab_size, seed=2)
    (expected,) = run(rig.engine(cuda_graphs=False), [request_for("r", prompt, new_tokens)]).values()
    _forget(rig)
    first, payloads = _hand_over(rig, prompt)
    _forget(rig)
    whole = payloads[-1]
    are_same = len(payloads) > 1 and all(np.array_equal(early, whole[: len(early)]) for early in payloads)

    engine, incoming = rig.engine(cuda_graphs=False), LayerArrival(timeout_s=60.0)
    request = replace(request_for("r", prompt, new_tokens), output_token_ids=(first,), external_tokens=length)
    engine.add(request)
    (fetch,) = engine.step().fetches
    block_ids, mark = fetch.sequence.block_ids, fetch.sequence.mark

    def bring() -> None:
        for layer in range(rig.loaded.layout.num_layers):
            part = replace(rig.part(len(whole)), first_layer=layer, num_layers=1)
            payload = np.ascontiguousarray(whole[:, layer : layer + 1])
            incoming.advance(layer + 1, write_pages(rig.loaded, part, block_ids, payload, mark))

    with ThreadPoolExecutor(1) as pool:
        bringing = pool.submit(bring)
        engine.arriving("r", length, incoming)
        tokens = [first, *run(engine, []).get("r", [])]
        bringing.result()
    return Verdict(
        are_same and tokens == expected,
        f"{len(payloads)} exports {_are(are_same)}, {len(tokens)} tokens {_are(tokens == expected)}",
    )


def _hand_over(rig: Rig, prompt: tuple[int, ...]) -> tuple[int, list[Payload]]:
    """The first token, and what each of the prompt's exports held, all of it last."""
    engine, tokens = rig.engine(cuda_graphs=False), list[int]()
    payloads, reading = list[Payload](), list[Future[None]]()
    engine.add(replace(request_for("r", prompt, 1), hand_over=True))
    with ThreadPoolExecutor(4) as pool:
        while engine.has_work:
            result = engine.step()
            tokens += [event.token_id for event in result.events if event.token_id is not None]
            for export in result.exports:
                part = rig.part(len(export.block_ids))
                payloads.append(rig.empty(part))
                arguments = rig.loaded, part, export.block_ids, payloads[-1], export.mark
                reading.append(pool.submit(read_pages, *arguments))
                if export.export_id != "r":
                    engine.release_export(export.export_id)  # the prompt keeps its blocks
    for read in reading:
        read.result()
    return tokens[0], payloads


def _forget(rig: Rig) -> None:
    """A new engine takes the same blocks, and must not find in them what it is to be given."""
    clear_pages(rig.loaded, range(rig.loaded.lanes.num_blocks))


def _are(equal: bool) -> str:
    return "are equal" if equal else "DIFFER"


def request_for(name: str, prompt: tuple[int, ...], new_tokens: int) -> EngineRequest:
    """Greedy."""
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(name, prompt, sampling)


def run(engine: Engine, requests: Sequence[EngineRequest]) -> dict[str, list[int]]:
    """All answers from here on. Raises RuntimeError when one of them cannot be had."""
    answers: dict[str, list[int]] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step().events:
            if event.error is not None:
                raise RuntimeError(event.error)
            if event.token_id is not None:
                answers.setdefault(event.request_id, []).append(event.token_id)
    return answers
