"""Block keys: what makes two KV blocks the same block.

The key of a block is SHA-256 over five fields, each preceded by its length in bytes (unsigned 64-bit little endian), so
that no two different sets of fields give the same input, whatever bytes they hold:

    domain tag | key of the parent block (empty for the first) | token ids (unsigned 32-bit little endian) |
    model fingerprint | cache salt

A key thereby names the whole prefix up to its block, is the same in every process and on every machine, and is shared
by two requests only when tokens, model and salt are all equal.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

KEY_BYTES = 32

_DOMAIN = b"equipoise/kv-block/1"


def block_keys(token_ids: Sequence[int], block_tokens: int, fingerprint: bytes, salt: bytes) -> list[bytes]:
    """Keys (32 bytes each) of the full blocks of `token_ids`, first block first; a partial last block gets none.

    Args:
        token_ids: ids from 0 to 2**32 - 1.
        block_tokens: tokens per block, at least 1.
        fingerprint: identifies weights, dtype and layout of the model.
        salt: separates tenants; requests with different salts share no key.

    Raises:
        ValueError: `block_tokens` is below 1, or a token id does not fit 32 bits.
    """
    return extend_block_keys([], token_ids, block_tokens, fingerprint, salt)


def extend_block_keys(
    keys: Sequence[bytes], token_ids: Sequence[int], block_tokens: int, fingerprint: bytes, salt: bytes
) -> list[bytes]:
    """`block_keys(token_ids, ...)` when the keys of its first blocks are already known: only new blocks are hashed.

    Args:
        keys: keys of the first `len(keys)` full blocks of `token_ids`, from an earlier call with the same other
            arguments. Trusted: they are not computed again. Left as they are.

    Returns:
        A new list: `keys` and the keys of the full blocks after them.

    Raises:
        ValueError: as `block_keys`, or `keys` has more entries than `token_ids` has full blocks.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens={block_tokens} is not allowed: give at least 1")
    num_blocks = len(token_ids) // block_tokens
    if len(keys) > num_blocks:
        raise ValueError(
            f"{len(keys)} keys were given for {num_blocks} full blocks ({len(token_ids)} tokens): "
            "give the keys of a prefix of these tokens"
        )
    new_tokens = token_ids[len(keys) * block_tokens : num_blocks * block_tokens]
    try:
        packed = struct.pack(f"<{len(new_tokens)}I", *new_tokens)
    except struct.error as error:
        raise ValueError(f"token ids must be ints from 0 to 2**32 - 1: {error}") from error

    head = _field(_DOMAIN)
    tail = _field(fingerprint) + _field(salt)
    chain = list(keys)
    parent = chain[-1] if chain else b""
    stride = 4 * block_tokens
    for start in range(0, len(packed), stride):
        tokens = packed[start : start + stride]
        parent = hashlib.sha256(head + _field(parent) + _field(tokens) + tail).digest()
        chain.append(parent)
    return chain


def _field(value: bytes) -> bytes:
    return len(value).to_bytes(8, "little") + value
