"""Workers that host for each other in a cycle: grants come to those whose own layers are away, whose blocks move for
it, and whose hosts have to follow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from migrate.links.memory_network import MemoryNetwork
from migrate.move_report import MoveFailedError
from tests.actors.moves.moving_worker import MovingWorker, join, memory_of, moving_workers
from tests.engine_driver import greedy, make_prompt
from tests.reference import assert_greedy, load_reference

PROMPTS = [make_prompt(length, length) for length in (5, 33, 90, 17, 64, 48, 200)]
OPTIONS = {"slab_pages": 2, "kv_cache_blocks": 80, "max_context_tokens": 320}
FolderOf = Callable[[str], Path]


async def move_when_there_is_room(home: MovingWorker, source: MovingWorker, destination: MovingWorker) -> None:
    """Where answers are long and memory is given away, a move may have to wait for some of them to end."""
    while True:
        try:
            await home.move(2, 1, source, destination)
            return
        except MoveFailedError as error:
            live = [worker for worker in (source, destination) if len(worker.ends) < len(worker.tokens)]
            if "blocks are held by live requests" not in str(error) or not live:
                raise
            await asyncio.gather(*(worker.tokens_more(10) for worker in live))


def test_three_host_for_each_other_in_a_cycle(family_folder: FolderOf, network: MemoryNetwork) -> None:
    folder = family_folder("llama")

    async def run() -> None:
        async with moving_workers(["a", "b", "c"], folder, network, **OPTIONS) as workers:
            a, b, c = workers
            cycle = [(a, b), (b, c), (c, a)]
            for pair in cycle:
                await join(*pair)
            before = [memory_of(await worker.state()) for worker in workers]
            for worker in workers:
                await worker.start(PROMPTS, greedy(40))
            for _ in range(3):
                for home, host in cycle:
                    await home.tokens_more(5)
                    await move_when_there_is_room(home, home, host)
                states = [await worker.state() for worker in workers]
                assert [len(state.hosted) for state in states] == [1, 1, 1]
                for home, host in cycle:
                    await home.tokens_more(5)
                    await move_when_there_is_room(home, host, home)
            for worker in workers:
                assert_greedy(load_reference(folder), PROMPTS, await worker.answers())
                assert set(worker.ends.values()) == {None}
            states = [await worker.state() for worker in workers]
            assert [memory_of(state) for state in states] == before
            assert [state.repairs for state in states] == [0, 0, 0]

    asyncio.run(run())


def test_in_a_cycle_one_dies(family_folder: FolderOf, network: MemoryNetwork) -> None:
    """Its host lets go of its layers, and its home takes back what it hosted."""
    folder = family_folder("llama")

    async def run() -> None:
        async with moving_workers(["a", "b", "c"], folder, network) as (a, b, c):
            for home, host in ((a, b), (b, c), (c, a)):
                await join(home, host)
                await home.move(2, 1, home, host)
                await home.start(PROMPTS[:4], greedy(40))
            await a.tokens_more(5)
            c.moves.close()
            assert_greedy(load_reference(folder), PROMPTS[:4], await a.answers())
            assert_greedy(load_reference(folder), PROMPTS[:4], await b.answers())
            state = await a.state_when(lambda state: not state.hosted)
            assert state.placement.layers_on("b") == (2,)  # these two have each other still
            state = await b.state_when(lambda state: state.repairs == 1 and state.under_way is None)
            assert state.placement.is_home
            assert [part.instance for part in state.hosted] == ["a"]

    asyncio.run(run())


def test_who_gave_its_memory_away_while_idle_has_its_layers_back_when_answers_end(
    family_folder: FolderOf, network: MemoryNetwork
) -> None:
    """Its guest was given what nobody used; what is live since then leaves no room for what comes home."""
    folder = family_folder("llama")

    async def run() -> None:
        async with moving_workers(["a", "b", "c"], folder, network, **OPTIONS) as (a, b, c):
            for pair in ((a, b), (c, a)):
                await join(*pair)
            before = [memory_of(await worker.state()) for worker in (a, b)]
            await a.move(2, 1, a, b)
            await c.start(PROMPTS, greedy(100))
            await c.tokens_more(200)
            await c.move(2, 1, c, a)
            await a.start(PROMPTS, greedy(100))
            await a.tokens_more(60)
            await asyncio.wrap_future(a.thread.hold_steps())  # so that no answer ends before the move is asked for
            with pytest.raises(MoveFailedError, match=r"blocks are held by live requests.*later"):
                await a.move(2, 1, b, a)
            assert (await a.state()).placement.layers_on("b") == (2,)
            a.thread.resume_steps()
            assert_greedy(load_reference(folder), PROMPTS, await a.answers())
            await a.move(2, 1, b, a)
            await c.move(2, 1, a, c)
            assert_greedy(load_reference(folder), PROMPTS, await c.answers())
            assert [memory_of(await worker.state()) for worker in (a, b)] == before
            assert [set(worker.ends.values()) for worker in (a, c)] == [{None}] * 2

    asyncio.run(run())
