"""Attention of some KV heads that another worker has: what is sent there, what comes back, and both as messages.

Unlike a stage's work (`stage_work`) it is for one layer, whose weights stay at home: q, k and v go, the heads' output
comes back, and the home joins it to its own heads' before the output projection. A step has one such work a layer, so
its tables go along with the first one only.
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
    step_fields,
    work_ids,
)


@dataclass(frozen=True, slots=True)
class HeadTables:
    """What all heads of a step share."""

    step: PackedStep
    """On the host CPU. Block ids are the home's."""
    fresh_blocks: torch.Tensor
    """As in StageWork."""


@dataclass(frozen=True, slots=True)
class HeadWork:
    """Heads for another worker to attend with, over the rows of one step."""

    instance: str
    """Worker id of the instance's home."""
    version: int
    """Of the placement."""
    step_id: int
    layer: int
    heads: range
    """KV heads, H of them, each with its query heads."""
    qkv: torch.Tensor
    """[T, H * group + 2 * H, head_dim], rotary applied: q of all these heads, then k, then v. Contiguous, on the CPU,
    in the model's dtype, and only read."""
    tables: HeadTables | None
    """None: those of the work before, which was of the same step."""


@dataclass(frozen=True, slots=True)
class HeadDone:
    """The answer to a HeadWork."""

    instance: str
    version: int
    step_id: int
    layer: int
    out: torch.Tensor | None
    """[T, H * group, head_dim], contiguous, on the CPU; None with an `error`."""
    error: str | None = None


class RemoteHeads(Protocol):
    """The way to other workers' heads."""

    def attend(self, worker: str, work: HeadWork, done: Callable[[HeadDone], None]) -> None:
        """Sends `work` to `worker`, and does not wait. `done` is called exactly once, from any thread, in this call
        already if need be; with an error when the worker cannot be reached or dies. Work for one worker arrives in the
        order in which it was given."""


def encode_head_work(work: HeadWork) -> Message:
    """`work` for a link. Its tensors go as they are."""
    meta = {
        "instance": work.instance,
        "version": work.version,
        "step_id": work.step_id,
        "layer": work.layer,
        "heads": [work.heads.start, work.heads.stop],
    }
    if work.tables is None:
        return json.dumps(meta).encode(), (work.qkv,)
    meta |= step_fields(work.tables.step)
    return json.dumps(meta).encode(), (work.qkv, work.tables.step.packed, work.tables.fresh_blocks)


def decode_head_work(meta: bytes, tensors: Sequence[torch.Tensor], limits: WorkLimits) -> HeadWork:
    """The work that a message asks for. Whether its rows fit the step and its heads is for the host to check.

    Raises:
        WorkMessageError: it is not what `encode_head_work` makes, or leaves `limits`.
    """
    fields = message_fields(meta)
    require(len(tensors) in (1, 3), f"{len(tensors)} tensors; work of heads has 1 or 3")
    first, stop = numbers(fields, "heads", 2)
    (layer,) = numbers(fields, "layer")
    require(layer < limits.num_layers, f"layer {layer}; the instance has {limits.num_layers}")
    tables = None
    if len(tensors) == 3:
        _, packed, fresh_blocks = tensors
        tables = HeadTables(decode_step(fields, packed, fresh_blocks, limits), fresh_blocks)
    return HeadWork(*work_ids(fields), layer, range(first, stop), tensors[0], tables)


def encode_head_done(done: HeadDone) -> Message:
    """`done` for a link."""
    meta = {
        "instance": done.instance,
        "version": done.version,
        "step_id": done.step_id,
        "layer": done.layer,
        "error": done.error,
    }
    return json.dumps(meta).encode(), () if done.out is None else (done.out,)


def decode_head_done(meta: bytes, tensors: Sequence[torch.Tensor]) -> HeadDone:
    """The answer that a message carries. Whether its output fits the work is for the home to check.

    Raises:
        WorkMessageError: it is not what `encode_head_done` makes.
    """
    fields = message_fields(meta)
    (layer,) = numbers(fields, "layer")
    return HeadDone(*work_ids(fields), layer, *decode_outcome(fields, tensors))
