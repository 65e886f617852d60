"""Which attention backend runs, decided from device, dtype, model and pages."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from actors.engine.attention.interface import AttentionBackend
from actors.engine.attention.native import NativeAttention
from actors.engine.attention.torch_backend import TorchAttention
from actors.engine.kernels.library import Kernels

DEFAULT_BLOCK_TOKENS = 16
"""Short enough for short prefixes to be shared."""

FLASH_PAGE_TOKENS = 256
"""flash-attn 2 wants pages of a multiple of so many tokens."""


class BackendError(ValueError):
    """The backend that was asked for does not work here."""


def flash_obstacle(device: torch.device, dtype: str, head_dim: int) -> str | None:
    """Why flash-attn 2 cannot run such a model here, or None. Its own limits: an NVIDIA GPU from Ampere on, half
    precision, heads of at most 256 numbers and a multiple of 8."""
    if device.type != "cuda":
        return f"a CUDA device is needed, and the device is {device.type}"
    if dtype not in ("float16", "bfloat16"):
        return f"dtype must be float16 or bfloat16, and it is {dtype}"
    if head_dim > 256 or head_dim % 8:
        return f"heads must have at most 256 numbers and a multiple of 8, and they have {head_dim}"
    if importlib.util.find_spec("flash_attn") is None:
        return "the flash_attn package is not installed (pip install flash-attn)"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"the GPU must have compute capability 8.0 or more (Ampere), and it has {capability[0]}.{capability[1]}"
    try:
        importlib.import_module("flash_attn")
    except ImportError as error:  # built for another version of torch or CUDA
        return f"the flash_attn package cannot be imported: {error}"
    return None


def choose_backend(
    name: str, device: torch.device, block_tokens: int, dtype: str, head_dim: int, kernels: Kernels | None = None
) -> AttentionBackend:
    """`auto` takes flash-attn where it runs and pages have a multiple of 256 tokens, else our own `kernels` if they are
    given, else torch's.

    Raises BackendError: an unknown name, or `flash` where it cannot run.
    """
    if name not in ("auto", "torch", "flash"):
        raise BackendError(f"attention is {name!r}; allowed are auto, torch and flash")
    if name == "torch":
        return TorchAttention()
    obstacle = flash_obstacle(device, dtype, head_dim)
    if obstacle is None and block_tokens % FLASH_PAGE_TOKENS:
        obstacle = f"block_tokens must be a multiple of {FLASH_PAGE_TOKENS}, and it is {block_tokens}"
    if obstacle is None:
        from actors.engine.attention.flash import FlashAttention

        return FlashAttention()
    if name == "flash":
        raise BackendError(f"attention: flash cannot be used: {obstacle}; attention: torch runs everywhere")
    return TorchAttention() if kernels is None else NativeAttention(kernels)


def default_block_tokens(name: str, device: torch.device, dtype: str, head_dim: int) -> int:
    """Tokens a block where the config leaves it open: flash-attn's pages where `choose_backend` will take it."""
    if name == "torch" or flash_obstacle(device, dtype, head_dim) is not None:
        return DEFAULT_BLOCK_TOKENS
    return FLASH_PAGE_TOKENS
