"""The two functions of flash-attn 2.8 that the engine calls, in plain torch, from their documentation.

Arguments are checked as the package checks them (shapes, int32, contiguous last dimensions, pages of a multiple of 256
tokens, head dimensions, half precision), so that a call it would refuse, or would read wrongly, fails here too.
"""

from __future__ import annotations

import torch

PAGE_TOKENS = 256


class FlashRefusal(RuntimeError):
    """What the package's own checks raise."""


class FlashReference:
    """`allow_float32` lifts the limit to half precision, for comparisons that rounding must not blur."""

    def __init__(self, *, allow_float32: bool) -> None:
        self.dtypes = [torch.float16, torch.bfloat16] + [torch.float32] * allow_float32
        self.calls: list[str] = []

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        rotary_cos: torch.Tensor | None = None,
        rotary_sin: torch.Tensor | None = None,
        cache_seqlens: torch.Tensor | None = None,
        cache_batch_idx: torch.Tensor | None = None,
        cache_leftpad: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> torch.Tensor:
        """q [batch, seqlen_q, heads, head_dim]; caches [pages, page tokens, KV heads, head_dim]."""
        self.calls.append("with_kvcache")
        unused = (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad)
        _require(all(argument is None for argument in unused), "only what the engine uses is modelled")
        _require(q.dim() == 4, "q is [batch, seqlen_q, heads, head_dim]")
        batch = q.shape[0]
        table = self._checked_table(q, k_cache, v_cache, block_table, batch)
        lengths = _checked_int32(cache_seqlens, (batch,), "seqlens_k")
        _require(int(lengths.max()) <= table.shape[1] * k_cache.shape[1], "a sequence is longer than its block table")
        out = torch.empty_like(q)
        for index in range(batch):
            keys, values = _read(k_cache, v_cache, table[index], int(lengths[index]))
            out[index] = _attention(q[index], keys, values, softmax_scale, causal, window_size)
        return out

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [total_q, heads, head_dim]; with a block table k and v are paged as above."""
        self.calls.append("varlen")
        is_plain = dropout_p == 0.0 and softcap == 0.0 and alibi_slopes is None and not return_attn_probs
        _require(is_plain, "only what the engine uses is modelled")
        _require(type(max_seqlen_q) is int and type(max_seqlen_k) is int, "maxima are numbers, not tensors")
        _require(q.dim() == 3, "q is [total_q, heads, head_dim]")
        batch = cu_seqlens_q.numel() - 1
        table = self._checked_table(q, k, v, block_table, batch)
        _checked_int32(cu_seqlens_q, (batch + 1,), "cu_seqlens_q")
        _checked_int32(cu_seqlens_k, (batch + 1,), "cu_seqlens_k")
        _require(int(cu_seqlens_q[0]) == int(cu_seqlens_k[0]) == 0, "running sums begin with 0")
        _require(int(cu_seqlens_q[-1]) == q.shape[0], "queries and cu_seqlens_q disagree")
        # The kernels would cut off longer sequences than the maxima without a word.
        _require(int(cu_seqlens_q.diff().max()) <= max_seqlen_q, "max_seqlen_q is too small")
        longest = int(cu_seqlens_k.diff().max())
        _require(longest <= max_seqlen_k <= table.shape[1] * k.shape[1], "max_seqlen_k is too small or too large")
        out = torch.empty_like(q)
        for index in range(batch):
            rows = slice(int(cu_seqlens_q[index]), int(cu_seqlens_q[index + 1]))
            keys, values = _read(k, v, table[index], int(cu_seqlens_k[index + 1] - cu_seqlens_k[index]))
            out[rows] = _attention(q[rows], keys, values, softmax_scale, causal, window_size)
        return out

    def _checked_table(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_table: torch.Tensor | None, batch: int
    ) -> torch.Tensor:
        heads, head_dim = q.shape[-2:]
        _require(batch > 0, "batch size must be positive")
        _require(q.dtype in self.dtypes, "FlashAttention only support fp16 and bf16 data type")
        _require(q.dtype == k.dtype == v.dtype, "query, key and value must have the same dtype")
        _require(q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "the last dimension must be contiguous")
        _require(head_dim <= 256 and head_dim % 8 == 0, "head_size must be at most 256 and a multiple of 8")
        _require(k.dim() == 4 and k.shape == v.shape and k.shape[-1] == head_dim, "wrong shape of k or v")
        _require(heads % k.shape[2] == 0, "number of heads in key/value must divide number of heads in query")
        _require(k.shape[1] % PAGE_TOKENS == 0, "Paged KV cache block size must be divisible by 256")
        if block_table is None:
            raise FlashRefusal("only paged calls are modelled")
        _require(block_table.dtype == torch.int32, "block_table must have dtype torch.int32")
        _require(block_table.stride(-1) == 1, "block_table must have contiguous last dimension")
        _require(block_table.dim() == 2 and block_table.shape[0] == batch, "wrong shape of block_table")
        return block_table


def _require(condition: bool, words: str) -> None:
    if not condition:
        raise FlashRefusal(words)


def _checked_int32(tensor: torch.Tensor | None, shape: tuple[int, ...], name: str) -> torch.Tensor:
    if tensor is None:
        raise FlashRefusal(f"{name} is missing")
    _require(tensor.dtype == torch.int32, f"{name} must have dtype int32")
    _require(tensor.is_contiguous() and tensor.shape == shape, f"{name} must be contiguous and of shape {shape}")
    return tensor


def _read(
    k_cache: torch.Tensor, v_cache: torch.Tensor, pages: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [length, KV heads, head_dim] of one sequence. Only pages that hold it are looked at."""
    held = pages[: -(-length // k_cache.shape[1])].long()
    return tuple(cache[held].flatten(0, 1)[:length] for cache in (k_cache, v_cache))  # type: ignore[return-value]


def _attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
) -> torch.Tensor:
    """q [seqlen_q, heads, head_dim]. The mask is aligned to the bottom right corner; a row that sees nothing is 0."""
    seqlen_q, heads, head_dim = q.shape
    seqlen_k, kv_heads = keys.shape[:2]
    own = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    places = torch.arange(seqlen_k)[None]
    left, right = window[0], 0 if causal else window[1]
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left >= 0:
        seen &= places >= own - left
    if right >= 0:
        seen &= places <= own + right
    group = heads // kv_heads
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * (head_dim**-0.5 if scale is None else scale)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
