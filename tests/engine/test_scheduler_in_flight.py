"""The scheduling policy with several steps in flight, without a model."""

from __future__ import annotations

import functools
import random
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.block_manager import BlockManager
from actors.engine.layer_arrival import LayerArrival
from actors.engine.request import EngineRequest, SamplingParams
from actors.engine.scheduler import Scheduler, SchedulerSettings
from actors.engine.sequence import SequenceState, Status
from actors.engine.step_plan import StepPlan
from kv.keys import extend_block_keys

BLOCK = 4
EXTEND = functools.partial(extend_block_keys, block_tokens=BLOCK, fingerprint=b"", salt=b"")


def make_scheduler(num_blocks: int, in_flight: int = 2, budget: int = 16, running: int = 8) -> Scheduler:
    scheduler = Scheduler(SchedulerSettings(BLOCK, budget, running), BlockManager(num_blocks))
    scheduler.max_steps_in_flight = in_flight
    return scheduler


def add(scheduler: Scheduler, name: str, prompt: int, seed: int | None = None, **more: object) -> SequenceState:
    rng = random.Random(name if seed is None else seed)
    tokens = tuple(rng.randrange(1000) for _ in range(prompt))
    request = EngineRequest(name, tokens, SamplingParams(max_tokens=100), **more)  # type: ignore[arg-type]
    return scheduler.add(request, EXTEND, now_s=0.0)


def end(scheduler: Scheduler, plan: StepPlan) -> None:
    """The step comes back; every sampled token is its sequence's length."""
    for chunk in scheduler.returned(plan):
        samples = chunk.samples
        if chunk.sequence.incoming is not None:
            scheduler.arrived(chunk.sequence)
        scheduler.computed(chunk)
        if samples:
            chunk.sequence.append(chunk.sequence.num_tokens)


def names(plan: StepPlan) -> list[tuple[str, int]]:
    return [(chunk.sequence.request_id, chunk.num_tokens) for chunk in plan.chunks]


def test_decodes_are_divided_over_the_steps_in_flight() -> None:
    scheduler = make_scheduler(32, in_flight=2)
    for name in "abcde":
        add(scheduler, name, 2)
    end(scheduler, scheduler.schedule())
    first, second = scheduler.schedule(), scheduler.schedule()
    assert names(first) == [("a", 1), ("b", 1), ("c", 1)]
    assert names(second) == [("d", 1), ("e", 1)]
    assert names(scheduler.schedule()) == []  # all wait for their tokens
    end(scheduler, first)
    assert names(scheduler.schedule()) == names(first)
    end(scheduler, second)
    assert names(scheduler.schedule()) == names(second)


def test_those_that_have_waited_longest_are_decoded_first() -> None:
    scheduler = make_scheduler(32, in_flight=2)
    for name in "abc":
        add(scheduler, name, 2)
    end(scheduler, scheduler.schedule())
    order = []
    for _ in range(3):  # nobody begins a second step
        plan = scheduler.schedule()
        order += names(plan)
        end(scheduler, plan)
    assert [name for name, _ in order] == ["a", "b", "c", "a", "b", "a"]  # "a" came before "c"


def test_a_prompts_next_chunk_does_not_wait_for_its_last_one() -> None:
    scheduler = make_scheduler(32, in_flight=3, budget=8)
    sequence = add(scheduler, "a", 17)
    plans = [scheduler.schedule() for _ in range(4)]
    assert [names(plan) for plan in plans] == [[("a", 8)], [("a", 8)], [("a", 1)], []]
    assert [chunk.first_token for plan in plans for chunk in plan.chunks] == [0, 8, 16]
    assert [chunk.samples for plan in plans for chunk in plan.chunks] == [False, False, True]
    assert scheduler.blocks.match_prefix(sequence.keys(BLOCK)) == []
    end(scheduler, plans[0])
    assert scheduler.blocks.match_prefix(sequence.keys(BLOCK)) == sequence.block_ids[:2]
    end(scheduler, plans[1])
    end(scheduler, plans[2])
    assert names(scheduler.schedule()) == [("a", 1)]


