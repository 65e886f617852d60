"""The pages of a worker's instance, as parts are copied from them and into them, wherever they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from actors.engine.device_event import DeviceEvent
from actors.engine.loading import LoadedModel
from actors.engine.page_io import read_pages, write_pages
from kv.part_range import PartRange


class PagesUnavailableError(Exception):
    """Pages that cannot be had now: the worker that has them refuses, does not answer, or is gone. The message says
    which and why. What was to be read is a refusal of the export; what was to be written is a shorter prefix."""


class KvPages(Protocol):
    """Used from any thread that may wait. See `page_io` for the arguments, and for what must be held meanwhile."""

    def read(
        self, part: PartRange, block_ids: Sequence[int], payload: NDArray[Any], after: DeviceEvent | None = None
    ) -> None:
        """See `read_pages`. Raises PagesUnavailableError; what is in `payload` then is of no use."""

    def write(
        self, part: PartRange, block_ids: Sequence[int], payload: NDArray[Any], after: DeviceEvent | None = None
    ) -> DeviceEvent | None:
        """See `write_pages`. Raises PagesUnavailableError; some of the pages may have been written then, and no more
        will be."""


class LocalPages:
    """KvPages of a worker whose lanes are all its own, and stay."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def read(
        self, part: PartRange, block_ids: Sequence[int], payload: NDArray[Any], after: DeviceEvent | None = None
    ) -> None:
        """See KvPages."""
        read_pages(self._loaded, part, block_ids, payload, after)

    def write(
        self, part: PartRange, block_ids: Sequence[int], payload: NDArray[Any], after: DeviceEvent | None = None
    ) -> DeviceEvent | None:
        """See KvPages."""
        return write_pages(self._loaded, part, block_ids, payload, after)
