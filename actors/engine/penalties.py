"""What changes a row's logits before temperature: penalties, `logit_bias` and the `min_tokens` mask.

Order and rules are vLLM's: repetition penalty over prompt and answer (CTRL, arXiv 1909.05858, as in transformers),
frequency and presence penalty over the answer alone (OpenAI), bias, mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from actors.engine.request import SamplingParams
from actors.engine.transfer import to_device

_FLOAT32_MAX = float(np.finfo(np.float32).max)


class PenaltyState:
    """The distinct tokens of one sequence and how often each stands in the answer.

    Kept up token by token, so that a step does not read the whole sequence; kept sparse and on the host, because a
    sequence holds few of a vocabulary's tokens and a batch's worth goes to the device in one copy. It is a cache:
    `from_tokens` rebuilds it from the sequence, so it never travels (decision D5).
    """

    __slots__ = ("_counts", "_slots", "_token_ids", "num_output_tokens", "vocab_size")

    def __init__(self, prompt_token_ids: Sequence[int], vocab_size: int) -> None:
        """Starts with the prompt and no answer. Raises ValueError for a token id outside the vocabulary."""
        distinct = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        for token_id in distinct[[0, -1]].tolist() if distinct.size else ():
            _check_token_id(token_id, vocab_size)
        self.vocab_size = vocab_size
        self.num_output_tokens = 0
        self._slots = {token_id: slot for slot, token_id in enumerate(distinct.tolist())}
        self._token_ids = distinct
        self._counts = np.zeros(distinct.size, dtype=np.float32)

    @classmethod
    def from_tokens(
        cls, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], vocab_size: int
    ) -> PenaltyState:
        """The state of a sequence with these tokens. Raises ValueError for a token id outside the vocabulary."""
        state = cls(prompt_token_ids, vocab_size)
        for token_id in output_token_ids:
            state.append(token_id)
        return state

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """The distinct tokens of prompt and answer, int64 [T], in no order of meaning. A view; do not change it."""
        return self._token_ids[: len(self._slots)]

    @property
    def output_counts(self) -> NDArray[np.float32]:
        """How often each of them stands in the answer, float32 [T] (exact up to 2**24). A view; do not change it."""
        return self._counts[: len(self._slots)]

    def append(self, token_id: int) -> None:
        """Adds one token of the answer. Raises ValueError for a token id outside the vocabulary."""
        slot = self._slots.get(token_id)
        if slot is None:
            _check_token_id(token_id, self.vocab_size)
            slot = len(self._slots)
            if slot == self._token_ids.size:
                spare = max(slot, 64)
                self._token_ids = np.concatenate([self._token_ids, np.zeros(spare, dtype=np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(spare, dtype=np.float32)])
            self._slots[token_id] = slot
            self._token_ids[slot] = token_id
        self._counts[slot] += 1.0
        self.num_output_tokens += 1


def uses_penalties(params: SamplingParams) -> bool:
    """Whether these parameters need a `PenaltyState`."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def apply_penalties(
    logits: torch.Tensor, row_indices: Sequence[int], params: Sequence[SamplingParams], states: Sequence[PenaltyState]
) -> None:
    """Penalises the rows `row_indices` of `logits` (float32 [B, vocab]) in place; the sequences run in parallel.

    Repetition: `x * r` for a negative logit of a token already there, `x / r` for another. Then
    `x - frequency * count - presence * (count > 0)`.
    """
    vocab_size = logits.shape[1]
    sizes = [state.token_ids.size for state in states]
    where = np.concatenate([state.token_ids + row * vocab_size for row, state in zip(row_indices, states, strict=True)])
    strengths = np.array(
        [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params], dtype=np.float32
    ).repeat(sizes, axis=0)
    counts = np.concatenate([state.output_counts for state in states])
    reductions = counts * strengths[:, 1] + (counts > 0) * strengths[:, 2]

    flat = logits.view(-1)
    index = to_device(torch.from_numpy(where), logits.device)
    repetition = to_device(torch.from_numpy(strengths[:, 0].copy()), logits.device)
    before = flat.index_select(0, index)
    after = torch.where(before < 0, before * repetition, before / repetition)
    flat.index_copy_(0, index, after - to_device(torch.from_numpy(reductions), logits.device))


def check_bias(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError if `logit_bias` names a token id outside the vocabulary."""
    for token_id, _ in params.logit_bias:
        _check_token_id(token_id, vocab_size)


def apply_bias(logits: torch.Tensor, row_indices: Sequence[int], params: Sequence[SamplingParams]) -> None:
    """Adds each row's `logit_bias` in place (float32 [B, vocab]). Ids must be in the vocabulary.

    A bias beyond float32 acts as the largest one, or as -inf, which forbids the token.
    """
    entries = [
        (row, token_id, -np.inf if bias < -_FLOAT32_MAX else min(bias, _FLOAT32_MAX))
        for row, p in zip(row_indices, params, strict=True)
        for token_id, bias in p.logit_bias
    ]
    rows, token_ids, biases = zip(*entries, strict=True)
    where = to_device(torch.tensor([rows, token_ids]), logits.device).unbind()
    logits.index_put_(where, to_device(torch.tensor(biases, dtype=torch.float32), logits.device), accumulate=True)


def mask_tokens(logits: torch.Tensor, entries: Sequence[tuple[int, int]]) -> None:
    """Sets the (row, token id) `entries` to -inf in place. Ids must be in the vocabulary."""
    rows, token_ids = zip(*entries, strict=True)
    where = to_device(torch.tensor([rows, token_ids]), logits.device).unbind()
    logits.index_put_(where, logits.new_full((), -torch.inf))


def _check_token_id(token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise ValueError(f"token id {token_id} is not in the model's vocabulary, 0 to {vocab_size - 1}")
