"""What is looked at on one node of a cluster. Imported there, so that a node without this package is found out."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import shutil
import socket
import time
import uuid
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kv.disk.settings import folder_at
from kv.errors import DiskTierError

PACKAGES = ("equipoise", "ray", "torch", "transformers", "tokenizers", "safetensors", "numpy", "llguidance", "xxhash")
"""Where these differ, workers may not understand each other, or tokens may differ by where they are computed."""
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Of a folder. Bytes a second, through the file system and onto the device."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    free_bytes: int


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What one node says of itself."""

    versions: dict[str, str]
    gpu_bytes: tuple[int, ...] = ()
    """Memory of each GPU that torch sees."""
    disk: DiskSpeed | None = None
    """None: not asked for, or it failed."""
    disk_failure: str | None = None


def probe_node(disk_folder: str | None, disk_bytes: int) -> NodeFacts:
    """Looks at the node that this runs on. `disk_folder` is made if it is not there; what is written goes again."""
    disk, failure = None, None
    if disk_folder is not None:
        try:
            disk = measure_disk(folder_at(disk_folder), disk_bytes)
        except OSError as error:
            failure = f"{disk_folder}: {error.strerror or error}"
        except DiskTierError as error:
            failure = str(error)
    return NodeFacts(_versions(), _gpu_bytes(), disk, failure)


def measure_disk(folder: Path, num_bytes: int) -> DiskSpeed:
    """Writes a file of so many bytes until the device has it, and reads it back from there. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path, chunk = folder / f".speed-{uuid.uuid4().hex}", os.urandom(min(num_bytes, _CHUNK_BYTES))
    try:
        began_s = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            written = 0
            while written < num_bytes:
                written += file.write(chunk)
            os.fsync(file.fileno())
            write_s = time.perf_counter() - began_s
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else memory would be read
        began_s = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            while file.read(_CHUNK_BYTES):
                pass
        read_s = time.perf_counter() - began_s
    finally:
        path.unlink(missing_ok=True)
    return DiskSpeed(written / write_s, written / read_s, shutil.disk_usage(folder).free)


class GroupMember:
    """One process of a group, on the node that this runs on. As an actor: that it answers at all shows that it has got
    its GPU."""

    def free_address(self) -> str:
        """Where the others can meet this one: its node's address as they see it, and a free port."""
        from ray.util import get_node_ip_address

        with socket.socket() as probe:
            probe.bind(("", 0))
            address = get_node_ip_address()  # type: ignore[no-untyped-call]
            return f"{address}:{probe.getsockname()[1]}"

    def sum_of_ranks(self, rank: int, num_ranks: int, address: str, backend: str, timeout_s: float) -> float:
        """Joins the group, and adds up their ranks over the network. Raises what torch raises."""
        import torch
        from torch import distributed

        device = "cuda" if backend == "nccl" else "cpu"
        distributed.init_process_group(
            backend,
            init_method=f"tcp://{address}",
            rank=rank,
            world_size=num_ranks,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        try:
            total = torch.full((1,), float(rank), device=device)
            distributed.all_reduce(total)
            return float(total.item())
        finally:
            with contextlib.suppress(RuntimeError):  # a member that is gone; what went wrong is on its way already
                distributed.destroy_process_group()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _gpu_bytes() -> tuple[int, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count()))
