from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from actors.engine.penalties import PenaltyState, apply_bias, apply_penalties, mask_tokens, uses_penalties
from actors.engine.request import SamplingParams

DEFAULT = SamplingParams(max_tokens=8)


def counts_by_token(state: PenaltyState) -> dict[int, float]:
    pairs = dict(zip(state.token_ids.tolist(), state.output_counts.tolist(), strict=True))
    assert len(pairs) == state.token_ids.size
    return pairs


def penalised(logits: torch.Tensor, rows: list[tuple[SamplingParams, list[int], list[int]]]) -> torch.Tensor:
    """Copies `logits` and penalises each row by (parameters, prompt, answer)."""
    logits = logits.clone()
    states = [PenaltyState.from_tokens(prompt, output, logits.shape[1]) for _, prompt, output in rows]
    apply_penalties(logits, range(len(rows)), [params for params, _, _ in rows], states)
    return logits


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.1, 2.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        logits = torch.randn(1, 50, generator=generator) * 3
        prompt = torch.randint(0, 50, (12,), generator=generator).tolist()
        output = torch.randint(0, 50, (9,), generator=generator).tolist()
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits.clone())
        ours = penalised(logits, [(replace(DEFAULT, repetition_penalty=penalty), prompt, output)])
        assert torch.equal(ours, expected)


def test_frequency_and_presence_count_the_answer_alone() -> None:
    logits = torch.tensor([[1.0, 2.0, -3.0, 0.0, 5.0]])
    prompt, output = [4, 4, 0], [0, 2, 2, 2]
    ours = penalised(logits, [(replace(DEFAULT, frequency_penalty=0.5, presence_penalty=0.25), prompt, output)])
    # Token 0: 1 - 1 * 0.5 - 0.25. Token 2: -3 - 3 * 0.5 - 0.25. Token 4 stands in the prompt only.
    assert ours.tolist() == [[0.25, 2.0, -4.75, 0.0, 5.0]]


def test_negative_penalties_encourage() -> None:
    logits = torch.tensor([[1.0, 2.0]])
    ours = penalised(logits, [(replace(DEFAULT, frequency_penalty=-0.5, presence_penalty=-1.0), [0], [1, 1])])
    assert ours.tolist() == [[1.0, 4.0]]


def test_repetition_comes_before_the_others() -> None:
    logits = torch.tensor([[4.0, -4.0, 1.0]])
    params = replace(DEFAULT, repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=0.5)
    # Token 0: 4 / 2 - 2 * 1 - 0.5. Token 1: -4 * 2, prompt only.
    assert penalised(logits, [(params, [1], [0, 0])]).tolist() == [[-0.5, -8.0, 1.0]]


def test_rows_keep_their_own_penalties_and_others_are_left_alone() -> None:
    logits = torch.ones(4, 3)
    states = [PenaltyState.from_tokens([0], [1], 3), PenaltyState.from_tokens([], [2, 2], 3)]
    params = [replace(DEFAULT, repetition_penalty=2.0), replace(DEFAULT, frequency_penalty=0.25)]
    apply_penalties(logits, [3, 1], params, states)
    assert logits.tolist() == [[1.0, 1.0, 1.0], [1.0, 1.0, 0.5], [1.0, 1.0, 1.0], [0.5, 0.5, 1.0]]


def test_a_forbidden_token_stays_forbidden() -> None:
    logits = torch.tensor([[-math.inf, 1.0]])
    params = replace(DEFAULT, repetition_penalty=1.5, frequency_penalty=-2.0, presence_penalty=-2.0)
    assert penalised(logits, [(params, [], [0])])[0, 0] == -math.inf


@given(st.lists(st.integers(0, 199), max_size=300), st.lists(st.integers(0, 199), max_size=300))
def test_token_by_token_and_rebuilt_states_are_what_a_plain_count_says(prompt: list[int], output: list[int]) -> None:
    state = PenaltyState(prompt, 200)
    for token_id in output:
        state.append(token_id)
    plain = {token_id: float(output.count(token_id)) for token_id in {*prompt, *output}}
    assert counts_by_token(state) == plain
    assert counts_by_token(PenaltyState.from_tokens(prompt, output, 200)) == plain
    assert state.num_output_tokens == len(output)
    assert state.token_ids.dtype == np.int64
    assert state.output_counts.dtype == np.float32


@pytest.mark.parametrize("token_id", [-1, 5, 2**40])
def test_tokens_outside_the_vocabulary_are_refused(token_id: int) -> None:
    with pytest.raises(ValueError, match=f"token id {token_id} .* 0 to 4"):
        PenaltyState([0, token_id, 1], 5)
    state = PenaltyState([0], 5)
    with pytest.raises(ValueError, match=f"token id {token_id} .* 0 to 4"):
        state.append(token_id)
    assert counts_by_token(state) == {0: 0.0}
    assert state.num_output_tokens == 0


def test_which_parameters_need_a_state() -> None:
    assert not uses_penalties(DEFAULT)
    assert uses_penalties(replace(DEFAULT, repetition_penalty=0.9))
    assert uses_penalties(replace(DEFAULT, presence_penalty=-0.1))
    assert uses_penalties(replace(DEFAULT, frequency_penalty=0.1))


def test_bias_is_added() -> None:
    logits = torch.zeros(3, 4)
    params = [replace(DEFAULT, logit_bias=((1, 2.5), (3, -100.0))), replace(DEFAULT, logit_bias=((0, 100.0),))]
    apply_bias(logits, [2, 0], params)
    assert logits.tolist() == [[100.0, 0.0, 0.0, 0.0], [0.0] * 4, [0.0, 2.5, 0.0, -100.0]]


def test_a_huge_bias_stays_finite_above_and_forbids_below() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, -math.inf]])
    apply_bias(logits, [0], [replace(DEFAULT, logit_bias=((0, 1e300), (1, -1e300), (3, math.inf)))])
    assert math.isfinite(logits[0, 0])
    assert logits[0, 0] > 1e38
    assert logits[0, 1:].tolist() == [-math.inf, 1.0, -math.inf]


def test_mask() -> None:
    logits = torch.zeros(2, 3)
    mask_tokens(logits, [(0, 2), (1, 0), (1, 1)])
    assert logits.tolist() == [[0.0, 0.0, -math.inf], [-math.inf, -math.inf, 0.0]]
