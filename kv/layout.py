"""The shape of KV: how many bytes a page, a block and a token take. Pure arithmetic, no arrays."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Element types that KV may have, with their size in bytes."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Dimensions of one model's KV. Two workers can exchange KV only when theirs are equal.

    Raises:
        ValueError: a dimension is not a positive int, or the dtype is not one of `DTYPE_BYTES`.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    """Tokens per block."""
    dtype: str

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_dim", "block_tokens"):
            value = getattr(self, field)
            if type(value) is not int or value < 1:
                raise ValueError(f"{field}={value!r} is not allowed: give an int of at least 1")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype={self.dtype!r} is not allowed: give one of {', '.join(DTYPE_BYTES)}")

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: K and V of one KV head of one layer for `block_tokens` tokens."""
        return 2 * self.block_tokens * self.head_dim * self.dtype_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: its pages of all layers and KV heads."""
        return self.num_layers * self.num_kv_heads * self.page_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token, all layers and KV heads."""
        return self.block_bytes // self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens; the last one may be partial."""
        return -(-tokens // self.block_tokens)

    def full_blocks(self, tokens: int) -> int:
        """Blocks that `tokens` tokens fill completely; only these get a key."""
        return tokens // self.block_tokens
