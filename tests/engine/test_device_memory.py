"""Memory of weights and KV."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.engine.device_memory import zeroed_memory

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_bytes", [0, 1, 100, 4096, 5_000_000])
def test_is_zero_writable_and_of_its_own(num_bytes: int) -> None:
    first, second = zeroed_memory(num_bytes, CPU), zeroed_memory(num_bytes, CPU)
    assert first.shape == (num_bytes,)
    assert first.dtype == torch.uint8
    assert not first.any()
    first.fill_(7)
    assert not second.any()


def test_views_outlive_the_tensor() -> None:
    view = zeroed_memory(1 << 20, CPU).view(torch.bfloat16)[1000:]
    view.fill_(2)
    assert bool((view == 2).all())


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="this kernel has no huge pages"
)
def test_huge_pages_are_asked_for() -> None:
    memory = zeroed_memory(8 << 20, CPU)
    flags: list[str] = []
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = line.split(" ")[0].split("-")
        if len(bounds) == 2:
            is_inside = int(bounds[0], 16) <= memory.data_ptr() < int(bounds[1], 16)
        elif is_inside and line.startswith("VmFlags:"):
            flags = line.split()
    assert "hg" in flags
