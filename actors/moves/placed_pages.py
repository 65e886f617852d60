"""The pages of an instance whose lanes may lie on other workers, and move."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from actors.engine.copy_gate import GateClosedError
from actors.engine.device_event import DeviceEvent
from actors.engine.engine import Engine
from actors.engine.module_transfer import PageChunk, page_chunks
from actors.engine.page_io import read_pages, write_pages
from actors.kv_pages import PagesUnavailableError
from actors.moves.page_links import PageLinks
from kv.part_range import PartRange
from migrate.placement import Placement

T = TypeVar("T")

_CHUNK_BYTES = 4 << 20
"""Pages in one question. All that a part takes are asked at once, so that a host's engine answers between two turns."""


@dataclass(frozen=True, slots=True)
class _Away:
    """Pages of a part that another worker has, and where they are in the part's payload."""

    worker: str
    chunk: PageChunk
    where: tuple[NDArray[np.int64], ...]
    """Index that gives [lanes, blocks, 2, block_tokens, head_dim]."""


class PlacedPages:
    """KvPages of one worker's instance. Each call sees one placement.

    Args:
        timeout_s: how long a call waits for a move, and to read pages of other workers.
    """

    def __init__(self, engine: Engine, links: PageLinks, timeout_s: float) -> None:
        self._engine = engine
        self._loaded = engine.loaded
        self._links = links
        self._timeout_s = timeout_s

    def read(
        self, part: PartRange, block_ids: Sequence[int], payload: NDArray[Any], after: DeviceEvent | None = None
    ) -> None:
        """See KvPages."""
        with self._one_placement() as (placement, until_s):
            if placement is None:
                read_pages(self._loaded, part, block_ids, payload, after)
                return
            wanted = block_ids[part.first_block : part.first_block + part.num_blocks]
            asked = [
                (away, self._links.read(away.worker, placement.version, away.chunk, until_s))
                for away in self._away(placement, part, wanted)
            ]
            for piece in pieces_on(placement.home, placement, part):
                own = np.empty(piece.shape(self._loaded.layout), payload.dtype)
                read_pages(self._loaded, piece, block_ids, own, after)
                payload[_window(part, piece)] = own
            for away, answer in asked:
                payload[away.where] = self._checked(away, _result(answer, until_s)).view(_raw(payload)).numpy()

    def write(
        self, part: PartRange, block_ids: Sequence[int], payload: NDArray[Any], after: DeviceEvent | None = None
    ) -> None:
        """See KvPages. The pages are filled at the return: an event would leave it to the device when, and a move may
        read them right after. Workers that have pages are waited for as long as their links live."""
        with self._one_placement() as (placement, _):
            asked, copied = list[Future[None]](), None
            try:
                if placement is None:
                    copied = write_pages(self._loaded, part, block_ids, payload, after)
                else:
                    for away in self._away(placement, part, block_ids):
                        pages = self._as_pages(payload[away.where])
                        asked.append(self._links.write(away.worker, placement.version, away.chunk, pages))
                    for piece in pieces_on(placement.home, placement, part):
                        own = np.ascontiguousarray(payload[_window(part, piece)])
                        copied = write_pages(self._loaded, piece, block_ids, own, after)
            finally:
                if copied is not None:
                    copied.synchronize()
                wait(asked)
            for answer in asked:
                answer.result()

    @contextmanager
    def _one_placement(self) -> Iterator[tuple[Placement | None, float]]:
        """What lies where as long as this lasts, and until when it may last."""
        until_s = time.monotonic() + self._timeout_s
        try:
            with self._engine.copy_gate.copying(self._timeout_s):
                yield self._engine.placement, until_s
        except GateClosedError as error:
            raise PagesUnavailableError(str(error)) from error

    def _away(self, placement: Placement, part: PartRange, blocks: Sequence[int]) -> Iterator[_Away]:
        """`blocks`: those of the part."""
        place = {block: index for index, block in enumerate(blocks)}
        for worker in sorted(placement.workers() - {placement.home}):
            for piece in pieces_on(worker, placement, part):
                lanes = [
                    (layer, head)
                    for layer in range(piece.first_layer, piece.first_layer + piece.num_layers)
                    for head in range(piece.first_head, piece.first_head + piece.num_heads)
                ]
                for chunk in page_chunks(self._loaded.arena, lanes, blocks, _CHUNK_BYTES):
                    rows = np.array([place[block] for block in chunk.blocks])
                    layers, heads = np.array(chunk.lanes).T[:, :, None] - [[[part.first_layer]], [[part.first_head]]]
                    yield _Away(worker, chunk, (rows, layers, heads))

    def _as_pages(self, payload: NDArray[Any]) -> torch.Tensor:
        """A copy of a payload's pages as they lie in an arena."""
        return torch.from_numpy(np.ascontiguousarray(payload)).view(self._loaded.arena.pages.dtype)

    def _checked(self, away: _Away, pages: torch.Tensor) -> torch.Tensor:
        arena = self._loaded.arena
        shape = (len(away.chunk.lanes), len(away.chunk.blocks), *arena.pages.shape[1:])
        if pages.dtype != arena.pages.dtype or tuple(pages.shape) != shape:
            raise PagesUnavailableError(
                f"pages came from {away.worker!r} as {pages.dtype} {list(pages.shape)}; expected {arena.pages.dtype} "
                f"{list(shape)}"
            )
        return pages


def pieces_on(worker: str, placement: Placement, part: PartRange) -> Iterator[PartRange]:
    """The part's lanes on a worker: neighbouring layers that lie alike together."""
    heads = range(part.first_head, part.first_head + part.num_heads)

    def lying(layer: int) -> tuple[str, ...]:
        return placement.lane_workers[layer][heads.start : heads.stop]

    for workers, run in groupby(range(part.first_layer, part.first_layer + part.num_layers), key=lying):
        layers = list(run)
        for here, run_of_heads in groupby(heads, key=lambda head: workers[head - heads.start] == worker):
            chosen = list(run_of_heads)
            if here:
                yield replace(
                    part, first_layer=layers[0], num_layers=len(layers), first_head=chosen[0], num_heads=len(chosen)
                )


def _window(part: PartRange, piece: PartRange) -> tuple[slice, slice, slice]:
    """Where a piece is in the payload of its part."""
    layer, head = piece.first_layer - part.first_layer, piece.first_head - part.first_head
    return slice(None), slice(layer, layer + piece.num_layers), slice(head, head + piece.num_heads)


def _raw(payload: NDArray[Any]) -> torch.dtype:
    """That of half precision, in a payload, is int16."""
    return torch.float32 if payload.dtype == np.float32 else torch.int16


def _result(answer: Future[T], until_s: float) -> T:
    try:
        return answer.result(max(0.0, until_s - time.monotonic()))
    except TimeoutError:
        raise PagesUnavailableError("a worker that has pages did not answer in time") from None
