"""What the flash backend asks of flash-attn, with the two functions of the package in plain torch.

The kernels themselves need a GPU: `python -m load_tests.gpu_check` compares them there.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from actors.engine.attention.interface import AttentionBackend
from actors.engine.attention.torch_backend import TorchAttention
from actors.engine.engine import Engine
from load_tests.recorded_ops import RecordedOps
from tests.engine.attention_contract import AttentionContract
from tests.engine.conftest import MakeEngine
from tests.engine.flash_reference import FlashReference, FlashRefusal
from tests.engine.paged_layout import PagedCase, Piece, Shape, make_case
from tests.engine_driver import greedy, make_prompt, run_prompts
from tests.reference import assert_greedy, load_reference

BLOCK = 256
_BACKEND = "actors.engine.attention.flash"


@pytest.fixture(scope="module")
def reference() -> FlashReference:
    return FlashReference(allow_float32=True)


@pytest.fixture(scope="module")
def flash_backend(reference: FlashReference) -> Iterator[type[AttentionBackend]]:
    """The backend's class, over the reference."""
    package: Any = ModuleType("flash_attn")
    package.flash_attn_varlen_func = reference.flash_attn_varlen_func
    package.flash_attn_with_kvcache = reference.flash_attn_with_kvcache
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", package)
        patch.delitem(sys.modules, _BACKEND, raising=False)
        yield importlib.import_module(_BACKEND).FlashAttention
        # The next import is to find the real package, or none.
        sys.modules.pop(_BACKEND)


class TestFlashAttention(AttentionContract):
    block_tokens = BLOCK
    max_examples = 40

    @pytest.fixture(autouse=True)
    def _take_class(self, flash_backend: type[AttentionBackend]) -> None:
        self._class = flash_backend

    def make_backend(self) -> AttentionBackend:
        return self._class()


def run(backend: AttentionBackend, case: PagedCase) -> torch.Tensor:
    pages = case.kv.pages.clone()
    with torch.inference_mode():
        backend.begin(case.batch)
        out = backend.attend(case.q, case.k, case.v, case.kv)
    case.kv.pages.copy_(pages)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 1, 100, 256, 300])
def test_mixed_batches_equal_torchs_own_kernels(
    window: int | None, dtype: torch.dtype, flash_backend: type[AttentionBackend]
) -> None:
    pieces = [
        Piece(0, 7, False), Piece(250, 12, False), Piece(512, 1, False), Piece(130, 150, False),
        Piece(0, 1, True), Piece(255, 1, True), Piece(256, 1, True), Piece(600, 1, True),
    ]  # fmt: skip
    case = make_case(Shape(2, 4, 16, BLOCK, window), pieces, seed=4, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(run(flash_backend(), case), run(TorchAttention(), case), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", ["llama", "mistral-window", "opt"])
def test_engine_on_flash_attention_gives_the_reference_tokens_also_from_graphs(
    family: str,
    family_folders: dict[str, Path],
    make_engine: MakeEngine,
    flash_backend: type[AttentionBackend],
    reference: FlashReference,
) -> None:
    plain = make_engine(
        family_folders[family], block_tokens=BLOCK, kv_cache_blocks=24, max_batch_tokens=96, kernels="torch"
    )
    plain.loaded.model._backend = flash_backend()
    prompts = [make_prompt(length, length) for length in (1, 30, 250, 256, 257, 60)]
    expected = load_reference(family_folders[family])
    assert_greedy(expected, prompts, run_prompts(plain, prompts, greedy(12)))

    @torch.library.custom_op(f"flash_reference::{family.replace('-', '_')}", mutates_args=())
    def one_operator(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, scale: float,
        window: list[int],
    ) -> torch.Tensor:  # fmt: skip
        return reference.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, block_table=table, softmax_scale=scale, causal=True,
            window_size=(window[0], window[1]),
        )  # fmt: skip

    def as_one_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
        out: torch.Tensor = one_operator(
            q, k, v, more["cache_seqlens"], more["block_table"], more["softmax_scale"], list(more["window_size"])
        )
        return out

    # To a recording, as to a graph, the kernel is one operator; whatever the backend does around it is recorded too.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[_BACKEND], "flash_attn_with_kvcache", as_one_kernel)
        captured = Engine(plain.loaded, plain.config, RecordedOps())
        assert_greedy(expected, prompts, run_prompts(captured, prompts, greedy(12)))
    assert captured.graphs is not None
    assert captured.graphs.num_failures == 0
    assert captured.graphs.num_replays >= 10


@pytest.mark.parametrize(
    ("pieces", "calls"),
    [
        ([Piece(9, 1, True), Piece(300, 1, True)], ["with_kvcache"]),
        ([Piece(9, 5, False), Piece(300, 2, False)], ["varlen"]),
        ([Piece(9, 1, True), Piece(300, 2, False)], ["with_kvcache", "varlen"]),
    ],
)
def test_one_call_for_all_decodes_and_one_for_all_prefills(
    pieces: list[Piece], calls: list[str], flash_backend: type[AttentionBackend], reference: FlashReference
) -> None:
    reference.calls.clear()
    run(flash_backend(), make_case(Shape(3, 2, 8, BLOCK), pieces, 0))
    assert reference.calls == calls


def test_arena_is_read_in_place(flash_backend: type[AttentionBackend], reference: FlashReference) -> None:
    """K and V reach the kernels as views of the arena: no page is copied."""
    seen: list[int] = []
    case = make_case(Shape(2, 2, 8, BLOCK), [Piece(9, 1, True), Piece(20, 3, False)], 0)

    class Spy(FlashReference):
        def _checked_table(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any) -> torch.Tensor:
            seen.extend(x.untyped_storage().data_ptr() for x in (k, v))
            return super()._checked_table(q, k, v, *more)

    spy = Spy(allow_float32=True)
    module = sys.modules[_BACKEND]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "flash_attn_varlen_func", spy.flash_attn_varlen_func)
        patch.setattr(module, "flash_attn_with_kvcache", spy.flash_attn_with_kvcache)
        run(flash_backend(), case)
    assert seen == [case.kv.pages.untyped_storage().data_ptr()] * 4


