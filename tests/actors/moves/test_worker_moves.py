"""Layers between workers that come and go: whatever ends, answers are whole and right, and memory is where it was."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.engine.engine import Engine
from migrate.links.memory_network import MemoryNetwork
from migrate.move_report import MoveFailedError
from migrate.moves import HeadMove
from tests.actors.moves.moving_worker import join, memory_of, moving_workers
from tests.engine_driver import greedy, make_prompt
from tests.link_ends import WAIT_S
from tests.reference import FAMILIES, assert_greedy, load_reference, make_model

PROMPTS = [make_prompt(length, length) for length in (5, 33, 90, 17, 64, 48, 200)]
FolderOf = Callable[[str], Path]


@pytest.mark.parametrize("messages", [0, 1, 7])
def test_layers_of_a_lost_host_come_home_in_the_middle_of_answers(
    messages: int, family_folder: FolderOf, network: MemoryNetwork
) -> None:
    folder = family_folder("llama")

    async def run() -> None:
        async with moving_workers(["home", "host"], folder, network) as (home, host):
            await join(home, host)
            before = memory_of(await home.state()), memory_of(await host.state())
            await home.start(PROMPTS, greedy(120))
            await home.tokens_more(10)
            await home.move(1, 2, home, host)
            away = await home.state()
            assert (away.placement.layers_on("host"), away.pool_blocks > 0) == ((1, 2), True)
            await home.tokens_more(10)
            network.faults("home", "host").die_after(messages)
            assert_greedy(load_reference(folder), PROMPTS, await home.answers())
            assert set(home.ends.values()) == {None}
            state = await home.state_when(lambda state: state.repairs == 1 and state.under_way is None)
            assert state.placement.is_home
            assert state.placement.version == 2
            there = await host.state_when(lambda state: not state.hosted)
            assert (memory_of(state), memory_of(there)) == before
            assert home.failures == []

    asyncio.run(run())


def test_forward_counters_stop_here_and_run_there(family_folder: FolderOf, network: MemoryNetwork) -> None:
    async def run() -> None:
        async with moving_workers(["home", "host"], family_folder("llama"), network) as (home, host):
            await join(home, host)
            await home.start(PROMPTS[:3], greedy(20))
            await home.answers()
            before = await home.state()
            assert len(set(before.layer_steps)) == 1
            await home.move(2, 1, home, host)
            await home.start(PROMPTS[3:], greedy(20))
            await home.answers()
            after, there = await home.state(), await host.state()
            (hosted,) = there.hosted
            steps = after.layer_steps[0] - before.layer_steps[0]
            assert steps >= 20
            assert after.layer_steps == (before.layer_steps[0] + steps,) * 2 + (before.layer_steps[2],)
            assert (hosted.instance, hosted.layers, hosted.layer_steps) == ("home", (2,), {2: steps})
            assert there.layer_steps == (0, 0, 0)

    asyncio.run(run())


def test_a_pool_grows_by_what_left(family_folder: FolderOf, network: MemoryNetwork) -> None:
    """A loaded home and an idle host: what a layer and its lanes took becomes room for tokens of the others."""
    options = {"slab_pages": 1, "kv_cache_blocks": 40, "max_context_tokens": 160}

    async def run() -> None:
        async with moving_workers(["home", "host"], family_folder("llama"), network, **options) as (home, host):
            await join(home, host)
            before, there_before = await home.state(), await host.state()
            await home.start([make_prompt(100, seed) for seed in range(8)], greedy(60))
            await home.tokens_more(5)
            live = await home.on_engine(
                lambda engine: (engine.scheduler.num_preemptions, len(engine.scheduler.waiting))
            )
            assert live != (0, 0)  # they do not all fit
            report = await home.move(2, 1, home, host)
            after, there = await home.state(), await host.state()
            (hosted,) = there.hosted
            page = before.kv_bytes // (40 * 6)
            freed_pages = -(-before.weight_bytes // 3 // page) + 40 * 2
            assert after.pool_blocks == report.pool_blocks == 40 + freed_pages // 4 <= hosted.num_blocks
            assert after.kv_bytes == after.pool_blocks * 4 * page
            assert before.weight_bytes - after.weight_bytes == before.weight_bytes // 3
            # What was promised to the host's own requests stays.
            assert 160 // 16 <= there.pool_blocks < there_before.pool_blocks
            await home.answers()
            await home.move(2, 1, host, home)
            states = [await home.state(), await host.state()]
            assert [memory_of(state) for state in states] == [memory_of(before), memory_of(there_before)]

    asyncio.run(run())


def test_who_no_longer_fits_is_told_and_the_others_go_on(family_folder: FolderOf, network: MemoryNetwork) -> None:
    """While layers were away the pool took a request that is longer than the pool at home."""
    folder = family_folder("llama")
    options = {"slab_pages": 1, "kv_cache_blocks": 12}

    async def run() -> None:
        async with moving_workers(["home"], folder, network, **options) as (home,):
            async with moving_workers(["host"], folder, network, **options | {"kv_cache_blocks": 200}) as (host,):
                await join(home, host)
                await home.move(2, 1, home, host)
                assert (await home.state()).pool_blocks > 16
                short, long = make_prompt(40, 1), make_prompt(60, 2)
                await home.start([short], greedy(30))
                await home.start([long], greedy(190))
                await home.tokens_more(12)
            answers = await home.answers()
            assert home.ends["0"] is None
            assert "without it there is room for 192 tokens" in (home.ends["1"] or "")
            reference = load_reference(folder)
            assert_greedy(reference, [short, long], answers)
            assert len(answers[1]) < 190
            state = await home.state_when(lambda state: state.under_way is None)
            assert (state.pool_blocks, state.placement.is_home) == (12, True)

    asyncio.run(run())


@pytest.mark.parametrize("messages", [0, 2, 4, 7])
def test_a_link_that_dies_in_a_move_is_made_anew_and_the_move_too(
    messages: int, family_folder: FolderOf, network: MemoryNetwork
) -> None:
    """Out and home again; the link dies somewhere on the way. In the end all is where it was."""
    folder = family_folder("llama")

    async def run() -> None:
        async with moving_workers(["home", "host"], folder, network) as (home, host):
            await join(home, host)
            before = memory_of(await home.state()), memory_of(await host.state())
            await home.start(PROMPTS, greedy(40))
            await home.tokens_more(5)
            network.faults("home", "host").die_after(messages)
            failed = 0
            try:
                await home.move(1, 2, home, host)
                await home.move(1, 2, host, home)
            except MoveFailedError:
                failed = 1
            network.faults("home", "host").die_after(1_000_000)
            await join(home, host, epoch=1)
            assert (await home.state()).placement.is_home
            assert not (await host.state()).hosted
            await home.move(1, 2, home, host)
            await home.move(1, 2, host, home)
            assert_greedy(load_reference(folder), PROMPTS, await home.answers())
            assert (memory_of(await home.state()), memory_of(await host.state())) == before
            assert failed == 1
            assert set(home.ends.values()) == {None}

    asyncio.run(run())


def test_a_host_that_lives_and_cannot_is_lost_too(family_folder: FolderOf, network: MemoryNetwork) -> None:
    folder = family_folder("llama")

    async def run() -> None:
        async with moving_workers(["home", "host"], folder, network) as (home, host):
            await join(home, host)
            before = memory_of(await host.state())
            await home.move(1, 2, home, host)
            await home.start(PROMPTS, greedy(30))
            await home.tokens_more(10)

            def spoil(engine: Engine) -> None:
                engine.grants.instances["home"].use_version(9)

            await host.on_engine(spoil)
            assert_greedy(load_reference(folder), PROMPTS, await home.answers())
            state = await home.state_when(lambda state: state.repairs == 1 and state.under_way is None)
            assert state.placement.is_home
            assert memory_of(await host.state()) == before
            await home.move(1, 2, home, host)  # over the same link

    asyncio.run(run())


def test_weights_that_are_not_what_they_were_are_not_used(
    tmp_path: Path, family_folder: FolderOf, network: MemoryNetwork
) -> None:
    """Better no worker than one with half another model."""
    folder = tmp_path / "model"
    shutil.copytree(family_folder("llama"), folder)

    async def run() -> None:
        async with moving_workers(["home", "host"], folder, network) as (home, host):
            await join(home, host)
            await home.move(2, 1, home, host)
            make_model(FAMILIES["llama"], folder, seed=1)
            host.moves.close()
            await home.state_when(lambda state: bool(home.failures))
            assert "weights of layer 2 came with another checksum" in home.failures[0]

    asyncio.run(run())


def test_what_cannot_be_is_refused_with_the_reason(family_folder: FolderOf, network: MemoryNetwork) -> None:
    async def run() -> None:
        async with moving_workers(["home", "host"], family_folder("llama"), network) as (home, host):
            with pytest.raises(MoveFailedError, match="has no link to 'host'"):
                await home.move(1, 1, home, host)
            await join(home, host)
            with pytest.raises(MoveFailedError, match="no lane there"):
                await home.moves.move(HeadMove("home", (1,), (0, 1), "home", "host"))
            with pytest.raises(MoveFailedError, match="no layer of 'home' would be left at home"):
                await home.move(0, 3, home, host)
            network.faults("home", "host").hold()
            moving = asyncio.create_task(home.move(1, 1, home, host))
            await home.state_when(lambda state: state.under_way is not None)
            with pytest.raises(MoveFailedError, match="busy with another thing: layer 1 of 'home'"):
                await home.move(2, 1, home, host)
            network.faults("home", "host").release()
            await moving
            assert (await home.state()).placement.layers_on("host") == (1,)

    asyncio.run(run())


def test_a_host_whose_home_has_left_lets_go(family_folder: FolderOf, network: MemoryNetwork) -> None:
    async def run() -> None:
        async with moving_workers(["home", "host"], family_folder("llama"), network) as (home, host):
            await join(home, host)
            before = memory_of(await host.state())
            await home.move(1, 2, home, host)
            assert memory_of(await host.state()) != before
            host.moves.unlink("home")
            assert memory_of(await host.state()) == before
            assert (await host.state()).links == {}

    asyncio.run(run())


def test_heads_of_a_lost_host_come_home_too(family_folder: FolderOf, network: MemoryNetwork) -> None:
    """A layer and heads of another one lie there; the weights of the latter are at home all along."""
    folder = family_folder("llama")

    async def run() -> None:
        async with moving_workers(["home", "host"], folder, network) as (home, host):
            await join(home, host)
            before = memory_of(await home.state()), memory_of(await host.state())
            await home.move(2, 1, home, host)
            await home.moves.move(HeadMove("home", (0, 1), (1,), "home", "host"))
            await home.start(PROMPTS, greedy(40))
            await home.tokens_more(10)
            assert (await home.state()).placement.lanes_on("host") == ((0, 1), (1, 1), (2, 0), (2, 1))
            network.faults("home", "host").die_after(20)
            assert_greedy(load_reference(folder), PROMPTS, await home.answers())
            state = await home.state_when(lambda state: state.repairs == 1 and state.under_way is None)
            there = await host.state_when(lambda state: not state.hosted)
            assert state.placement.is_home
            assert (memory_of(state), memory_of(there)) == before

    asyncio.run(run())


def test_a_host_that_is_lost_while_another_is_told_of_its_repair_is_repaired_too(
    family_folder: FolderOf, network: MemoryNetwork
) -> None:
    """The first lives, and is told that it has nothing any more; its answer takes a while."""
    folder = family_folder("llama")

    async def run() -> None:
        async with moving_workers(["home", "slow"], folder, network) as (home, slow):
            async with moving_workers(["host"], folder, network) as (host,):
                await join(home, slow)
                await join(home, host)
                await home.start(PROMPTS, greedy(120))
                await home.tokens_more(10)
                await home.move(1, 1, home, slow)
                await home.move(2, 1, home, host)
                is_told, may_answer = asyncio.Event(), asyncio.Event()
                give_back = home.moves._home.give_back

                async def tell_and_wait(*arguments: object) -> None:
                    is_told.set()
                    await may_answer.wait()
                    await give_back(*arguments)  # type: ignore[arg-type]

                home.moves._home.give_back = tell_and_wait  # type: ignore[method-assign]
                home.moves._home.lose("slow", "it did not answer in time")
                await asyncio.wait_for(is_told.wait(), WAIT_S)
            await home.state_when(lambda state: state.repairs == 1 and home.engine.failure is not None)
            may_answer.set()
            assert_greedy(load_reference(folder), PROMPTS, await home.answers())
            state = await home.state_when(lambda state: state.repairs == 2 and state.under_way is None)
            assert state.placement.is_home

    asyncio.run(run())


def test_two_attend_for_each_other(family_folder: FolderOf, network: MemoryNetwork) -> None:
    """The second grant comes to one whose own heads are away, and whose steps wait for the other one's."""
    folder = family_folder("llama")

    async def run() -> None:
        async with moving_workers(["a", "b"], folder, network, max_context_tokens=320) as (a, b):
            await join(a, b)
            for worker in (a, b):
                await worker.start(PROMPTS, greedy(40))
            for home, host in ((a, b), (b, a)):
                await home.tokens_more(5)
                await home.moves.move(HeadMove(home.name, (0, 2), (0,), home.name, host.name))
            for home, host in ((b, a), (a, b)):
                await home.tokens_more(5)
                await home.moves.move(HeadMove(home.name, (0, 2), (0,), host.name, home.name))
            for worker in (a, b):
                assert_greedy(load_reference(folder), PROMPTS, await worker.answers())
                state = await worker.state()
                assert (state.placement.is_home, state.hosted, state.repairs) == (True, (), 0)

    asyncio.run(run())


