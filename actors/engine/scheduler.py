"""What runs in the next step: continuous batching with chunked prefill under one token budget.

Two passes, after nano-vllm and vLLM: decodes first, so that a long prompt never delays the tokens of running answers
by more than one budget of prefill; then prefill chunks of running and newly admitted sequences with what is left. When
a running sequence needs a block and none is free, the one whose turn is last is preempted: its blocks go back, its
tokens stay, and it recomputes them (or finds them cached) when it is admitted again. The one whose turn is first is
therefore never preempted for long, and two generations that do not fit together both finish.

Turns (`migrate.waiting_line`) are arrivals, shifted by priorities. They say who is admitted, whose prompt is computed,
and who is preempted; nobody is preempted for one that waits.

Answers that have ended and are being published hold blocks too: whoever needs blocks takes theirs before it waits or
has another sequence preempted (`HeldExports`).

**Several steps in flight**, where the layers lie on several workers, so that these compute at the same time. A step may
be planned while earlier ones have not come back:

- the decodes are divided evenly over the steps in flight, and a sequence whose next token is not sampled yet has to
  wait for it; a prompt's next chunk need not wait for its last one, since all workers run steps in their order;
- prompt chunks have what is left of the whole budget in each step: a stage is a share of the layers, so that as many
  full steps as there are stages take a round no longer than one of them does at home (ours). A host that has steps of
  its own may ask for less (`max_prompt_tokens`);
- blocks of a sequence that ends in flight are nobody else's before its last step has come back, which may still write
  to them. One that is to be preempted in flight gives way then; what it computed until then is not lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from actors.engine.block_manager import BlockManager
from actors.engine.held_exports import HeldExports
from actors.engine.layer_arrival import LayerArrival
from actors.engine.request import EngineRequest
from actors.engine.sequence import ExtendKeys, SequenceState, Status
from actors.engine.sequence_blocks import SequenceBlocks
from actors.engine.step_plan import Chunk, Fetch, StepPlan
from migrate.waiting_line import Turn, WaitingLine


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Limits of one step, in tokens and sequences."""

    block_tokens: int
    max_batch_tokens: int = 512
    max_running_requests: int = 64

    def __post_init__(self) -> None:
        for name in ("block_tokens", "max_batch_tokens", "max_running_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_batch_tokens < self.max_running_requests:
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) is below max_running_requests "
                f"({self.max_running_requests}): "
                "every running request needs one token of a step; raise the first or lower the second"
            )


