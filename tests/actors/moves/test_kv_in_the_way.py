"""A pool that shrinks, because layers come home to less room, while KV is being fetched over a link."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.engine.engine import Engine
from actors.engine.request import EngineRequest
from actors.engine.room import GrantRefusedError
from actors.moves.layer_moves import MoveFailedError
from actors.moves.repair import Repairs
from migrate.links.memory_network import MemoryNetwork
from tests.actors.moves.divided_cell import Cell, config_of, run
from tests.engine_driver import greedy, make_prompt
from tests.link_ends import WAIT_S
from tests.reference import assert_greedy, load_reference

EARLIER, FETCHED, RUNNING = make_prompt(200, 1), make_prompt(33, 2), make_prompt(40, 3)
BLOCKS, SMALLER = 32, 16
"""Blocks of the pool, also while layers are away, and those that are left when they are back."""


def hold_at(engine: Engine, host: str, num_blocks: int) -> None:
    """A pool that layers have left grows."""
    assert not engine.grants.shrink_pool(num_blocks)
    engine.grants.limit_blocks(host, num_blocks)


async def move_out_and_take_the_room(cell: Cell) -> None:
    """The decode worker has served something, two of its layers are away, and there is less room for them at home."""
    decode = cell.decode
    await decode.serve(EngineRequest("earlier", EARLIER, greedy(4), owner="earlier"))
    await cell.move_out(decode, 1, 2)
    host, fingerprint = cell.host_of(decode).name, decode.engine.loaded.fingerprint
    await decode.ask_engine(lambda engine: engine.grant("another", [(1, 0)], [], SMALLER, fingerprint))
    await decode.ask_engine(lambda engine: hold_at(engine, host, BLOCKS))


async def live_blocks(cell: Cell, name: str) -> list[int]:
    """Once it has some."""

    def read(engine: Engine) -> list[int]:
        sequences = [s for s in engine.scheduler.sequences() if s.request_id == name]
        return list(sequences[0].block_ids) if sequences else []

    while not (blocks := await asyncio.wrap_future(cell.decode.thread.call(read))):
        await asyncio.sleep(0.001)
    return blocks


@pytest.mark.parametrize("is_in_the_way", [False, True])
def test_blocks_that_are_fetched_into_stay_where_they_are(
    is_in_the_way: bool, family_folder: Callable[[str], Path], network: MemoryNetwork
) -> None:
    """Those of another request make way, at the host as at home; or the move waits a while for the fetch to end, and is
    refused if it does not."""
    folder = family_folder("llama")

    async def body(cell: Cell) -> None:
        decode, may_come = cell.decode, asyncio.Event()

        async def before(event: int) -> None:
            if event > 1:
                await may_come.wait()

        async def fetch() -> list[int]:
            return await cell.answer("fetched", FETCHED, greedy(8))

        async def compute() -> list[int]:
            return (await decode.serve(EngineRequest("running", RUNNING, greedy(150), owner="running")))[0]

        cell.shelf.before = before
        await move_out_and_take_the_room(cell)
        order = {"running": compute, "fetched": fetch} if is_in_the_way else {"fetched": fetch, "running": compute}
        asked, blocks = {}, {}
        for name, ask in order.items():
            asked[name] = asyncio.create_task(ask())
            blocks[name] = await live_blocks(cell, name)
        assert [max(blocks[name]) >= SMALLER for name in order] == [False, True]
        if is_in_the_way:
            with pytest.raises((GrantRefusedError, MoveFailedError), match="being copied by exports or fetches"):
                await cell.move_back(decode, 1, 2)
        moving = asyncio.create_task(cell.move_back(decode, 1, 2))
        while is_in_the_way and decode.home.under_way is None:
            await asyncio.sleep(0)
        if is_in_the_way:
            may_come.set()
        await moving
        assert await decode.ask_engine(lambda engine: engine.blocks.num_blocks) == SMALLER
        may_come.set()
        assert_greedy(
            load_reference(folder), [FETCHED, RUNNING], [await asked[name] for name in ("fetched", "running")]
        )
        assert cell.num_checked(decode, FETCHED) > 0
        assert decode.engine.counters.fetched_tokens == len(FETCHED)
        await decode.ask_engine(lambda engine: engine.release("another"))

    run(folder, network, body, config_of(blocks=BLOCKS))


def test_a_repair_waits_for_no_fetch_that_waits_for_it(
    family_folder: Callable[[str], Path], network: MemoryNetwork
) -> None:
    """Its blocks are in the way, and it would be let into them when the repair is over. It begins anew, as all do."""
    folder = family_folder("llama")

    async def body(cell: Cell) -> None:
        decode, may_come = cell.decode, asyncio.Event()

        async def before(event: int) -> None:
            if event > 1:
                await may_come.wait()

        await move_out_and_take_the_room(cell)
        host = cell.host_of(decode).name
        cell.shelf.before = before
        running = EngineRequest("running", RUNNING, greedy(150), owner="running")
        asked = [asyncio.create_task(decode.serve(running))]
        await live_blocks(cell, "running")
        asked.append(asyncio.create_task(cell.answer("fetched", FETCHED, greedy(8))))  # type: ignore[arg-type]
        assert max(await live_blocks(cell, "fetched")) >= SMALLER
        failures: list[str] = []
        repairs = Repairs(decode.home, folder, decode.moves.checksums, decode.tracker.take_turn, failures.append)
        close = decode.engine.copy_gate.close

        def close_and_let_come() -> None:
            close()
            loop.call_soon_threadsafe(may_come.set)

        loop = asyncio.get_running_loop()
        decode.engine.copy_gate.close = close_and_let_come  # type: ignore[method-assign]
        decode.home.lose(host, "it is lost")
        repairs.begin(host, "it is lost")
        async with asyncio.timeout(WAIT_S / 2):  # the copy itself would wait for longer than the test may take
            await repairs.settled()
        assert failures == []
        (tokens, _), fetched = await asyncio.gather(*asked)
        assert_greedy(load_reference(folder), [RUNNING, FETCHED], [tokens, fetched])
        await decode.ask_engine(lambda engine: engine.release("another"))

    run(folder, network, body, config_of(blocks=BLOCKS))


def test_a_move_home_that_is_given_up_when_blocks_have_moved_leaves_them_moved_everywhere(
    family_folder: Callable[[str], Path], network: MemoryNetwork
) -> None:
    """At home they have become others; so they must at the host, whoever has no wish for the move any more."""
    folder = family_folder("llama")

    async def body(cell: Cell) -> None:
        decode = cell.decode
        await move_out_and_take_the_room(cell)
        first = asyncio.create_task(decode.serve(EngineRequest("first", FETCHED, greedy(150), owner="first")))
        await live_blocks(cell, "first")
        asked = asyncio.create_task(decode.serve(EngineRequest("running", RUNNING, greedy(150), owner="running")))
        assert max(await live_blocks(cell, "running")) >= SMALLER
        moving = asyncio.create_task(cell.move_back(decode, 1, 2))
        while decode.engine.blocks.num_blocks != SMALLER:
            await asyncio.sleep(0)
        moving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await moving
        answers = [(await asked)[0], (await first)[0]]
        assert_greedy(load_reference(folder), [RUNNING, FETCHED], answers)
        await decode.ask_engine(lambda engine: engine.release("another"))

    run(folder, network, body, config_of(blocks=BLOCKS))
