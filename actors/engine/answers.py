"""What a step's output becomes for the requests that have not ended: tokens, log-probabilities, errors, ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from actors.engine.counters import EngineCounters
from actors.engine.exports import EarlyExports, Export, content_of
from actors.engine.grammar import GrammarError, GrammarState
from actors.engine.loading import LoadedModel
from actors.engine.request import (
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    EngineRequest,
    TokenEvent,
    TokenLogprobs,
)
from actors.engine.sampler import SamplerOutput, SamplerRow, prompt_logprobs, sample
from actors.engine.scheduler import Scheduler
from actors.engine.sequence import SequenceState
from actors.engine.step_plan import Chunk
from actors.engine.step_runner import StepOutput


@dataclass(slots=True)
class Outcome:
    """What a step gave: token events in the order of the batch, and exports that somebody must end."""

    events: list[TokenEvent] = field(default_factory=list)
    exports: list[Export] = field(default_factory=list)
    waited_s: float = 0.0
    """For so long it waited for KV."""


class Answers:
    """The requests of one engine that have not ended.

    Args:
        max_context_tokens: prompt and answer together may have so many tokens, now.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        scheduler: Scheduler,
        early_exports: EarlyExports,
        counters: EngineCounters,
        max_context_tokens: Callable[[], int],
    ) -> None:
        self.sequences: dict[str, SequenceState] = {}
        self._rows: dict[str, SamplerRow] = {}
        self._model = loaded.model
        self._block_tokens = loaded.layout.block_tokens
        self._scheduler = scheduler
        self._early_exports = early_exports
        self._counters = counters
        self._max_context_tokens = max_context_tokens

    def begin(self, sequence: SequenceState, grammar: GrammarState | None = None) -> None:
        """One that the scheduler has just been given, with the state of its grammar, if it has one."""
        request = sequence.request
        self.sequences[request.request_id] = sequence
        end_tokens = (*request.sampling.stop_token_ids, *request.eos_token_ids)
        self._rows[request.request_id] = SamplerRow(
            request.sampling, request.prompt_token_ids, sequence.output_token_ids, end_tokens, grammar=grammar
        )

    def fail(self, sequence: SequenceState, reason: str) -> TokenEvent:
        """Ends one with an error."""
        self._counters.failed_requests += 1
        grammar = self._rows[sequence.request_id].grammar
        self.remove(sequence)
        return TokenEvent(
            sequence.request_id,
            None,
            FINISH_ERROR,
            sequence.request.owner,
            error=reason,
            blames_grammar=grammar is not None and grammar.has_failed,
        )

    def remove(self, sequence: SequenceState, *, keep_blocks: bool = False) -> None:
        """It has ended, or nobody wants it. Its blocks may be kept for an export."""
        self._scheduler.finish(sequence, keep_blocks=keep_blocks)
        del self.sequences[sequence.request_id]
        del self._rows[sequence.request_id]

    def fetched(self, request_id: str, num_tokens: int) -> bool:
        """See `Engine.fetched`."""
        sequence = self._scheduler.fetched(request_id, num_tokens)
        if sequence is None:
            return False
        self._counters.fetched_tokens += sequence.num_fetched_tokens
        return True

    def take_step(self, chunks: list[Chunk], output: StepOutput, wanted: list[Chunk]) -> Outcome:
        """Takes in what a step over `chunks` gave. Those that are not `wanted` belong to requests that ended, or to
        ones that begin anew."""
        rows = _Rows(chunks, output)
        # What was computed from KV that did not come. The other rows of the batch have nothing to do with it.
        void = {
            chunk.sequence.request_id: chunk.sequence
            for chunk in wanted
            if chunk.sequence.incoming is not None and chunk.sequence.incoming.has_failed
        }
        damaged: dict[str, str] = {}
        for chunk in wanted:
            if not chunk.sequence.reuses_prefix:
                try:
                    self._collect_prompt_logprobs(chunk, rows.of(chunk))
                except ValueError as error:  # of this request's logits alone
                    damaged[chunk.sequence.request_id] = str(error)
        sampling = [chunk.sequence for chunk in wanted if chunk.samples]
        tokens = self._sample(sampling, rows.sampled(wanted))
        unusable = damaged.keys() | void.keys()
        events = [self.fail(self.sequences[request_id], reason) for request_id, reason in damaged.items()]
        for sequence in void.values():
            self._scheduler.return_to_fetching(sequence)
        waited_s, exports = 0.0, list[Export]()
        for chunk in wanted:
            sequence = chunk.sequence
            if sequence.request_id in void:
                continue
            if sequence.incoming is not None:
                waited_s += sequence.incoming.waited_s
                self._scheduler.arrived(sequence)
                self._counters.fetched_tokens += sequence.num_fetched_tokens
            self._counters.count_chunk(chunk)
            if sequence.request_id not in damaged:
                self._scheduler.computed(chunk)
                if self._is_early(chunk) and (early := self._early_exports.begin(sequence)) is not None:
                    exports.append(early)
        events += [
            self._accept(sequence, token)
            for sequence, token in zip(sampling, tokens, strict=True)
            if sequence.request_id not in unusable
        ]
        exports += [
            content_of(self._scheduler.exports[event.request_id], self._block_tokens)
            for event in events
            if event.awaits_export
        ]
        return Outcome(events, exports, waited_s)

    def _collect_prompt_logprobs(self, chunk: Chunk, hidden: torch.Tensor) -> None:
        """Adds the log-probabilities of the prompt tokens that follow the chunk's rows; hidden [rows of the chunk,
        hidden]."""
        sequence, start = chunk.sequence, chunk.first_token
        stop = min(start + chunk.num_tokens, sequence.num_prompt_tokens - 1)
        if start == 0:
            sequence.prompt_logprobs = [None]
        if start < stop:
            logits = self._model.logits(hidden[: stop - start])
            k = sequence.request.sampling.prompt_logprobs or 0
            sequence.prompt_logprobs += prompt_logprobs(logits, sequence.tokens[start + 1 : stop + 1], k)

    def _sample(self, sequences: list[SequenceState], hidden: torch.Tensor) -> list[_Token]:
        """The next token of each sequence; hidden [sequences, hidden]."""
        if not sequences:
            return []
        logits = self._model.logits(hidden)
        output: SamplerOutput = sample(logits, [self._rows[sequence.request_id] for sequence in sequences])
        return [_Token(*token) for token in zip(output.token_ids, output.logprobs, output.errors, strict=True)]

    def _accept(self, sequence: SequenceState, token: _Token) -> TokenEvent:
        """Takes a sampled token in and says what follows from it."""
        request, limit = sequence.request, sequence.request.sampling.max_tokens
        if token.error is not None:
            return self.fail(sequence, token.error)
        is_first = sequence.num_output_tokens == len(request.output_token_ids)
        event = TokenEvent(
            request.request_id,
            token.token_id if limit else None,
            owner=request.owner,
            logprobs=token.logprobs if limit else None,
            prompt_logprobs=tuple(sequence.prompt_logprobs) if is_first and not sequence.reuses_prefix else None,
            cached_tokens=sequence.num_cached_tokens if is_first and not request.output_token_ids else None,
        )
        if limit:  # max_tokens is 0 where only the prompt's log-probabilities are wanted
            sequence.append(token.token_id)
            self._counters.generated_tokens += 1
            grammar = self._rows[request.request_id].grammar
            if grammar is not None:
                try:
                    grammar.follow(sequence.output_token_ids)
                except GrammarError as error:
                    return self.fail(sequence, str(error))
        finish_reason = self._finish_reason(sequence)
        if finish_reason is None and not request.hand_over:
            return event
        self._counters.finished_requests += 1
        is_kept = request.hand_over or self._is_worth_publishing(sequence)
        self.remove(sequence, keep_blocks=is_kept)
        return replace(event, finish_reason=finish_reason, awaits_export=is_kept)

    @staticmethod
    def _is_early(chunk: Chunk) -> bool:
        """Whether what a prompt's chunk filled may go to the store now. Where a hand-over ends the request, its last
        chunk goes with that; an answer goes on for long after it."""
        request = chunk.sequence.request
        if request.hand_over:
            return chunk.sequence.num_uncomputed > 0
        return request.publish_beyond_blocks is not None and chunk.num_tokens > 1

    def _is_worth_publishing(self, sequence: SequenceState) -> bool:
        """Whether an answer that ended has filled blocks which the store has not. What is never among them is the KV of
        the last token, which is not computed."""
        known = sequence.request.publish_beyond_blocks
        full = sequence.num_computed // self._block_tokens
        return known is not None and full > max(known, sequence.num_exported_blocks)

    def _finish_reason(self, sequence: SequenceState) -> str | None:
        request, sampling = sequence.request, sequence.request.sampling
        last = sequence.tokens[-1] if sequence.output_token_ids else None
        goes_on_after_eos = sampling.ignore_eos and sampling.grammar is None  # nothing can follow a grammar's end
        if last in sampling.stop_token_ids or (last in request.eos_token_ids and not goes_on_after_eos):
            return FINISH_STOP
        if sequence.num_output_tokens >= sampling.max_tokens or sequence.num_tokens >= self._max_context_tokens():
            return FINISH_LENGTH
        return None


