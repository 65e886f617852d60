"""The scheduling policy alone, without a model: a step 'computes' by saying so."""

from __future__ import annotations

import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.block_manager import BlockManager
from actors.engine.layer_arrival import LayerArrival
from actors.engine.request import EngineRequest, SamplingParams
from actors.engine.scheduler import Scheduler, SchedulerSettings
from actors.engine.sequence import SequenceState, Status
from kv.keys import extend_block_keys

BLOCK = 4
EXTEND = functools.partial(extend_block_keys, block_tokens=BLOCK, fingerprint=b"", salt=b"")


def make_scheduler(num_blocks: int, budget: int = 16, running: int = 8) -> Scheduler:
    return Scheduler(SchedulerSettings(BLOCK, budget, running), BlockManager(num_blocks))


def add(
    scheduler: Scheduler, name: str, prompt: int, seed: int | None = None, now_s: float = 0.0, **more: object
) -> SequenceState:
    rng = random.Random(name if seed is None else seed)
    tokens = tuple(rng.randrange(1000) for _ in range(prompt))
    request = EngineRequest(name, tokens, SamplingParams(max_tokens=100), **more)  # type: ignore[arg-type]
    return scheduler.add(request, EXTEND, now_s=now_s)


def run_step(scheduler: Scheduler) -> list[tuple[str, int]]:
    """One step in which every sampled token is its sequence's length."""
    plan = scheduler.schedule()
    for chunk in scheduler.returned(plan):
        samples = chunk.samples
        scheduler.computed(chunk)
        if samples:
            chunk.sequence.append(chunk.sequence.num_tokens)
    return [(chunk.sequence.request_id, chunk.num_tokens) for chunk in plan.chunks]


def test_prompts_share_the_budget_and_decodes_go_first() -> None:
    scheduler = make_scheduler(32, budget=8)
    add(scheduler, "a", 6)
    add(scheduler, "b", 9)
    assert run_step(scheduler) == [("a", 6), ("b", 2)]
    assert run_step(scheduler) == [("a", 1), ("b", 7)]
    assert run_step(scheduler) == [("a", 1), ("b", 1)]


def test_running_slots_bound_the_batch() -> None:
    scheduler = make_scheduler(32, running=2)
    for name in "abc":
        add(scheduler, name, 2)
    assert [name for name, _ in run_step(scheduler)] == ["a", "b"]
    scheduler.finish(scheduler.running[0])
    assert [name for name, _ in run_step(scheduler)] == ["b", "c"]


def test_latest_arrival_is_preempted_and_comes_back_first() -> None:
    scheduler = make_scheduler(5)
    first, second = add(scheduler, "a", 8), add(scheduler, "b", 7)
    while first.num_preemptions + second.num_preemptions == 0:
        run_step(scheduler)
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert second.status is Status.WAITING
    assert list(scheduler.waiting) == [second]
    scheduler.finish(first)
    # Its full blocks may still be cached, but the tokens it generated are all kept.
    tokens = list(second.tokens)
    run_step(scheduler)
    assert second.tokens[: len(tokens)] == tokens


def test_those_that_wait_are_admitted_in_their_turns() -> None:
    scheduler = make_scheduler(32, running=1)
    add(scheduler, "running", 2, now_s=100.0)
    run_step(scheduler)
    for name, now_s, priority_s in (("a", 101.0, 0.0), ("b", 102.0, 5.0), ("c", 103.0, -5.0), ("d", 104.0, 0.0)):
        add(scheduler, name, 2, now_s=now_s, priority_s=priority_s)
    came = []
    for _ in range(4):
        scheduler.finish(scheduler.running[0])
        came += [name for name, _ in run_step(scheduler)]
    assert came == ["c", "a", "d", "b"]


def test_a_prompt_with_an_earlier_turn_begins_in_the_midst_of_a_long_one() -> None:
    scheduler = make_scheduler(64, budget=8)
    add(scheduler, "long", 40)
    assert run_step(scheduler) == [("long", 8)]
    add(scheduler, "sooner", 11, now_s=1.0, priority_s=-10.0)
    add(scheduler, "after", 4, now_s=2.0)
    assert run_step(scheduler) == [("sooner", 8)]
    assert run_step(scheduler) == [("sooner", 3), ("long", 5)]
    assert run_step(scheduler) == [("sooner", 1), ("long", 7)]


def test_an_earlier_turn_without_room_holds_up_nobody_that_runs() -> None:
    scheduler = make_scheduler(11, budget=8)
    long = add(scheduler, "long", 36)
    run_step(scheduler)
    add(scheduler, "sooner", 16, priority_s=-10.0)
    add(scheduler, "small", 1)
    while long.num_uncomputed > 1:
        assert [name for name, _ in run_step(scheduler)] == ["long"]


