"""From one sequence's token events to pieces of text that may be sent: detokenization, stop strings, accounting."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from actors.engine.request import FINISH_LENGTH, FINISH_STOP, TokenEvent, TokenLogprobs
from app.detokenizer import IncrementalDetokenizer
from app.openai_responses import FinishReason
from app.stop_strings import StopMatcher
from app.token_bytes import TokenBytes


@dataclass(slots=True)
class Piece:
    """What one step added to a choice."""

    index: int
    """Of the choice: prompt * n + choice."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """One for each token, when log-probabilities were asked for."""
    text_offsets: list[int] = field(default_factory=list)
    """Characters of the choice's text before each token."""
    finish_reason: FinishReason | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One for each token of the prompt, on the first piece, when they were asked for."""


class ChoiceText:
    """One choice of one prompt. `completion_tokens` counts up to and including the token that ended it."""

    def __init__(
        self,
        index: int,
        table: TokenBytes,
        stops: Sequence[str],
        *,
        include_stop: bool,
        skip_special_tokens: bool,
        echoed_prompt: Sequence[int] | None,
        after_text: bool,
        shown_ids: Collection[int] = (),
    ) -> None:
        """`echoed_prompt`: the prompt's tokens come first in the text, as `echo` asks. `after_text`, `shown_ids`: see
        the detokenizer; a completion's first token keeps its leading space."""
        self.index = index
        self.completion_tokens = 0
        self.ended = False
        self._table = table
        self._skip_special_tokens = skip_special_tokens
        self._detokenizer = IncrementalDetokenizer(
            table,
            skip_special_tokens=skip_special_tokens,
            after_text=after_text and echoed_prompt is None,
            shown_ids=shown_ids,
        )
        self._stops = StopMatcher(stops, include_in_output=include_stop)
        self._echoed_prompt = echoed_prompt
        self._num_chars = 0

    def take(self, event: TokenEvent) -> Piece:
        """The piece that a token event gives. After one with a finish reason the choice has `ended`."""
        piece = Piece(self.index, prompt_logprobs=event.prompt_logprobs)
        if self._echoed_prompt is not None:
            self._echo(piece, self._echoed_prompt, event.prompt_logprobs)
            self._echoed_prompt = None
        stopped = False
        if event.token_id is not None:
            self.completion_tokens += 1
            piece.token_ids.append(event.token_id)
            piece.logprobs.append(event.logprobs)
            piece.text_offsets.append(self._num_chars)
            # The token that ended the answer by itself (end of sequence, stop token) is no part of its text.
            silent = event.finish_reason == FINISH_STOP and self._skip_special_tokens
            text = "" if silent else self._detokenizer.push(event.token_id)
            self._num_chars += len(text)
            sent, stopped = self._stops.push(text)
            piece.text += sent
        if stopped:
            piece.finish_reason = "stop"
        elif event.finish_reason is not None:
            rest, stopped = self._stops.push(self._detokenizer.finish())
            piece.text += rest + self._stops.flush()
            piece.finish_reason = "stop" if stopped or event.finish_reason != FINISH_LENGTH else "length"
        self.ended = piece.finish_reason is not None
        return piece

    def _echo(self, piece: Piece, prompt: Sequence[int], logprobs: tuple[TokenLogprobs | None, ...] | None) -> None:
        """The prompt goes around the stop matcher: a stop string in it ends nothing."""
        for position, token_id in enumerate(prompt):
            piece.token_ids.append(token_id)
            piece.logprobs.append(logprobs[position] if logprobs else None)
            piece.text_offsets.append(self._num_chars)
            text = self._detokenizer.push(token_id)
            self._num_chars += len(text)
            piece.text += text