def test_reference_refuses_what_the_package_refuses() -> None:
    """The stand-in must not be kinder than the package."""
    case = make_case(Shape(1, 2, 8, BLOCK), [Piece(9, 1, True)], 0)
    q, caches = case.q.unsqueeze(1), [case.kv.pages[:, side].unsqueeze(2) for side in (0, 1)]
    table, context = case.kv.page_of[:, case.batch.decode_blocks].flatten(0, 1), case.batch.decode_context
    strict, lenient = FlashReference(allow_float32=False), FlashReference(allow_float32=True)
    good: dict[str, Any] = {"cache_seqlens": context.int(), "block_table": table.int(), "causal": True}
    assert lenient.flash_attn_with_kvcache(q, *caches, **good).shape == (1, 1, 2, 8)
    for reference, bad, halves, words in (
        (strict, {}, caches, "fp16 and bf16"),
        (lenient, {"block_table": table}, caches, "block_table must have dtype torch.int32"),
        (lenient, {"cache_seqlens": context}, caches, "seqlens_k must have dtype int32"),
        (lenient, {"cache_seqlens": context.int() + 500}, caches, "longer than its block table"),
        (lenient, {}, [cache[:, :128] for cache in caches], "divisible by 256"),
    ):
        with pytest.raises(FlashRefusal, match=words):
            reference.flash_attn_with_kvcache(q, *halves, **good | bad)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "window", "mask"),
    [
        # The two masks that flash-attn's documentation draws, then windows counted from the row's own token.
        (2, 5, (-1, -1), ["11110", "11111"]),
        (5, 2, (-1, -1), ["00", "00", "00", "10", "11"]),
        (2, 5, (1, 0), ["00110", "00011"]),
        (1, 4, (2, 0), ["0111"]),
    ],
)
def test_reference_masks_as_documented(seqlen_q: int, seqlen_k: int, window: tuple[int, int], mask: list[str]) -> None:
    """With equal scores and unit vectors as values, the output is the mask with its rows divided by their sums."""
    pages = torch.zeros(1, 256, 1, 8)
    values = pages.clone()
    values[0, :seqlen_k, 0, :seqlen_k] = torch.eye(seqlen_k)
    ends = [torch.tensor([0, length], dtype=torch.int32) for length in (seqlen_q, seqlen_k)]
    out = FlashReference(allow_float32=True).flash_attn_varlen_func(
        torch.zeros(seqlen_q, 1, 8), pages, values, *ends, seqlen_q, seqlen_k, causal=True, window_size=window,
        block_table=torch.zeros(1, 1, dtype=torch.int32),
    )  # fmt: skip
    expected = torch.tensor([[float(place) for place in row] for row in mask])
    expected /= expected.sum(1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(out[:, 0, :seqlen_k], expected)
