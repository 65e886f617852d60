"""Memory for weights and KV."""

from __future__ import annotations

import contextlib
import mmap

import torch


def zeroed_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes] of zeros on `device`, for as long as the tensor or a view of it lives.

    On a CPU with Linux it asks for huge pages: a step reads all weights, and KV from pages of a few KiB all over the
    arena, and finding each of them in memory by small pages takes longer than reading it. Physical memory is taken
    here, since a lane's pages touch nearly all huge pages at once: the first request would wait for it.
    """
    if device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
    tensor[:: mmap.PAGESIZE].zero_()
    return tensor
