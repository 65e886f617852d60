"""Layers of a step that another worker runs: what is sent there, what comes back, and both as a link's message.

A link carries a message's `meta` (bytes) and tensors. What comes out of one is checked before anybody computes with it:
a wrong block id would be another request's memory, or another instance's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from actors.engine.batch import PackedStep, StepShape

Message = tuple[bytes, tuple[torch.Tensor, ...]]
"""(meta, contiguous tensors on the CPU)"""


class StageMessageError(ValueError):
    """A message that is no stage's work, or no answer to it."""


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


class RemoteStages(Protocol):
    """The way to other workers."""

    def submit(self, worker: str, work: StageWork, done: Callable[[StageDone], None]) -> None:
        """Sends `work` to `worker`, and does not wait. `done` is called exactly once, from any thread, in this call
        already if need be; with an error when the worker cannot be reached or dies. Work for one worker arrives in the
        order in which it was submitted."""


@dataclass(frozen=True, slots=True)
class StageLimits:
    """What a host has of an instance: bounds for what a message may ask of it."""

    num_layers: int
    hidden_size: int
    dtype: torch.dtype
    vocab_size: int
    block_tokens: int
    num_blocks: int
    """Blocks that were granted."""


def encode_work(work: StageWork) -> Message:
    """`work` for a link. Its tensors go as they are."""
    shape = work.step.shape
    meta = {
        "instance": work.instance,
        "version": work.version,
        "step_id": work.step_id,
        "layers": [work.layers.start, work.layers.stop],
        "shape": [
            shape.num_rows, shape.num_decodes, shape.decode_width, shape.num_prefills, shape.prefill_width,
        ],
        "num_sampled": work.step.num_sampled,
    }  # fmt: skip
    return json.dumps(meta).encode(), (work.step.packed, work.hidden, work.fresh_blocks)


def decode_work(meta: bytes, tensors: Sequence[torch.Tensor], limits: StageLimits) -> StageWork:
    """The work that a message asks for.

    Raises:
        StageMessageError: it is not what `encode_work` makes, or leaves `limits`.
    """
    fields = _fields(meta)
    _require(len(tensors) == 3, f"{len(tensors)} tensors; work has 3")
    packed, hidden, fresh_blocks = tensors
    first, stop = _numbers(fields, "layers", 2)
    _require(first < stop <= limits.num_layers, f"layers {first} to {stop}; the instance has {limits.num_layers}")
    shape = StepShape(*_numbers(fields, "shape", 5))
    (num_sampled,) = _numbers(fields, "num_sampled")
    for name, tensor, dtype, size in (
        ("the step", packed, torch.int64, (shape.num_integers,)),
        ("hidden states", hidden, limits.dtype, (shape.num_rows, limits.hidden_size)),
        ("fresh blocks", fresh_blocks, torch.int64, (fresh_blocks.numel(),)),
    ):
        _require(
            tensor.dtype == dtype and tuple(tensor.shape) == size and tensor.is_contiguous(),
            f"{name} {tensor.dtype} {list(tensor.shape)}; expected {dtype} {list(size)}, contiguous",
        )
    _require_within(fresh_blocks.numpy(), 0, limits.num_blocks, "fresh blocks")
    step = PackedStep(packed, shape, num_sampled, _checked_chunks(packed, shape, num_sampled, limits))
    return StageWork(*_ids(fields), range(first, stop), step, hidden, fresh_blocks)


def encode_done(done: StageDone) -> Message:
    """`done` for a link."""
    meta = {"instance": done.instance, "version": done.version, "step_id": done.step_id, "error": done.error}
    return json.dumps(meta).encode(), () if done.hidden is None else (done.hidden,)


def decode_done(meta: bytes, tensors: Sequence[torch.Tensor]) -> StageDone:
    """The answer that a message carries. Whether its hidden states fit the step is for the home to check.

    Raises:
        StageMessageError: it is not what `encode_done` makes.
    """
    fields = _fields(meta)
    error = fields.get("error")
    _require(error is None or isinstance(error, str), "an error that is no text")
    _require(len(tensors) == (error is None), f"{len(tensors)} tensors with error {error!r}")
    return StageDone(*_ids(fields), tensors[0] if tensors else None, error)


