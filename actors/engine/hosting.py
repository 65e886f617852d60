"""Layers and heads of another worker's instance, run here for it.

The instance's home sends a step's integers with its own block ids; here they are looked up in the lanes that were
granted. Whatever arrives is checked against the grant, so that no work reaches memory of another instance, and whatever
goes wrong is an answer that says so, never an exception: the host's own requests have nothing to do with it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch

from actors.engine.attention.interface import LayerKv
from actors.engine.batch import StepBatch
from actors.engine.dirty_blocks import DirtyBlocks
from actors.engine.head_work import HeadDone, HeadWork
from actors.engine.lane_table import LaneTable
from actors.engine.loading import LoadedModel
from actors.engine.model import CausalModel
from actors.engine.stage_work import StageDone, StageLimits, StageMessageError, StageWork, decode_work, encode_work

logger = logging.getLogger("equipoise.engine")


class WorkRefusedError(ValueError):
    """Work that must not be done here."""


class HostedInstance:
    """What one engine holds of another's instance. Used from the engine's thread, between its own steps.

    `Grants` gives it lanes and layers. It serves nothing before `use_version`.
    """

    def __init__(self, instance: str, loaded: LoadedModel) -> None:
        self.instance = instance
        self.lanes = LaneTable(loaded.arena, ())
        self.layers: set[int] = set()
        """Layers whose weights it was granted here."""
        self.version: int | None = None
        self.dirty_blocks = DirtyBlocks()
        self._loaded = loaded
        self._backend = loaded.new_backend()
        weights = loaded.layer_memory.weights
        self._model = CausalModel(
            loaded.spec, {}, weights, loaded.arena.pages, self.lanes, self._backend, loaded.model.ops
        )
        self._last_done = (-1, -1)

    @property
    def num_blocks(self) -> int:
        """Blocks that were granted: ids below it are the instance's."""
        return self.lanes.num_blocks

    @property
    def limits(self) -> StageLimits:
        """What work may ask for."""
        spec, layout = self._loaded.spec, self._loaded.layout
        dtype = self._loaded.arena.pages.dtype
        return StageLimits(
            spec.num_layers, spec.hidden_size, dtype, spec.vocab_size, layout.block_tokens, self.num_blocks
        )

    def use_version(self, version: int) -> None:
        """The placement has this version from now on: work that carries another one is refused. To be called when
        everything that was copied here is in place, and for every later placement that leaves something here."""
        if self.version is not None and version <= self.version:
            raise ValueError(f"the placement has version {self.version} already; {version} is not above it")
        self.version = version

    def move_blocks(self, moves: Mapping[int, int]) -> None:
        """The home has put blocks' content into other blocks (`Grant.moved_blocks`): so does this.

        Raises:
            ValueError: one of them is beyond the grant.
        """
        if any(not 0 <= block < self.num_blocks for move in moves.items() for block in move):
            raise ValueError(f"blocks {dict(moves)} were to move; the grant is of {self.num_blocks} blocks")
        self.lanes.copy_blocks(moves)
        self._loaded.copies.computed()
        self.dirty_blocks.relocated(moves, self.num_blocks)

    @torch.inference_mode()
    def run(self, work: StageWork) -> StageDone:
        """Runs layers over a step's hidden states and writes their K and V. What cannot be done is an `error`."""
        try:
            self._check_order(work, work.layers.start)
            # The same check as of a message from a link.
            return self.run_checked(decode_work(*encode_work(work), self.limits))
        except Exception as error:  # as in `run_checked`
            return StageDone(work.instance, work.version, work.step_id, None, self._reason(error))

    @torch.inference_mode()
    def run_checked(self, work: StageWork) -> StageDone:
        """`run`, for work that `decode_work` made within `limits`."""
        try:
            self._check_order(work, work.layers.start)
            for layer in work.layers:
                self._check_layer(layer)
            batch = self._prepare(work, work.layers)
            try:
                hidden = self._model.run_layers(work.hidden.to(self._device), work.layers, batch)
            finally:
                self._loaded.copies.computed()
            return StageDone(work.instance, work.version, work.step_id, hidden.cpu().contiguous())
        except Exception as error:  # whatever it is, the home must hear of it, and this engine goes on
            return StageDone(work.instance, work.version, work.step_id, None, self._reason(error))

    @torch.inference_mode()
    def attend(self, work: HeadWork) -> HeadDone:
        """Writes the K and V of heads of one layer and attends with them. What cannot be done is an `error`."""
        try:
            self._check_order(work, work.layer)
            kv = self._head_lanes(work)
            # The step alone is checked as a stage's is, which has hidden states of no width.
            num_rows = work.step.shape.num_rows
            hidden = torch.empty(num_rows, 0, dtype=work.q.dtype)
            stage = StageWork(
                work.instance, work.version, work.step_id, range(work.layer, work.layer + 1), work.step, hidden,
                work.fresh_blocks,
            )  # fmt: skip
            stage = decode_work(*encode_work(stage), replace(self.limits, hidden_size=0))
            self._check_rows(work)
            self._backend.begin(self._prepare(stage, stage.layers))
            q, k, v = (rows.to(self._device) for rows in (work.q, work.k, work.v))
            try:
                out = self._backend.attend(q, k, v, kv)
            finally:
                self._loaded.copies.computed()
            return HeadDone(work.instance, work.version, work.step_id, work.layer, out.cpu().contiguous())
        except Exception as error:  # as in `run`
            return HeadDone(work.instance, work.version, work.step_id, work.layer, None, self._reason(error))

    @property
    def _device(self) -> torch.device:
        return self._loaded.arena.pages.device

    def _reason(self, error: Exception) -> str:
        if not isinstance(error, WorkRefusedError | StageMessageError):
            logger.error("work for instance %s failed", self.instance, exc_info=error)
        return f"{type(error).__name__}: {error}"

    def _check_order(self, work: StageWork | HeadWork, layer: int) -> None:
        if work.instance != self.instance:
            raise WorkRefusedError(f"work of instance {work.instance!r} came to {self.instance!r}")
        if work.version != self.version:
            raise WorkRefusedError(f"work has placement version {work.version}; here it is {self.version}")
        if (work.step_id, layer) <= self._last_done:
            done_step, done_layer = self._last_done
            raise WorkRefusedError(
                f"step {work.step_id} from layer {layer} on came after step {done_step}, layer {done_layer}"
            )

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

    def _check_rows(self, work: HeadWork) -> None:
        spec, dtype = self._loaded.spec, self._loaded.arena.pages.dtype
        rows, heads = work.step.shape.num_rows, len(work.heads)
        for name, tensor, width in (("q", work.q, heads * spec.group_size), ("k", work.k, heads), ("v", work.v, heads)):
            expected = (rows, width, spec.head_dim)
            if tuple(tensor.shape) != expected or tensor.dtype != dtype or not tensor.is_contiguous():
                raise WorkRefusedError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)}; expected {dtype} {list(expected)}, contiguous"
                )

    def _prepare(self, work: StageWork, layers: range) -> StepBatch:
        """The step's tensors on the device. From here on the work counts as done: its writes may have begun."""
        self._last_done = (work.step_id, layers.stop - 1)
        step, block_tokens = work.step, self._loaded.layout.block_tokens
        batch = step.batch(step.packed.to(self._device), block_tokens)
        if self._backend.name != "flash":  # flash-attn reads no masked places
            self.lanes.clear_blocks(work.fresh_blocks.tolist(), layers)
        self.dirty_blocks.wrote(step.shape.split(step.packed)[2].tolist())
        return batch
