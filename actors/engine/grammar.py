"""Answers held to a grammar: which tokens may come next. The grammars and the work are llguidance's.

A state is a function of the grammar and the tokens so far, so it never travels: a worker that takes an answer over
makes it anew from its tokens (decision D5).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from actors.engine.grammar_limits import LIMITS, reason_of
from actors.engine.transfer import to_device

_WORD_BITS = 32


class GrammarError(ValueError):
    """A grammar that cannot be used, or an answer that has left it."""


class GrammarState:
    """One answer's way through its grammar. Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher) -> None:
        """Takes `matcher` over, which must be at its beginning."""
        self._matcher = matcher
        self._num_tokens = 0

    @property
    def has_failed(self) -> bool:
        """Whether the grammar, or an answer that has left it, is why nothing more can follow."""
        return self._matcher.is_error()

    def follow(self, output_token_ids: Sequence[int]) -> None:
        """Takes in what is new of an answer. Raises GrammarError for a token that may not stand there."""
        for token_id in output_token_ids[self._num_tokens :]:
            if not self._matcher.consume_token(token_id):
                raise GrammarError(
                    f"the answer does not keep to its grammar at token {self._num_tokens}"
                    + (f": {reason_of(self._matcher.get_error())}" if self._matcher.is_error() else "")
                )
            self._num_tokens += 1

    def write_mask(self, words: torch.Tensor) -> None:
        """Fills `words` (int32 [ceil(vocab / 32)], contiguous, on the CPU): bit t % 32 of word t // 32 is set where
        token t may come next; where nothing can, for the end tokens. Raises GrammarError where the grammar takes more
        work than llguidance's limits allow."""
        self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.numel() * words.element_size())
        if self._matcher.is_error():
            raise GrammarError(reason_of(self._matcher.get_error()))


class Grammars:
    """Grammars over one model's tokens. Its tokenizer is read with the first one, which takes a second."""

    def __init__(self, folder: Path, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        """`vocab_size` is that of the logits; with one of `end_token_ids` an answer ends."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._end_token_ids = list(end_token_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def state(self, grammar: str) -> GrammarState:
        """A state at the beginning of `grammar`, which is in llguidance's own form. May take a second; from any thread.

        Raises:
            GrammarError: no grammar, or one over llguidance's limits; a model without a fast tokenizer, or without an
                end-of-sequence token.
        """
        if not self._end_token_ids:
            raise GrammarError("the model has no end-of-sequence token, with which an answer could end")
        matcher = LLMatcher(self._read_tokenizer(), grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarError(reason_of(matcher.get_error()))
        return GrammarState(matcher)

    def _read_tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                from transformers import AutoTokenizer  # not above: most workers never need it

                tokenizer: Any = AutoTokenizer.from_pretrained(self._folder)
                try:
                    self._tokenizer = from_tokenizer(tokenizer, self._vocab_size, self._end_token_ids)
                except ValueError as error:
                    raise GrammarError(f"the model's tokenizer cannot be used with grammars: {error}") from error
            return self._tokenizer


def mask_by_grammars(logits: torch.Tensor, states: dict[int, GrammarState]) -> dict[int, str]:
    """Sets the logits (float32 [B, vocab], changed in place) of tokens that may not come next to -inf, in the rows that
    `states` has. Returns what went wrong, by row; such a row stays as it is."""
    vocab_size = logits.shape[1]
    words = torch.zeros((len(states), -(-vocab_size // _WORD_BITS)), dtype=torch.int32)
    errors = {}
    for position, (row, state) in enumerate(states.items()):
        try:
            state.write_mask(words[position])
        except GrammarError as error:
            errors[row] = str(error)
            words[position] = -1
    words = to_device(words, logits.device)
    bits = torch.arange(_WORD_BITS, dtype=torch.int32, device=logits.device)
    is_barred = ((words[:, :, None] >> bits) & 1 == 0).flatten(1)[:, :vocab_size]
    rows = to_device(torch.tensor(list(states)), logits.device)
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(is_barred, -torch.inf))
    return errors
