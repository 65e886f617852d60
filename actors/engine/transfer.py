"""Small host tables on their way to the device, in the middle of a step."""

from __future__ import annotations

import torch


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values`, a host tensor, on `device`. Queued, not waited for: a copy from pageable memory would wait until a CUDA
    device has done all it was given. On the CPU it may be the same tensor.

    Pinned memory comes from torch's cache, which gives it to nobody else before the copy from it is done.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
