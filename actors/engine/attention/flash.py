"""flash-attn 2's paged kernels, by the interface of version 2.8. Pages must hold a multiple of 256 tokens.

Each KV head is a sequence of its own with one KV head and its query group, so that a layer's heads may lie anywhere in
the arena, as the lane table says. K and V of the arena are strided views (the kernels take any page and row stride as
long as the last dimension is contiguous); nothing is gathered. Sequences are ordered by head, then by row: sequence
`head * rows + row`. CUDA's grid allows 65,535 of them in a call.
"""

from __future__ import annotations

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

from actors.engine.attention.interface import LayerKv
from actors.engine.attention.torch_backend import write_rows
from actors.engine.batch import StepBatch


class FlashAttention:
    """See the module. Holds the index tensors of the current step only."""

    name = "flash"

    def __init__(self) -> None:
        self._batch: StepBatch | None = None
        self._decode_context: dict[int, torch.Tensor] = {}
        self._prefill_ends: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self, batch: StepBatch) -> None:
        """Forgets the last step's index tensors."""
        self._batch = batch
        self._decode_context = {}
        self._prefill_ends = {}

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: LayerKv) -> torch.Tensor:
        """See AttentionBackend."""
        batch = self._batch
        if batch is None:
            raise RuntimeError("attend was called before begin")
        write_rows(batch, k, v, kv)
        decodes = batch.num_decodes
        parts = []
        if decodes:
            parts.append(self._decode(batch, q[:decodes], kv))
        if batch.prefills:
            parts.append(self._prefill(batch, q[decodes:], kv))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, batch: StepBatch, q: torch.Tensor, kv: LayerKv) -> torch.Tensor:
        num_heads, rows = kv.page_of.shape[0], q.shape[0]
        if num_heads not in self._decode_context:
            self._decode_context[num_heads] = batch.decode_context.int().repeat(num_heads)
        out: torch.Tensor = flash_attn_with_kvcache(
            _by_head(q, num_heads).unsqueeze(1),
            *_caches(kv),
            cache_seqlens=self._decode_context[num_heads],
            block_table=kv.page_of[:, batch.decode_blocks].flatten(0, 1).int(),
            softmax_scale=kv.scale,
            causal=True,
            window_size=_window(kv),
        )
        return _by_row(out.squeeze(1), num_heads, rows)

    def _prefill(self, batch: StepBatch, q: torch.Tensor, kv: LayerKv) -> torch.Tensor:
        num_heads, rows = kv.page_of.shape[0], q.shape[0]
        if num_heads not in self._prefill_ends:
            self._prefill_ends[num_heads] = (
                _ends(batch.prefill_rows.repeat(num_heads)),
                _ends(batch.prefill_context.repeat(num_heads)),
            )
        query_ends, key_ends = self._prefill_ends[num_heads]
        out: torch.Tensor = flash_attn_varlen_func(
            _by_head(q, num_heads),
            *_caches(kv),
            cu_seqlens_q=query_ends,
            cu_seqlens_k=key_ends,
            max_seqlen_q=max(rows.num_rows for rows in batch.prefills),
            max_seqlen_k=max(rows.context_tokens for rows in batch.prefills),
            softmax_scale=kv.scale,
            causal=True,
            window_size=_window(kv),
            block_table=kv.page_of[:, batch.prefill_blocks].flatten(0, 1).int(),
        )
        return _by_row(out, num_heads, rows)


def _caches(kv: LayerKv) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as the kernels want them: [num_pages, block_tokens, 1, head_dim]."""
    return kv.pages[:, 0].unsqueeze(2), kv.pages[:, 1].unsqueeze(2)


def _by_head(q: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[rows, num_heads * group, head_dim] -> [num_heads * rows, group, head_dim]"""
    rows, _, head_dim = q.shape
    return q.reshape(rows, num_heads, -1, head_dim).transpose(0, 1).reshape(num_heads * rows, -1, head_dim)


def _by_row(out: torch.Tensor, num_heads: int, rows: int) -> torch.Tensor:
    """The inverse of `_by_head`."""
    head_dim = out.shape[-1]
    return out.reshape(num_heads, rows, -1, head_dim).transpose(0, 1).reshape(rows, -1, head_dim)


def _ends(lengths: torch.Tensor) -> torch.Tensor:
    """[n] lengths -> int32 [n + 1] running sums from 0."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()


def _window(kv: LayerKv) -> tuple[int, int]:
    """flash-attn counts the tokens to the left, without the token itself; -1 is no limit."""
    return (-1, -1) if kv.window is None else (kv.window - 1, 0)
