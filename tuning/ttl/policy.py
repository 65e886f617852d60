"""Group TTLs as a policy that the live store and the simulator load."""

from __future__ import annotations

from collections.abc import Sequence

from kv.policy.policy_file import Eviction, GroupTtl, PolicySpec
from tuning.ttl.plan import GroupTtlPlan

SHORTEST_TTL_S = 1e-6
"""In the place of 0, which a policy does not allow: a microsecond keeps no block for a later use either."""


def to_policy_spec(plan: GroupTtlPlan, root_keys: Sequence[bytes], eviction: Eviction = "lru") -> PolicySpec:
    """The policy of a plan. Its groups are named group-1 and so on, in the order of their numbers.

    Args:
        root_keys: for each group but the rest, by number from 1, the key (32 bytes) of the block at its root: that of
            the live store, or for the simulator what `tuning.simulator.group_roots.root_key` makes of the block's id.
        eviction: what orders the blocks that have not expired.

    Raises:
        ValueError: there is not one key for each group.
    """
    if len(root_keys) != len(plan.ttls_s) - 1:
        raise ValueError(f"{len(root_keys)} keys for {len(plan.ttls_s) - 1} groups: give each but the rest its root's")
    ttls_s = [None if ttl_s is None else max(ttl_s, SHORTEST_TTL_S) for ttl_s in plan.ttls_s]
    groups = zip(root_keys, ttls_s[1:], strict=True)
    return PolicySpec(
        eviction,
        ttls_s[0],
        tuple(GroupTtl(f"group-{number}", key, ttl_s) for number, (key, ttl_s) in enumerate(groups, start=1)),
    )
