"""What a disk tier is made with. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kv.errors import DiskTierError
from kv.policy.admission import DiskAdmission


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """The disk tier of each node."""

    folder: str
    """On the node's own disk, of this store alone; made when it is not there."""
    limit_bytes: int
    """All that lies in the folder takes at most so much."""
    admission: DiskAdmission = DiskAdmission.ALWAYS
    remove_leftovers: bool = True
    """See `kv.disk.tier.DiskTier.open`."""
    retry_s: float = 10.0
    """A folder that could not be used, or not be written to, is not tried again before."""


def folder_at(given: str) -> Path:
    """The folder that a setting names on this node, which need not be there; `~` is somebody's home.

    Raises:
        DiskTierError: no folder can have this name, or nobody here has this home.
    """
    try:
        if "\0" in given:
            raise ValueError("no name has a null byte in it")
        return Path(given).expanduser()
    except (RuntimeError, ValueError) as error:
        raise DiskTierError(f"{given!r} cannot be a disk tier's folder ({error}): give a folder's path") from error
