"""Attention with torch's scaled_dot_product_attention (SDPA), on any device.

Decode gives SDPA a KV head's query group as its query rows, so that K and V are not repeated for the group and a
sequence's keys meet one product; with one query row a head it is less than half as fast on a CPU. A prompt chunk is a
call of its own.

Keys come as whole blocks and query rows in multiples of 16, what is too much hidden by the mask: on a CPU torch
generates code for every shape of the last tile and keeps it (load_tests/LOG.md).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from actors.engine.attention.interface import LayerKv
from actors.engine.batch import PrefillRows, StepBatch
from actors.engine.row_padding import TILE_ROWS


class TorchAttention:
    """See the module. Holds masks of the current step only."""

    name = "torch"

    def __init__(self) -> None:
        self._batch: StepBatch | None = None
        self._masks: dict[tuple[int | None, int | None], torch.Tensor] = {}
        """By first row of the chunk (None: the decodes) and window."""

    def begin(self, batch: StepBatch) -> None:
        """Forgets the last step's masks."""
        self._batch = batch
        self._masks = {}

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: LayerKv) -> torch.Tensor:
        """See AttentionBackend."""
        batch = self._batch
        if batch is None:
            raise RuntimeError("attend was called before begin")
        self._write(batch, k, v, kv)
        return self._attend(batch, q, kv)

    def _write(self, batch: StepBatch, k: torch.Tensor, v: torch.Tensor, kv: LayerKv) -> None:
        write_rows(batch, k, v, kv)

    def _attend(self, batch: StepBatch, q: torch.Tensor, kv: LayerKv) -> torch.Tensor:
        if not batch.prefills:
            return self._decode(batch, q, kv)
        parts = [self._decode(batch, q[: batch.num_decodes], kv)] if batch.num_decodes else []
        for rows in batch.prefills:
            parts.append(self._prefill(rows, q[rows.first_row : rows.first_row + rows.num_rows], kv))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, batch: StepBatch, q: torch.Tensor, kv: LayerKv) -> torch.Tensor:
        num_heads, rows, head_dim = kv.page_of.shape[0], q.shape[0], q.shape[-1]
        keys, values = _gather(kv, kv.page_of[:, batch.decode_blocks].transpose(0, 1), (rows, num_heads))
        if (None, kv.window) not in self._masks:
            own = batch.decode_context - 1
            self._masks[None, kv.window] = _mask(own, keys.shape[2], kv.window, q.dtype)[:, None, None]
        out = F.scaled_dot_product_attention(
            q.view(rows, num_heads, -1, head_dim),
            keys,
            values,
            attn_mask=self._masks[None, kv.window],
            scale=kv.scale,
        )
        return out.reshape(q.shape)

    def _prefill(self, rows: PrefillRows, q: torch.Tensor, kv: LayerKv) -> torch.Tensor:
        """q [n, heads, head_dim] -> the same shape."""
        keys, values = _gather(kv, kv.page_of[None, :, rows.blocks], (1, kv.page_of.shape[0]))
        padding = -rows.num_rows % TILE_ROWS
        num_queries, num_keys = rows.num_rows + padding, keys.shape[2]
        causal = rows.num_rows == rows.context_tokens and num_queries == num_keys and kv.window is None
        key = rows.first_row, kv.window
        if not causal and key not in self._masks:
            own = torch.arange(num_queries, device=q.device) + (rows.context_tokens - rows.num_rows)
            # Padding rows look where the last row looks: a row that sees nothing gives NaN.
            own = own.clamp(max=rows.context_tokens - 1)
            self._masks[key] = _mask(own, num_keys, kv.window, q.dtype)
        out = F.scaled_dot_product_attention(
            (F.pad(q, (0, 0, 0, 0, 0, padding)) if padding else q).transpose(0, 1)[None],
            keys,
            values,
            attn_mask=None if causal else self._masks[key],
            is_causal=causal,
            scale=kv.scale,
            enable_gqa=True,
        )
        return out[0, :, : rows.num_rows].transpose(0, 1)


def write_rows(batch: StepBatch, k: torch.Tensor, v: torch.Tensor, kv: LayerKv) -> None:
    """Stores the rows' K and V, each [T, H, head_dim], in their pages."""
    block_tokens, head_dim = kv.pages.shape[2:]
    first = kv.page_of[:, batch.write_blocks] * (2 * block_tokens) + batch.write_offsets
    rows = first.transpose(0, 1).reshape(-1)
    memory = kv.pages.view(-1, head_dim)
    memory.index_copy_(0, rows, k.reshape(-1, head_dim))
    memory.index_copy_(0, rows + block_tokens, v.reshape(-1, head_dim))


def _gather(kv: LayerKv, pages: torch.Tensor, leading: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of `pages` [*leading, n], copied together: two tensors [*leading, n * block_tokens, head_dim]."""
    halves = kv.pages.view(kv.pages.shape[0] * 2, -1)
    index = pages.reshape(-1) * 2
    shape = (*leading, -1, kv.pages.shape[-1])
    return halves.index_select(0, index).view(shape), halves.index_select(0, index + 1).view(shape)


def _mask(own: torch.Tensor, num_keys: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """[n, num_keys] for queries at the places `own` [n]: 0 where they may look and -inf where not. SDPA makes this of a
    bool mask itself, but in every layer."""
    places, own = torch.arange(num_keys, device=own.device), own[:, None]
    visible = places <= own
    if window is not None:
        visible &= places > own - window
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
