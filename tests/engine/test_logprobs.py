from __future__ import annotations

import math

import pytest
import torch

from actors.engine.logprobs import gather_logprobs, prompt_logprobs
from actors.engine.ranking import ranked_token_ids


def ranked(logits: torch.Tensor) -> list[int]:
    values = logits.tolist()
    return sorted(range(len(values)), key=lambda token_id: (-values[token_id], token_id))


@pytest.mark.parametrize("width", [1, 5, 299, 300])
@pytest.mark.parametrize("step", [None, 0.5])
def test_ranking_is_by_logit_then_id(width: int, step: float | None) -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0)) * 3
    if step is not None:
        logits = (logits / step).round() * step
    logits[0] = 1.5
    logits[1, ::3] = -math.inf
    logits[2, ::2] = 0.0
    logits[2, 1::2] = -0.0
    logits[3] *= 1e37
    logits[4] *= 1e-42
    logits[5, 7] = math.inf
    before = logits.clone()
    assert ranked_token_ids(logits, width).tolist() == [ranked(row)[:width] for row in logits]
    assert torch.equal(logits, before)


def test_values_are_a_float64_log_softmax() -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(2)) * 5
    chosen = torch.tensor([0, 999, 17, 500])
    exact = logits.double().log_softmax(1)
    results = gather_logprobs(logits, chosen, 6).to_host([6, 0, 3, 1])
    for row, (result, count) in enumerate(zip(results, [6, 0, 3, 1], strict=True)):
        assert result.token_id == chosen[row]
        assert result.logprob == pytest.approx(exact[row, chosen[row]].item(), abs=1e-5)
        assert [token_id for token_id, _ in result.top] == ranked(logits[row])[:count]
        for token_id, logprob in result.top:
            assert logprob == pytest.approx(exact[row, token_id].item(), abs=1e-5)


def test_half_precision_logits_are_normalised_in_float32() -> None:
    logits = (torch.randn(3, 400, generator=torch.Generator().manual_seed(3)) * 4).bfloat16()
    chosen = torch.tensor([1, 2, 3])
    assert gather_logprobs(logits, chosen, 4).to_host([4] * 3) == gather_logprobs(logits.float(), chosen, 4).to_host(
        [4] * 3
    )


def test_more_alternatives_than_tokens() -> None:
    (result,) = gather_logprobs(torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([0]), 20).to_host([20])
    assert [token_id for token_id, _ in result.top] == [1, 0]
    assert [math.exp(logprob) for _, logprob in result.top] == pytest.approx([0.75, 0.25])


def test_prompt_logprobs_match_position_by_position() -> None:
    count = 150
    logits = torch.randn(count, 60, generator=torch.Generator().manual_seed(4))
    next_ids = torch.randint(0, 60, (count,), generator=torch.Generator().manual_seed(5)).tolist()
    exact = logits.double().log_softmax(1)
    results = prompt_logprobs(logits, next_ids, 2)
    assert [result.token_id for result in results] == next_ids
    assert [result.logprob for result in results] == pytest.approx(
        [exact[i, token_id].item() for i, token_id in enumerate(next_ids)], abs=1e-5
    )
    assert [[token_id for token_id, _ in result.top] for result in results] == [ranked(row)[:2] for row in logits]
    assert all(result.top == () for result in prompt_logprobs(logits, next_ids, 0))
    assert prompt_logprobs(logits[:0], [], 1) == []


def test_prompt_logprobs_refuses_what_it_cannot_answer() -> None:
    logits = torch.zeros(3, 4)
    with pytest.raises(ValueError, match="got 2 for 3"):
        prompt_logprobs(logits, [0, 1], 0)
    with pytest.raises(ValueError, match=r"token id 4 .* 0 to 3"):
        prompt_logprobs(logits, [0, 4, 1], 0)
    for bad in (math.nan, math.inf):
        broken = logits.clone()
        broken[1, 2] = bad
        with pytest.raises(ValueError, match="row 1"):
            prompt_logprobs(broken, [0, 1, 2], 2)
