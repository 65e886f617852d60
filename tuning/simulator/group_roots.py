"""Groups of a policy, where a policy for the simulator names blocks of a trace."""

from __future__ import annotations

from typing import Final

from kv.policy.policy_file import PolicySpec
from tuning.trace.trace import Trace
from tuning.ttl.groups import group_of_block

_KEY_BYTES: Final = 32


def root_key(block_id: int) -> bytes:
    """What stands for a block of a trace where a `GroupTtl` wants a block's key: its id, big-endian."""
    return block_id.to_bytes(_KEY_BYTES, "big")


def groups_of_trace(trace: Trace, policy: PolicySpec) -> list[int] | None:
    """Group numbers by block id, as `kv.policy.groups.GroupTable` would give them; None without groups.

    Raises:
        ValueError: a group's root is no block of the trace.
    """
    if not policy.groups:
        return None
    groups: list[int] = group_of_block(trace, [int.from_bytes(group.root, "big") for group in policy.groups]).tolist()
    return groups
