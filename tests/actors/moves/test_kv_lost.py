"""KV that another worker has and cannot be had: a refusal, or a shorter prefix, and never a wrong token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.engine.engine import Engine
from actors.engine.request import EngineRequest
from actors.kv_pages import PagesUnavailableError
from actors.messages import Submission
from migrate.links.memory_network import MemoryNetwork
from migrate.placement import Placement
from tests.actors.moves.divided_cell import PROMPTS, Cell, config_of, run
from tests.actors.moves.storing_worker import StoringWorker
from tests.actors.moves.test_work_links import put_last_layers
from tests.engine_driver import greedy
from tests.link_ends import WAIT_S
from tests.reference import assert_greedy, load_reference

PROMPT = PROMPTS[2]
FolderOf = Callable[[str], Path]
Lose = Callable[[Cell, StoringWorker], None]


def break_link(cell: Cell, worker: StoringWorker) -> None:
    """The next answer of the host does not come, nor anything after it."""
    cell.network.faults(cell.host_of(worker).name, worker.name).die_after(0)


def forget(cell: Cell, worker: StoringWorker) -> None:
    """The host lives, and has nothing any more: whatever is read from now on, in whichever thread, is not there."""
    cell.host_of(worker).thread.call_drained(lambda engine: engine.release(worker.name)).result(WAIT_S)


async def come_home(worker: StoringWorker) -> None:
    """As whoever repairs a placement does it. What the layers at home computed before they left is still there."""
    at_home = worker.at_home

    def repair(engine: Engine) -> None:
        engine.use_placement(Placement(worker.name, at_home.layer_workers, at_home.lane_workers, version=7))
        engine.recompute_lost(all_content=True)

    held = worker.thread.hold_steps()
    try:
        await asyncio.wrap_future(held)
        await worker.ask_engine(repair)
    finally:
        worker.thread.resume_steps()


async def repair_on_failure(worker: StoringWorker) -> None:
    while not worker.failures:
        await asyncio.sleep(0.001)
    await come_home(worker)


@pytest.mark.parametrize(("lose", "reason"), [(break_link, "died"), (forget, "nothing of instance")])
def test_an_export_that_cannot_be_read_is_a_refusal_and_what_was_to_come_is_computed(
    lose: Lose, reason: str, family_folder: FolderOf, network: MemoryNetwork
) -> None:
    folder = family_folder("llama")

    async def body(cell: Cell) -> None:
        put_last_layers(cell.prefill, cell.prefill_host, 2)

        async def before(_: int) -> None:
            lose(cell, cell.prefill)

        cell.shelf.before = before
        tokens = await cell.answer("r", PROMPT, greedy(12))
        assert_greedy(load_reference(folder), [PROMPT], [tokens])
        (refusal,) = cell.shelf.refusals
        assert isinstance(refusal, PagesUnavailableError)
        assert "'prefill host'" in str(refusal)
        assert reason in str(refusal)
        assert cell.prefill.exchange.refusals == {"raised": 1}
        assert cell.decode.engine.counters.fetched_tokens == 0

    run(folder, network, body)


@pytest.mark.parametrize("lose", [break_link, forget])
@pytest.mark.parametrize("number", [1, 4, 6])
def test_a_fetch_that_cannot_be_written_is_a_shorter_prefix(
    number: int, lose: Lose, family_folder: FolderOf, network: MemoryNetwork
) -> None:
    """Before the first, a middle and the last of its parts. The next step fails then too, and all begins anew."""
    folder = family_folder("llama")

    async def body(cell: Cell) -> None:
        put_last_layers(cell.decode, cell.decode_host, 2)

        async def before(event: int) -> None:
            if event == number:
                lose(cell, cell.decode)

        cell.shelf.before = before
        tokens, _ = await asyncio.gather(cell.answer("r", PROMPT, greedy(12)), repair_on_failure(cell.decode))
        assert_greedy(load_reference(folder), [PROMPT], [tokens])
        assert cell.decode.exchange.misses == {"pages_away": 1}
        assert cell.decode.engine.counters.fetched_tokens == 0

    run(folder, network, body)


@pytest.mark.parametrize("is_early", [False, True])
def test_an_export_ends_when_its_content_is_lost(
    is_early: bool, family_folder: FolderOf, network: MemoryNetwork
) -> None:
    """The lanes that are at home again before it is read never had that content. An early one is of a prompt that is
    computed in chunks."""
    folder = family_folder("llama")

    async def body(cell: Cell) -> None:
        put_last_layers(cell.prefill, cell.prefill_host, 2)

        async def before(event: int) -> None:
            if event == 0:
                await come_home(cell.prefill)

        cell.shelf.before = before
        tokens = await cell.answer("r", PROMPT, greedy(12))
        assert_greedy(load_reference(folder), [PROMPT], [tokens])
        # The first, and what had been begun until nothing was in flight.
        assert 1 <= len(cell.shelf.refusals) <= 1 + is_early
        assert all(isinstance(refusal, LookupError) for refusal in cell.shelf.refusals)
        # Only what was computed after that is in the store.
        assert await cell.answer("again", PROMPT, greedy(12)) == tokens
        for worker in (cell.prefill, cell.decode):
            assert cell.num_checked(worker, PROMPT) == len(PROMPT) // 16

    run(folder, network, body, config_of(exports_early=is_early))


def test_a_request_that_is_aborted_keeps_its_blocks_until_they_have_been_written(
    family_folder: FolderOf, network: MemoryNetwork
) -> None:
    """The host's answers are held back, so that a part is on its way as long as that lasts."""
    folder = family_folder("llama")

    async def body(cell: Cell) -> None:
        await cell.move_out(cell.decode, 1, 2)
        request = EngineRequest("r", PROMPT, greedy(12), owner="r", hand_over=True)
        first, hand_over = await cell.prefill.serve(request)
        follow_up = EngineRequest("r", PROMPT, greedy(12), owner="r", output_token_ids=tuple(first))
        answers = cell.network.faults("decode host", "decode")
        answers.hold()
        cell.decode.tracker.submit(Submission(follow_up, hand_over))
        while not cell.decode.engine.copy_gate.num_under_way:
            await asyncio.sleep(0)
        cell.decode.tracker.abort("r")
        for _ in range(100):
            await asyncio.sleep(0)
        assert await cell.decode.ask_engine(lambda engine: engine.blocks.num_live) == 6
        answers.release()
        await cell.decode.wait_free()
        assert await cell.decode.ask_engine(lambda engine: engine.blocks.num_live) == 0
        assert cell.decode.exchange.misses == {"cancelled": 1}
        assert len(await cell.answer("next", PROMPT, greedy(4))) == 4

    run(folder, network, body)