@pytest.mark.parametrize("turns", [1, 3, 6, 12])
@pytest.mark.parametrize("is_return", [False, True], ids=["out", "home"])
def test_a_move_that_is_given_up_was_made_or_was_none(
    turns: int, is_return: bool, family_folder: FolderOf, network: MemoryNetwork
) -> None:
    folder = family_folder("llama")

    async def run() -> None:
        async with moving_workers(["home", "host"], folder, network) as (home, host):
            await join(home, host)
            before = memory_of(await home.state()), memory_of(await host.state())
            await home.start(PROMPTS, greedy(40))
            if is_return:
                await home.move(1, 2, home, host)
            ends = (host, home) if is_return else (home, host)
            moving = asyncio.create_task(home.move(1, 2, *ends))
            for _ in range(turns):  # the move and this take turns in the engine's thread
                await home.on_engine(lambda _: None)
            moving.cancel()
            await asyncio.wait([moving])
            placement = (await home.state_when(lambda state: state.under_way is None)).placement
            assert placement.layers_on("host") in ((), (1, 2))
            if not placement.is_home:
                await home.move(1, 2, host, home)
            assert_greedy(load_reference(folder), PROMPTS, await home.answers())
            await host.state_when(lambda state: not state.hosted)
            state = await home.state()
            assert (memory_of(state), memory_of(await host.state())) == before
            assert state.granted_blocks == {}
            assert home.failures == []

    asyncio.run(run())