def test_a_prompt_keeps_the_whole_budget_beside_a_share_of_the_decodes() -> None:
    scheduler = make_scheduler(32, in_flight=2, budget=8)
    for name in "abcd":
        add(scheduler, name, 2)
    end(scheduler, scheduler.schedule())
    add(scheduler, "long", 20)
    assert names(scheduler.schedule()) == [("a", 1), ("b", 1), ("long", 6)]
    assert names(scheduler.schedule()) == [("c", 1), ("d", 1), ("long", 6)]


def test_blocks_of_a_sequence_that_ends_in_flight_come_back_with_its_last_step() -> None:
    scheduler = make_scheduler(8, budget=8)
    sequence = add(scheduler, "a", 16)
    first, second = scheduler.schedule(), scheduler.schedule()
    keys = sequence.keys(BLOCK)
    end(scheduler, first)
    scheduler.finish(sequence)
    assert scheduler.blocks.num_live == 4
    assert scheduler.num_unfinished == 0
    third = scheduler.schedule()
    assert names(third) == []
    end(scheduler, second)
    assert scheduler.blocks.num_live == 0
    # What had come back before it ended can be found, the rest cannot.
    assert len(scheduler.blocks.match_prefix(keys)) == 2


def test_a_sequence_that_is_preempted_in_flight_keeps_its_token_and_its_blocks_until_then() -> None:
    scheduler = make_scheduler(5)
    first, second = add(scheduler, "a", 7), add(scheduler, "b", 8)
    end(scheduler, scheduler.schedule())
    plans = [scheduler.schedule(), scheduler.schedule()]
    assert [names(plan) for plan in plans] == [[("a", 1)], [("b", 1)]]  # "b" has taken the fifth block
    end(scheduler, plans[0])  # "a" needs a third block, and none is free: "b" came later
    assert names(scheduler.schedule()) == []
    assert (second.status, len(second.block_ids)) == (Status.RUNNING, 3)
    end(scheduler, plans[1])
    assert names(scheduler.schedule()) == [("a", 1)]
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert (second.status, second.num_tokens) == (Status.WAITING, 10)
    assert len(first.block_ids) == 3


def test_nobody_is_preempted_for_blocks_that_come_back_with_a_step() -> None:
    scheduler = make_scheduler(8, budget=32)
    first, second, third = (add(scheduler, name, 7) for name in "abc")
    end(scheduler, scheduler.schedule())
    scheduler.blocks.allocate(2)  # somebody else's
    plans = [scheduler.schedule(), scheduler.schedule()]
    assert [names(plan) for plan in plans] == [[("a", 1), ("b", 1)], [("c", 1)]]
    scheduler.finish(third)
    end(scheduler, plans[0])
    assert names(scheduler.schedule()) == []
    end(scheduler, plans[1])
    assert [names(scheduler.schedule()) for _ in range(2)] == [[("a", 1)], [("b", 1)]]
    assert first.num_preemptions == second.num_preemptions == 0


def arriving(scheduler: Scheduler, seed: int = 1) -> SequenceState:
    """A running prompt of 30 tokens, 16 of which are still arriving."""
    sequence = add(scheduler, "late", 30, seed=seed, external_tokens=16)
    plan = scheduler.schedule()
    assert [fetch.last_token for fetch in plan.fetches] == [16]
    end(scheduler, plan)
    assert scheduler.arriving("late", 16, LayerArrival(timeout_s=60.0))
    return sequence


