"""torch's own kernels over pages against dense attention."""

from __future__ import annotations

import pytest
import torch

from actors.engine.attention.choice import BackendError, choose_backend, default_block_tokens, flash_obstacle
from actors.engine.attention.interface import AttentionBackend
from actors.engine.attention.torch_backend import TorchAttention
from tests.engine.attention_contract import AttentionContract

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class TestTorchAttention(AttentionContract):
    block_tokens = 4
    max_examples = 150

    def make_backend(self) -> AttentionBackend:
        return TorchAttention()


class TestTorchAttentionOverWholeTiles(AttentionContract):
    """Blocks as long as the tiles that query rows are padded to: then a whole prompt needs no mask."""

    block_tokens = 16
    max_examples = 100

    def make_backend(self) -> AttentionBackend:
        return TorchAttention()


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_torch_is_chosen_where_flash_cannot_run(name: str) -> None:
    assert choose_backend(name, CPU, 256, "bfloat16", 64).name == "torch"
    # What flash-attn has no kernels for is known without a GPU, and before any package is looked for.
    assert choose_backend(name, CUDA, 256, "float32", 64).name == "torch"
    assert choose_backend(name, CUDA, 256, "float16", 320).name == "torch"
    assert default_block_tokens(name, CUDA, "float32", 64) == 16
    assert default_block_tokens(name, CPU, "bfloat16", 64) == 16


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "words"),
    [
        (CPU, "bfloat16", 64, "a CUDA device is needed, and the device is cpu"),
        (CUDA, "float32", 64, "dtype must be float16 or bfloat16, and it is float32"),
        (CUDA, "bfloat16", 264, "at most 256 numbers"),
        (CUDA, "bfloat16", 20, "a multiple of 8, and they have 20"),
    ],
)
def test_flash_says_why_it_cannot_run(device: torch.device, dtype: str, head_dim: int, words: str) -> None:
    assert words in (flash_obstacle(device, dtype, head_dim) or "")
    with pytest.raises(BackendError, match="attention: torch runs everywhere") as refused:
        choose_backend("flash", device, 256, dtype, head_dim)
    assert words in str(refused.value)


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(BackendError, match="'xformers'; allowed are auto, torch and flash"):
        choose_backend("xformers", CPU, 16, "float32", 64)
