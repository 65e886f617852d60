"""Builds what an engine runs on from a model folder and a config: device, memory, weights, lanes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from actors.engine.arena import TORCH_DTYPES, Arena
from actors.engine.attention.choice import choose_backend, default_block_tokens
from actors.engine.attention.interface import AttentionBackend
from actors.engine.config import ConfigError, EngineConfig
from actors.engine.device_memory import zeroed_memory
from actors.engine.kernels.layer_ops import NativeLayerOps
from actors.engine.kernels.library import DTYPES, Kernels, load_kernels
from actors.engine.lane_table import LaneTable
from actors.engine.layer_memory import LayerMemory
from actors.engine.layer_ops import LayerOps, TorchLayerOps
from actors.engine.model import CausalModel
from actors.engine.model_spec import ModelSpec, read_model_spec
from actors.engine.page_copies import PageCopies, make_page_copies
from actors.engine.weight_names import read_layer, read_outer
from actors.engine.weights import Checkpoint, pack, packed_bytes
from kv.layout import KvLayout

_DEFAULT_CPU_KV_BYTES = 1 << 30
# Room for activations, logits, the kernels' workspaces and staging buffers beside weights and KV on a GPU.
_GPU_WORKSPACE_BYTES = 2 << 30

logger = logging.getLogger("equipoise.engine")


@dataclass(frozen=True)
class LoadedModel:
    """A model in device memory, ready to run. The engine owns it."""

    model: CausalModel
    spec: ModelSpec
    layout: KvLayout
    arena: Arena
    lanes: LaneTable
    layer_memory: LayerMemory
    """Whose weights lie in the arena, those that other instances run here included."""
    fingerprint: bytes
    """16 bytes over weights, dtype and layout: KV blocks are exchanged only between equal ones."""
    backend_name: str
    new_backend: Callable[[], AttentionBackend]
    """Another one of the same kind: each keeps what belongs to a step of one instance."""
    copies: PageCopies
    """Between the arena's pages and host memory."""

    @property
    def weight_slabs(self) -> dict[int, range]:
        """By layer: the arena slabs its weights take."""
        return self.layer_memory.slabs


