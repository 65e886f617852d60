"""The engine: schedule, run, sample, collect. Plain torch; one thread calls it.

What other threads may touch while a step runs: pages of blocks that a fetching sequence or an export holds. Such blocks
are written, or read, by nobody else (a fetching sequence is not scheduled; a finished block never changes).
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch

from actors.engine.block_manager import BlockManager
from actors.engine.config import EngineConfig
from actors.engine.counters import EngineCounters
from actors.engine.cuda_graphs import Capture, DecodeGraphs
from actors.engine.exports import EarlyExports, Export, content_of
from actors.engine.grants import Grant, Grants
from actors.engine.lane_table import Lane
from actors.engine.layer_arrival import LayerArrival
from actors.engine.loading import LoadedModel
from actors.engine.page_io import clear_pages
from actors.engine.request import (
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    EngineRequest,
    TokenEvent,
    TokenLogprobs,
)
from actors.engine.sampler import SamplerOutput, SamplerRow, prompt_logprobs, sample
from actors.engine.scheduler import Chunk, Fetch, Scheduler
from actors.engine.sequence import SequenceState, Status
from actors.engine.step_runner import make_step_runner
from kv.keys import extend_block_keys


@dataclass(slots=True)
class StepResult:
    """What a step gave: token events in the order of the batch, fetches that somebody must carry out, and exports that
    somebody must end."""

    events: list[TokenEvent] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    exports: list[Export] = field(default_factory=list)
    """Of every event that awaits one, under the request's id. The others are early ones."""
    prefill_tokens: int = 0
    decode_tokens: int = 0
    duration_s: float = 0.0

    @property
    def is_empty(self) -> bool:
        """Nothing could run: all that waits, waits for blocks or for KV from outside."""
        return self.prefill_tokens + self.decode_tokens == 0 and not self.fetches


