"""Our attention of prompt chunks over pages against dense attention, and to the bit against the same prompts divided
otherwise, with every instruction set that the processor has."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.engine.attention.native import NativeAttention
from actors.engine.kernels.library import InstructionSet
from tests.engine.attention_contract import check
from tests.engine.kernel_sets import SETS, kernels_of
from tests.engine.paged_layout import PagedCase, Piece, Shape, make_case

every_set = pytest.mark.parametrize("instructions", SETS, ids=[each.name for each in SETS])
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def attend(backend: NativeAttention, case: PagedCase) -> torch.Tensor:
    with torch.inference_mode():
        backend.begin(case.batch)
        return backend.attend(case.q, case.k, case.v, case.kv)


@every_set
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    group=st.integers(1, 9),
    head_dim=st.sampled_from([1, 7, 32, 64, 80, 96, 128]),
    block_tokens=st.sampled_from([5, 16, 32]),
    chunks=st.lists(st.tuples(st.sampled_from([0, 1, 15, 16, 100, 127, 128, 260]), st.integers(1, 40)), min_size=1,
                    max_size=2),
    decodes=st.lists(st.integers(0, 70), max_size=1),
    window=st.sampled_from([None, 1, 5, 33, 128, 150]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_chunks_of_odd_shapes(
    instructions: InstructionSet, group: int, head_dim: int, block_tokens: int, chunks: list[tuple[int, int]],
    decodes: list[int], window: int | None, dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    pieces = [Piece(context, new, False) for context, new in chunks]
    pieces += [Piece(context, 1, True) for context in decodes]
    case = make_case(Shape(1, group, head_dim, block_tokens, window), pieces, seed, dtype)
    check(NativeAttention(kernels_of(instructions)), case)


@every_set
@every_dtype
def test_rows_of_several_items(instructions: InstructionSet, dtype: torch.dtype) -> None:
    """More tokens than are attended to at a time."""
    check(
        NativeAttention(kernels_of(instructions)),
        make_case(Shape(2, 6, 32, 16), [Piece(50, 150, False), Piece(0, 70, False)], 1, dtype),
    )


@every_set
@every_dtype
@pytest.mark.parametrize("window", [None, 20, 140])
def test_a_row_does_not_depend_on_how_its_prompt_is_divided(
    instructions: InstructionSet, dtype: torch.dtype, window: int | None
) -> None:
    """Nor on what else is in the step: the last rows of a prompt at once, and as a chunk beside another one."""
    backend, shape, total = NativeAttention(kernels_of(instructions)), Shape(2, 3, 64, 16, window), 300
    whole = make_case(shape, [Piece(0, total, False)], 1, dtype)
    expected = attend(backend, whole)
    for context in (1, 128, 163, 299):
        apart = make_case(shape, [Piece(context, total - context, False), Piece(3, 30, False)], 2, dtype)
        pages = apart.kv.pages.clone()
        for head in range(2):  # the same K and V, where this layout has them
            source = whole.kv.page_of[head, whole.batch.prefill_blocks[0]]
            target = apart.kv.page_of[head, apart.batch.prefill_blocks[0, : len(source)]]
            pages[target] = whole.kv.pages[source]
        rows = total - context
        case = dataclasses.replace(
            apart,
            q=torch.cat((whole.q[context:], apart.q[rows:])),
            k=torch.cat((whole.k[context:], apart.k[rows:])),
            v=torch.cat((whole.v[context:], apart.v[rows:])),
            kv=dataclasses.replace(apart.kv, pages=pages),
        )
        assert torch.equal(attend(backend, case)[:rows], expected[context:])


@every_set
@every_dtype
def test_memory_behind_the_last_token_does_not_matter(instructions: InstructionSet, dtype: torch.dtype) -> None:
    backend = NativeAttention(kernels_of(instructions))
    case = make_case(Shape(2, 3, 64, 16), [Piece(20, 18, False), Piece(0, 5, False)], 1, dtype)
    expected = attend(backend, case)
    written = torch.zeros_like(case.kv.pages, dtype=torch.bool)
    for blocks, context in zip(case.batch.prefill_blocks, case.batch.prefill_context.tolist(), strict=True):
        for token in range(context):
            written[case.kv.page_of[:, blocks[token // 16]], :, token % 16] = True
    case.kv.pages[~written] = torch.nan
    assert torch.equal(attend(backend, case), expected)


@every_set
@every_dtype
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_an_overflow_in_a_key_is_not_hidden(instructions: InstructionSet, dtype: torch.dtype, number: float) -> None:
    backend = NativeAttention(kernels_of(instructions))
    case = make_case(Shape(1, 2, 64, 16), [Piece(40, 10, False), Piece(20, 4, False)], 1, dtype)
    case.kv.pages[case.kv.page_of[0, case.batch.prefill_blocks[0, 1]], 0, 3] = number
    case.q[:10] = case.q[:10].abs()
    out = attend(backend, case)
    assert out[:10].isnan().all()
    assert not out[10:].isnan().any()


@every_set
def test_more_threads_change_nothing(instructions: InstructionSet) -> None:
    backend = NativeAttention(kernels_of(instructions))
    case = make_case(
        Shape(2, 4, 64, 16), [Piece(7, 150, False), Piece(30, 9, False), Piece(9, 1, True)], 1, torch.bfloat16
    )
    alone = attend(backend, case)
    torch.set_num_threads(2)
    try:
        assert torch.equal(attend(backend, case), alone)
    finally:
        torch.set_num_threads(1)