@pytest.mark.parametrize("is_followed", [True, False])
def test_hosts_follow_when_a_grant_moves_blocks(
    is_followed: bool, family_folder: FolderOf, network: MemoryNetwork
) -> None:
    """A worker with a layer away gives room to another one, and live blocks of its own, which lie high, become lower
    ones. Its host does the same, or is lost."""
    folder = family_folder("llama")
    options = {"slab_pages": 1, "kv_cache_blocks": 60, "max_context_tokens": 256}
    short, long = [make_prompt(100, seed) for seed in range(5)], [make_prompt(60, 10), make_prompt(50, 11)]

    async def run() -> None:
        async with moving_workers(["a", "b", "c"], folder, network, **options) as (a, b, c):
            await join(a, b)
            await join(b, c)
            await b.move(2, 1, b, c)
            await b.start(short, greedy(2))
            await b.start(long, greedy(150))
            await b.ended(len(short))  # which have the low blocks
            high = await b.on_engine(lambda engine: max(engine.blocks.live_from(0)))
            if is_followed:
                await a.move(1, 2, a, b)
                assert (await b.state()).pool_blocks <= high
            else:
                network.faults("b", "c").hold()  # what is on the way there is late, and never arrives
                moving = asyncio.create_task(a.move(1, 2, a, b))
                await b.state_when(lambda state: state.under_way is not None)
                network.faults("b", "c").die_after(0)
                network.faults("b", "c").release()
                with contextlib.suppress(MoveFailedError):  # it may be told that the other one is busy with its loss
                    await moving
            await a.start(long, greedy(30))
            assert_greedy(load_reference(folder), short + long, await b.answers())
            assert_greedy(load_reference(folder), long, await a.answers())
            state = await b.state_when(lambda state: state.under_way is None)
            assert (state.repairs, state.placement.is_home) == ((0, False) if is_followed else (1, True))
            assert set(b.ends.values()) == {None}

    asyncio.run(run())
