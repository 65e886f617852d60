"""Reads a checkpoint's tensors from safetensors files and packs one layer's weights into device memory.

The fingerprint covers every byte that is read: two workers share KV blocks only when their weights are the same to
the bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open

_ALIGNMENT_BYTES = 64
_INDEX_FILE = "model.safetensors.index.json"


class CheckpointError(ValueError):
    """The folder's files are not a checkpoint that can be read."""


class Checkpoint:
    """A folder of safetensors files, single or sharded. Reads lazily, one tensor at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stored = {_full_name(name): (name, file) for name, file in self._index(folder).items()}
        self._digest = xxhash.xxh3_128()

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def read(self, name: str) -> torch.Tensor:
        """The tensor as stored, on the CPU; its bytes go into the fingerprint."""
        if name not in self._stored:
            raise CheckpointError(f"{self.folder} has no tensor {name!r}: is the checkpoint complete?")
        stored_name, file_name = self._stored[name]
        try:
            with safe_open(self.folder / file_name, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(stored_name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.folder / file_name} cannot be read: {error}") from error
        self._digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        self._digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        return tensor

    def fingerprint(self) -> bytes:
        """16 bytes over all tensors read so far, in the order they were read (the same in every process)."""
        return self._digest.digest()

    @staticmethod
    def _index(folder: Path) -> dict[str, str]:
        if (folder / _INDEX_FILE).exists():
            return dict(json.loads((folder / _INDEX_FILE).read_text())["weight_map"])
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder} holds no .safetensors file; give a folder in Hugging Face format")
        index: dict[str, str] = {}
        for name in files:
            try:
                with safe_open(folder / name, framework="pt") as file:
                    index.update(dict.fromkeys(file.keys(), name))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{folder / name} cannot be read: {error}") from error
        return index


def _full_name(name: str) -> str:
    """Checkpoints saved from a model without its head lack the leading `model.`."""
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


LayerWeights = Mapping[str, torch.Tensor]
"""One layer's tensors by role (`qkv.weight`, `o.bias`, ...), views into one run of the arena."""


def packed_bytes(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> int:
    """Bytes that `pack` needs for these tensors in `dtype`."""
    return sum(_aligned(tensor.numel() * dtype.itemsize) for tensor in tensors.values())


def pack(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, take: Callable[[int], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Copies tensors, cast to `dtype`, into one piece of memory from `take(num_bytes)` and returns views of it."""
    memory = take(packed_bytes(tensors, dtype))
    views = packed_views({role: tensor.shape for role, tensor in tensors.items()}, dtype, memory)
    for role, tensor in tensors.items():
        views[role].copy_(tensor)
    return views


def packed_views(shapes: Mapping[str, torch.Size], dtype: torch.dtype, memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of `memory`, uint8, where `pack` puts tensors of these shapes. The same shapes in the same order lie the
    same way in every process, so a layer can be copied as bytes."""
    views, offset = {}, 0
    for role, shape in shapes.items():
        num_bytes = shape.numel() * dtype.itemsize
        views[role] = memory[offset : offset + num_bytes].view(dtype).view(shape)
        offset += _aligned(num_bytes)
    return views


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
