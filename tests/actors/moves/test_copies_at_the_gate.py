"""Copies of exports and fetches that wait for a move take threads, all that the event loop has if they are many."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from actors.engine.copy_gate import GateClosedError
from migrate.links.memory_network import MemoryNetwork
from tests.actors.moves.moving_worker import MovingWorker, join, moving_workers
from tests.actors.moves.unnoticed import PROMPTS
from tests.engine_driver import greedy
from tests.link_ends import WAIT_S
from tests.reference import assert_greedy, load_reference

ANSWER = 60


class CopiesAtTheGate:
    """Has one begin each time that a worker closes its gate, in the one thread that there is."""

    def __init__(self, worker: MovingWorker) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(1))
        self._gate = worker.engine.copy_gate
        self._close = self._gate.close
        self.begun: list[asyncio.Future[None]] = []
        worker.engine.copy_gate.close = self._close_and_copy  # type: ignore[method-assign]

    def _close_and_copy(self) -> None:
        self._close()
        self._loop.call_soon_threadsafe(self._begin)  # runs before who has the steps held hears that they are

    def _begin(self) -> None:
        self.begun.append(self._loop.run_in_executor(None, self._copy))

    def _copy(self) -> None:
        with self._gate.copying(WAIT_S):
            pass


def test_moves_and_repairs_go_on(family_folder: Callable[[str], Path], network: MemoryNetwork) -> None:
    folder = family_folder("llama")

    async def run() -> None:
        async with moving_workers(["home"], folder, network) as (home,):
            async with moving_workers(["host"], folder, network) as (host,):
                await join(home, host)
                copies = CopiesAtTheGate(home)
                await home.start(PROMPTS, greedy(ANSWER))
                await home.tokens_more(20)
                await home.move(1, 2, home, host)
                await home.tokens_more(20)
                await home.move(1, 1, host, home)
                await home.tokens_more(20)
            answers = await home.answers()
            state = await home.state_when(lambda state: state.repairs == 1 and state.under_way is None)
            assert state.placement.is_home
            assert_greedy(load_reference(folder), PROMPTS, answers)
            *of_moves, of_repair = await asyncio.gather(*copies.begun, return_exceptions=True)
            assert len(of_moves) >= 2
            assert set(of_moves) == {None}
            # Its KV is computed anew; one that begins late finds the gate open again.
            assert of_repair is None or isinstance(of_repair, GateClosedError)

    asyncio.run(run())