def load_model(folder: Path, config: EngineConfig) -> LoadedModel:
    """Reads the checkpoint into one arena. Raises ConfigError, UnsupportedModelError or CheckpointError."""
    spec = read_model_spec(folder)
    device = choose_device(config.device)
    dtype_name = choose_dtype(config.dtype, spec, device)
    block_tokens = config.block_tokens or default_block_tokens(config.attention, device, dtype_name, spec.head_dim)
    layout = KvLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, block_tokens, dtype_name)
    dtype = TORCH_DTYPES[dtype_name]
    kernels = choose_kernels(config.kernels, device, dtype)
    new_backend = functools.partial(
        choose_backend, config.attention, device, block_tokens, dtype_name, spec.head_dim, kernels
    )
    backend = new_backend()

    checkpoint = Checkpoint(folder)
    outer = pack(read_outer(checkpoint, spec), dtype, lambda num_bytes: zeroed_memory(num_bytes, device))
    first = read_layer(checkpoint, spec, 0)
    slab_bytes = config.slab_pages * layout.page_bytes
    weight_slabs_each = -(-packed_bytes(first, dtype) // slab_bytes)
    kv_slabs = _kv_slabs(config, layout, device, spec.num_layers * weight_slabs_each * slab_bytes)
    arena = Arena(layout, spec.num_layers * weight_slabs_each + kv_slabs, config.slab_pages, device)

    layer_memory = LayerMemory(arena, dtype)
    layers = {
        layer: layer_memory.load(layer, first if layer == 0 else read_layer(checkpoint, spec, layer))
        for layer in range(spec.num_layers)
    }
    lanes = LaneTable(
        arena,
        [(layer, head) for layer in range(spec.num_layers) for head in range(spec.num_kv_heads)],
        config.kv_cache_blocks,
    )
    logger.info(
        "loaded %s on %s: %d layers, %s, %d blocks of %d tokens, %s attention, kernels %s",
        folder, device, spec.num_layers, dtype_name, lanes.num_blocks, block_tokens, backend.name,
        "torch" if kernels is None else kernels.instructions.name.lower(),
    )  # fmt: skip
    ops: LayerOps = TorchLayerOps(spec) if kernels is None else NativeLayerOps(spec, kernels)
    model = CausalModel(spec, outer, layers, arena.pages, lanes, backend, ops)
    fingerprint = _fingerprint(checkpoint, spec, layout)
    copies = make_page_copies(arena.pages)
    return LoadedModel(model, spec, layout, arena, lanes, layer_memory, fingerprint, backend.name, new_backend, copies)


def read_packed_layer(folder: Path, spec: ModelSpec, dtype: torch.dtype, layer: int) -> torch.Tensor:
    """A layer of the checkpoint as it lies in an arena, uint8 on the CPU: for a worker that has it no more. Raises
    CheckpointError."""
    memory: list[torch.Tensor] = []

    def take(num_bytes: int) -> torch.Tensor:
        memory.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return memory[0]

    pack(read_layer(Checkpoint(folder), spec, layer), dtype, take)
    return memory[0]


def choose_device(name: str) -> torch.device:
    """`auto` takes a GPU when torch sees one."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; allowed are auto, cpu and cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device: cuda was asked for, but torch sees no CUDA device; use device: cpu, or give the worker a GPU"
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def choose_dtype(name: str, spec: ModelSpec, device: torch.device) -> str:
    """`auto` takes the checkpoint's dtype; on a CPU float16 becomes bfloat16, for which it has kernels."""
    if name != "auto":
        if name not in TORCH_DTYPES:
            raise ConfigError(f"dtype is {name!r}; allowed are auto, {', '.join(TORCH_DTYPES)}")
        return name
    if spec.checkpoint_dtype not in TORCH_DTYPES:
        return "float32"
    return "bfloat16" if spec.checkpoint_dtype == "float16" and device.type == "cpu" else spec.checkpoint_dtype


def choose_kernels(name: str, device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """Our own kernels, or None for torch's operators. `auto` takes them on a CPU where they can be built."""
    if name not in ("auto", "torch"):
        raise ConfigError(f"kernels is {name!r}; allowed are auto and torch")
    return load_kernels() if name == "auto" and device.type == "cpu" and dtype in DTYPES else None


def _kv_slabs(config: EngineConfig, layout: KvLayout, device: torch.device, weight_bytes: int) -> int:
    """Slabs for KV: as many for each lane, and at least what the config asks for in blocks."""
    lanes = layout.num_layers * layout.num_kv_heads
    if config.kv_cache_blocks is not None:
        return lanes * -(-config.kv_cache_blocks // config.slab_pages)
    if config.kv_cache_bytes is not None:
        num_bytes = config.kv_cache_bytes
    elif device.type == "cpu":
        num_bytes = _DEFAULT_CPU_KV_BYTES
    else:
        free, total = torch.cuda.mem_get_info(device)
        spoken_for = total - free + weight_bytes + _GPU_WORKSPACE_BYTES
        num_bytes = int(total * config.gpu_memory_utilization) - spoken_for
    slabs_each = num_bytes // (lanes * config.slab_pages * layout.page_bytes)
    if slabs_each < 1:
        raise ConfigError(
            f"{max(num_bytes, 0) / 2**30:.2f} GiB are left for the KV cache; {lanes} lanes need at least "
            f"{lanes * config.slab_pages * layout.page_bytes / 2**30:.2f} GiB (one slab each): raise kv_cache_gib or "
            "gpu_memory_utilization, or lower slab_pages"
        )
    return lanes * slabs_each


def _fingerprint(checkpoint: Checkpoint, spec: ModelSpec, layout: KvLayout) -> bytes:
    digest = xxhash.xxh3_128(checkpoint.fingerprint())
    digest.update(repr((spec, layout)).encode())
    return digest.digest()
