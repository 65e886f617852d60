"""What is sent to another worker: nothing is lost on the way, and nothing wrong comes out."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.batch import StepBatch, pack_step
from actors.engine.request import EngineRequest, SamplingParams
from actors.engine.sequence import SequenceState
from actors.engine.stage_work import (
    StageDone,
    StageWork,
    decode_done,
    decode_work,
    encode_done,
    encode_work,
)
from actors.engine.step_messages import WorkLimits, WorkMessageError
from actors.engine.step_plan import Chunk
from migrate.waiting_line import Turn

BLOCK = 4
LIMITS = WorkLimits(num_layers=5, hidden_size=3, dtype=torch.bfloat16, vocab_size=50, block_tokens=BLOCK, num_blocks=40)


def make_work(decodes: list[int], prefills: list[tuple[int, int]]) -> StageWork:
    """Decodes by their context before the row, prompt chunks by theirs and their rows. Each has blocks of its own."""
    free = iter(range(LIMITS.num_blocks))

    def chunk(computed: int, new: int) -> Chunk:
        tokens = tuple(range(computed + new))
        sequence = SequenceState(
            EngineRequest("r", tokens, SamplingParams(max_tokens=1)), Turn(0.0, 0), lambda keys, tokens: []
        )
        sequence.num_computed = computed
        sequence.block_ids = [next(free) for _ in range(-(-len(tokens) // BLOCK))]
        return Chunk(sequence, new, computed)

    step = pack_step([chunk(n, 1) for n in decodes], [chunk(*sizes) for sizes in prefills], BLOCK)
    hidden = torch.randn(step.shape.num_rows, LIMITS.hidden_size).to(LIMITS.dtype)
    return StageWork("home", 3, 8, range(1, 4), step, hidden, torch.tensor([2, 39]))


works = (
    st.tuples(
        st.lists(st.integers(0, 15), max_size=4),
        st.lists(st.tuples(st.integers(0, 10), st.integers(2, 8)), max_size=3),
    )
    .filter(any)
    .map(lambda sizes: make_work(*sizes))
)


def fields_of(work: StageWork) -> list[torch.Tensor]:
    batch = work.step.batch(work.step.packed, BLOCK)
    return [
        value for field in dataclasses.fields(batch) if isinstance(value := getattr(batch, field.name), torch.Tensor)
    ]


@given(works)
def test_work_comes_out_as_it_went_in(work: StageWork) -> None:
    meta, tensors = encode_work(work)
    got = decode_work(meta, [tensor.clone() for tensor in tensors], LIMITS)
    assert (got.instance, got.version, got.step_id, got.layers) == ("home", 3, 8, range(1, 4))
    assert (got.step.shape, got.step.num_sampled, got.step.chunks) == (
        work.step.shape, work.step.num_sampled, work.step.chunks,
    )  # fmt: skip
    for mine, theirs in zip(fields_of(work), fields_of(got), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(got.hidden, work.hidden)
    assert torch.equal(got.fresh_blocks, work.fresh_blocks)


def check_harmless(batch: StepBatch) -> None:
    """Row by row: each one reads and writes places that exist, in the table of its own chunk."""
    rows: list[tuple[int, list[int]]] = []
    for context, table in zip(batch.decode_context.tolist(), batch.decode_blocks.tolist(), strict=True):
        rows.append((context - 1, table))
    for chunk in batch.prefills:
        first = chunk.context_tokens - chunk.num_rows
        assert len(chunk.blocks) == -(-chunk.context_tokens // BLOCK)
        rows += [(first + index, chunk.blocks.tolist()) for index in range(chunk.num_rows)]
    assert len(rows) == len(batch.token_ids)
    for row, (position, table) in enumerate(rows):
        assert 0 <= position < len(table) * BLOCK
        assert batch.positions[row] == position
        assert batch.write_blocks[row] == table[position // BLOCK]
        assert batch.write_offsets[row] == position % BLOCK
        assert all(0 <= block < LIMITS.num_blocks for block in table)
    assert all(0 <= token < LIMITS.vocab_size for token in batch.token_ids.tolist())
    assert all(0 <= row < len(rows) for row in batch.sampled_rows.tolist())


@given(works, st.data())
def test_a_step_with_wrong_integers_is_refused_or_harmless(work: StageWork, data: st.DataObject) -> None:
    meta, (packed, *others) = encode_work(work)
    packed = packed.clone()
    for _ in range(data.draw(st.integers(1, 2))):
        index = data.draw(st.integers(0, len(packed) - 1))
        packed[index] = data.draw(st.integers(-3, 45) | st.sampled_from([2**62, -(2**63), 2**63 - 1]))
    try:
        got = decode_work(meta, (packed, *others), LIMITS)
    except WorkMessageError:
        return
    check_harmless(got.step.batch(got.step.packed, BLOCK))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": [1, 6]}, "layers 1 to 6; the instance has 5"),
        ({"layers": [3, 3]}, "layers 3 to 3"),
        ({"layers": [-1, 3]}, r"layers \[-1, 3\]"),
        ({"layers": 3}, "layers 3"),
        ({"version": None}, "version None"),
        ({"version": True}, "version True"),
        ({"step_id": 1.0}, "step_id 1.0"),
        ({"instance": 4}, "no instance"),
        ({"num_sampled": 4}, "4 rows to sample from"),
        ({"shape": [7, 2, 3, 1]}, "shape"),
        ({"shape": [10**30, 0, 0, 0, 0]}, r"the step torch.int64"),
        ({"shape": [0, 0, 0, 0, 0]}, r"the step torch.int64"),
    ],
)
def test_fields_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    meta, tensors = encode_work(make_work([3, 9], [(2, 5)]))
    with pytest.raises(WorkMessageError, match=words):
        decode_work(json.dumps(json.loads(meta) | changes).encode(), tensors, LIMITS)


def test_tensors_that_cannot_be_are_refused() -> None:
    meta, (packed, hidden, fresh) = encode_work(make_work([3, 9], [(2, 5)]))
    wide = torch.zeros(len(hidden), 6, dtype=hidden.dtype)
    for tensors in (
        (packed, hidden), (packed.int(), hidden, fresh), (packed[:-1], hidden, fresh), (packed, hidden.float(), fresh),
        (packed, hidden[1:], fresh), (packed, wide[:, ::2], fresh), (packed, hidden, fresh + 1),
        (packed, hidden, fresh - 3), (packed, hidden, fresh.float()), (packed, hidden, fresh[None]),
    ):  # fmt: skip
        with pytest.raises(WorkMessageError):
            decode_work(meta, tensors, LIMITS)
    for garbage in (b"", b"\xff", b"[]", b"[" * 100_000, b"{}"):
        with pytest.raises(WorkMessageError):
            decode_work(garbage, (packed, hidden, fresh), LIMITS)


@pytest.mark.parametrize("error", [None, "the worker died"])
def test_answers_come_out_as_they_went_in(error: str | None) -> None:
    hidden = None if error else torch.randn(4, 3)
    got = decode_done(*encode_done(StageDone("home", 2, 5, hidden, error, 1_200, 40_000)))
    assert (got.instance, got.version, got.step_id, got.error) == ("home", 2, 5, error)
    assert (got.stage_us, got.host_step_us) == (1_200, 40_000)
    assert (got.hidden is None) if hidden is None else torch.equal(got.hidden, hidden)  # type: ignore[arg-type]


def test_answers_with_neither_or_both_are_refused() -> None:
    hidden = torch.randn(4, 3)
    meta_good, _ = encode_done(StageDone("home", 2, 5, hidden))
    meta_bad, _ = encode_done(StageDone("home", 2, 5, None, "failed"))
    for meta, tensors in ((meta_good, ()), (meta_good, (hidden, hidden)), (meta_bad, (hidden,)), (b"5", ())):
        with pytest.raises(WorkMessageError):
            decode_done(meta, tensors)