@pytest.mark.parametrize(("priority_s", "preempted"), [(0.0, "b"), (-5.0, "a"), (5.0, "b")])
def test_the_last_in_turn_is_preempted_whoever_came_first(priority_s: float, preempted: str) -> None:
    scheduler = make_scheduler(5)
    both = [add(scheduler, "a", 8), add(scheduler, "b", 7, now_s=1.0, priority_s=priority_s)]
    while scheduler.num_preemptions == 0:
        run_step(scheduler)
    assert [s.request_id for s in both if s.num_preemptions] == [preempted]
    assert [s.request_id for s in scheduler.waiting] == [preempted]


def test_admission_leaves_running_sequences_a_block_to_grow() -> None:
    scheduler = make_scheduler(4)
    add(scheduler, "a", 8)
    run_step(scheduler)
    late = add(scheduler, "b", 4)
    run_step(scheduler)
    assert late.status is Status.WAITING
    # "a" took one of the two free blocks to grow; the other is reserved for its next one.
    assert scheduler.blocks.num_available == 1


def test_same_prompt_reuses_blocks_but_recomputes_its_last_token() -> None:
    scheduler = make_scheduler(16)
    first = add(scheduler, "a", 8, seed=1)
    run_step(scheduler)
    second = add(scheduler, "b", 8, seed=1)
    assert ("b", BLOCK) in run_step(scheduler)
    assert second.num_cached_tokens == BLOCK
    assert first.block_ids[0] == second.block_ids[0]


def test_external_tokens_wait_for_their_fetch() -> None:
    scheduler = make_scheduler(16)
    sequence = add(scheduler, "a", 10, external_tokens=9)
    plan = scheduler.schedule()
    assert plan.chunks == []
    assert [(f.first_token, f.last_token) for f in plan.fetches] == [(0, 9)]
    assert len(sequence.block_ids) == 3
    assert scheduler.fetched("a", 9) is sequence
    assert run_step(scheduler) == [("a", 1)]
    assert sequence.num_cached_tokens == 9


def test_failed_fetch_is_computed_instead() -> None:
    scheduler = make_scheduler(16)
    sequence = add(scheduler, "a", 10, external_tokens=9)
    scheduler.schedule()
    scheduler.fetched("a", 4)
    assert run_step(scheduler) == [("a", 6)]
    assert sequence.num_cached_tokens == 4


@pytest.mark.parametrize(
    ("num_fetched", "unfilled"), [(15, [4]), (12, [3, 4]), (8, [2, 3, 4]), (4, [1, 2, 3, 4]), (0, [1, 2, 3, 4])]
)
@pytest.mark.parametrize("begins_early", [False, True])
def test_blocks_are_fresh_that_a_fetch_has_not_filled(
    num_fetched: int, unfilled: list[int], begins_early: bool
) -> None:
    """Block 0 is held here already, 1 and 2 are to be fetched whole, 3 in part, of which the rest is cleared with it; 4
    is computed."""
    scheduler = make_scheduler(16, budget=32)
    add(scheduler, "early", 5, seed=7)
    run_step(scheduler)
    sequence = add(scheduler, "a", 20, seed=7, external_tokens=15)
    plan = scheduler.schedule()
    blocks = sequence.block_ids
    assert [(fetch.first_token, fetch.last_token) for fetch in plan.fetches] == [(4, 15)]
    assert not set(blocks) & set(plan.fresh_blocks)
    scheduler.returned(plan)
    if begins_early:
        assert scheduler.arriving("a", 15, LayerArrival(timeout_s=60.0))
        plan = scheduler.schedule()
        assert plan.fresh_blocks == [blocks[4]]
        scheduler.returned(plan)
        scheduler.return_to_fetching(sequence)
    scheduler.fetched("a", num_fetched)
    again = scheduler.schedule()
    assert [chunk.sequence.request_id for chunk in again.prefills] == ["a"]
    assert again.fresh_blocks == [blocks[index] for index in unfilled]
    assert scheduler.schedule().fresh_blocks == []


def test_blocks_of_a_fetch_that_was_given_up_are_fresh_for_the_next() -> None:
    scheduler = make_scheduler(4)
    sequence = add(scheduler, "a", 16, external_tokens=15)
    assert scheduler.schedule().fresh_blocks == []
    scheduler.finish(sequence)
    following = add(scheduler, "b", 16)
    assert scheduler.schedule().fresh_blocks == following.block_ids


def test_fetch_of_a_request_that_is_gone_is_refused() -> None:
    scheduler = make_scheduler(16)
    sequence = add(scheduler, "a", 10, external_tokens=9)
    scheduler.schedule()
    scheduler.finish(sequence)
    assert scheduler.fetched("a", 9) is None
    assert scheduler.blocks.num_available == 16


def finish_answer(scheduler: Scheduler, name: str, prompt: int, **more: object) -> SequenceState:
    """An answer that ended and is being published."""
    sequence = add(scheduler, name, prompt, **more)
    run_step(scheduler)
    assert sequence.status is Status.RUNNING
    scheduler.finish(sequence, keep_blocks=True)
    return sequence


