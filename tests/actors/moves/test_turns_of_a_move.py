"""How often a move asks an engine's thread for something while steps go on: each time it waits for one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from actors.engine_thread import EngineThread
from actors.moves.instance_home import QuestionFailedError
from actors.moves.questions import Kind, encode
from migrate.moves import LayerMove
from migrate.prediction import HOME_TURNS, HOST_TURNS, TURNS_FOR_WEIGHTS
from tests.actors.moves.conftest import MakeWorker
from tests.actors.moves.linked_worker import join, moves_of
from tests.actors.moves.test_copies_beside_steps import in_a_step
from tests.actors.moves.unnoticed import PROMPTS
from tests.engine_driver import greedy

OUT, BACK = LayerMove("home", 1, 2, "home", "host"), LayerMove("home", 1, 2, "host", "home")


class Turns:
    """Counts the calls that may wait for a step; while steps are held there is none to wait for."""

    def __init__(self, thread: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._held = False
        for name in ("call", "hold_steps", "resume_steps"):
            monkeypatch.setattr(thread, name, self._counting(name, getattr(thread, name)))

    def _counting(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: object) -> object:
            self.count += name != "resume_steps" and not self._held
            self._held = name == "hold_steps" or (self._held and name != "resume_steps")
            return method(*arguments)

        return counted


@pytest.mark.parametrize("drops_cached", [False, True])
def test_a_move_takes_few_turns_of_either_engine(
    drops_cached: bool, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, host = make_worker("home"), make_worker("host")
    join(home, host)
    home.start(PROMPTS, greedy(60))
    home.wait_for_tokens(20)
    at_home, at_host = Turns(home.thread, monkeypatch), Turns(host.thread, monkeypatch)
    moves = moves_of(home, drops_cached=drops_cached)
    for move in (OUT, BACK):
        at_home.count = at_host.count = 0
        report = asyncio.run(moves.make(move))
        assert report.kv_bytes > 0
        assert (report.weight_bytes > 0) == (move is BACK)  # the host has the same model
        assert at_home.count == HOME_TURNS + (TURNS_FOR_WEIGHTS if report.weight_bytes else 0)
        assert at_host.count == HOST_TURNS
    home.wait()


def test_what_a_move_asks_of_a_host_while_it_copies_does_not_wait_for_its_step(make_worker: MakeWorker) -> None:
    home, host = make_worker("home"), make_worker("host")
    join(home, host)
    asyncio.run(moves_of(home).make(OUT))
    hosted = host.engine.grants.instances["home"]
    with in_a_step(host):
        asyncio.run(home.home.ask("host", Kind.DIRTY_POINT, encode()))
        asyncio.run(home.home.ask("host", Kind.DIRTY_SINCE, encode(point=0)))
        version = (hosted.version or 0) + 1
        asyncio.run(home.home.ask("host", Kind.USE_VERSION, encode(version=version)))
        assert hosted.version == version
        with pytest.raises(QuestionFailedError, match=f"the placement has version {version} already"):
            asyncio.run(home.home.ask("host", Kind.USE_VERSION, encode(version=version)))
