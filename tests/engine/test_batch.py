"""The packed layout of a step against the plan it was made from, token by token."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.batch import StepBatch, build_batch, pack_step
from actors.engine.request import EngineRequest, SamplingParams
from actors.engine.sequence import SequenceState
from actors.engine.step_plan import Chunk
from migrate.waiting_line import Turn

BLOCK = 4

lengths = st.integers(0, 18)
decode_lists = st.lists(st.tuples(lengths, st.booleans()), max_size=5)
prefill_lists = st.lists(st.tuples(lengths, st.integers(1, 9), st.integers(0, 3)), max_size=4)


def make_chunk(number: int, computed: int, new: int, left: int) -> Chunk:
    """A chunk of `new` tokens after `computed` ones, of a sequence with `left` more; every number in it is its own."""
    total = computed + new + left
    request = EngineRequest("r", tuple(range(1000 * number, 1000 * number + total)), SamplingParams(max_tokens=1))
    sequence = SequenceState(request, Turn(0.0), lambda keys, tokens: [])
    sequence.num_computed = computed
    sequence.block_ids = list(range(100 * number, 100 * number + -(-total // BLOCK)))
    return Chunk(sequence, new, computed)


def check_rows(batch: StepBatch, chunks: list[Chunk]) -> None:
    rows = [(chunk, chunk.sequence.num_computed + index) for chunk in chunks for index in range(chunk.num_tokens)]
    assert batch.token_ids.tolist() == [chunk.sequence.tokens[position] for chunk, position in rows]
    assert batch.positions.tolist() == [position for _, position in rows]
    assert batch.write_blocks.tolist() == [chunk.sequence.block_ids[position // BLOCK] for chunk, position in rows]
    assert batch.write_offsets.tolist() == [position % BLOCK for _, position in rows]


@given(decode_lists, prefill_lists)
def test_fields_say_what_the_plan_says(
    decode_sizes: list[tuple[int, bool]], prefill_sizes: list[tuple[int, int, int]]
) -> None:
    decodes = [make_chunk(i, computed, 1, int(more)) for i, (computed, more) in enumerate(decode_sizes)]
    prefills = [make_chunk(10 + i, computed, new, left) for i, (computed, new, left) in enumerate(prefill_sizes)]
    batch = build_batch(decodes, prefills, BLOCK, torch.device("cpu"))
    check_rows(batch, decodes + prefills)
    assert batch.decode_context.tolist() == [chunk.sequence.num_computed + 1 for chunk in decodes]
    for table, chunk in zip(batch.decode_blocks.tolist(), decodes, strict=True):
        needed = chunk.sequence.num_computed // BLOCK + 1
        assert table[:needed] == chunk.sequence.block_ids[:needed]
        assert set(table[needed:]) <= {table[needed - 1]}
    assert batch.prefill_rows.tolist() == [chunk.num_tokens for chunk in prefills]
    assert batch.prefill_context.tolist() == [rows.context_tokens for rows in batch.prefills]
    ends, end = [], 0
    for chunk in decodes + prefills:
        end += chunk.num_tokens
        if chunk.samples:
            ends.append(end - 1)
    assert batch.sampled_rows.tolist() == ends
    for rows, table, chunk in zip(batch.prefills, batch.prefill_blocks.tolist(), prefills, strict=True):
        context = chunk.sequence.num_computed + chunk.num_tokens
        own = chunk.sequence.block_ids[: -(-context // BLOCK)]
        assert (rows.num_rows, rows.context_tokens) == (chunk.num_tokens, context)
        assert batch.positions[rows.first_row] == chunk.sequence.num_computed
        assert rows.blocks.tolist() == own == table[: len(own)]
        assert set(table[len(own) :]) <= {own[-1]}


@given(st.lists(lengths, min_size=1, max_size=5), st.integers(0, 12))
def test_tables_are_as_wide_as_asked_for(contexts: list[int], width: int) -> None:
    decodes = [make_chunk(i, computed, 1, 0) for i, computed in enumerate(contexts)]
    step = pack_step(decodes, [], BLOCK, decode_width=width)
    batch = step.batch(step.packed.clone(), BLOCK)
    check_rows(batch, decodes)
    assert batch.decode_blocks.shape == (len(contexts), max(width, max(contexts) // BLOCK + 1))
    # One tensor holds everything, and the fields are views of it.
    assert step.packed.numel() == step.shape.num_integers == 6 * len(contexts) + batch.decode_blocks.numel()
