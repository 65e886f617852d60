"""What a device can do at best, measured: how fast it moves bytes and multiplies matrices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Medians over several runs."""

    bytes_per_s: float
    """Read and written by a copy within the device's memory."""
    flop_per_s: float
    """In a large matrix product, two operations for each multiplication with its addition."""


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What a model's steps must move and compute, whatever the program."""

    weight_bytes: int
    """Read by every step; an embedding that is not also the head is only looked up."""
    kv_bytes_per_token: int
    parameters: int
    """Multiplied with every token."""

    def decode_floor_s(self, rates: DeviceRates, batch: int, context_tokens: float) -> float:
        """Least time of a decode step: weights and KV are read once, at the speed of a copy."""
        return (self.weight_bytes + batch * context_tokens * self.kv_bytes_per_token) / rates.bytes_per_s

    def prefill_floor_s(self, rates: DeviceRates, tokens: int) -> float:
        """Least time to compute so many prompt tokens: two operations for each parameter; attention is left out."""
        return 2 * self.parameters * tokens / rates.flop_per_s


def measure_rates(device: torch.device, dtype: torch.dtype, *, copy_bytes: int, matrix_size: int) -> DeviceRates:
    """Copies `copy_bytes` and multiplies two square matrices, several times each."""
    source = torch.ones(copy_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy_s = median_time_s(device, lambda: target.copy_(source))
    left = torch.randn(matrix_size, matrix_size, device=device).to(dtype)
    right = torch.randn(matrix_size, matrix_size, device=device).to(dtype)
    product_s = median_time_s(device, lambda: left @ right)
    return DeviceRates(2 * source.numel() * 4 / copy_s, 2 * matrix_size**3 / product_s)


def median_time_s(device: torch.device, function: Callable[[], object], *, runs: int = 10, warm_up: int = 3) -> float:
    """Wall time of one call, each waited for."""
    times = []
    for run in range(warm_up + runs):
        started_s = now_s(device)
        function()
        if run >= warm_up:
            times.append(now_s(device) - started_s)
        else:
            now_s(device)
    return statistics.median(times)


def now_s(device: torch.device) -> float:
    """The clock, once the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
