"""From logits to tokens, for a batch of independent rows. No state of its own: decision D5.

A row's token is a function of its logits, its parameters and its tokens alone. Neighbours in the batch do not change
it, and a row that fails (NaN from an overflow, say) is reported by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from actors.engine.draw import draw_tokens
from actors.engine.grammar import GrammarState, mask_by_grammars
from actors.engine.logprobs import DeviceLogprobs, gather_logprobs, prompt_logprobs
from actors.engine.penalties import (
    PenaltyState,
    apply_bias,
    apply_penalties,
    check_bias,
    mask_tokens,
    uses_penalties,
)
from actors.engine.philox import uniforms
from actors.engine.request import SamplingParams, TokenLogprobs
from actors.engine.transfer import to_device

__all__ = ["NO_TOKEN", "PenaltyState", "SamplerOutput", "SamplerRow", "choose_tokens", "prompt_logprobs", "sample"]

NO_TOKEN = -1
"""Stands for the token of a row that failed."""


@dataclass(slots=True)
class SamplerRow:
    """What sampling needs to know of one sequence. Keep it as long as the sequence runs: `penalty_state` is reused."""

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    """The answer so far, tokens generated elsewhere included. May be the engine's own list, which grows. Its length is
    the position that the next token's uniform is drawn for."""
    end_token_ids: tuple[int, ...] = ()
    """End-of-sequence and stop tokens, masked while the answer is shorter than `params.min_tokens`."""
    penalty_state: PenaltyState | None = None
    """Made and kept up by `sample` for a row that uses penalties. None rebuilds it."""
    grammar: GrammarState | None = None
    """Of a row with a grammar, and as far as its answer."""


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Results of B rows, in their order."""

    token_ids: list[int]
    """`NO_TOKEN` where `errors` has a message."""
    logprobs: list[TokenLogprobs | None]
    """For rows that asked (`params.logprobs` is not None) and did not fail."""
    errors: list[str | None]
    """Why this row has no token; its request is to be ended with this message, the other rows are good."""


def sample(logits: torch.Tensor, rows: Sequence[SamplerRow]) -> SamplerOutput:
    """Chooses the next token of every row. Waits for the device once, at the end.

    Order: repetition, frequency and presence penalty, `logit_bias`, `min_tokens`, grammar; a row with temperature 0
    then takes its largest logit (ties: the lowest id), the others `actors.engine.draw`'s rule. Log-probabilities are of
    `logits` as given. Appending the token to the sequence is the caller's.

    Args:
        logits: [B, vocab], float32, bfloat16 or float16, on any device. Not changed.
        rows: B.

    Raises:
        ValueError: `logits` is not [B, vocab].
    """
    if logits.dim() != 2 or logits.shape[0] != len(rows):
        raise ValueError(f"sample needs logits [{len(rows)}, vocab] for {len(rows)} rows; got {list(logits.shape)}")
    if not rows:
        return SamplerOutput([], [], [])
    tokens, peaks, errors = choose_tokens(logits, rows)
    asking = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    gathered = _logprobs_of(logits, tokens, rows, asking) if asking else None

    token_ids: list[int] = tokens.tolist()
    for index, peak in enumerate(peaks.tolist()):
        errors[index] = errors[index] or _peak_error(peak)
    logprobs: list[TokenLogprobs | None] = [None] * len(rows)
    if gathered is not None:
        results = gathered.to_host([rows[index].params.logprobs or 0 for index in asking])
        for index, result in zip(asking, results, strict=True):
            logprobs[index] = result
            if math.isnan(result.logprob):
                errors[index] = errors[index] or "the model's logits hold NaN or +inf: no log-probabilities"
    for index, error in enumerate(errors):
        if error is not None:
            token_ids[index] = NO_TOKEN
            logprobs[index] = None
    return SamplerOutput(token_ids, logprobs, errors)


def choose_tokens(
    logits: torch.Tensor, rows: Sequence[SamplerRow]
) -> tuple[torch.Tensor, torch.Tensor, list[str | None]]:
    """The device's part of `sample`: it never waits for an accelerator.

    Returns:
        Token ids (int64 [B]) and each row's largest logit after penalties, bias and mask ([B]), both on the device, and
        the errors known so far. A token counts only where there is no error and that logit is finite.
    """
    errors: list[str | None] = [None] * len(rows)
    if all(_is_plain_greedy(row) for row in rows):
        peaks, tokens = logits.max(1)
        return tokens, peaks, errors
    processed = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    _edit_logits(processed, rows, errors)
    peaks, tokens = processed.max(1)
    params = [row.params for row in rows]
    drawing = [p.temperature > 0.0 for p in params]
    if any(drawing):
        numbers = uniforms(
            [p.seed for p in params],
            [p.choice_index for p in params],
            [len(row.output_token_ids) for row in rows],
        )
        drawn = draw_tokens(processed, peaks, params, numbers)
        tokens = torch.where(to_device(torch.tensor(drawing), logits.device), drawn, tokens)
    return tokens, peaks, errors


def _is_plain_greedy(row: SamplerRow) -> bool:
    params = row.params
    is_edited = uses_penalties(params) or params.logit_bias or _is_masked(row) or row.grammar is not None
    return params.temperature == 0.0 and not is_edited


def _is_masked(row: SamplerRow) -> bool:
    return bool(row.end_token_ids) and len(row.output_token_ids) < row.params.min_tokens


def _edit_logits(logits: torch.Tensor, rows: Sequence[SamplerRow], errors: list[str | None]) -> None:
    """Penalties, bias and masks in place; a row that cannot be edited gets its error and stays as it is."""
    vocab_size = logits.shape[1]
    penalised: dict[int, PenaltyState] = {}
    biased: list[int] = []
    masked: list[tuple[int, int]] = []
    grammars: dict[int, GrammarState] = {}
    for index, row in enumerate(rows):
        try:
            check_bias(row.params, vocab_size)
            if uses_penalties(row.params):
                penalised[index] = _current_penalty_state(row, vocab_size)
        except ValueError as error:
            errors[index] = str(error)
            continue
        if row.params.logit_bias:
            biased.append(index)
        if _is_masked(row):
            # A model may name end tokens beyond its logits; there is nothing to mask then.
            masked += [(index, token_id) for token_id in row.end_token_ids if 0 <= token_id < vocab_size]
        if row.grammar is not None:
            grammars[index] = row.grammar
    if penalised:
        states = list(penalised.values())
        apply_penalties(logits, list(penalised), [rows[index].params for index in penalised], states)
    if biased:
        apply_bias(logits, biased, [rows[index].params for index in biased])
    if masked:
        mask_tokens(logits, masked)
    if grammars:
        for index, reason in mask_by_grammars(logits, grammars).items():
            errors[index] = reason


def _current_penalty_state(row: SamplerRow, vocab_size: int) -> PenaltyState:
    """The row's state with every token of the answer in it; made anew when there is none or the answer got shorter."""
    state = row.penalty_state
    if state is None or state.num_output_tokens > len(row.output_token_ids):
        state = PenaltyState.from_tokens(row.prompt_token_ids, row.output_token_ids, vocab_size)
        row.penalty_state = state
    for token_id in row.output_token_ids[state.num_output_tokens :]:
        state.append(token_id)
    return state


def _logprobs_of(
    logits: torch.Tensor, tokens: torch.Tensor, rows: Sequence[SamplerRow], asking: Sequence[int]
) -> DeviceLogprobs:
    where = to_device(torch.tensor(asking), logits.device)
    width = max(rows[index].params.logprobs or 0 for index in asking)
    return gather_logprobs(logits.index_select(0, where), tokens.index_select(0, where), width)


def _peak_error(peak: float) -> str | None:
    if math.isnan(peak):
        return "the model's logits hold NaN: an overflow in the model, or damaged weights"
    if peak == math.inf:
        return "the model's logits hold +inf: an overflow in the model, or damaged weights"
    if peak == -math.inf:
        return "no token is left to choose: every logit is -inf after logit_bias, min_tokens and grammar"
    return None
