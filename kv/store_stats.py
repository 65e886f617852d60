"""What a node's store says of itself: gauges, and counts since it was started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DiskStats:
    """The disk tier."""

    limit_bytes: int
    """In force: less than what was set for a while after the file system was full."""
    used_bytes: int
    """All that lies in the folder, and what is reserved for writes under way."""
    other_bytes: int
    """Of these, what is no extent, so that no eviction frees it."""
    num_extents: int
    num_queued_extents: int
    """That wait to be written."""
    is_scanned: bool
    """Whether all that an earlier run left has been listed."""
    num_found_extents: int
    """That an earlier run left, and that are listed."""
    num_unusable_files: int
    num_written_extents: int
    written_bytes: int
    num_demoted_extents: int
    """Of those written, the ones that DRAM had to wait for."""
    demoted_bytes: int
    num_read_extents: int
    read_bytes: int
    num_promoted_extents: int
    """Of those read, the ones that went to DRAM again; for the others there was no room."""
    promoted_bytes: int
    refusals: dict[str, int]
    """By metric label: why something was not written, or not read."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The whole store; fields without a tier in their name are the DRAM tier's."""

    limit_bytes: int
    used_bytes: int
    """Held, and reserved by pulls and reads that are under way."""
    num_extents: int
    num_tails: int
    num_pulls: int
    num_stored_blocks: int
    stored_bytes: int
    """Of their extents."""
    num_expired_tails: int
    num_given_parts: int
    """References handed to readers."""
    given_bytes: int
    """Of those that were in DRAM; the parts of an extent are taken for equally large."""
    num_prefetched_extents: int
    refusals: dict[str, int]
    """By metric label."""
    disk: DiskStats | None
    """None where there is no disk tier, or none that can be used; each try to open one that failed counts as the
    refusal disk_unavailable, and so does the loss of one."""
