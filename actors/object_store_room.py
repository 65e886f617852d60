"""Whether a node's object store has room for the DRAM tier and for what is in flight beside it.

What the tier's limit does not count are objects that somebody reads: copies from other nodes, extents that were evicted
while they are fetched, and those read from disk for which there was no room. As an estimate, each worker of the node
reads one request of the longest kind at a time (ours).
"""

from __future__ import annotations

from typing import Final

GIB: Final = 1 << 30


def needed_bytes(dram_bytes: int, longest_request_bytes: list[int]) -> int:
    """That the object store should have. `longest_request_bytes`: KV of the longest request of each worker."""
    return dram_bytes + sum(longest_request_bytes)


def room_problem(object_store_bytes: int, dram_bytes: int, longest_request_bytes: list[int]) -> str | None:
    """What is wrong with the size of an object store, and what to do; None when it has room."""
    needed = needed_bytes(dram_bytes, longest_request_bytes)
    if needed <= object_store_bytes:
        return None
    in_flight = sum(longest_request_bytes)
    left_gib = max(0, object_store_bytes - in_flight) * 100 // GIB / 100
    return (
        f"Ray's object store of {object_store_bytes / GIB:.2f} GiB is too small for store.dram_gib "
        f"({dram_bytes / GIB:.2f} GiB) and {in_flight / GIB:.2f} GiB in flight (the longest request of each worker): "
        f"Ray would spill KV and read it back, which is slow. Start Ray with --object-store-memory {needed} or more, "
        f"or set store.dram_gib to {left_gib:g} or less"
    )
