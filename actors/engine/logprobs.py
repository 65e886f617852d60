"""Log-probabilities as the API reports them: of the model's own logits, before penalties, bias and temperature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from actors.engine.ranking import ranked_token_ids
from actors.engine.request import TokenLogprobs
from actors.engine.transfer import to_device

_ROWS_AT_ONCE = 64
"""Prompt positions handled together: bounds the float32 and int64 copies of [rows, vocab]."""


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """Log-probabilities of R positions, still on the device."""

    token_ids: torch.Tensor
    """int64 [R], the chosen tokens."""
    chosen: torch.Tensor
    """float32 [R]"""
    top_ids: torch.Tensor
    """int64 [R, width], most likely first, ties by the lower id."""
    top: torch.Tensor
    """float32 [R, width]"""

    def to_host(self, top_counts: Sequence[int]) -> list[TokenLogprobs]:
        """R results with `top_counts[i]` alternatives each (at most the width). Waits for the device."""
        return [
            TokenLogprobs(token_id, logprob, tuple(zip(ids[:count], values[:count], strict=True)))
            for token_id, logprob, ids, values, count in zip(
                self.token_ids.tolist(),
                self.chosen.tolist(),
                self.top_ids.tolist(),
                self.top.tolist(),
                top_counts,
                strict=True,
            )
        ]


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, width: int) -> DeviceLogprobs:
    """Log-softmax in float32 of `logits` [R, vocab] at `token_ids` (int64 [R]) and at the `width` most likely tokens.

    `width` may be 0 and is cut to the vocabulary. Tokens are ranked by logit, so that the first one is the greedy token
    even where float32 log-probabilities tie. `logits` is not changed and nothing waits for the device.
    """
    logits = logits.float()
    logprobs = logits.log_softmax(1)
    width = min(width, logits.shape[1])
    if width == 0:
        top_ids = torch.empty((logits.shape[0], 0), dtype=torch.int64, device=logits.device)
    else:
        top_ids = ranked_token_ids(logits, width)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    return DeviceLogprobs(token_ids, chosen, top_ids, logprobs.gather(1, top_ids))


def prompt_logprobs(logits: torch.Tensor, next_token_ids: Sequence[int], k: int) -> list[TokenLogprobs]:
    """Log-probabilities of the prompt's tokens, for a run of positions.

    Args:
        logits: [n, vocab] of n consecutive prompt positions, float32, bfloat16 or float16. Not changed.
        next_token_ids: n, the prompt token that follows each position.
        k: how many of the most likely tokens to report as well, from 0.

    Returns:
        n results, the i-th for `next_token_ids[i]`. (The prompt's first token follows nothing and has none.)

    Raises:
        ValueError: the lengths differ, a token is not in the vocabulary, or a row of logits is not finite enough to
            normalise (NaN, +inf, all -inf).
    """
    rows, vocab_size = logits.shape
    if len(next_token_ids) != rows:
        raise ValueError(f"prompt_logprobs needs one next token a row of logits; got {len(next_token_ids)} for {rows}")
    for token_id in next_token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"token id {token_id} is not in the model's vocabulary, 0 to {vocab_size - 1}")
    results: list[TokenLogprobs] = []
    for start in range(0, rows, _ROWS_AT_ONCE):
        chunk_ids = to_device(torch.tensor(next_token_ids[start : start + _ROWS_AT_ONCE]), logits.device)
        gathered = gather_logprobs(logits[start : start + _ROWS_AT_ONCE], chunk_ids, k)
        results += gathered.to_host([k] * chunk_ids.shape[0])
    for index, result in enumerate(results):
        if math.isnan(result.logprob):
            raise ValueError(f"the model's logits at row {index} hold NaN or +inf, or are all -inf")
    return results
