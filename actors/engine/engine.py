"""The engine: schedule, run, sample, collect. Plain torch; one thread calls it.

A step begins (`begin_step`) and ends (`end_step`). Where all layers lie here it has been run in between, and `step` is
both. Where a placement puts layers elsewhere, other workers run them meanwhile, and up to `max_steps_in_flight` steps
are under way at a time; they end in the order in which they began.

What other threads may touch while a step runs: pages of blocks that a fetching sequence or an export holds. Such blocks
are written, or read, by nobody else (a fetching sequence is not scheduled; a finished block never changes). Where a
device does its work later than it is given it, the sequence's and the export's `mark` says when that holds for it too.
Where lanes may move, such a copy passes `copy_gate`, and looks within it where the lanes are (`placement`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch

from actors.engine.answers import Answers, why_unlike
from actors.engine.block_manager import BlockManager
from actors.engine.config import EngineConfig
from actors.engine.copy_gate import CopyGate
from actors.engine.counters import EngineCounters
from actors.engine.cuda_graphs import Capture, DecodeGraphs
from actors.engine.exports import EarlyExports, Export, content_of
from actors.engine.grammar import GrammarState
from actors.engine.grants import Grant, Grants
from actors.engine.head_work import RemoteHeads
from actors.engine.hosted_slice import HostedSlice
from actors.engine.lane_table import Lane
from actors.engine.layer_arrival import LayerArrival
from actors.engine.loading import LoadedModel
from actors.engine.page_io import clear_pages
from actors.engine.request import (
    FINISH_ERROR,
    EngineRequest,
    TokenEvent,
)
from actors.engine.scheduler import Scheduler
from actors.engine.sequence import Status
from actors.engine.split_heads import HeadRoute
from actors.engine.stage_work import RemoteStages
from actors.engine.stages import stages_of
from actors.engine.step_clock import StepClock
from actors.engine.step_plan import Fetch
from actors.engine.step_runner import make_step_runner
from actors.engine.steps_in_flight import Route, StageFailure, StepsInFlight
from kv.keys import extend_block_keys
from migrate.placement import Placement


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
    """Wall time of which this step is the oldest in flight, waiting for KV left out."""
    failure: StageFailure | None = None
    """Another worker has not run its part: nothing came of the step. See `Engine.recompute_lost`."""

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
        self.copy_gate = CopyGate()
        """Closed by whoever changes the placement: see `EngineThread.hold_steps`."""
        self.counters = EngineCounters()
        self.clock = StepClock(waits_in_layers=loaded.arena.pages.device.type != "cuda")
        self.on_news: Callable[[], None] = _ignore
        """Called from any thread when `has_news` has become true."""
        self.failure: StageFailure | None = None
        """The first one since `recompute_lost`. While there is one, no step begins."""
        self._runner = make_step_runner(loaded, config, capture)
        self._in_flight = StepsInFlight(self._runner, lambda: self.on_news())
        self._hosted_slice = HostedSlice(config.hosted_slice_s, config.max_batch_tokens)
        self._placement_version = -1
        self._last_end_s = 0.0
        self._answers = Answers(
            loaded, self.scheduler, self.early_exports, self.counters, lambda: self.max_context_tokens
        )
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
    def placement(self) -> Placement | None:
        """What lies where; None while everything is here. From any thread, for as long as a copy lasts that has passed
        `copy_gate`."""
        route = self._in_flight.route
        return None if route is None else route.placement

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something (fetching sequences wait for their KV and do not count)."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    @property
    def can_begin(self) -> bool:
        """Whether another step may begin, and there is something that it could compute."""
        return self.has_work and self.failure is None and self.num_in_flight < self.scheduler.max_steps_in_flight

    @property
    def may_gain_rows(self) -> bool:
        """Whether the next step is one of decodes alone, all layers at home, which others could still join."""
        running = self.scheduler.running
        return (
            self._in_flight.route is None
            and not self.scheduler.waiting
            and len(running) < self.config.max_running_requests
            and all(sequence.num_unscheduled <= 1 for sequence in running)
        )

    @property
    def num_in_flight(self) -> int:
        """Steps that have begun and not ended."""
        return len(self._in_flight)

    @property
    def has_news(self) -> bool:
        """Whether another worker has answered, so that `advance` has something to do."""
        return self._in_flight.has_news

    @property
    def is_step_over(self) -> bool:
        """Whether the oldest step in flight can be ended."""
        return self._in_flight.is_oldest_over

    @property
    def layer_steps(self) -> list[int]:
        """[layer] steps of this instance for which the layer was run here."""
        return [
            self._in_flight.whole_steps + self._in_flight.layer_steps[layer]
            for layer in range(self.loaded.spec.num_layers)
        ]

    @property
    def num_live_requests(self) -> int:
        """Requests not finished yet, finished ones whose KV waits for its export, and early exports."""
        return len(self._answers.sequences) + len(self.scheduler.exports) + len(self.early_exports)

    def refusal(self, request: EngineRequest) -> str | None:
        """Why this request can never be served here, or None. The ingress checks the same limits; this is the last
        net."""
        tokens = len(request.prompt_token_ids)
        if tokens == 0:
            return "the prompt is empty"
        if request.request_id in self._answers.sequences or request.request_id in self.scheduler.exports:
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

    def add(self, request: EngineRequest, grammar: GrammarState | None = None) -> TokenEvent | None:
        """Queues a request; returns its error event when it can never be served. `grammar`: a state of the request's
        grammar at its beginning, where it has one; the engine's from now on."""
        reason = self.refusal(request) or why_unlike(request, grammar)
        if reason is not None:
            self.counters.failed_requests += 1
            is_blamed = grammar is not None and grammar.has_failed
            return TokenEvent(
                request.request_id, None, FINISH_ERROR, request.owner, error=reason, blames_grammar=is_blamed
            )
        extend_keys = functools.partial(
            extend_block_keys, block_tokens=self.block_tokens, fingerprint=self.loaded.fingerprint, salt=request.salt
        )
        self._answers.begin(self.scheduler.add(request, extend_keys, now_s=time.monotonic()), grammar)
        return None

    def abort(self, request_id: str) -> bool:
        """Frees a request at once, wherever it is, its export included. False when it is not here (any more)."""
        sequence = self._answers.sequences.get(request_id)
        if sequence is None:
            return self.release_export(request_id)
        self._answers.remove(sequence)
        self.counters.aborted_requests += 1
        return True

    def arriving(self, request_id: str, num_tokens: int, incoming: LayerArrival) -> bool:
        """The KV of the first `num_tokens` tokens of a fetching request is on its way, first layers first: it is
        computed meanwhile. `fetched` follows in any case. False when the request is gone, or layers lie elsewhere: the
        step would wait for the worker that has them to take its KV in, and that one, in a step of its own, for this
        one."""
        if self.placement is not None or not self.scheduler.arriving(request_id, num_tokens, incoming):
            return False
        self.counters.early_starts += 1
        return True

    def fetched(self, request_id: str, num_tokens: int) -> bool:
        """The KV of the first `num_tokens` tokens of a fetching request arrived. False when the request is gone, or is
        computed, or has been, while they arrive."""
        return self._answers.fetched(request_id, num_tokens)

    def export_content(self, export_id: str) -> Export:
        """What is held for an export. KeyError when it is gone. From any thread: nobody waits for a step. The blocks of
        a hand-over, and early ones, stay until `release_export`; those of an answer may be taken before, which
        `holds_export` tells."""
        if export_id in self.early_exports:
            return self.early_exports.content(export_id)
        return content_of(self.scheduler.exports[export_id], self.block_tokens)

    def release_export(self, export_id: str) -> bool:
        """The export ended, well or not: its blocks go back (their full ones stay findable until evicted)."""
        return self.early_exports.end(export_id) or self.scheduler.exports.release(export_id)

    def holds_export(self, export_id: str) -> bool:
        """Whether the blocks of an export are still its own. From any thread: what was read of them before this said
        True is whole."""
        return export_id in self.scheduler.exports or export_id in self.early_exports

    def step(self) -> StepResult:
        """Runs one step: one token for every decoding sequence, prompt chunks in the rest of the budget. RuntimeError
        where it has to wait for another worker."""
        if self.begin_step():
            return self.end_step()
        return StepResult(fetches=self.take_fetches())

    @torch.inference_mode()
    def begin_step(self) -> bool:
        """Plans the next step and runs the layers that lie here, up to the first that does not. False when nothing can
        be computed now, or no step may begin (`can_begin`). Fetches may have been planned in any case (`take_fetches`,
        or the next `end_step`)."""
        if not self.can_begin:
            return False
        plan = self.scheduler.schedule()
        # Kept until a step has ended well or not: their sequences wait for them.
        self._fetches += plan.fetches
        for fetch in plan.fetches:  # their blocks were others' up to now, at the latest in the step before this one
            fetch.sequence.mark = self.loaded.copies.mark
        # flash-attn reads no masked places
        if plan.fresh_blocks and self.loaded.backend_name != "flash" and self.loaded.lanes.lanes:
            clear_pages(self.loaded, plan.fresh_blocks)
        if not plan.chunks:
            return False
        self._in_flight.begin(plan)
        return True

    @torch.inference_mode()
    def advance(self) -> None:
        """Runs what follows in the steps in flight now that other workers have answered."""
        self._in_flight.advance()

    @torch.inference_mode()
    def end_step(self) -> StepResult:
        """Samples from the oldest step in flight and takes in what it gave. Raises what its layers raised here, and
        RuntimeError when it is not over (`is_step_over`)."""
        step = self._in_flight.end_oldest()
        if step.failure is not None:
            self.scheduler.lost(step.plan)
            self.counters.lost_steps += 1
            self.failure = self.failure or step.failure
            return StepResult(fetches=self.take_fetches(), failure=step.failure)
        wanted = self.scheduler.returned(step.plan)
        if step.output is None:
            assert step.error is not None
            raise step.error
        computed_s = time.perf_counter()
        outcome = self._answers.take_step(step.plan.chunks, step.output, wanted)
        ended_s = time.perf_counter()
        duration_s = ended_s - max(step.started_s, self._last_end_s) - outcome.waited_s
        self._last_end_s = ended_s
        turns, num_running = self.scheduler.max_steps_in_flight, len(self.scheduler.running)
        self.counters.count_step(step.plan, duration_s, outcome.waited_s, turns=turns, num_running=num_running)
        if self._in_flight.route is None:
            self.clock.count(step.plan, len(step.output.sampled), duration_s, ended_s - computed_s)
        elif step.hosted_s and step.plan.prefills:
            num_tokens = sum(chunk.num_tokens for chunk in step.plan.chunks)
            self._hosted_slice.count(num_tokens, step.hosted_s, step.host_step_s)
            self.scheduler.max_prompt_tokens = self._hosted_slice.most_tokens()
        return StepResult(
            outcome.events,
            self.take_fetches(),
            outcome.exports,
            prefill_tokens=sum(chunk.num_tokens for chunk in step.plan.prefills),
            decode_tokens=len(step.plan.decodes),
            duration_s=duration_s,
        )

    def take_fetches(self) -> list[Fetch]:
        """Fetches that were planned since they were asked for last; somebody must carry them out."""
        fetches, self._fetches = self._fetches, []
        return fetches

    def use_placement(
        self, placement: Placement, remote: RemoteStages | None = None, heads: RemoteHeads | None = None
    ) -> None:
        """From the next step on layers and heads lie as `placement` says. Its home is this engine's worker; `remote` is
        the way to the others' layers, and `heads` that to their heads of layers at home. Unless all are at home,
        requests that were to be computed while their KV arrives wait for all of it.

        Raises:
            RuntimeError: steps are in flight, or other threads copy pages.
            ValueError: another model's placement, one that is not newer than the last, layers or heads at home that are
                not here, heads elsewhere of a layer that is not at home, or no way to other workers.
        """
        if self.num_in_flight:
            raise RuntimeError(f"{self.num_in_flight} steps are in flight; a placement changes between steps only")
        if self.copy_gate.num_under_way:
            raise RuntimeError(f"{self.copy_gate.num_under_way} copies of pages are under way; close the gate first")
        spec, stages = self.loaded.spec, stages_of(placement)
        if (placement.num_layers, placement.num_kv_heads) != (spec.num_layers, spec.num_kv_heads):
            raise ValueError(
                f"the placement is of {placement.num_layers} layers and {placement.num_kv_heads} KV heads; the model "
                f"has {spec.num_layers} and {spec.num_kv_heads}"
            )
        if placement.version <= self._placement_version:
            raise ValueError(
                f"the placement has version {placement.version}; it must be above {self._placement_version}"
            )
        own = placement.layers_on(placement.home)
        lanes_missing = set(placement.lanes_on(placement.home)) - self.loaded.lanes.lanes
        missing = {layer for layer, _ in lanes_missing} | {
            layer for layer in own if layer not in self.loaded.model.layers
        }
        if missing:
            raise ValueError(f"layers {sorted(missing)} are to be run at home, but their weights or lanes are not here")
        layers_away = len(own) < placement.num_layers
        heads_away = any(set(placement.lane_workers[layer]) != {placement.home} for layer in own)
        if (remote is None and layers_away) or (heads is None and heads_away):
            raise ValueError("layers or heads lie on other workers; give the way to them")
        head_route = HeadRoute(placement, heads) if heads is not None and heads_away else None
        self._in_flight.route = None if placement.is_home else Route(placement, stages, remote, head_route)
        self._placement_version = placement.version
        if not placement.is_home:
            self._await_arrivals()
        self._hosted_slice = HostedSlice(self.config.hosted_slice_s, self.config.max_batch_tokens)
        self.scheduler.max_prompt_tokens = None
        # Heads elsewhere are waited for within a layer: further steps in flight would gain nothing.
        self.scheduler.max_steps_in_flight = self.config.max_steps_in_flight if layers_away else 1

    def lose(self, worker: str, reason: str) -> None:
        """What another worker has of this instance is not to be relied on: no step begins before `recompute_lost`."""
        self.failure = self.failure or StageFailure(worker, -1, reason)

    def recompute_lost(self, *, all_content: bool) -> None:
        """After a failure: the requests of the steps that were lost wait again, to be computed from their tokens, and
        steps may begin. Nobody finds what is in their blocks.

        Args:
            all_content: all KV that was ever computed here is void, that of other requests and of exports too: so it
                is when a worker with some of it is gone. The exports end: nothing that was read of them counts.

        Raises:
            RuntimeError: steps are in flight.
        """
        if self.num_in_flight:
            raise RuntimeError(f"{self.num_in_flight} steps are in flight; requests begin anew when all have ended")
        if all_content:
            self.early_exports.end_all()
        self.scheduler.recompute_lost(all_content=all_content)
        self.failure = None

    def fail_all(self, reason: str) -> StepResult:
        """Ends every request that may have been in a step that broke. Exports and fetching sequences stay: their blocks
        are in use by others. Fetches that the broken step planned are in the result."""
        self._await_arrivals()
        failed = [s for s in self._answers.sequences.values() if s.status is not Status.FETCHING]
        return StepResult([self._answers.fail(sequence, reason) for sequence in failed], fetches=self.take_fetches())

    def fail_longer_than(self, num_tokens: int, reason: str) -> StepResult:
        """Ends requests that may grow beyond `num_tokens`, for which there will be no room. Those that are fetching
        stay, because their blocks are written to; they may be ended when that is over."""
        too_long = [
            s
            for s in self._answers.sequences.values()
            if s.status is not Status.FETCHING and s.num_prompt_tokens + s.request.sampling.max_tokens > num_tokens
        ]
        return StepResult([self._answers.fail(sequence, reason) for sequence in too_long])

    def _await_arrivals(self) -> None:
        """Those whose KV still arrives are computed when all of it is there."""
        for sequence in [s for s in self.scheduler.running if s.incoming is not None]:
            self.scheduler.return_to_fetching(sequence)

    def check_idle(self) -> None:
        """Raises RuntimeError when blocks are held though no request is left, or the pool is inconsistent."""
        self.blocks.check_integrity()
        if self.num_live_requests == 0 and self.num_in_flight == 0 and self.blocks.num_live:
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

    def lanes_returning(self, lanes: Collection[Lane], layers: Collection[int] = (), *, in_need: bool = False) -> Grant:
        """Makes room for lanes and weights that are to come home. The pool shrinks to what all lanes, those that come
        included, can hold. `grants.returning` has them, for copies into it; meanwhile they are run where they are.
        `in_need`: they have nowhere else to be, and the pool may become smaller than `grants.promised_blocks`.
        Raises GrantRefusedError, with nothing changed."""
        return self.grants.begin_return(lanes, layers, in_need=in_need)

    def lanes_returned(self) -> int:
        """What `lanes_returning` made room for has been copied and is at home. Returns by how many blocks the pool
        grew. ValueError when weights are missing. `grants.abandon_return` is for a return that comes to nothing."""
        return self.grants.end_return()


def _ignore() -> None:
    """Nobody waits for news of steps in flight."""
