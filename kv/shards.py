"""Which shard of the directory knows what. Pure.

The directory is divided by the roots of chains: all blocks that begin with the same first block belong to one shard, so
that a look-up stays one call, and a prefix, its groups and its holds one shard's affair. Roots are hashes (`kv.keys`),
so they spread evenly, and who does not know the salt cannot aim at a shard; but a root is never divided, however often
it is used.

The name of an extent ends with the first bytes of its root. So it tells the shard without anybody asking, whatever the
number of shards is by then, and files on disk need nothing beside it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

_ROOT_BYTES = 4
_RANDOM_BYTES = 12


def new_extent_id(store_id: str, root: bytes) -> str:
    """A name that nothing had yet: the store's, then 32 hexadecimal digits, the last eight of them the root's.

    Args:
        root: key of the first block of the chain that the extent lies on.
    """
    return f"{store_id}/{secrets.token_hex(_RANDOM_BYTES)}{root_digits(root)}"


def root_digits(root: bytes) -> str:
    """What the names of a root's extents end with."""
    return root[:_ROOT_BYTES].hex()


def shard_of_chain(keys: Sequence[bytes], num_shards: int) -> int:
    """The shard of a chain, given from its first block. An empty one may go anywhere: to the first."""
    return int.from_bytes(keys[0][:_ROOT_BYTES]) % num_shards if keys else 0


def shard_of_extent(extent_id: str, num_shards: int) -> int:
    """The shard of an extent, by its name."""
    return int(extent_id[-2 * _ROOT_BYTES :], 16) % num_shards


def hold_id_of(own_id: int, shard: int, num_shards: int) -> int:
    """What a lease or put of a shard is called outside, where those of all shards are told apart."""
    return own_id * num_shards + shard


def own_hold_id(hold_id: int, num_shards: int) -> tuple[int, int]:
    """Shard of a lease or put, and what that shard calls it."""
    own_id, shard = divmod(hold_id, num_shards)
    return shard, own_id
