"""Layers of a step that another worker runs: what is sent there, what comes back, and both as a link's message.

A link carries a message's `meta` (bytes) and tensors (`step_messages`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from actors.engine.batch import PackedStep
from actors.engine.step_messages import (
    Message,
    WorkLimits,
    decode_outcome,
    decode_step,
    message_fields,
    numbers,
    require,
    require_tensor,
    step_fields,
    work_ids,
)


@dataclass(frozen=True, slots=True)
class StageWork:
    """Layers for another worker to run, over the hidden states of one step."""

    instance: str
    """Worker id of the instance's home."""
    version: int
    """Of the placement. A host refuses another one than it was granted for."""
    step_id: int
    """Of the instance; unique and rising. A host runs the steps of an instance in this order."""
    layers: range
    step: PackedStep
    """On the host CPU. Block ids are the home's."""
    hidden: torch.Tensor
    """[T, hidden], the model's dtype, contiguous, on the CPU: before the first of `layers`. T is never 0. Only read."""
    fresh_blocks: torch.Tensor
    """int64 [blocks whose pages hold what an earlier request left there]. Where attention reads masked places, they are
    cleared before the layers run (see `page_io.clear_pages`)."""


@dataclass(frozen=True, slots=True)
class StageDone:
    """The answer to a StageWork."""

    instance: str
    version: int
    step_id: int
    hidden: torch.Tensor | None
    """[T, hidden] after the last of the layers, contiguous, on the CPU; None with an `error`."""
    error: str | None = None
    """Why the layers were not run: a stale version, an unknown instance, a failure, a worker that died."""
    stage_us: int = 0
    """What they took, in microseconds of wall time."""
    host_step_us: int = 0
    """What a step of the host's own takes at present; 0: it has run none."""


class RemoteStages(Protocol):
    """The way to other workers."""

    def submit(self, worker: str, work: StageWork, done: Callable[[StageDone], None]) -> None:
        """Sends `work` to `worker`, and does not wait. `done` is called exactly once, from any thread, in this call
        already if need be; with an error when the worker cannot be reached or dies. Work for one worker arrives in the
        order in which it was submitted."""


def encode_work(work: StageWork) -> Message:
    """`work` for a link. Its tensors go as they are."""
    meta = {
        "instance": work.instance,
        "version": work.version,
        "step_id": work.step_id,
        "layers": [work.layers.start, work.layers.stop],
        **step_fields(work.step),
    }
    return json.dumps(meta).encode(), (work.step.packed, work.hidden, work.fresh_blocks)


def decode_work(meta: bytes, tensors: Sequence[torch.Tensor], limits: WorkLimits) -> StageWork:
    """The work that a message asks for.

    Raises:
        WorkMessageError: it is not what `encode_work` makes, or leaves `limits`.
    """
    fields = message_fields(meta)
    require(len(tensors) == 3, f"{len(tensors)} tensors; work has 3")
    packed, hidden, fresh_blocks = tensors
    first, stop = numbers(fields, "layers", 2)
    require(first < stop <= limits.num_layers, f"layers {first} to {stop}; the instance has {limits.num_layers}")
    step = decode_step(fields, packed, fresh_blocks, limits)
    require_tensor("hidden states", hidden, limits.dtype, (step.shape.num_rows, limits.hidden_size))
    return StageWork(*work_ids(fields), range(first, stop), step, hidden, fresh_blocks)


def encode_done(done: StageDone) -> Message:
    """`done` for a link."""
    meta = {
        "instance": done.instance,
        "version": done.version,
        "step_id": done.step_id,
        "error": done.error,
        "took_us": [done.stage_us, done.host_step_us],
    }
    return json.dumps(meta).encode(), () if done.hidden is None else (done.hidden,)


def decode_done(meta: bytes, tensors: Sequence[torch.Tensor]) -> StageDone:
    """The answer that a message carries. Whether its hidden states fit the step is for the home to check.

    Raises:
        WorkMessageError: it is not what `encode_done` makes.
    """
    fields = message_fields(meta)
    return StageDone(*work_ids(fields), *decode_outcome(fields, tensors), *numbers(fields, "took_us", 2))