def test_a_waiting_request_takes_the_blocks_of_the_oldest_published_answers_it_needs() -> None:
    scheduler = make_scheduler(8)
    for name in "abc":
        finish_answer(scheduler, name, 8)
    assert (scheduler.blocks.num_live, scheduler.exports.num_reclaimable) == (6, 6)
    small = add(scheduler, "small", 8)
    run_step(scheduler)  # two blocks were free
    assert list(scheduler.exports) == ["a", "b", "c"]
    late = add(scheduler, "late", 8)
    run_step(scheduler)
    assert small.status is late.status is Status.RUNNING
    # One for the growth of "small", one to be left for it, two for the newcomer.
    assert list(scheduler.exports) == ["c"]
    assert scheduler.exports.num_given_up == 2
    assert (scheduler.num_preemptions, scheduler.exports.num_reclaimable) == (0, 2)


def test_published_answers_are_kept_when_all_their_blocks_would_not_admit_the_request() -> None:
    scheduler = make_scheduler(8)
    running = add(scheduler, "running", 14)
    run_step(scheduler)
    finish_answer(scheduler, "a", 3)
    waiting = add(scheduler, "waiting", 15)
    run_step(scheduler)
    assert waiting.status is Status.WAITING
    assert list(scheduler.exports) == ["a"]
    scheduler.finish(running)
    run_step(scheduler)
    assert waiting.status is Status.RUNNING
    assert list(scheduler.exports) == ["a"]


def test_blocks_that_a_request_shares_with_a_published_answer_free_nothing() -> None:
    scheduler = make_scheduler(6)
    finish_answer(scheduler, "old", 8, seed=1)
    finish_answer(scheduler, "new", 8, seed=2)
    follower = add(scheduler, "follower", 17, seed=1)  # two blocks of "old", and three of its own; two are free
    run_step(scheduler)
    assert follower.status is Status.RUNNING
    assert list(scheduler.exports) == []
    assert scheduler.blocks.num_live == 5


def test_a_published_answer_goes_before_anybody_is_preempted() -> None:
    scheduler = make_scheduler(7)
    first, second = add(scheduler, "a", 4), add(scheduler, "b", 4)
    run_step(scheduler)
    finish_answer(scheduler, "published", 4)
    while first.num_tokens < 13:  # their fourth blocks are taken for the 13th tokens
        assert list(scheduler.exports) == ["published"]
        run_step(scheduler)
        assert first.num_tokens == second.num_tokens
    run_step(scheduler)
    assert (scheduler.exports.num_given_up, scheduler.num_preemptions) == (1, 1)


def test_blocks_of_a_hand_over_are_nobody_elses_until_it_is_released() -> None:
    scheduler = make_scheduler(4)
    finish_answer(scheduler, "handed over", 12, hand_over=True)
    waiting = add(scheduler, "waiting", 8)
    assert run_step(scheduler) == []
    assert scheduler.exports.num_reclaimable == 0
    assert scheduler.exports.release("handed over")
    assert not scheduler.exports.release("handed over")
    run_step(scheduler)
    assert waiting.status is Status.RUNNING


def test_budget_below_the_running_limit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_batch_tokens \(4\) is below max_running_requests \(8\)"):
        SchedulerSettings(BLOCK, 4, 8)


@settings(max_examples=150, deadline=None)
@given(
    num_blocks=st.integers(4, 12),
    budget=st.integers(4, 20),
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=8),
    aborts=st.lists(st.integers(0, 7), max_size=3),
    published=st.sets(st.integers(0, 7)),
    priorities=st.lists(st.integers(-2, 2), min_size=8, max_size=8),
)
def test_every_request_that_fits_the_pool_ends(
    num_blocks: int,
    budget: int,
    lengths: list[tuple[int, int]],
    aborts: list[int],
    published: set[int],
    priorities: list[int],
) -> None:
    """Progress: whatever the sizes and priorities, and however long answers are being published, all requests that can
    run alone finish, and all blocks come back."""
    scheduler = make_scheduler(num_blocks, budget, running=4)
    goal = {}
    for index, (prompt, output) in enumerate(lengths):
        if prompt + output <= num_blocks * BLOCK:
            sequence = add(scheduler, str(index), prompt, seed=index % 2, priority_s=float(priorities[index]))
            goal[sequence.request_id] = prompt + output
    for step in range(600):
        if scheduler.num_unfinished == 0:
            break
        ran = run_step(scheduler)
        assert ran, "nothing ran, though requests wait"
        assert sum(count for _, count in ran) <= budget
        for sequence in list(scheduler.sequences()):
            aborted = step == 3 and int(sequence.request_id) in aborts
            if aborted or sequence.num_tokens >= goal[sequence.request_id]:
                # Answers whose publication never ends by itself.
                scheduler.finish(sequence, keep_blocks=not aborted and int(sequence.request_id) in published)
        scheduler.blocks.check_integrity()
    assert scheduler.num_unfinished == 0
    assert scheduler.blocks.num_live == scheduler.exports.num_reclaimable
    for name in list(scheduler.exports):
        assert scheduler.exports.release(name)
    assert scheduler.blocks.num_live == 0