def test_sequences_of_a_lost_step_begin_anew_and_nobody_finds_what_they_had() -> None:
    scheduler = make_scheduler(16, budget=8)
    lost = add(scheduler, "lost", 12)
    first = scheduler.schedule()
    other = add(scheduler, "other", 3)
    second = scheduler.schedule()
    assert [names(plan) for plan in (first, second)] == [[("lost", 8)], [("lost", 4), ("other", 3)]]
    scheduler.lost(first)
    # The second chunk stands on the first one.
    assert [chunk.sequence for chunk in scheduler.returned(second)] == [other]
    assert names(scheduler.schedule()) == [("other", 3)]
    end(scheduler, StepPlan(9))
    scheduler.recompute_lost(all_content=False)
    assert (lost.status, lost.num_computed, lost.block_ids) == (Status.WAITING, 0, [])
    assert scheduler.blocks.match_prefix(lost.keys(BLOCK)) == []
    assert (scheduler.num_begun_anew, scheduler.num_preemptions) == (1, 0)
    assert names(scheduler.schedule()) == [("lost", 8)]


def test_when_all_content_is_lost_nothing_is_found_and_fetching_ones_begin_anew_too() -> None:
    scheduler = make_scheduler(32, budget=64)
    ended, running, exported = (add(scheduler, name, 8) for name in ("ended", "running", "exported"))
    end(scheduler, scheduler.schedule())
    scheduler.finish(ended)
    scheduler.finish(exported, keep_blocks=True)
    fetching = add(scheduler, "fetching", 12, seed=3, external_tokens=8)
    end(scheduler, scheduler.schedule())
    arrives = arriving(scheduler, seed=4)
    scheduler.recompute_lost(all_content=True)
    assert scheduler.blocks.match_prefix(ended.keys(BLOCK)) == []
    assert scheduler.exports == {}
    assert running.status is Status.WAITING
    # Their blocks are still being written to.
    assert {s.request_id: len(s.block_ids) for s in (fetching, arrives)} == {"fetching": 3, "late": 8}
    assert not scheduler.arriving("fetching", 8, LayerArrival(timeout_s=60.0))
    assert scheduler.fetched("fetching", 8) is None
    assert scheduler.fetched("late", 16) is None
    scheduler.blocks.check_integrity()
    assert scheduler.blocks.num_live == 0
    assert {s.status for s in (running, fetching, arrives)} == {Status.WAITING}
    assert scheduler.num_begun_anew == 3
    plan = scheduler.schedule()
    assert {chunk.sequence for chunk in plan.chunks} == {running, fetching, arrives}
    assert [fetch.sequence for fetch in plan.fetches] == []
    assert {chunk.first_token for chunk in plan.chunks} == {0}


