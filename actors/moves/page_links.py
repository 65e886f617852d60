"""Pages of this worker's instance that other workers have, read and written over links."""

from __future__ import annotations

import math
from concurrent.futures import Future

import torch

from actors.engine.module_transfer import PageChunk
from actors.kv_pages import PagesUnavailableError
from actors.moves.questions import Kind, encode_chunk
from migrate.links.calls import Answer, LinkCalls


class PageLinks:
    """Safe to use from any thread; nothing waits. What goes wrong is a PagesUnavailableError of the future.

    `version` is that of the placement by which a worker has the pages; it refuses one that is older than it knows.
    """

    def __init__(self, calls: LinkCalls) -> None:
        self._calls = calls

    def read(self, worker: str, version: int, chunk: PageChunk, until_s: float) -> Future[torch.Tensor]:
        """See `read_chunk`. `until_s`: see `LinkCalls.call`."""
        data: Future[torch.Tensor] = Future()

        def done(answer: Answer) -> None:
            if answer.error is None and len(answer.tensors) == 1:
                data.set_result(answer.tensors[0])
            else:
                data.set_exception(_unavailable(worker, answer.error or f"it sent {len(answer.tensors)} tensors"))

        self._calls.call(worker, Kind.READ_PAGES, version, encode_chunk(chunk), (), done, until_s)
        return data

    def write(self, worker: str, version: int, chunk: PageChunk, data: torch.Tensor) -> Future[None]:
        """See `write_chunk`. `data` must not be written to any more. Done when the pages are written, or never will be
        while the link lives: there is no time limit, after which they might still be."""
        written: Future[None] = Future()

        def done(answer: Answer) -> None:
            if answer.error is None:
                written.set_result(None)
            else:
                written.set_exception(_unavailable(worker, answer.error))

        self._calls.call(worker, Kind.WRITE_PAGES, version, encode_chunk(chunk), (data,), done, math.inf)
        return written


def _unavailable(worker: str, reason: str) -> PagesUnavailableError:
    return PagesUnavailableError(f"pages that {worker!r} has: {reason}")
