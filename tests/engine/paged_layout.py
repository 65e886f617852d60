"""Random paged layouts for attention, and dense attention without pages to compare with.

A layout is a batch of sequences whose KV lies in scattered pages, in blocks dealt at random, with noise everywhere
else. The reference knows the sequences' keys and values as plain arrays and does softmax over them in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from actors.engine.attention.interface import LayerKv
from actors.engine.batch import StepBatch, build_batch
from actors.engine.request import EngineRequest, SamplingParams
from actors.engine.sequence import SequenceState
from actors.engine.step_plan import Chunk
from migrate.waiting_line import Turn


@dataclass(frozen=True)
class Piece:
    """One sequence's part of a step: `context` tokens have their KV in pages already, `new` tokens are the rows."""

    context: int
    new: int
    decodes: bool


@dataclass(frozen=True)
class Shape:
    kv_heads: int
    group: int
    head_dim: int
    block_tokens: int
    window: int | None = None


@dataclass(frozen=True)
class PagedCase:
    """What a backend is given, and what it must give."""

    batch: StepBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kv: LayerKv
    expected: torch.Tensor
    """float64 [rows, heads, head_dim]"""
    pages_after: torch.Tensor
    """The arena with the rows' K and V in their places and nothing else changed."""


def make_case(shape: Shape, pieces: Sequence[Piece], seed: int, dtype: torch.dtype = torch.float32) -> PagedCase:
    """`pieces` in any order: decodes are put first, as in a step."""
    rng = np.random.default_rng(seed)
    pieces = sorted(pieces, key=lambda piece: not piece.decodes)
    bt = shape.block_tokens
    num_blocks = [-(-(piece.context + piece.new) // bt) for piece in pieces]
    capacity = sum(num_blocks) + 3
    blocks = rng.permutation(capacity).tolist()
    page_of = rng.permutation(shape.kv_heads * capacity + 5)[: shape.kv_heads * capacity].reshape(shape.kv_heads, -1)

    def randn(*size: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(size)).to(dtype)

    pages = randn(shape.kv_heads * capacity + 5, 2, bt, shape.head_dim) * 3
    after = pages.clone()
    chunks, queries, keys, values, expected = [], [], [], [], []
    for piece, count in zip(pieces, num_blocks, strict=True):
        own = [blocks.pop() for _ in range(count)]
        total = piece.context + piece.new
        kv = randn(2, shape.kv_heads, total, shape.head_dim)
        for head in range(shape.kv_heads):
            for position in range(total):
                page, offset = page_of[head, own[position // bt]], position % bt
                after[page, :, offset] = kv[:, head, position]
                if position < piece.context:
                    pages[page, :, offset] = kv[:, head, position]
        q = randn(piece.new, shape.kv_heads * shape.group, shape.head_dim)
        expected.append(dense_attention(q, kv[0], kv[1], shape))
        queries.append(q)
        keys.append(kv[0, :, piece.context :].transpose(0, 1))
        values.append(kv[1, :, piece.context :].transpose(0, 1))
        chunks.append(Chunk(_sequence(total, piece.context, own), piece.new, piece.context))
    split = sum(piece.decodes for piece in pieces)
    return PagedCase(
        build_batch(chunks[:split], chunks[split:], bt, torch.device("cpu")),
        torch.cat(queries),
        torch.cat(keys),
        torch.cat(values),
        LayerKv(pages, torch.from_numpy(page_of), shape.window, shape.head_dim**-0.5),
        torch.cat(expected),
        after,
    )


def dense_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: Shape) -> torch.Tensor:
    """q [new, heads, head_dim] are the last of the sequence's tokens; keys and values [kv_heads, total, head_dim]."""
    new, total = q.shape[0], keys.shape[1]
    out = np.zeros(q.shape)
    for row in range(new):
        position = total - new + row
        first = 0 if shape.window is None else max(0, position - shape.window + 1)
        for head in range(q.shape[1]):
            k = keys[head // shape.group, first : position + 1].double().numpy()
            v = values[head // shape.group, first : position + 1].double().numpy()
            scores = k @ q[row, head].double().numpy() * shape.head_dim**-0.5
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ v / weights.sum()
    return torch.from_numpy(out)


def _sequence(total: int, context: int, blocks: list[int]) -> SequenceState:
    request = EngineRequest("r", tuple(range(total)), SamplingParams(max_tokens=1))
    sequence = SequenceState(request, Turn(0.0), lambda keys, tokens: [])
    sequence.num_computed = context
    sequence.block_ids = blocks
    return sequence
