"""Layers and heads of another worker's instance, run here for it.

The instance's home sends a step's integers with its own block ids; here they are looked up in the lanes that were
granted. Whatever arrives is checked against the grant, so that no work reaches memory of another instance, and whatever
goes wrong is an answer that says so, never an exception: the host's own requests have nothing to do with it.

Layers are run in the engine's thread, between its own steps. Heads are attended with in a thread of their own: a step
asks for them once a layer, and would wait for a step of the host's each time. Pages and weights are copied in a third
one, beside the host's own steps. `Grants.lock` keeps the three apart.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from actors.engine.attention.interface import LayerKv
from actors.engine.batch import PackedStep, StepBatch
from actors.engine.dirty_blocks import DirtyBlocks
from actors.engine.head_work import HeadDone, HeadTables, HeadWork, decode_head_work, encode_head_work
from actors.engine.lane_table import LaneTable
from actors.engine.loading import LoadedModel
from actors.engine.model import CausalModel
from actors.engine.module_transfer import (
    PageChunk,
    TransferError,
    read_chunk,
    read_weights,
    write_chunk,
    write_weights,
)
from actors.engine.stage_work import StageDone, StageWork, decode_work, encode_work
from actors.engine.step_messages import WorkLimits, WorkMessageError, require_tensor

logger = logging.getLogger("equipoise.engine")


class WorkRefusedError(ValueError):
    """Work that must not be done here."""


class HostedInstance:
    """What one engine holds of another's instance. `Grants` gives it lanes and layers. It serves nothing before
    `use_version`.

    Args:
        lock: held by whoever uses or changes what is hosted. All methods that run or copy something take it; who
            touches `lanes`, their pages or `dirty_blocks` in another way does so under it.
    """

    def __init__(self, instance: str, loaded: LoadedModel, lock: threading.RLock) -> None:
        self.instance = instance
        self.lock = lock
        self.lanes = LaneTable(loaded.arena, ())
        self.layers: set[int] = set()
        """Layers whose weights it was granted here."""
        self.version: int | None = None
        self.dirty_blocks = DirtyBlocks()
        self.layer_steps: Counter[int] = Counter()
        """By layer: steps for which it was run here."""
        self._loaded = loaded
        # Backends of its own: each keeps what belongs to a step, and so does the engine's.
        self._backend, self._head_backend = loaded.new_backend(), loaded.new_backend()
        weights = loaded.layer_memory.weights
        self._model = CausalModel(
            loaded.spec, {}, weights, loaded.arena.pages, self.lanes, self._backend, loaded.model.ops
        )
        self._last_done = (-1, -1)
        self._last_attended: dict[int, int] = {}
        """By layer, the step that was last."""
        self._tables: tuple[int, HeadTables] | None = None
        """Of the step, by its id, whose heads are being attended with."""

    @property
    def num_blocks(self) -> int:
        """Blocks that were granted: ids below it are the instance's."""
        return self.lanes.num_blocks

    @property
    def limits(self) -> WorkLimits:
        """What work may ask for."""
        spec, layout = self._loaded.spec, self._loaded.layout
        dtype = self._loaded.arena.pages.dtype
        return WorkLimits(
            spec.num_layers, spec.hidden_size, dtype, spec.vocab_size, layout.block_tokens, self.num_blocks
        )

    def use_version(self, version: int) -> None:
        """Serves from this version of the placement on: everything that was copied here is in place. Work of an earlier
        version is refused, and so is work of the versions before the last that came."""
        if self.version is not None and version <= self.version:
            raise ValueError(f"the placement has version {self.version} already; {version} is not above it")
        self.version = version

    def move_blocks(self, moves: Mapping[int, int]) -> None:
        """The home has put blocks' content into other blocks (`Grant.moved_blocks`): so does this.

        Raises:
            ValueError: one of them is beyond the grant.
        """
        with self.lock:
            if any(not 0 <= block < self.num_blocks for move in moves.items() for block in move):
                raise ValueError(f"blocks {dict(moves)} were to move; the grant is of {self.num_blocks} blocks")
            self.lanes.copy_blocks(moves)
            self._loaded.copies.computed()
            self.dirty_blocks.relocated(moves, self.num_blocks)

    def read_pages(self, chunk: PageChunk) -> torch.Tensor:
        """See `read_chunk`. From any thread."""
        with self.lock:
            return read_chunk(self._loaded.arena, self.lanes, chunk)

    def write_pages(self, chunk: PageChunk, data: torch.Tensor) -> None:
        """See `write_chunk`. From any thread: lanes that have left, or are given to others, are not written to."""
        with self.lock:
            write_chunk(self._loaded.arena, self.lanes, chunk, data)
            self._loaded.copies.computed()
            self.dirty_blocks.wrote(chunk.blocks)

    def read_weights(self, layer: int) -> tuple[torch.Tensor, bytes]:
        """See `module_transfer.read_weights`. From any thread."""
        with self.lock:
            return read_weights(self._loaded.layer_memory, layer)

    def write_weights(self, layer: int, data: torch.Tensor, checksum: bytes) -> None:
        """See `module_transfer.write_weights`. From any thread."""
        with self.lock:
            if layer not in self.layers:
                raise TransferError(f"layer {layer} was not granted; granted are {sorted(self.layers)}")
            write_weights(self._loaded.layer_memory, layer, data, checksum)

    @torch.inference_mode()
    def run(self, work: StageWork) -> StageDone:
        """Runs layers over a step's hidden states and writes their K and V. What cannot be done is an `error`."""
        try:
            self._check_order(work)
            # The same check as of a message from a link.
            return self.run_checked(decode_work(*encode_work(work), self.limits))
        except Exception as error:  # as in `run_checked`
            return StageDone(work.instance, work.version, work.step_id, None, self._reason(error))

    @torch.inference_mode()
    def run_checked(self, work: StageWork) -> StageDone:
        """`run`, for work that `decode_work` made within `limits`."""
        try:
            with self.lock:
                self._check_order(work)
                for layer in work.layers:
                    self._check_layer(layer)
                batch = self._prepare(work)
                try:
                    hidden = self._model.run_layers(work.hidden.to(self._device), work.layers, batch)
                    self.layer_steps.update(work.layers)
                finally:
                    self._loaded.copies.computed()
                return StageDone(work.instance, work.version, work.step_id, hidden.cpu().contiguous())
        except Exception as error:  # whatever it is, the home must hear of it, and this engine goes on
            return StageDone(work.instance, work.version, work.step_id, None, self._reason(error))

    @torch.inference_mode()
    def attend(self, work: HeadWork) -> HeadDone:
        """Writes the K and V of heads of one layer and attends with them. What cannot be done is an `error`."""
        try:
            return self.attend_checked(decode_head_work(*encode_head_work(work), self.limits))
        except Exception as error:  # as in `run`
            return HeadDone(work.instance, work.version, work.step_id, work.layer, None, self._reason(error))

    @torch.inference_mode()
    def attend_checked(self, work: HeadWork) -> HeadDone:
        """`attend`, for work that `decode_head_work` made within `limits`. From any one thread."""
        try:
            with self.lock:
                self._check_heads_order(work)
                kv, tables = self._head_lanes(work), self._head_tables(work)
                q, k, v = self._head_rows(work, tables)
                if self._tables is None or self._tables[1] is not tables:
                    self._tables = work.step_id, tables
                    step = tables.step
                    packed = step.packed.to(self._device)
                    self._head_backend.begin(step.batch(packed, self._loaded.layout.block_tokens))
                self._last_attended[work.layer] = work.step_id
                try:
                    self._clear(tables.fresh_blocks, [work.layer])
                    out = self._head_backend.attend(q, k, v, kv)
                finally:
                    self._loaded.copies.computed()
                    self._wrote(tables.step)
                return HeadDone(work.instance, work.version, work.step_id, work.layer, out.cpu().contiguous())
        except Exception as error:  # as in `run_checked`
            return HeadDone(work.instance, work.version, work.step_id, work.layer, None, self._reason(error))

    @property
    def _device(self) -> torch.device:
        return self._loaded.arena.pages.device

    def _reason(self, error: Exception) -> str:
        if not isinstance(error, WorkRefusedError | WorkMessageError):
            logger.error("work for instance %s failed", self.instance, exc_info=error)
        return f"{type(error).__name__}: {error}"

    def _check_version(self, work: StageWork | HeadWork) -> None:
        if work.instance != self.instance:
            raise WorkRefusedError(f"work of instance {work.instance!r} came to {self.instance!r}")
        if self.version is None or work.version < self.version:
            raise WorkRefusedError(f"work has placement version {work.version}; here it is {self.version}")
        self.version = work.version  # a later one leaves here what is here, or the home would have taken it away

    def _check_order(self, work: StageWork) -> None:
        self._check_version(work)
        if (work.step_id, work.layers.start) <= self._last_done:
            done_step, done_layer = self._last_done
            raise WorkRefusedError(
                f"step {work.step_id} from layer {work.layers.start} on came after step {done_step}, layer {done_layer}"
            )

    def _check_heads_order(self, work: HeadWork) -> None:
        """By layer: with several steps in flight, one may have come further than the step before it began."""
        self._check_version(work)
        last = self._last_attended.get(work.layer, -1)
        if work.step_id <= last:
            raise WorkRefusedError(f"heads of layer {work.layer} of step {work.step_id} came after step {last}")

    def _check_layer(self, layer: int) -> None:
        if layer not in self.layers:
            raise WorkRefusedError(f"layer {layer} was not granted; granted are {sorted(self.layers)}")
        if layer not in self._loaded.layer_memory.weights:
            raise WorkRefusedError(f"the weights of layer {layer} have not arrived")
        heads, num_heads = self.lanes.heads(layer), self._loaded.spec.num_kv_heads
        if len(heads) != num_heads:
            raise WorkRefusedError(f"of layer {layer} KV heads {heads} are here; to run it all {num_heads} must be")

    def _head_lanes(self, work: HeadWork) -> LayerKv:
        spec, here = self._loaded.spec, self.lanes.heads(work.layer)
        if not work.heads or not set(work.heads) <= set(here):
            raise WorkRefusedError(f"layer {work.layer}: KV heads {list(work.heads)} were asked for, {here} are here")
        page_of = self.lanes.pages(work.layer)[[here.index(head) for head in work.heads]]
        return LayerKv(self._loaded.arena.pages, page_of, spec.windows[work.layer], spec.head_dim**-0.5)

    def _head_tables(self, work: HeadWork) -> HeadTables:
        if work.tables is not None:
            return work.tables
        if self._tables is None or self._tables[0] != work.step_id:
            raise WorkRefusedError(f"heads of step {work.step_id} came without its tables")
        return self._tables[1]

    def _head_rows(self, work: HeadWork, tables: HeadTables) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, H * group, head_dim], k and v [T, H, head_dim] on the device."""
        spec, heads = self._loaded.spec, len(work.heads)
        widths = [heads * spec.group_size, heads, heads]
        shape = (tables.step.shape.num_rows, sum(widths), spec.head_dim)
        require_tensor("q, k and v", work.qkv, self._loaded.arena.pages.dtype, shape)
        q, k, v = work.qkv.to(self._device).split(widths, dim=1)
        return q, k, v

    def _prepare(self, work: StageWork) -> StepBatch:
        """The step's tensors on the device. From here on the work counts as done: its writes may have begun."""
        self._last_done = (work.step_id, work.layers.stop - 1)
        batch = work.step.batch(work.step.packed.to(self._device), self._loaded.layout.block_tokens)
        self._clear(work.fresh_blocks, work.layers)
        self._wrote(work.step)
        return batch

    def _clear(self, fresh_blocks: torch.Tensor, layers: Iterable[int]) -> None:
        if self._backend.name != "flash":  # flash-attn reads no masked places
            self.lanes.clear_blocks(fresh_blocks.tolist(), layers)

    def _wrote(self, step: PackedStep) -> None:
        self.dirty_blocks.wrote(step.shape.split(step.packed)[2].tolist())
