from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from actors.engine.draw import draw_tokens
from actors.engine.request import SamplingParams

DEFAULT = SamplingParams(max_tokens=8)
LAST_UNIFORM = 1.0 - 2.0**-53


def transformers_probabilities(logits: torch.Tensor, params: SamplingParams) -> list[float]:
    """The distribution of transformers' own warpers, in their float64."""
    no_ids = torch.empty((1, 0), dtype=torch.int64)
    scores = TemperatureLogitsWarper(params.temperature)(no_ids, logits.double().unsqueeze(0))
    if params.min_p > 0.0:
        scores = MinPLogitsWarper(params.min_p)(no_ids, scores)
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(no_ids, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(no_ids, scores)
    return scores.softmax(1)[0].tolist()


def ranked(logits: torch.Tensor) -> list[int]:
    values = logits.tolist()
    return sorted(range(len(values)), key=lambda token_id: (-values[token_id], token_id))


def spelled_out_probabilities(logits: torch.Tensor, params: SamplingParams) -> list[float]:
    """The documented rule, ties included, in plain Python floats."""
    values = logits.tolist()
    weights = [math.exp((value - max(values)) / params.temperature) for value in values]
    candidates = [token_id for token_id in ranked(logits) if weights[token_id] >= params.min_p]
    candidates = candidates[: params.top_k or None]
    total = math.fsum(weights[token_id] for token_id in candidates)
    kept: list[int] = []
    for token_id in candidates:
        if params.top_p < 1.0 and math.fsum(weights[i] for i in kept) >= params.top_p * total:
            break
        kept.append(token_id)
    total = math.fsum(weights[token_id] for token_id in kept)
    return [weights[token_id] / total if token_id in kept else 0.0 for token_id in range(len(values))]


def draw(logits: torch.Tensor, params: SamplingParams, uniforms: list[float]) -> list[int]:
    batch = logits.expand(len(uniforms), -1)
    return draw_tokens(batch, batch.max(1).values, [params] * len(uniforms), np.array(uniforms)).tolist()


def assert_distribution(logits: torch.Tensor, params: SamplingParams, probabilities: list[float], slack: float) -> None:
    """Every token owns exactly its interval of [0, 1), in the documented order, up to `slack` at either end.

    So the candidates, their order and their probabilities are those given, not only about so.
    """
    truncates = 0 < params.top_k < len(probabilities) or params.top_p < 1.0
    order = ranked(logits) if truncates else range(len(probabilities))
    candidates = [token_id for token_id in order if probabilities[token_id] > 0.0]
    ends = list(itertools.accumulate(probabilities[token_id] for token_id in candidates))
    intervals = [
        (token_id, start, end)
        for token_id, start, end in zip(candidates, [0.0, *ends], ends, strict=False)
        if end - start > 4 * slack
    ]
    if len(intervals) > 120:
        chosen = sorted(random.Random(len(intervals)).sample(range(40, len(intervals) - 40), 40))
        intervals = intervals[:40] + [intervals[i] for i in chosen] + intervals[-40:]
    uniforms = [u for _, start, end in intervals for u in (start + slack, end - slack)]
    expected = [token_id for token_id, _, _ in intervals for _ in range(2)]
    assert draw(logits, params, uniforms) == expected
    assert set(draw(logits, params, [0.0, LAST_UNIFORM])) <= set(candidates)


def random_logits(vocab_size: int, spread: float, seed: int) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


FILTERS = [
    {},
    {"min_p": 0.05},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 280},
    {"top_k": 4500},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 300, "top_p": 0.95},
    {"min_p": 0.02, "top_p": 0.9},
    {"min_p": 0.1, "top_k": 5},
    {"min_p": 0.01, "top_k": 40, "top_p": 0.7},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocab_size", [5, 200, 700, 5000])
def test_distribution_is_that_of_transformers(filters: dict[str, float], vocab_size: int) -> None:
    for seed, (temperature, spread) in enumerate(itertools.product([0.2, 0.8, 1.0, 3.0, 100.0], [0.5, 3.0])):
        params = replace(DEFAULT, temperature=temperature, **filters)
        logits = random_logits(vocab_size, spread, 100 * vocab_size + seed)
        assert_distribution(logits, params, transformers_probabilities(logits, params), 1e-11)


