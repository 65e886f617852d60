"""A step as part of a message to another worker, and the checks that all messages of work pass.

What arrives is checked before anybody computes with it: a wrong block id would be another request's memory, or another
instance's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from actors.engine.batch import PackedStep, StepShape

Message = tuple[bytes, tuple[torch.Tensor, ...]]
"""(meta, contiguous tensors on the CPU)"""


class WorkMessageError(ValueError):
    """A message that is no work for another worker, or no answer to it."""


@dataclass(frozen=True, slots=True)
class WorkLimits:
    """What a host has of an instance: bounds for what a message may ask of it."""

    num_layers: int
    hidden_size: int
    dtype: torch.dtype
    vocab_size: int
    block_tokens: int
    num_blocks: int
    """Blocks that were granted."""


def step_fields(step: PackedStep) -> dict[str, Any]:
    """What a message's meta says of a step whose integers are one of its tensors."""
    shape = step.shape
    sizes = [shape.num_rows, shape.num_decodes, shape.decode_width, shape.num_prefills, shape.prefill_width]
    return {"shape": sizes, "num_sampled": step.num_sampled}


def decode_step(
    fields: dict[str, Any], packed: torch.Tensor, fresh_blocks: torch.Tensor, limits: WorkLimits
) -> PackedStep:
    """The step that `step_fields` and its integers tell of, once it is certain that it stays within `limits`.

    Raises:
        WorkMessageError: it does not.
    """
    shape = StepShape(*numbers(fields, "shape", 5))
    (num_sampled,) = numbers(fields, "num_sampled")
    require_tensor("the step", packed, torch.int64, (shape.num_integers,))
    require_tensor("fresh blocks", fresh_blocks, torch.int64, (fresh_blocks.numel(),))
    require_within(fresh_blocks.numpy(), 0, limits.num_blocks, "fresh blocks")
    return PackedStep(packed, shape, num_sampled, _checked_chunks(packed, shape, num_sampled, limits))


def _checked_chunks(
    packed: torch.Tensor, shape: StepShape, num_sampled: int, limits: WorkLimits
) -> tuple[tuple[int, int, int], ...]:
    """(first row, rows, context tokens) of each prompt chunk, once it is certain that every row of the step reads and
    writes the blocks of its own table, in places that exist."""
    num_rows, num_decodes, tokens = shape.num_rows, shape.num_decodes, limits.block_tokens
    (
        token_ids, positions, write_blocks, write_offsets, decode_blocks, decode_context, prefill_blocks, prefill_rows,
        prefill_context, sampled_rows,
    ) = (view.numpy() for view in shape.split(packed))  # fmt: skip
    require(num_rows >= 1, "a step without rows")
    require(num_sampled <= num_decodes + shape.num_prefills, f"{num_sampled} rows to sample from")
    require_within(token_ids, 0, limits.vocab_size, "token ids")
    require_within(sampled_rows, 0, num_rows, "rows to sample from")
    require_within(decode_blocks, 0, limits.num_blocks, "blocks of decodes")
    require_within(prefill_blocks, 0, limits.num_blocks, "blocks of prompt chunks")
    require_within(decode_context, 1, shape.decode_width * tokens + 1, "contexts of decodes")
    require_within(prefill_context, 1, shape.prefill_width * tokens + 1, "contexts of prompt chunks")
    require_within(prefill_rows, 1, num_rows + 1, "rows of prompt chunks")
    require(num_decodes + int(prefill_rows.sum()) == num_rows, f"chunks that do not add up to {num_rows} rows")
    require(bool((prefill_rows <= prefill_context).all()), "chunks longer than their contexts")
    first_rows = num_decodes + np.cumsum(prefill_rows) - prefill_rows
    chunk_of_row = np.repeat(np.arange(shape.num_prefills), prefill_rows)
    expected = np.concatenate(
        (
            decode_context - 1,
            np.arange(num_decodes, num_rows) + (prefill_context - prefill_rows - first_rows)[chunk_of_row],
        )
    )
    require(np.array_equal(positions, expected), "positions that do not follow from the chunks")
    columns = positions // tokens
    expected = np.concatenate(
        (
            decode_blocks[np.arange(num_decodes), columns[:num_decodes]],
            prefill_blocks[chunk_of_row, columns[num_decodes:]],
        )
    )
    require(
        np.array_equal(write_blocks, expected) and np.array_equal(write_offsets, positions % tokens),
        "places to write that are not the rows' own",
    )
    return tuple(zip(first_rows.tolist(), prefill_rows.tolist(), prefill_context.tolist(), strict=True))


def message_fields(meta: bytes) -> dict[str, Any]:
    """What a message's meta holds. WorkMessageError when it is not what these messages are made of."""
    try:
        fields = json.loads(meta)
    except (ValueError, RecursionError) as error:
        raise WorkMessageError(f"a message that cannot be read: {error}") from None
    require(isinstance(fields, dict), "no fields")
    return dict(fields)


def work_ids(fields: dict[str, Any]) -> tuple[str, int, int]:
    """Instance, version of the placement, and step."""
    instance = fields.get("instance")
    require(isinstance(instance, str), "no instance")
    return str(instance), *numbers(fields, "version"), *numbers(fields, "step_id")  # type: ignore[return-value]


def decode_outcome(fields: dict[str, Any], tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, str | None]:
    """What an answer gives: one tensor, or why there is none. WorkMessageError when it is neither."""
    error = fields.get("error")
    require(error is None or isinstance(error, str), "an error that is no text")
    require(len(tensors) == (error is None), f"{len(tensors)} tensors with error {error!r}")
    return (tensors[0] if tensors else None), error


def numbers(fields: dict[str, Any], name: str, count: int | None = None) -> list[int]:
    """A field of `count` numbers, or of one alone, none of them negative."""
    value = fields.get(name)
    numbers = [value] if count is None else value
    require(
        isinstance(numbers, list)
        and len(numbers) == (count or 1)
        and all(type(number) is int and number >= 0 for number in numbers),
        f"{name} {value!r}",
    )
    return list(numbers or ())


def require_within(values: np.ndarray[Any, Any], low: int, high: int, what: str) -> None:
    if values.size and (values.min() < low or values.max() >= high):
        raise WorkMessageError(
            f"a message has {what} from {values.min()} to {values.max()}; allowed are {low} to {high - 1}"
        )


def require_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype, size: tuple[int, ...]) -> None:
    """WorkMessageError unless a message's tensor is contiguous and so."""
    require(
        tensor.dtype == dtype and tuple(tensor.shape) == size and tensor.is_contiguous(),
        f"{name} {tensor.dtype} {list(tensor.shape)}; expected {dtype} {list(size)}, contiguous",
    )


def require(holds: bool, what: str) -> None:
    """WorkMessageError unless it holds."""
    if not holds:
        raise WorkMessageError(f"a message has {what}")