class World:
    """Plays engine and memory: what a step writes is there when it comes back, at the latest."""

    def __init__(self, num_blocks: int, in_flight: int, budget: int) -> None:
        self.scheduler = make_scheduler(num_blocks, in_flight, budget, running=4)
        self.in_flight: deque[tuple[StepPlan, dict[str, list[int]]]] = deque()
        self.memory: dict[tuple[int, int], tuple[int, ...]] = {}
        """(block, offset) -> all tokens up to the one whose KV is there"""
        self.goals: dict[str, int] = {}
        self.planned: dict[str, int] = {}
        """Tokens of each sequence that were planned since it was admitted last."""
        self.must_drain = self.all_content = False

    def begin(self) -> bool:
        scheduler = self.scheduler
        if self.must_drain or len(self.in_flight) == scheduler.max_steps_in_flight:
            return False
        decoding = sum(1 for s in scheduler.running if s.num_unscheduled <= 1)
        unsampled = {s.request_id for s in scheduler.running if s.num_unscheduled == 0}
        before = {s: s.num_preemptions for s in scheduler.running}
        plan = scheduler.schedule()
        started = sum(1 for c in plan.decodes if before.get(c.sequence) != c.sequence.num_preemptions)
        assert len(plan.decodes) <= -(-decoding // scheduler.max_steps_in_flight) + started
        assert sum(chunk.num_tokens for chunk in plan.chunks) <= scheduler.settings.max_batch_tokens
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert sequence.request_id not in unsampled
            expected = self.planned.get(sequence.request_id, 0)
            if chunk.first_token != expected:  # it was admitted anew, or for the first time, and found a prefix
                assert sequence.num_in_flight == chunk.num_tokens
                assert chunk.first_token == sequence.num_registered * BLOCK
            self.planned[sequence.request_id] = chunk.first_token + chunk.num_tokens
        if plan.chunks:
            self.in_flight.append((plan, {c.sequence.request_id: list(c.sequence.block_ids) for c in plan.chunks}))
        return bool(plan.chunks)

    def write(self, plan: StepPlan, tables: dict[str, list[int]]) -> None:
        for chunk in plan.chunks:
            table = tables[chunk.sequence.request_id]
            for position in range(chunk.first_token, chunk.first_token + chunk.num_tokens):
                tokens = tuple(chunk.sequence.tokens[: position + 1])
                self.memory[table[position // BLOCK], position % BLOCK] = tokens

    def end(self) -> bool:
        if not self.in_flight:
            return False
        plan, tables = self.in_flight.popleft()
        self.write(plan, tables)
        for chunk in self.scheduler.returned(plan):
            sequence, samples = chunk.sequence, chunk.samples
            assert sequence.num_computed == chunk.first_token
            self.scheduler.computed(chunk)
            for position in range(sequence.num_computed):
                place = tables[sequence.request_id][position // BLOCK], position % BLOCK
                assert self.memory[place] == tuple(sequence.tokens[: position + 1])
            if samples:
                sequence.append(sequence.num_tokens)
                if sequence.num_tokens >= self.goals[sequence.request_id]:
                    self.scheduler.finish(sequence)
        if not self.in_flight and self.must_drain:
            self.scheduler.recompute_lost(all_content=self.all_content)
            self.must_drain = False
        return True

    def lose(self, all_content: bool) -> None:
        """The oldest step is lost, half written; those behind it still come back."""
        if self.in_flight:
            plan, tables = self.in_flight.popleft()
            self.write(StepPlan(plan.step_id, plan.chunks[::2]), tables)
            self.scheduler.lost(plan)
            self.must_drain, self.all_content = True, all_content
            if not self.in_flight:
                self.scheduler.recompute_lost(all_content=all_content)
                self.must_drain = False

    def abort(self, index: int) -> None:
        unfinished = sorted(self.scheduler.sequences(), key=lambda s: s.turn)
        if unfinished:
            self.scheduler.finish(unfinished[index % len(unfinished)])


@settings(max_examples=200, deadline=None)
@given(
    num_blocks=st.integers(4, 12),
    in_flight=st.integers(1, 4),
    budget=st.integers(4, 20),
    actions=st.lists(
        st.tuples(st.just("add"), st.integers(1, 14), st.integers(1, 12))
        | st.tuples(st.sampled_from(["begin", "begin", "end", "end"]))
        | st.tuples(st.just("abort"), st.integers(0, 7))
        | st.tuples(st.just("lose"), st.booleans()),
        max_size=40,
    ),
)
def test_every_token_is_computed_once_in_order_and_no_block_is_two_peoples(
    num_blocks: int, in_flight: int, budget: int, actions: list[tuple[object, ...]]
) -> None:
    world = World(num_blocks, in_flight, budget)
    scheduler = world.scheduler
    for number, (action, *arguments) in enumerate(actions):
        if action == "add":
            prompt, output = arguments
            if prompt + output <= num_blocks * BLOCK:  # type: ignore[operator]
                world.goals[str(number)] = prompt + output  # type: ignore[operator]
                add(scheduler, str(number), prompt, seed=number % 2)  # type: ignore[arg-type]
        else:
            getattr(world, str(action))(*arguments)
        scheduler.blocks.check_integrity()
        held = [block for plan, tables in world.in_flight for table in tables.values() for block in table]
        assert scheduler.blocks.num_cached_among(held) == 0  # nobody can be given them
    for _ in range(1000):
        if scheduler.num_unfinished == 0 and not world.in_flight:
            break
        assert world.begin() or world.end(), "nothing runs, though requests wait"
    assert scheduler.num_unfinished == 0
    assert scheduler.blocks.num_live == 0
    scheduler.blocks.check_integrity()