def _checked_chunks(
    packed: torch.Tensor, shape: StepShape, num_sampled: int, limits: StageLimits
) -> tuple[tuple[int, int, int], ...]:
    """(first row, rows, context tokens) of each prompt chunk, once it is certain that every row of the step reads and
    writes the blocks of its own table, in places that exist."""
    num_rows, num_decodes, tokens = shape.num_rows, shape.num_decodes, limits.block_tokens
    (
        token_ids, positions, write_blocks, write_offsets, decode_blocks, decode_context, prefill_blocks, prefill_rows,
        prefill_context, sampled_rows,
    ) = (view.numpy() for view in shape.split(packed))  # fmt: skip
    _require(num_rows >= 1, "a step without rows")
    _require(num_sampled <= num_decodes + shape.num_prefills, f"{num_sampled} rows to sample from")
    _require_within(token_ids, 0, limits.vocab_size, "token ids")
    _require_within(sampled_rows, 0, num_rows, "rows to sample from")
    _require_within(decode_blocks, 0, limits.num_blocks, "blocks of decodes")
    _require_within(prefill_blocks, 0, limits.num_blocks, "blocks of prompt chunks")
    _require_within(decode_context, 1, shape.decode_width * tokens + 1, "contexts of decodes")
    _require_within(prefill_context, 1, shape.prefill_width * tokens + 1, "contexts of prompt chunks")
    _require_within(prefill_rows, 1, num_rows + 1, "rows of prompt chunks")
    _require(num_decodes + int(prefill_rows.sum()) == num_rows, f"chunks that do not add up to {num_rows} rows")
    _require(bool((prefill_rows <= prefill_context).all()), "chunks longer than their contexts")
    first_rows = num_decodes + np.cumsum(prefill_rows) - prefill_rows
    chunk_of_row = np.repeat(np.arange(shape.num_prefills), prefill_rows)
    expected = np.concatenate(
        (
            decode_context - 1,
            np.arange(num_decodes, num_rows) + (prefill_context - prefill_rows - first_rows)[chunk_of_row],
        )
    )
    _require(np.array_equal(positions, expected), "positions that do not follow from the chunks")
    columns = positions // tokens
    expected = np.concatenate(
        (
            decode_blocks[np.arange(num_decodes), columns[:num_decodes]],
            prefill_blocks[chunk_of_row, columns[num_decodes:]],
        )
    )
    _require(
        np.array_equal(write_blocks, expected) and np.array_equal(write_offsets, positions % tokens),
        "places to write that are not the rows' own",
    )
    return tuple(zip(first_rows.tolist(), prefill_rows.tolist(), prefill_context.tolist(), strict=True))


def _fields(meta: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(meta)
    except (ValueError, RecursionError) as error:
        raise StageMessageError(f"a stage's message that cannot be read: {error}") from None
    _require(isinstance(fields, dict), "no fields")
    return dict(fields)


def _ids(fields: dict[str, Any]) -> tuple[str, int, int]:
    instance = fields.get("instance")
    _require(isinstance(instance, str), "no instance")
    return str(instance), *_numbers(fields, "version"), *_numbers(fields, "step_id")  # type: ignore[return-value]


def _numbers(fields: dict[str, Any], name: str, count: int | None = None) -> list[int]:
    """A field of `count` numbers, or of one alone, none of them negative."""
    value = fields.get(name)
    numbers = [value] if count is None else value
    _require(
        isinstance(numbers, list)
        and len(numbers) == (count or 1)
        and all(type(number) is int and number >= 0 for number in numbers),
        f"{name} {value!r}",
    )
    return list(numbers or ())


def _require_within(values: np.ndarray[Any, Any], low: int, high: int, what: str) -> None:
    if values.size and (values.min() < low or values.max() >= high):
        raise StageMessageError(
            f"a stage's message has {what} from {values.min()} to {values.max()}; allowed are {low} to {high - 1}"
        )


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise StageMessageError(f"a stage's message has {what}")
