"""Our attention over pages against dense attention, with every instruction set that the processor has."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.engine.attention.interface import AttentionBackend
from actors.engine.attention.native import NativeAttention
from actors.engine.kernels.library import InstructionSet
from tests.engine.attention_contract import AttentionContract, check
from tests.engine.kernel_sets import SETS, kernels_of
from tests.engine.paged_layout import Piece, Shape, make_case


class TestNativeAttention(AttentionContract):
    block_tokens = 4
    max_examples = 80

    def make_backend(self) -> AttentionBackend:
        return NativeAttention(kernels_of(InstructionSet.AVX512))


class TestNativeAttentionOfOlderProcessors(AttentionContract):
    block_tokens: ClassVar[int] = 16

    def make_backend(self) -> AttentionBackend:
        return NativeAttention(kernels_of(InstructionSet.AVX2))


@pytest.mark.parametrize("instructions", SETS, ids=[each.name for each in SETS])
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    group=st.integers(1, 9),
    head_dim=st.sampled_from([1, 7, 20, 64, 80, 100, 128]),
    contexts=st.lists(st.integers(0, 70), min_size=1, max_size=3),
    window=st.sampled_from([None, 1, 5, 33]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_decodes_of_odd_shapes(
    instructions: InstructionSet, group: int, head_dim: int, contexts: list[int], window: int | None,
    dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    shape = Shape(2, group, head_dim, 5, window)
    case = make_case(shape, [Piece(context, 1, True) for context in contexts], seed, dtype)
    check(NativeAttention(kernels_of(instructions)), case)


@pytest.mark.parametrize("instructions", SETS, ids=[each.name for each in SETS])
def test_a_row_does_not_depend_on_the_others(instructions: InstructionSet) -> None:
    """Nor on what lies in memory that it does not see."""
    backend = NativeAttention(kernels_of(instructions))
    case = make_case(Shape(2, 3, 64, 16), [Piece(context, 1, True) for context in (40, 3, 17)], 1, torch.bfloat16)
    with torch.inference_mode():
        backend.begin(case.batch)
        out = backend.attend(case.q, case.k, case.v, case.kv)
        own_pages = case.kv.page_of[:, case.batch.decode_blocks[0]].flatten()
        others = torch.ones(len(case.kv.pages), dtype=torch.bool).index_fill_(0, own_pages, False)
        case.kv.pages[others] = torch.nan
        assert torch.equal(backend.attend(case.q, case.k, case.v, case.kv)[0], out[0])


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("instructions", SETS, ids=[each.name for each in SETS])
def test_an_overflow_in_a_key_is_not_hidden(instructions: InstructionSet, dtype: torch.dtype, number: float) -> None:
    backend = NativeAttention(kernels_of(instructions))
    case = make_case(Shape(1, 2, 64, 16), [Piece(40, 1, True), Piece(20, 1, True)], 1, dtype)
    page = case.kv.page_of[0, case.batch.decode_blocks[0, 1]]
    case.kv.pages[page, 0, 3] = number
    case.q[0] = case.q[0].abs()
    with torch.inference_mode():
        backend.begin(case.batch)
        out = backend.attend(case.q, case.k, case.v, case.kv)
    assert out[0].isnan().all()
    assert not out[1].isnan().any()
