from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from actors.engine.request import SamplingParams
from actors.engine.sampler import NO_TOKEN, PenaltyState, SamplerRow, choose_tokens, sample

VOCAB = 600
DEFAULT = SamplingParams(max_tokens=100)
GREEDY = replace(DEFAULT, temperature=0.0)
KINDS = [
    GREEDY,
    replace(GREEDY, repetition_penalty=1.3),
    DEFAULT,
    replace(DEFAULT, min_p=0.1),
    replace(DEFAULT, top_k=10),
    replace(DEFAULT, top_k=500, top_p=0.9),
    replace(DEFAULT, top_p=0.9),
    replace(DEFAULT, top_p=0.99, temperature=3.0),
    replace(DEFAULT, presence_penalty=1.0, frequency_penalty=0.5),
    replace(DEFAULT, logit_bias=((3, 5.0), (9, -100.0))),
    replace(DEFAULT, min_tokens=5),
]


def make_logits(rows: int, seed: int, spread: float = 3.0, vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def fresh(params: SamplingParams, output: list[int] | range = range(0), prompt: tuple[int, ...] = (1, 2)) -> SamplerRow:
    return SamplerRow(params, prompt, output, end_token_ids=(0, 7))


def only_token(logits: torch.Tensor, row: SamplerRow) -> int:
    output = sample(logits.reshape(1, -1), [row])
    assert output.errors == [None]
    return output.token_ids[0]


# Greedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_is_argmax_and_ties_go_to_the_lowest_id(dtype: torch.dtype) -> None:
    logits = make_logits(40, seed=0, spread=1.0).to(dtype)
    # A lower ceiling makes ties at the top in every row.
    logits = logits.clamp(max=1.0)
    assert ((logits == 1.0).sum(1) > 1).all()
    expected = [row.tolist().index(1.0) for row in logits]
    assert sample(logits, [fresh(GREEDY) for _ in range(40)]).token_ids == expected
    mixed = sample(logits, [fresh(GREEDY if i % 2 else DEFAULT) for i in range(40)])
    assert mixed.token_ids[1::2] == expected[1::2]
    assert torch.argmax(logits.float(), 1).tolist() == expected


def test_greedy_next_to_sampled_rows_is_argmax() -> None:
    logits = make_logits(len(KINDS), seed=1)
    output = sample(logits, [fresh(params) for params in KINDS])
    assert output.token_ids[0] == int(logits[0].argmax())
    assert output.errors == [None] * len(KINDS)


def test_greedy_follows_penalties_and_bias() -> None:
    logits = torch.tensor([[5.0, 4.9, 1.0, 0.0]])
    assert only_token(logits, SamplerRow(GREEDY, [], [0])) == 0
    assert only_token(logits, SamplerRow(replace(GREEDY, repetition_penalty=1.1), [0], [])) == 1
    assert only_token(logits, SamplerRow(replace(GREEDY, presence_penalty=0.2), [0], [])) == 0
    assert only_token(logits, SamplerRow(replace(GREEDY, presence_penalty=0.2), [], [0])) == 1
    assert only_token(logits, SamplerRow(replace(GREEDY, logit_bias=((2, 100.0),)), [], [])) == 2
    assert only_token(logits, SamplerRow(replace(GREEDY, logit_bias=((0, -100.0),)), [], [])) == 1
    assert only_token(logits, SamplerRow(replace(GREEDY, logit_bias=((3, 1e300),)), [], [])) == 3
    assert only_token(logits, SamplerRow(replace(GREEDY, logit_bias=((0, -1e300), (1, -math.inf))), [], [])) == 2


# Distribution


@pytest.mark.parametrize(
    ("axis", "params"),
    [
        ("position", DEFAULT),
        ("position", replace(DEFAULT, temperature=0.8, min_p=0.01, top_k=12, top_p=0.9, repetition_penalty=0.7)),
        ("seed", replace(DEFAULT, temperature=0.7, min_p=0.05)),
        ("seed", replace(DEFAULT, temperature=1.5, top_k=8)),
        ("choice_index", replace(DEFAULT, top_p=0.8, repetition_penalty=1.4)),
    ],
)
def test_frequencies_are_those_of_transformers(axis: str, params: SamplingParams) -> None:
    """Chi-square of 20,000 draws along one axis of the generator against the warpers' exact probabilities."""
    draws, chunk, vocab_size, prompt = 20_000, 500, 24, (3, 5, 5, 11)
    logits = make_logits(1, seed=8, spread=1.5, vocab_size=vocab_size)
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(params.repetition_penalty)])
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        processors.append(TopPLogitsWarper(params.top_p))
    probabilities = processors(torch.tensor([prompt]), logits.double()).softmax(1)[0].tolist()

    def row(step: int) -> SamplerRow:
        if axis == "position":
            # An answer of tokens that the prompt holds already: only its length matters.
            return SamplerRow(replace(params, seed=77 + step // chunk), prompt, [3] * (step % chunk))
        return SamplerRow(replace(params, **{axis: step}), prompt, [])

    observed: Counter[int] = Counter()
    for start in range(0, draws, chunk):
        rows = [row(step) for step in range(start, start + chunk)]
        observed.update(sample(logits.expand(chunk, -1), rows).token_ids)
    assert set(observed) <= {token_id for token_id, p in enumerate(probabilities) if p > 0.0}
    likely = [(token_id, p * draws) for token_id, p in enumerate(probabilities) if p * draws >= 5.0]
    statistic = sum((observed[token_id] - expected) ** 2 / expected for token_id, expected in likely)
    freedom = len(likely) - 1
    # Wilson and Hilferty's approximation of the 0.1 % point.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


def test_seed_choice_and_position_each_change_the_draw() -> None:
    logits = torch.zeros(1, 50_000)
    rows = [
        fresh(DEFAULT),
        fresh(replace(DEFAULT, seed=1)),
        fresh(replace(DEFAULT, choice_index=1)),
        fresh(DEFAULT, range(1)),
    ]
    tokens = sample(logits.expand(4, -1), rows).token_ids
    assert len(set(tokens)) == 4
    assert tokens == sample(logits.expand(4, -1), rows).token_ids


def test_hard_masking_before_min_tokens() -> None:
    params = replace(GREEDY, min_tokens=3)
    logits = torch.zeros(1, 10)
    logits[0, 7], logits[0, 0], logits[0, 4] = 9.0, 8.0, 7.0
    chosen = [only_token(logits, SamplerRow(params, [1], [5] * n, end_token_ids=(0, 7, 999))) for n in range(5)]
    assert chosen == [4, 4, 4, 7, 7]
    biased = replace(params, logit_bias=((7, 100.0),))
    assert only_token(logits, SamplerRow(biased, [1], [], end_token_ids=(7,))) == 0


# A row is on its own

row_strategy = st.tuples(
    st.sampled_from(KINDS),
    st.integers(0, 2**64 - 1),
    st.integers(0, 3),
    st.lists(st.integers(0, VOCAB - 1), max_size=12),
    st.integers(0, 200),
    st.sampled_from([0.3, 2.0, 8.0]),
    st.booleans(),
)
RowCase = tuple[SamplingParams, int, int, list[int], int, float, bool]


@settings(deadline=None)
@given(st.lists(row_strategy, min_size=1, max_size=12), st.integers(0, 2), st.data())
def test_a_row_gets_the_same_token_alone_and_in_any_batch(
    cases: list[RowCase], broken_rows: int, data: st.DataObject
) -> None:
    def build(case: RowCase) -> tuple[torch.Tensor, SamplerRow]:
        params, seed, choice_index, output, logits_seed, spread, is_coarse = case
        logits = make_logits(1, logits_seed, spread)
        if is_coarse:
            logits = logits.bfloat16().float()
        return logits, fresh(replace(params, seed=seed, choice_index=choice_index, logprobs=2), output)

    built = [build(case) for case in cases]
    alone = []
    for logits, row in built:
        result = sample(logits, [row])
        assert result.errors == [None]
        alone.append((result.token_ids[0], result.logprobs[0]))
    broken = [(torch.full((1, VOCAB), math.nan), fresh(params)) for params in KINDS[2 : 2 + broken_rows]]
    order = data.draw(st.permutations(range(len(built) + len(broken))))
    batch = [(built + broken)[index] for index in order]
    together = sample(torch.cat([logits for logits, _ in batch]), [row for _, row in batch])
    for place, index in enumerate(order):
        if index < len(built):
            assert together.errors[place] is None
            assert (together.token_ids[place], together.logprobs[place]) == alone[index]
        else:
            assert together.errors[place] is not None


@pytest.mark.parametrize("params", KINDS, ids=str)
@pytest.mark.parametrize(
    ("make_bad", "message"),
    [
        (lambda row: row.fill_(math.nan), "NaN"),
        (lambda row: row[5:6].fill_(math.nan), "NaN"),
        (lambda row: row[5:6].fill_(math.inf), "inf"),
        (lambda row: row.fill_(-math.inf), "every logit is -inf"),
    ],
)
@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_broken_row_fails_alone(params: SamplingParams, make_bad: object, message: str, logprobs: int | None) -> None:
    params = replace(params, logprobs=logprobs)
    good = make_logits(3, seed=5)
    rows = [fresh(params), fresh(replace(DEFAULT, seed=4)), fresh(replace(params, seed=6))]
    expected = sample(good, rows)
    broken = good.clone()
    make_bad(broken[0])  # type: ignore[operator]
    output = sample(broken, rows)
    assert output.token_ids == [NO_TOKEN, *expected.token_ids[1:]]
    assert output.errors[0] is not None
    assert message in output.errors[0]
    assert output.errors[1:] == [None, None]
    assert output.logprobs == [None, *expected.logprobs[1:]]


@pytest.mark.parametrize("params", [GREEDY, DEFAULT])
def test_nan_under_the_mask_has_a_token_but_no_logprobs(params: SamplingParams) -> None:
    logits = torch.zeros(2, 4)
    logits[:, 1] = math.nan
    params = replace(params, min_tokens=1)
    rows = [SamplerRow(replace(params, logprobs=k), [], [], end_token_ids=(1,)) for k in (None, 0)]
    output = sample(logits, rows)
    assert output.errors[0] is None
    assert output.token_ids[0] in (0, 2, 3)
    assert output.token_ids[1] == NO_TOKEN
    assert output.errors[1] is not None
    assert output.logprobs == [None, None]


def test_nothing_left_to_choose_is_an_error() -> None:
    rows = [
        SamplerRow(replace(params, logit_bias=((0, -1e300),), min_tokens=1), [], [], end_token_ids=(1,))
        for params in (GREEDY, DEFAULT)
    ]
    output = sample(torch.zeros(2, 2), rows)
    assert output.token_ids == [NO_TOKEN, NO_TOKEN]
    assert all(error is not None and "-inf" in error for error in output.errors)


@pytest.mark.parametrize(
    "row",
    [
        fresh(replace(DEFAULT, logit_bias=((VOCAB, 1.0),))),
        fresh(replace(DEFAULT, logit_bias=((-1, 1.0),))),
        fresh(replace(GREEDY, repetition_penalty=1.1), prompt=(VOCAB,)),
        fresh(replace(GREEDY, presence_penalty=1.1), [3, VOCAB]),
    ],
)
def test_ids_outside_the_vocabulary_fail_alone(row: SamplerRow) -> None:
    logits = make_logits(2, seed=6)
    output = sample(logits, [row, fresh(GREEDY)])
    assert output.token_ids == [NO_TOKEN, int(logits[1].argmax())]
    assert output.errors[0] is not None
    assert f"0 to {VOCAB - 1}" in output.errors[0]


# Inputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_upcast(dtype: torch.dtype) -> None:
    logits = make_logits(len(KINDS), seed=2).to(dtype)
    rows = [fresh(replace(params, seed=9, logprobs=1)) for params in KINDS]
    assert sample(logits, rows) == sample(logits.float(), rows)


def test_logits_are_not_changed_and_may_be_strided() -> None:
    logits = make_logits(len(KINDS), seed=3)
    rows = [fresh(replace(params, logprobs=1), [4, 4]) for params in KINDS]
    before = logits.clone()
    output = sample(logits, rows)
    assert torch.equal(logits, before)
    assert sample(logits.t().contiguous().t(), rows) == output
    wide = torch.cat([logits, torch.zeros(len(KINDS), 5)], dim=1)
    assert sample(wide[:, :VOCAB], rows) == output


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"\[2, vocab\].*got \[1, 4\]"):
        sample(torch.zeros(1, 4), [fresh(GREEDY), fresh(GREEDY)])
    with pytest.raises(ValueError, match="got"):
        sample(torch.zeros(4), [fresh(GREEDY)])
    empty = sample(torch.zeros(0, 4), [])
    assert (empty.token_ids, empty.logprobs, empty.errors) == ([], [], [])


def test_the_device_part_reads_nothing_back() -> None:
    """Tensors of the meta device hold no data: reading a value or a data-dependent shape of one raises."""
    rows = [fresh(params, [5, 5, 6]) for params in KINDS]
    tokens, peaks, errors = choose_tokens(torch.empty(len(rows), VOCAB, device="meta"), rows)
    assert tokens.shape == peaks.shape == (len(rows),)
    assert tokens.device.type == "meta"
    assert errors == [None] * len(rows)
    choose_tokens(torch.empty(2, VOCAB, device="meta"), [fresh(GREEDY), fresh(GREEDY)])


# Penalty state


def test_a_kept_row_and_a_rebuilt_one_agree_token_by_token() -> None:
    params = replace(DEFAULT, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, seed=5)
    prompt, output = (1, 2, 3), [9, 9]
    kept = SamplerRow(params, prompt, output)
    for step in range(30):
        logits = make_logits(1, seed=step, spread=1.0)
        token = only_token(logits, kept)
        assert token == only_token(logits, SamplerRow(params, prompt, tuple(output)))
        output.append(token)
    state = kept.penalty_state
    assert isinstance(state, PenaltyState)
    assert state.num_output_tokens == 31
    only_token(make_logits(1, seed=99), kept)
    assert kept.penalty_state is state
    assert state.num_output_tokens == 32


def test_a_row_whose_answer_was_cut_is_rebuilt() -> None:
    params = replace(GREEDY, presence_penalty=50.0)
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    row = SamplerRow(params, (), [0, 1])
    assert only_token(logits, row) == 2
    row.output_token_ids = [0]
    assert only_token(logits, row) == 1


def test_no_state_without_penalties() -> None:
    row = fresh(DEFAULT, [4])
    only_token(make_logits(1, seed=0), row)
    assert row.penalty_state is None


# Log-probabilities


def test_logprobs_are_the_models_own() -> None:
    logits = make_logits(len(KINDS) + 1, seed=11)
    rows = [fresh(replace(params, logprobs=index % 4), [4]) for index, params in enumerate(KINDS)] + [fresh(GREEDY)]
    output = sample(logits, rows)
    exact = logits.double().log_softmax(1)
    for index, result in enumerate(output.logprobs[:-1]):
        assert result is not None
        assert result.token_id == output.token_ids[index]
        assert result.logprob == pytest.approx(exact[index, result.token_id].item(), abs=1e-5)
        best = exact[index].topk(index % 4)
        assert [token_id for token_id, _ in result.top] == best.indices.tolist()
        assert [logprob for _, logprob in result.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert output.logprobs[-1] is None


def test_logprobs_of_ties_name_the_lower_id_first() -> None:
    (result,) = sample(torch.tensor([[1.0, 2.0, 2.0, 1.0]]), [SamplerRow(replace(GREEDY, logprobs=3), [], [])]).logprobs
    assert result is not None
    assert [token_id for token_id, _ in result.top] == [1, 2, 0]
    assert result.top[0] == (result.token_id, result.logprob)
