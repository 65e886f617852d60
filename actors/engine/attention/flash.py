"""flash-attn 2's paged kernels. Pages must hold a multiple of 256 tokens.

Each KV head is a sequence of its own with one KV head and its query group, so that a layer's heads may lie anywhere in
the arena, as the lane table says. K and V of the arena are strided views; nothing is gathered.
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
        self._prefill_blocks = torch.empty(0)
        self._query_ends = torch.empty(0)
        self._key_ends = torch.empty(0)
        self._longest_query = 0
        self._longest_key = 0

    def begin(self, batch: StepBatch) -> None:
        """Builds the prefill chunks' offsets, the same for every head and layer."""
        self._batch = batch
        if batch.prefills:
            device = batch.token_ids.device
            widest = max(rows.blocks.shape[0] for rows in batch.prefills)
            self._prefill_blocks = torch.zeros(len(batch.prefills), widest, dtype=torch.int64, device=device)
            for index, rows in enumerate(batch.prefills):
                self._prefill_blocks[index, : rows.blocks.shape[0]] = rows.blocks
            queries = torch.tensor([rows.num_rows for rows in batch.prefills], device=device)
            keys = torch.tensor([rows.context_tokens for rows in batch.prefills], device=device)
            self._query_ends, self._key_ends = queries, keys
            self._longest_query = max(rows.num_rows for rows in batch.prefills)
            self._longest_key = max(rows.context_tokens for rows in batch.prefills)

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
            parts.append(self._prefill(q[decodes:], kv))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, batch: StepBatch, q: torch.Tensor, kv: LayerKv) -> torch.Tensor:
        num_heads, rows, head_dim = kv.page_of.shape[0], q.shape[0], q.shape[-1]
        group = q.shape[1] // num_heads
        table = kv.page_of[:, batch.decode_blocks].flatten(0, 1).int()
        out: torch.Tensor = flash_attn_with_kvcache(
            q.view(rows, num_heads, group, head_dim).transpose(0, 1).reshape(num_heads * rows, 1, group, head_dim),
            kv.pages[:, 0].unsqueeze(2),
            kv.pages[:, 1].unsqueeze(2),
            cache_seqlens=batch.decode_context.int().repeat(num_heads),
            block_table=table,
            softmax_scale=kv.scale,
            causal=True,
            window_size=_window(kv),
        )
        return out.view(num_heads, rows, group, head_dim).transpose(0, 1).reshape(rows, num_heads * group, head_dim)

    def _prefill(self, q: torch.Tensor, kv: LayerKv) -> torch.Tensor:
        num_heads, rows, head_dim = kv.page_of.shape[0], q.shape[0], q.shape[-1]
        group = q.shape[1] // num_heads
        out: torch.Tensor = flash_attn_varlen_func(
            q.view(rows, num_heads, group, head_dim).transpose(0, 1).reshape(num_heads * rows, group, head_dim),
            kv.pages[:, 0].unsqueeze(2),
            kv.pages[:, 1].unsqueeze(2),
            cu_seqlens_q=_offsets(self._query_ends.repeat(num_heads)),
            cu_seqlens_k=_offsets(self._key_ends.repeat(num_heads)),
            max_seqlen_q=self._longest_query,
            max_seqlen_k=self._longest_key,
            block_table=kv.page_of[:, self._prefill_blocks].flatten(0, 1).int(),
            softmax_scale=kv.scale,
            causal=True,
            window_size=_window(kv),
        )
        return out.view(num_heads, rows, group, head_dim).transpose(0, 1).reshape(rows, num_heads * group, head_dim)


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    """[n] lengths -> int32 [n + 1] running sums from 0."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()


def _window(kv: LayerKv) -> tuple[int, int]:
    """flash-attn counts the tokens to the left, without the token itself; -1 is no limit."""
    return (-1, -1) if kv.window is None else (kv.window - 1, 0)