class Engine:
    """One instance of a model on one device, serving many sequences."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, capture: Capture | None = None) -> None:
        """`capture` stands in for CUDA's way of capturing decode steps, where there is no CUDA."""
        self.loaded = loaded
        self.config = config
        self.block_tokens = loaded.layout.block_tokens
        self.blocks = BlockManager(loaded.lanes.num_blocks)
        self.scheduler = Scheduler(config.scheduler_settings(self.block_tokens), self.blocks)
        self.early_exports = EarlyExports(
            self.blocks,
            self.block_tokens,
            min_blocks=-(-config.early_export_bytes // (loaded.layout.kv_bytes_per_token * self.block_tokens)),
        )
        self.grants = Grants(loaded, self.scheduler, self.early_exports)
        self.counters = EngineCounters()
        self._runner = make_step_runner(loaded, config, capture)
        self._sequences: dict[str, SequenceState] = {}
        self._rows: dict[str, SamplerRow] = {}
        self._fetches: list[Fetch] = []

    @property
    def max_context_tokens(self) -> int:
        """Prompt and answer together may have so many tokens: the least of the model's, the config's and the pool's
        limit."""
        limits = [self.loaded.spec.max_context_tokens, self.scheduler.max_tokens()]
        if self.config.max_context_tokens is not None:
            limits.append(self.config.max_context_tokens)
        return min(limits)

    @property
    def graphs(self) -> DecodeGraphs | None:
        """The captured decode steps; None where every step is run operator by operator."""
        return self._runner.graphs

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something (fetching sequences wait for their KV and do not count)."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    @property
    def num_live_requests(self) -> int:
        """Requests not finished yet, finished ones whose KV waits for its export, and early exports."""
        return len(self._sequences) + len(self.scheduler.exports) + len(self.early_exports)

    def refusal(self, request: EngineRequest) -> str | None:
        """Why this request can never be served here, or None. The ingress checks the same limits; this is the last
        net."""
        tokens = len(request.prompt_token_ids)
        if tokens == 0:
            return "the prompt is empty"
        if request.request_id in self._sequences or request.request_id in self.scheduler.exports:
            return f"request id {request.request_id!r} is in use"
        if tokens + request.sampling.max_tokens > self.max_context_tokens:
            return (
                f"{tokens} prompt tokens and {request.sampling.max_tokens} to generate exceed the context of "
                f"{self.max_context_tokens} tokens"
            )
        vocab = self.loaded.spec.vocab_size
        if not all(0 <= token < vocab for token in (*request.prompt_token_ids, *request.output_token_ids)):
            return f"token ids must be between 0 and {vocab - 1}"
        return None

    def add(self, request: EngineRequest) -> TokenEvent | None:
        """Queues a request; returns its error event when it can never be served."""
        reason = self.refusal(request)
        if reason is not None:
            self.counters.failed_requests += 1
            return TokenEvent(request.request_id, None, FINISH_ERROR, request.owner, error=reason)
        extend_keys = functools.partial(
            extend_block_keys, block_tokens=self.block_tokens, fingerprint=self.loaded.fingerprint, salt=request.salt
        )
        sequence = self.scheduler.add(request, extend_keys)
        self._sequences[request.request_id] = sequence
        end_tokens = (*request.sampling.stop_token_ids, *request.eos_token_ids)
        self._rows[request.request_id] = SamplerRow(
            request.sampling, request.prompt_token_ids, sequence.output_token_ids, end_tokens
        )
        return None

    def abort(self, request_id: str) -> bool:
        """Frees a request at once, wherever it is, its export included. False when it is not here (any more)."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return self.release_export(request_id)
        self._remove(sequence)
        self.counters.aborted_requests += 1
        return True

    def arriving(self, request_id: str, num_tokens: int, incoming: LayerArrival) -> bool:
        """The KV of the first `num_tokens` tokens of a fetching request is on its way, first layers first: it is
        computed meanwhile. `fetched` follows in any case. False when the request is gone."""
        return self.scheduler.arriving(request_id, num_tokens, incoming)

    def fetched(self, request_id: str, num_tokens: int) -> bool:
        """The KV of the first `num_tokens` tokens of a fetching request arrived. False when the request is gone, or has
        been computed while they arrived."""
        sequence = self.scheduler.fetched(request_id, num_tokens)
        if sequence is None:
            return False
        self.counters.fetched_tokens += sequence.num_fetched_tokens
        return True

    def export_content(self, export_id: str) -> Export:
        """What is held for an export. KeyError when it is gone. From any thread: nobody waits for a step. The blocks of
        a hand-over, and early ones, stay until `release_export`; those of an answer may be taken before, which
        `holds_export` tells."""
        if export_id in self.early_exports:
            return self.early_exports.content(export_id)
        return content_of(self.scheduler.exports[export_id], self.block_tokens)

    def release_export(self, export_id: str) -> bool:
        """The export ended, well or not: its blocks go back (their full ones stay findable until evicted)."""
        return self.early_exports.end(export_id) or self.scheduler.release_export(export_id)

    def holds_export(self, export_id: str) -> bool:
        """Whether the blocks of an export are still its own. From any thread: what was read of them before this said
        True is whole."""
        return export_id in self.scheduler.exports or export_id in self.early_exports

    @torch.inference_mode()
    def step(self) -> StepResult:
        """Runs one step: one token for every decoding sequence, prompt chunks in the rest of the budget."""
        plan = self.scheduler.schedule()
        # Kept until a step has ended well or not: their sequences wait for them.
        self._fetches += plan.fetches
        if plan.fresh_blocks and self.loaded.backend_name == "torch":  # flash-attn reads no masked places
            clear_pages(self.loaded, plan.fresh_blocks)
        chunks = plan.chunks
        if not chunks:
            return StepResult(fetches=self._take_fetches())
        started_s = time.perf_counter()
        output = self._runner.run(plan)
        # What was computed from KV that did not come. The other rows of the batch have nothing to do with it.
        void = {
            chunk.sequence.request_id: chunk.sequence
            for chunk in chunks
            if chunk.sequence.incoming is not None and chunk.sequence.incoming.has_failed
        }
        last_rows = itertools.accumulate(chunk.num_tokens for chunk in chunks)
        damaged: dict[str, str] = {}
        for chunk, end in zip(chunks, last_rows, strict=True):
            if not chunk.sequence.reuses_prefix:
                try:
                    self._collect_prompt_logprobs(chunk, output.hidden[end - chunk.num_tokens : end])
                except ValueError as error:  # of this request's logits alone
                    damaged[chunk.sequence.request_id] = str(error)
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        tokens = self._sample(sampling, output.sampled)
        unusable = damaged.keys() | void.keys()
        events = [self._fail(self._sequences[request_id], reason) for request_id, reason in damaged.items()]
        for sequence in void.values():
            self.scheduler.return_to_fetching(sequence)
        waited_s, exports = 0.0, list[Export]()
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.request_id in void:
                continue
            if sequence.incoming is not None:
                waited_s += sequence.incoming.waited_s
                self.scheduler.arrived(sequence)
                self.counters.fetched_tokens += sequence.num_fetched_tokens
            self.counters.count_chunk(chunk)
            if sequence.request_id not in damaged:
                self.scheduler.computed(chunk)
                is_prompt_left = sequence.request.hand_over and sequence.num_uncomputed > 0
                if is_prompt_left and (early := self.early_exports.begin(sequence)) is not None:
                    exports.append(early)
        events += [
            self._accept(sequence, token)
            for sequence, token in zip(sampling, tokens, strict=True)
            if sequence.request_id not in unusable
        ]
        exports += [self.export_content(event.request_id) for event in events if event.awaits_export]
        result = StepResult(
            events,
            self._take_fetches(),
            exports,
            prefill_tokens=sum(chunk.num_tokens for chunk in plan.prefills),
            decode_tokens=len(plan.decodes),
            duration_s=time.perf_counter() - started_s - waited_s,
        )
        self.counters.waited_s += waited_s
        self.counters.steps += 1
        self.counters.busy_s += result.duration_s
        return result

    def fail_all(self, reason: str) -> StepResult:
        """Ends every request that may have been in a step that broke. Exports and fetching sequences stay: their blocks
        are in use by others. Fetches that the broken step planned are in the result."""
        for sequence in [s for s in self._sequences.values() if s.incoming is not None]:
            self.scheduler.return_to_fetching(sequence)
        failed = [s for s in self._sequences.values() if s.status is not Status.FETCHING]
        return StepResult([self._fail(sequence, reason) for sequence in failed], fetches=self._take_fetches())

    def check_idle(self) -> None:
        """Raises RuntimeError when blocks are held though no request is left, or the pool is inconsistent."""
        self.blocks.check_integrity()
        if self.num_live_requests == 0 and self.blocks.num_live:
            raise RuntimeError(f"{self.blocks.num_live} blocks are held, though no request is left")

    def grant(
        self, instance: str, lanes: Collection[Lane], layers: Collection[int], num_blocks: int, fingerprint: bytes
    ) -> Grant:
        """Makes room for lanes and layers of another's instance; `grants.instances[instance]` runs them. See
        `Grants.grant`. Raises GrantRefusedError, with nothing changed."""
        return self.grants.grant(instance, lanes, layers, num_blocks, fingerprint)

    def release(self, instance: str, lanes: Collection[Lane] | None = None, layers: Collection[int] = ()) -> int:
        """The opposite. Returns by how many blocks the own pool grew. See `Grants.release`."""
        return self.grants.release(instance, lanes, layers)

    def lanes_departed(self, lanes: Collection[Lane], layers: Collection[int] = ()) -> int:
        """Lanes, and whole layers' weights, now lie elsewhere: their memory becomes room for tokens of the lanes that
        stay, and of what others have here. Returns by how many blocks the pool grew. A layer given here leaves with its
        lanes and weights; weights stay that another instance runs here. ValueError when they are not all here.

        Before it, `grants.limit_blocks` is told what their host has room for.
        """
        return self.grants.depart(lanes, layers)

    def lanes_returning(self, lanes: Collection[Lane], layers: Collection[int] = ()) -> Grant:
        """Makes room for lanes and weights that are to come home. The pool shrinks to what all lanes, those that come
        included, can hold. `grants.returning` has them, for copies into it; meanwhile they are run where they are.
        Raises GrantRefusedError, with nothing changed."""
        return self.grants.begin_return(lanes, layers)

    def lanes_returned(self) -> int:
        """What `lanes_returning` made room for has been copied and is at home. Returns by how many blocks the pool
        grew. ValueError when weights are missing. `grants.abandon_return` is for a return that comes to nothing."""
        return self.grants.end_return()

    def _collect_prompt_logprobs(self, chunk: Chunk, hidden: torch.Tensor) -> None:
        """Adds the log-probabilities of the prompt tokens that follow the chunk's rows; hidden [rows of the chunk,
        hidden]."""
        sequence = chunk.sequence
        start = sequence.num_computed
        stop = min(start + chunk.num_tokens, sequence.num_prompt_tokens - 1)
        if start == 0:
            sequence.prompt_logprobs = [None]
        if start < stop:
            logits = self.loaded.model.logits(hidden[: stop - start])
            k = sequence.request.sampling.prompt_logprobs or 0
            sequence.prompt_logprobs += prompt_logprobs(logits, sequence.tokens[start + 1 : stop + 1], k)

    def _sample(self, sequences: list[SequenceState], hidden: torch.Tensor) -> list[_Token]:
        """The next token of each sequence; hidden [sequences, hidden]."""
        if not sequences:
            return []
        logits = self.loaded.model.logits(hidden)
        output: SamplerOutput = sample(logits, [self._rows[sequence.request_id] for sequence in sequences])
        return [_Token(*token) for token in zip(output.token_ids, output.logprobs, output.errors, strict=True)]

    def _accept(self, sequence: SequenceState, token: _Token) -> TokenEvent:
        """Takes a sampled token in and says what follows from it."""
        request, limit = sequence.request, sequence.request.sampling.max_tokens
        if token.error is not None:
            return self._fail(sequence, token.error)
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
            self.counters.generated_tokens += 1
        finish_reason = self._finish_reason(sequence)
        if finish_reason is None and not request.hand_over:
            return event
        self.counters.finished_requests += 1
        is_kept = request.hand_over or self._is_worth_publishing(sequence)
        self._remove(sequence, keep_blocks=is_kept)
        return replace(event, finish_reason=finish_reason, awaits_export=is_kept)

    def _is_worth_publishing(self, sequence: SequenceState) -> bool:
        """Whether an answer that ended has filled blocks which the store has not. What is never among them is the KV of
        the last token, which is not computed."""
        known = sequence.request.publish_beyond_blocks
        return known is not None and sequence.num_computed // self.block_tokens > known

    def _finish_reason(self, sequence: SequenceState) -> str | None:
        request, sampling = sequence.request, sequence.request.sampling
        last = sequence.tokens[-1] if sequence.output_token_ids else None
        if last in sampling.stop_token_ids or (last in request.eos_token_ids and not sampling.ignore_eos):
            return FINISH_STOP
        if sequence.num_output_tokens >= sampling.max_tokens or sequence.num_tokens >= self.max_context_tokens:
            return FINISH_LENGTH
        return None

    def _fail(self, sequence: SequenceState, reason: str) -> TokenEvent:
        self.counters.failed_requests += 1
        self._remove(sequence)
        return TokenEvent(sequence.request_id, None, FINISH_ERROR, sequence.request.owner, error=reason)

    def _take_fetches(self) -> list[Fetch]:
        fetches, self._fetches = self._fetches, []
        return fetches

    def _remove(self, sequence: SequenceState, *, keep_blocks: bool = False) -> None:
        self.scheduler.finish(sequence, keep_blocks=keep_blocks)
        del self._sequences[sequence.request_id]
        del self._rows[sequence.request_id]


@dataclass(frozen=True, slots=True)
class _Token:
    token_id: int
    logprobs: TokenLogprobs | None
    error: str | None
