"""What the directory counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from kv.tiers import TIERS, Tier


def _by_tier() -> dict[Tier, int]:
    return dict.fromkeys(TIERS, 0)


@dataclass(slots=True)
class DirectoryCounters:
    """Counts since the start."""

    queries: int = 0
    queried_blocks: int = 0
    hit_blocks: int = 0
    hit_blocks_disk: int = 0
    """Of these, those that only a disk had."""
    leases_granted: int = 0
    leases_expired: int = 0
    puts_committed: int = 0
    puts_aborted: int = 0
    puts_expired: int = 0
    puts_refused: int = 0
    """Commits that came too late or did not fit their put."""
    extents_adopted: int = 0
    adoptions_refused: int = 0
    """Extents found on a disk whose blocks are visible elsewhere, or being put."""
    evicted: dict[Tier, int] = field(default_factory=_by_tier)
    """Copies that went to make room."""
    trimmed: dict[Tier, int] = field(default_factory=_by_tier)
    """Copies that went since a limit was lowered, or found exceeded."""
    expired: dict[Tier, int] = field(default_factory=_by_tier)
    """Copies that outlived their time-to-live."""
    extents_broken: int = 0
    """Dropped because a part was damaged or gone."""
    lost: dict[Tier, int] = field(default_factory=_by_tier)
    """Copies that went with their store."""
    evictions_refused: int = 0
    """Demands for room that could not be met because too much is held."""
