"""Decode steps captured in CUDA graphs, so that a step costs one launch and not one for every kernel of every layer.

A graph replays the same kernels over the same memory. So a batch is padded to one of a few sizes, its block tables to
one of a few widths, and its integers are copied into a tensor that belongs to the graph of that size. Graphs are
captured when a size first occurs. Steps with prompt chunks are never captured: their shapes hardly recur.

**Padding rows are copies of a real row** (ours): the same token, position, block table and place to write. They compute
what that row computes and write the same K and V to the same place, so that they corrupt nothing and need no memory
of their own - a block set aside for them would cost 200 MB in a model of 13 billion parameters. The row with the
shortest context is copied, which costs the least attention.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from actors.engine.batch import StepBatch, pack_step
from actors.engine.step_plan import Chunk

MAX_GRAPHS = 64
"""Graphs kept at a time; each takes some MB of the driver's memory."""

_SMALLEST_WIDTH_TOKENS = 256
"""The narrowest block table holds so many tokens: below that, more graphs would save nothing."""

logger = logging.getLogger("equipoise.engine")


class Replayable(Protocol):
    """What a capture gives."""

    @property
    def output(self) -> torch.Tensor:
        """What the captured function returned; `replay` fills it anew."""

    def replay(self) -> None:
        """Does again what the captured function did, over the same memory. It is queued, not waited for."""


class Capture(Protocol):
    """How a function is captured."""

    def capture(self, function: Callable[[], torch.Tensor]) -> Replayable:
        """`function` may be run several times, then and now. Raises RuntimeError when it cannot be captured."""

    def forget(self) -> None:
        """Later captures share no memory with earlier ones."""


class CudaCapture:
    """Captures on a stream of its own, all graphs in one memory pool.

    Sharing is safe because graphs are replayed one after another on one stream, and a graph's output is used up before
    the next replay.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], torch.Tensor]) -> Replayable:
        """See Capture."""
        # First on the caller's stream: what the function makes and keeps (page tables) is then in order for every other
        # user of that stream. Then on the stream of the capture, where libraries set up what they want for it.
        function()
        stream, callers_stream = self._stream, torch.cuda.current_stream(self._device)
        stream.wait_stream(callers_stream)
        graph = torch.cuda.CUDAGraph()
        # The outer `with` restores the caller's stream even where ending a failed capture raises.
        with torch.cuda.stream(stream):
            function()
            # thread_local: other threads copy pages meanwhile, and may allocate.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                output = function()
        callers_stream.wait_stream(stream)
        return _CudaReplay(graph, output)

    def forget(self) -> None:
        """See Capture. A pool whose graphs are all gone cannot be used again."""
        self._pool = torch.cuda.graph_pool_handle()


@dataclass(frozen=True, slots=True)
class _CudaReplay:
    graph: torch.cuda.CUDAGraph
    output: torch.Tensor

    def replay(self) -> None:
        self.graph.replay()


@dataclass(frozen=True, slots=True)
class _Captured:
    packed: torch.Tensor
    """int64, the step's integers on the device: the graph reads them."""
    graph: Replayable


class DecodeGraphs:
    """Runs pure decode steps by replay. One thread calls it, in inference mode."""

    def __init__(
        self,
        forward: Callable[[StepBatch], torch.Tensor],
        capture: Capture,
        version: Callable[[], int],
        *,
        block_tokens: int,
        max_rows: int,
        device: torch.device,
        max_graphs: int = MAX_GRAPHS,
    ) -> None:
        """`forward` gives hidden states [rows, hidden] and is what is captured. `version` changes whenever the memory
        that it reads is laid out anew (`LaneTable.version`); all graphs are dropped then."""
        self.num_captures = 0
        self.num_replays = 0
        self.num_failures = 0
        self._forward = forward
        self._capture = capture
        self._version = version
        self._block_tokens = block_tokens
        self._device = device
        self._max_graphs = max_graphs
        self._sizes = batch_sizes(max_rows)
        self._smallest_width = max(1, _SMALLEST_WIDTH_TOKENS // block_tokens)
        self._captured: OrderedDict[tuple[int, int], _Captured] = OrderedDict()
        self._refused: set[tuple[int, int]] = set()
        self._captured_version = version()

    @property
    def num_graphs(self) -> int:
        """Graphs held now."""
        return len(self._captured)

    def run(self, decodes: Sequence[Chunk]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Hidden states [D, hidden] of the decodes and the rows that are sampled from, int64 [S], both valid until the
        next call; None when such a step cannot be replayed and is to be run as any other."""
        self._drop_outdated()
        size = next((size for size in self._sizes if size >= len(decodes)), None)
        if size is None or not decodes:
            return None
        shortest = min(decodes, key=lambda chunk: chunk.first_token)
        longest = max(chunk.first_token for chunk in decodes)
        width = self._smallest_width
        while width * self._block_tokens <= longest:
            width *= 2
        if (size, width) in self._refused:
            return None
        padded = [*decodes, *[shortest] * (size - len(decodes))]
        step = pack_step(padded, (), self._block_tokens, decode_width=width, pin_memory=self._device.type == "cuda")
        captured = self._captured.get((size, width))
        if captured is None:
            packed = step.packed.to(self._device, copy=True)
            captured = self._capture_step(step.batch(packed, self._block_tokens), packed, (size, width))
            if captured is None:
                return None
        else:
            captured.packed.copy_(step.packed, non_blocking=True)
        self._captured.move_to_end((size, width))
        captured.graph.replay()
        self.num_replays += 1
        # The padding rows are sampled from as well as the row they copy; they come last.
        num_sampled = sum(chunk.samples for chunk in decodes)
        sampled_rows = step.batch(captured.packed, self._block_tokens).sampled_rows[:num_sampled]
        return captured.graph.output[: len(decodes)], sampled_rows

    def _capture_step(self, batch: StepBatch, packed: torch.Tensor, key: tuple[int, int]) -> _Captured | None:
        try:
            captured = _Captured(packed, self._capture.capture(lambda: self._forward(batch)))
        except RuntimeError as error:  # out of memory, or an operation that no graph can hold
            logger.warning(
                "a decode step of %d rows and %d blocks a table could not be captured; such steps run without a CUDA "
                "graph: %s", *key, error,
            )  # fmt: skip
            self.num_failures += 1
            self._refused.add(key)
            self._capture.forget()
            return None
        self.num_captures += 1
        self._captured[key] = captured
        if len(self._captured) > self._max_graphs:
            self._captured.popitem(last=False)
        return captured

    def _drop_outdated(self) -> None:
        version = self._version()
        if version != self._captured_version:
            self._captured_version = version
            self._captured.clear()
            self._refused.clear()
            self._capture.forget()


def batch_sizes(max_rows: int) -> tuple[int, ...]:
    """What batches are padded to: powers of two below `max_rows`, and `max_rows`."""
    sizes = [1]
    while sizes[-1] * 2 < max_rows:
        sizes.append(sizes[-1] * 2)
    return tuple(dict.fromkeys([*sizes, max_rows]))
