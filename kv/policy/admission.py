"""What is worth writing to disk."""

from __future__ import annotations

from enum import StrEnum


class DiskAdmission(StrEnum):
    """Which extents of the DRAM tier are copied to the disk tier. Members are named as settings name them."""

    ALWAYS = "always"
    """All of them, once they are stored."""
    ON_REUSE = "on_reuse"
    """Those that were used again: a prefix that is never seen twice costs no write and no place on the disk."""

    def admits(self, num_uses: int) -> bool:
        """Whether an extent goes to disk.

        Args:
            num_uses: how often it was used since it was stored, the put that stored it not counted.
        """
        return self is DiskAdmission.ALWAYS or num_uses >= 1