@pytest.mark.parametrize("filters", [{}, {"top_k": 50}, {"top_p": 0.5}, {"top_p": 0.95}], ids=str)
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_distribution_over_a_vocabulary_of_49152(filters: dict[str, float], spread: float) -> None:
    params = replace(DEFAULT, temperature=0.7, **filters)
    logits = random_logits(49152, spread, 7)
    assert_distribution(logits, params, transformers_probabilities(logits, params), 1e-8)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_tied_logits_go_by_the_lower_id(filters: dict[str, float]) -> None:
    for seed in range(20):
        # Rounded to halves: hundreds of ties, at every cut.
        logits = (random_logits(600, 2.0, seed) * 2).round() / 2
        params = replace(DEFAULT, temperature=[0.5, 1.0, 2.0][seed % 3], **filters)
        assert_distribution(logits, params, spelled_out_probabilities(logits, params), 1e-11)


def test_the_spelled_out_rule_is_that_of_transformers_without_ties() -> None:
    for seed, filters in enumerate(FILTERS):
        logits = random_logits(60, 2.0, seed)
        params = replace(DEFAULT, temperature=0.9, **filters)
        if params.top_k < 60:
            expected = transformers_probabilities(logits, params)
            assert spelled_out_probabilities(logits, params) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_forbidden_tokens_are_never_drawn(filters: dict[str, float]) -> None:
    logits = random_logits(5000, 1.0, 3)
    logits[::2] = -math.inf
    logits[:100] = -math.inf
    logits[-100:] = -math.inf
    params = replace(DEFAULT, **filters)
    assert_distribution(logits, params, transformers_probabilities(logits, params), 1e-11)
    drawn = draw(logits, params, [0.0, *np.linspace(0.0, LAST_UNIFORM, 200).tolist(), LAST_UNIFORM])
    assert all(logits[token_id] > -math.inf for token_id in drawn)


def test_equal_logits_share_evenly() -> None:
    logits = torch.full((1000,), 3.25)
    uniforms = [0.0, 0.2505, 0.9995, LAST_UNIFORM]
    assert draw(logits, DEFAULT, uniforms) == [0, 250, 999, 999]
    assert draw(logits, replace(DEFAULT, min_p=1.0), uniforms) == [0, 250, 999, 999]
    assert draw(logits, replace(DEFAULT, top_k=8), uniforms) == [0, 2, 7, 7]
    assert draw(logits, replace(DEFAULT, top_p=0.5), uniforms) == [0, 125, 499, 499]
    assert draw(logits, replace(DEFAULT, top_p=1e-9), uniforms) == [0, 0, 0, 0]


@pytest.mark.parametrize("filters", [{"temperature": 1e-6}, {"top_k": 1}, {"top_p": 1e-12}, {"min_p": 1.0}], ids=str)
def test_narrow_settings_take_the_likeliest_token(filters: dict[str, float]) -> None:
    for seed in range(10):
        logits = random_logits(5000, 2.0, seed)
        params = replace(DEFAULT, **filters)
        assert set(draw(logits, params, [0.0, 0.3, LAST_UNIFORM])) == {int(logits.argmax())}


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 1.0, 100.0])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4, 1e37])
def test_extreme_temperatures_and_logits(temperature: float, scale: float) -> None:
    logits = torch.tensor([3.0, -1.0, 2.9999, -3.0, 0.0]) * scale
    for filters in FILTERS:
        params = replace(DEFAULT, temperature=temperature, **filters)
        assert_distribution(logits, params, spelled_out_probabilities(logits, params), 1e-11)


def test_a_vocabulary_of_one() -> None:
    for filters in FILTERS:
        assert draw(torch.tensor([-4.0]), replace(DEFAULT, **filters), [0.0, 0.5, LAST_UNIFORM]) == [0, 0, 0]


def test_rows_of_every_kind_in_one_batch_are_drawn_as_alone() -> None:
    kinds = [replace(DEFAULT, temperature=t, **filters) for t in (0.5, 2.0) for filters in FILTERS]
    logits = torch.stack([random_logits(5000, 1.0 + seed % 5, seed) for seed in range(len(kinds))])
    uniforms = np.random.default_rng(0).random(len(kinds))
    together = draw_tokens(logits, logits.max(1).values, kinds, uniforms).tolist()
    alone = [draw(row, params, [u])[0] for row, params, u in zip(logits, kinds, uniforms.tolist(), strict=True)]
    assert together == alone