def why_unlike(request: EngineRequest, grammar: GrammarState | None) -> str | None:
    """Why a request and the state of its grammar do not fit together, or None. The state is then as far as the
    answer."""
    if (request.sampling.grammar is None) != (grammar is None):
        return "a request with a grammar needs its state, and no other one does"
    if grammar is not None:
        try:
            grammar.follow(request.output_token_ids)
        except GrammarError as error:
            return str(error)
    return None


class _Rows:
    """Which rows of a step's output are a chunk's."""

    def __init__(self, chunks: list[Chunk], output: StepOutput) -> None:
        self._chunks = chunks
        self._output = output

    def of(self, chunk: Chunk) -> torch.Tensor:
        """[rows of the chunk, hidden]"""
        assert self._output.hidden is not None, "a step with prompts whose log-probabilities are wanted gives all rows"
        before = itertools.takewhile(lambda other: other is not chunk, self._chunks)
        first = sum(other.num_tokens for other in before)
        return self._output.hidden[first : first + chunk.num_tokens]

    def sampled(self, wanted: list[Chunk]) -> torch.Tensor:
        """[those of `wanted` that are sampled from, hidden], in their order."""
        if len(wanted) == len(self._chunks):
            return self._output.sampled
        kept = {id(chunk) for chunk in wanted}
        sampled = [chunk for chunk in self._chunks if chunk.samples]
        return self._output.sampled[[index for index, chunk in enumerate(sampled) if id(chunk) in kept]]


@dataclass(frozen=True, slots=True)
class _Token:
    token_id: int
    logprobs: TokenLogprobs | None
    error: str | None
