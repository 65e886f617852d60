"""How pages get into host memory and back: at once where they lie in it, else staged."""

from __future__ import annotations

from typing import Protocol

import torch

from actors.engine.arena import page_rows
from actors.engine.device_event import DeviceEvent
from actors.engine.device_streams import CudaStreams
from actors.engine.staging import StagedCopies


class PageCopies(Protocol):
    """Over the pages of one arena. Indices, targets and sources are in host memory: `index` int64 [n], the others int64
    [n, words of a page]. Any number of threads may copy at a time."""

    @property
    def mark(self) -> DeviceEvent | None:
        """Of the last `computed`."""

    def computed(self) -> DeviceEvent | None:
        """A mark behind all that touches pages and was given to the device in the calling thread, which is that of the
        steps. None where it has been done already."""

    def read(self, index: torch.Tensor, target: torch.Tensor, after: DeviceEvent | None) -> None:
        """Fills `target` from the pages of `index`, as they are after `after`; None stands for the last mark."""

    def write(self, index: torch.Tensor, source: torch.Tensor, after: DeviceEvent | None) -> DeviceEvent | None:
        """Stores `source` in the pages of `index`, after `after` (None: the last mark). What is returned comes after
        this write and all that were begun before it; None: it has been done."""


class DirectCopies:
    """Pages in host memory, int64 [pages, words]."""

    mark = None

    def __init__(self, pages: torch.Tensor) -> None:
        self._pages = pages

    def computed(self) -> None:
        """See PageCopies."""

    def read(self, index: torch.Tensor, target: torch.Tensor, after: DeviceEvent | None) -> None:
        """See PageCopies."""
        torch.index_select(self._pages, 0, index, out=target)

    def write(self, index: torch.Tensor, source: torch.Tensor, after: DeviceEvent | None) -> None:
        """See PageCopies."""
        self._pages.index_copy_(0, index, source)


def make_page_copies(pages: torch.Tensor) -> PageCopies:
    """For `pages` [pages, ...], wherever they lie."""
    if pages.device.type == "cuda":
        return StagedCopies(page_rows(pages), CudaStreams(pages.device))
    return DirectCopies(page_rows(pages))
