"""What an earlier run left in a disk tier's folder, as its owner is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kv.disk.extent_file import ExtentIndex
from kv.disk.folder import FolderListing, is_unlinked


@dataclass(frozen=True, slots=True)
class FoundExtent:
    """An extent that an earlier run left. Its payload is not verified: whoever reads it does that."""

    extent_id: str
    index: ExtentIndex
    last_use_s: float
    """Seconds since 1970, never in the future."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in the folder that is no usable extent."""

    path: Path
    extent_id: str | None
    """For a file with an extent's name; as long as it is not removed, `DiskTier.remove` takes it."""
    reason: str
    """One short word for a metric label: temporary, foreign, or that of a `PartError`."""
    detail: str
    disk_bytes: int
    is_removed: bool
    """Else it takes up its bytes of the limit."""


def leftovers(listing: FolderListing, *, remove: bool) -> list[Problem]:
    """What has no extent's name. With `remove`, what lies where only a disk tier writes is removed."""
    return [
        Problem(
            other.path,
            None,
            other.reason,
            "an extent that was not finished" if other.reason == "temporary" else "not a file of this tier",
            other.disk_bytes,
            is_removed=remove and other.is_removable and is_unlinked(other.path),
        )
        for other in listing.others
    ]