class Scheduler:
    """Owns the sequences and the block manager. The runner never sees either's policy."""

    def __init__(self, settings: SchedulerSettings, blocks: BlockManager) -> None:
        self.settings = settings
        self.blocks = blocks
        self.waiting: WaitingLine[SequenceState] = WaitingLine()
        self.running: list[SequenceState] = []
        self.fetching: dict[str, SequenceState] = {}
        self._blocks_of = SequenceBlocks(blocks, settings.block_tokens)
        self.exports = HeldExports(blocks, self._blocks_of)
        self.max_steps_in_flight = 1
        """So many steps at most are planned that have not come back. The decodes are divided by it."""
        self.max_prompt_tokens: int | None = None
        """Tokens of prompt chunks in one step at most, within the budget; None: what the decodes leave of it."""
        self.dirty_blocks = self._blocks_of.dirty
        self.num_preemptions = 0
        self.num_begun_anew = 0
        self._arrivals = 0
        self._steps = 0
        self._ended_in_flight: set[SequenceState] = set()
        self._giving_way: list[SequenceState] = []

    @property
    def num_unfinished(self) -> int:
        """Sequences waiting, fetching or running."""
        return len(self.waiting) + len(self.running) + len(self.fetching)

    def sequences(self) -> Iterable[SequenceState]:
        """All unfinished sequences."""
        yield from self.running
        yield from self.fetching.values()
        yield from self.waiting

    def max_tokens(self) -> int:
        """Tokens of KV the whole pool holds: no sequence may grow beyond it."""
        return self.blocks.num_blocks * self.settings.block_tokens

    def add(self, request: EngineRequest, extend_keys: ExtendKeys, *, now_s: float) -> SequenceState:
        """Queues a request that has come now, in its turn."""
        sequence = SequenceState(request, Turn(now_s + request.priority_s, self._arrivals), extend_keys)
        self._arrivals += 1
        self.waiting.add(sequence.request_id, sequence, sequence.turn)
        return sequence

    def schedule(self) -> StepPlan:
        """Plans the next step and allocates its blocks. Each plan with chunks is to be given to `returned` or `lost`,
        in the order of the plans."""
        self._steps += 1
        plan = StepPlan(self._steps)
        budget = self.settings.max_batch_tokens
        if self._giving_way:
            self._preempt_those_that_give_way()
        decodes, prefills = self._next_running()
        for sequence in decodes:
            if sequence.may_be_scheduled and self._make_room(sequence, sequence.num_tokens):
                plan.decodes.append(Chunk(sequence, 1, sequence.num_scheduled))
        # Making room may have preempted a sequence that was planned before it.
        plan.decodes = [chunk for chunk in plan.decodes if chunk.sequence.status is Status.RUNNING]
        budget -= len(plan.decodes)
        if self.max_prompt_tokens is not None:
            budget = min(budget, self.max_prompt_tokens)
        self._plan_prompts(plan, prefills, budget)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_in_flight += chunk.num_tokens
            sequence.last_step = plan.step_id
            plan.fresh_blocks += sequence.fresh_blocks
            sequence.fresh_blocks = []
        return plan

    def _plan_prompts(self, plan: StepPlan, prefills: list[SequenceState], budget: int) -> None:
        """Deals out what is left of a step to running prompts and to those that wait, in their turns: who waits with an
        earlier turn than a long prompt that runs begins in the midst of it."""
        running = sorted(prefills, key=lambda s: s.turn, reverse=True)
        may_admit = True
        while budget > 0:
            waiting = self.waiting.first() if may_admit and self._has_running_slot() else None
            if running and (waiting is None or running[-1].turn < waiting.turn):
                sequence = running.pop()
                if sequence.may_be_scheduled:
                    plan.prefills.append(self._chunk(sequence, budget))
                    budget -= plan.prefills[-1].num_tokens
            elif waiting is None:
                break
            elif not self._admit(waiting):
                may_admit = False
            elif self._leave_line(waiting, plan):
                chunk = self._chunk(waiting, budget)
                (plan.decodes if chunk.num_tokens == 1 else plan.prefills).append(chunk)
                budget -= chunk.num_tokens

    def _leave_line(self, sequence: SequenceState, plan: StepPlan) -> bool:
        """An admitted sequence waits no more. False: it is not to run yet, since its KV is to be fetched."""
        self.waiting.remove(sequence.request_id)
        if sequence.external_tokens <= sequence.num_computed:
            self._start(sequence)
            return True
        sequence.status = Status.FETCHING
        self.fetching[sequence.request_id] = sequence
        plan.fetches.append(Fetch(sequence, sequence.num_computed, sequence.external_tokens))
        sequence.fresh_blocks = []  # which of them the fetch leaves as they are is known at its end
        return False

    def returned(self, plan: StepPlan) -> list[Chunk]:
        """The step is over, well or not: nothing of it will be written any more. Gives the chunks that somebody still
        wants; of those that were computed, `computed` is to be told."""
        wanted = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_in_flight -= chunk.num_tokens
            if sequence.status is not Status.FINISHED:
                if not sequence.is_void:
                    wanted.append(chunk)
            elif sequence.num_in_flight == 0:
                self._ended_in_flight.remove(sequence)
                self._blocks_of.release(sequence)
        return wanted

    def lost(self, plan: StepPlan) -> None:
        """The step is over, and another worker has not run its part: what its sequences have in their blocks is void.
        Nothing is planned for them before `recompute_lost`."""
        for chunk in self.returned(plan):
            chunk.sequence.is_void = True

    def recompute_lost(self, *, all_content: bool) -> None:
        """The sequences of lost steps wait again, to be computed from their tokens; their blocks go back and are not
        found again. `all_content`: all that was ever computed is void, whoever has it, and exports end. Only while no
        step is in flight."""
        if all_content:
            self.blocks.forget(range(self.blocks.num_blocks))
            for request_id in list(self.exports):
                self.exports.release(request_id)
            for sequence in (*self.running, *self.fetching.values()):
                sequence.is_void = True
        for sequence in [sequence for sequence in self.running if sequence.is_void]:
            if sequence.incoming is None:
                self._begin_anew(sequence)
            else:
                self.return_to_fetching(sequence)

    def arriving(self, request_id: str, num_tokens: int, incoming: LayerArrival) -> bool:
        """The first `num_tokens` tokens' KV of a fetching sequence is on its way, first layers first: it may be
        computed. False when the request is gone, is fetching no more, or will begin anew."""
        sequence = self.fetching.get(request_id)
        if sequence is None or sequence.is_void:
            return False
        del self.fetching[request_id]
        sequence.num_computed = max(sequence.num_computed, min(num_tokens, sequence.num_tokens - 1))
        sequence.incoming = incoming
        self._blocks_of.to_be_filled(sequence, num_tokens)
        self._start(sequence)
        return True

    def return_to_fetching(self, sequence: SequenceState) -> None:
        """What was arriving for it has failed, or is not to be computed with before all of it is there: it waits for
        `fetched` again, which says what there is."""
        self.running.remove(sequence)
        sequence.status = Status.FETCHING
        self.fetching[sequence.request_id] = sequence
        sequence.incoming = None
        sequence.num_computed = sequence.num_registered * self.settings.block_tokens

    def fetched(self, request_id: str, num_tokens: int) -> SequenceState | None:
        """The first `num_tokens` tokens' KV of a fetching sequence are in its blocks; the rest will be computed. None
        when the request is gone, was computed while it arrived, or begins anew."""
        sequence = self.fetching.get(request_id)
        if sequence is None:
            sequence = next((s for s in self.running if s.request_id == request_id and s.incoming is not None), None)
            if sequence is None:
                return None
            self.return_to_fetching(sequence)
        del self.fetching[request_id]
        if sequence.is_void:
            sequence.external_tokens = 0
            self._begin_anew(sequence)
            return None
        self._blocks_of.to_be_filled(sequence, num_tokens)
        sequence.num_computed = max(sequence.num_computed, min(num_tokens, sequence.num_tokens - 1))
        self._count_fetched(sequence)
        self._start(sequence)
        return sequence

    def arrived(self, sequence: SequenceState) -> None:
        """All of what was arriving for a sequence is in its blocks."""
        sequence.incoming = None
        self._count_fetched(sequence)

    def computed(self, chunk: Chunk) -> None:
        """The chunk's KV is in its blocks: full blocks become findable."""
        self._blocks_of.wrote(chunk.sequence, chunk.sequence.num_computed, chunk.num_tokens)
        chunk.sequence.num_computed += chunk.num_tokens
        self._blocks_of.register_full(chunk.sequence)

    def pinned_blocks(self) -> set[int]:
        """Blocks that others than the next step may read or write at any moment: of fetching sequences, of those whose
        KV still arrives, of exports, and of steps in flight."""
        holders = [
            *self.fetching.values(),
            *self.exports.values(),
            *self._ended_in_flight,
            *(s for s in self.running if s.incoming is not None or s.num_in_flight),
        ]
        return {block for sequence in holders for block in sequence.block_ids}

    def relocate(self, moves: Mapping[int, int], num_blocks: int) -> None:
        """Blocks have become other blocks, none of them pinned, and the pool will have `num_blocks`."""
        self._blocks_of.relocate(self.running, moves, num_blocks)

    def finish(self, sequence: SequenceState, *, keep_blocks: bool = False) -> None:
        """Takes the sequence out; its blocks go back, after its last step in flight, unless they are kept for an export
        (see `HeldExports`)."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence.request_id)
        elif sequence.status is Status.FETCHING:
            del self.fetching[sequence.request_id]
        elif sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        self._need_not_give_way(sequence)
        sequence.status = Status.FINISHED
        if keep_blocks:
            self.exports.hold(sequence)
        elif sequence.num_in_flight:
            self._ended_in_flight.add(sequence)
        else:
            self._blocks_of.release(sequence)

    def _has_running_slot(self) -> bool:
        return len(self.running) + len(self.fetching) < self.settings.max_running_requests

    def _start(self, sequence: SequenceState) -> None:
        sequence.status = Status.RUNNING
        self.running.append(sequence)

    def _admit(self, sequence: SequenceState) -> bool:
        """Gives a waiting sequence blocks for all its tokens, reusing cached ones, if they are to be had."""
        block_tokens = self.settings.block_tokens
        reusable = (sequence.num_tokens - 1) // block_tokens if sequence.reuses_prefix else 0
        hit = self.blocks.match_prefix(sequence.keys(block_tokens)[:reusable])
        needed = -(-sequence.num_tokens // block_tokens) - len(hit)
        # One block of growth for each running sequence, so that an admission does not cause a preemption at once.
        reserve = len(self.running) + len(self.fetching)
        shortage = needed + reserve - (self.blocks.num_available - self.blocks.num_cached_among(hit))
        if shortage > 0:
            self.exports.give_up_answers(shortage, spared=set(hit))
        if needed + reserve > self.blocks.num_available - self.blocks.num_cached_among(hit):
            return False
        self.blocks.share(hit)
        sequence.block_ids = list(hit)
        self._blocks_of.extend(sequence, needed)
        sequence.num_computed = len(hit) * block_tokens
        sequence.num_registered = len(hit)
        if sequence.external_tokens <= sequence.num_computed:
            self._count_cached(sequence)
        return True

    def _count_fetched(self, sequence: SequenceState) -> None:
        # Whatever was not brought in by now is computed here: a preempted sequence must not ask for it again.
        sequence.external_tokens = 0
        first_token = sequence.num_registered * self.settings.block_tokens
        sequence.num_fetched_tokens = sequence.num_computed - first_token
        self._blocks_of.wrote(sequence, first_token, sequence.num_fetched_tokens)
        self._count_cached(sequence)
        self._blocks_of.register_full(sequence)

    def _count_cached(self, sequence: SequenceState) -> None:
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)

    def _make_room(self, sequence: SequenceState, num_tokens: int) -> bool:
        """Extends the sequence's blocks to hold `num_tokens`, preempting those whose turns are last. False when it was
        itself preempted, or has to wait for blocks that steps in flight write to."""
        missing = -(-num_tokens // self.settings.block_tokens) - len(sequence.block_ids)
        if missing > self.blocks.num_available:
            self.exports.give_up_answers(missing - self.blocks.num_available)
        while missing > self.blocks.num_available:
            if missing <= self.blocks.num_available + self._num_freed_in_flight():
                return False  # in one of the next steps
            # Blocks that KV arrives in cannot be given away.
            victim = max((s for s in self.running if s.incoming is None and not s.gives_way), key=lambda s: s.turn)
            if victim.num_in_flight:
                victim.gives_way = True
                self._giving_way.append(victim)
            else:
                self._preempt(victim)
            if victim is sequence:
                return False
        if missing > 0:
            self._blocks_of.extend(sequence, missing)
        return True

    def _next_running(self) -> tuple[list[SequenceState], list[SequenceState]]:
        """Running sequences whose last token is to be run now, and those with more to run. The first are this step's
        share of all that decode, those first that have waited longest."""
        ready, prefills, num_decoding = list[SequenceState](), list[SequenceState](), 0
        for sequence in self.running:
            num_unscheduled = sequence.num_unscheduled
            if num_unscheduled > 1:
                prefills.append(sequence)
                continue
            num_decoding += 1
            if num_unscheduled and sequence.may_be_scheduled:
                ready.append(sequence)
        share = -(-num_decoding // self.max_steps_in_flight)
        return ready if len(ready) <= share else sorted(ready, key=lambda s: s.last_step)[:share], prefills

    @staticmethod
    def _chunk(sequence: SequenceState, budget: int) -> Chunk:
        return Chunk(sequence, min(budget, sequence.num_unscheduled), sequence.num_scheduled)

    def _num_freed_in_flight(self) -> int:
        """Blocks that can be had once the steps in flight have come back."""
        leaving = [*self._ended_in_flight, *self._giving_way]
        return self.blocks.num_freed_by(block for sequence in leaving for block in sequence.block_ids)

    def _preempt_those_that_give_way(self) -> None:
        for sequence in list(self._giving_way):
            if sequence.num_in_flight == 0:
                self._preempt(sequence)

    def _preempt(self, sequence: SequenceState) -> None:
        self.running.remove(sequence)
        self._wait_again(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def _begin_anew(self, sequence: SequenceState) -> None:
        """A void sequence, which is fetching no more."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        self.blocks.forget(sequence.block_ids)
        self._wait_again(sequence)
        self.num_begun_anew += 1

    def _wait_again(self, sequence: SequenceState) -> None:
        self._blocks_of.release(sequence)
        sequence.status = Status.WAITING
        sequence.num_computed = sequence.num_registered = 0
        sequence.is_void = False
        self._need_not_give_way(sequence)
        self.waiting.add(sequence.request_id, sequence, sequence.turn)

    def _need_not_give_way(self, sequence: SequenceState) -> None:
        if sequence.gives_way:
            sequence.gives_way = False
            self._giving_way.remove(sequence)
