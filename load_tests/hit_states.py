"""Where a prefix can be found, how long to wait until it is only there, and whether a request really found it there.

Pure: no clock, no I/O.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from load_tests.app_counters import AppCounts, AppError, AppSizes

HitState = Literal["recompute", "device hit", "DRAM hit", "disk hit"]
STATES: tuple[HitState, ...] = ("recompute", "device hit", "DRAM hit", "disk hit")
"""In the order in which a round has them."""


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Every round brings one new prefix, and comes back to two earlier ones: the prefix of `dram_after` rounds ago has
    left the device's pool by then and is in DRAM, that of `disk_after` rounds ago has left DRAM too."""

    dram_after: int
    disk_after: int


def plan_rounds(sizes: AppSizes, prompt_tokens: int, rounds: int) -> RoundPlan:
    """When to come back to a prefix. Only the one new prefix of each round is counted on to push others out.

    Args:
        prompt_tokens: of each prompt, answer included.
        rounds: with a sample of each state.

    Raises:
        AppError: pool, DRAM and disk do not have sizes with which that can be done; the message says which would do.
    """
    if sizes.pool_tokens < prompt_tokens:
        raise AppError(
            f"the pool holds {sizes.pool_tokens} tokens and a prompt takes {prompt_tokens}: give "
            f"engine.kv_cache_blocks of at least {-(-prompt_tokens // sizes.block_tokens)}"
        )
    prompt_bytes = prompt_tokens * sizes.kv_bytes_per_token
    dram_after = math.ceil(sizes.pool_tokens / prompt_tokens) + 1
    # At most two prefixes a round come to DRAM: the new one, and the one that is read from disk.
    least_dram = (2 * dram_after + 2) * prompt_bytes
    if sizes.dram_bytes < least_dram:
        raise AppError(
            f"store.dram_gib of {sizes.dram_bytes / 2**30:.3f} loses prefixes before they have left the pool of "
            f"{sizes.pool_tokens} tokens: give at least {least_dram / 2**30:.3f}, or fewer engine.kv_cache_blocks"
        )
    disk_after = dram_after + math.ceil(sizes.dram_bytes / prompt_bytes) + 2
    least_disk = 2 * (disk_after + rounds) * prompt_bytes
    if sizes.disk_bytes < least_disk:
        raise AppError(
            f"store.disk.limit_gib of {sizes.disk_bytes / 2**30:.3f} may lose prefixes that are to be read again: give "
            f"at least {least_disk / 2**30:.3f}, or less store.dram_gib"
        )
    return RoundPlan(dram_after, disk_after)


def why_not(
    state: HitState,
    prefix_tokens: int,
    block_tokens: int,
    cached_tokens: int | None,
    before: AppCounts,
    after: AppCounts,
) -> str | None:
    """What shows that a request did not find its prefix where `state` says; None when all that is counted agrees.

    Args:
        prefix_tokens: common to this request and the earlier one.
        cached_tokens: as the server answered.
        before, after: with nothing else between them.
    """
    blocks = prefix_tokens // block_tokens
    expected = {
        "cached tokens": 0 if state == "recompute" else blocks * block_tokens,
        "tokens fetched from the store": blocks * block_tokens if state in ("DRAM hit", "disk hit") else 0,
        "tokens whose fetch was declined": 0,
    }
    found = {
        "cached tokens": cached_tokens,
        "tokens fetched from the store": after.fetched_tokens - before.fetched_tokens,
        "tokens whose fetch was declined": after.declined_tokens - before.declined_tokens,
    }
    wrong = [f"{found[name]} {name} instead of {count}" for name, count in expected.items() if found[name] != count]
    disk_blocks = after.disk_hit_blocks - before.disk_hit_blocks
    disk_reads = after.disk_read_extents - before.disk_read_extents
    if state == "disk hit":
        if disk_blocks < blocks or disk_reads == 0:
            wrong.append(f"{disk_blocks} of {blocks} blocks were on disk only, {disk_reads} extents were read")
    elif disk_blocks or disk_reads:
        wrong.append(f"{disk_blocks} blocks were on disk only, {disk_reads} extents were read")
    return ", ".join(wrong) or None
