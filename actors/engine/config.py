"""How an engine is set up. Plain data, checked at once; the app's settings are turned into this."""

from __future__ import annotations

import math
from dataclasses import dataclass

from actors.engine.scheduler import SchedulerSettings


class ConfigError(ValueError):
    """A setting that cannot work on this machine or with this model."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine on one device. `auto` and None are filled in when the engine is built, from the device and the
    model."""

    device: str = "auto"
    """auto, cpu or cuda."""
    dtype: str = "auto"
    """auto (the checkpoint's), float32, bfloat16 or float16."""
    block_tokens: int | None = None
    """Tokens a KV block; None: 16, or 256 where flash-attn is used."""
    slab_pages: int = 16
    """Pages a slab: the grain in which memory moves between lanes and weights."""
    kv_cache_bytes: int | None = None
    """None: 1 GiB on a CPU; what gpu_memory_utilization leaves on a GPU."""
    kv_cache_blocks: int | None = None
    """Exactly so many blocks instead."""
    gpu_memory_utilization: float = 0.9
    max_batch_tokens: int = 512
    max_running_requests: int = 64
    max_steps_in_flight: int = 2
    """Steps under way at a time where some layers lie on other workers; 1 where all are here."""
    hosted_slice_s: float | None = None
    """What another worker may take for its layers of a prompt's chunk; None: as long as for a step of its own, as far
    as that pays."""
    hosting_pause: float = 1.0
    """Between two decode steps of a worker that runs layers of others, over what the first one took; 0: none."""
    max_context_tokens: int | None = None
    """None: the model's own limit. Never more than the KV pool holds."""
    attention: str = "auto"
    """auto, torch or flash."""
    kernels: str = "auto"
    """auto (our own on a CPU where they can be built) or torch."""
    cuda_graphs: bool = True
    """Capture decode steps in CUDA graphs on a CUDA device."""
    early_export_bytes: int = 4 << 20
    """A prompt that is to be handed over gives away what it has filled, while the rest is computed, whenever that is so
    much. Less is not worth a pull of its own: parts are to be 1 to 16 MiB."""

    def __post_init__(self) -> None:
        if self.kv_cache_bytes is not None and self.kv_cache_blocks is not None:
            raise ConfigError("both kv_cache_bytes and kv_cache_blocks are given; give one of them")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be above 0 and at most 1"
            )
        for name in ("slab_pages", "early_export_bytes", "max_steps_in_flight"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.hosted_slice_s is not None and self.hosted_slice_s <= 0:
            raise ConfigError(f"hosted_slice_s is {self.hosted_slice_s}; it must be above 0, or None")
        if not (math.isfinite(self.hosting_pause) and self.hosting_pause >= 0):
            raise ConfigError(f"hosting_pause is {self.hosting_pause}; it must be finite and 0 or more")
        self.scheduler_settings(self.block_tokens or 16)

    def scheduler_settings(self, block_tokens: int) -> SchedulerSettings:
        """The scheduler's part, checked."""
        return SchedulerSettings(block_tokens, self.max_batch_tokens, self.max_running_requests)
