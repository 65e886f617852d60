from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from load_tests.ordered_move import Desk, Made, MovesStuckError
from migrate.ctl.client import NotYetError, UnreachableError
from migrate.moves import LayerMove

MOVE = LayerMove("a", 1, 2, "a", "b")
HAPPENED = {"weight_bytes": 1, "kv_bytes": 2, "duration_s": 3.0, "held_s": 0.1}


class Routes(ThreadingHTTPServer):
    """Answers what it is told to, in order; the last answer stays."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.gets: list[tuple[int, Any]] = []
        self.post: tuple[int, Any] = (202, {})
        self.posted: list[Any] = []


class Handler(BaseHTTPRequestHandler):
    server: Routes

    def do_GET(self) -> None:
        self._send(*(self.server.gets.pop(0) if len(self.server.gets) > 1 else self.server.gets[0]))

    def do_POST(self) -> None:
        self.server.posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._send(*self.server.post)

    def _send(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def routes() -> Iterator[Routes]:
    with Routes() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def desk(routes: Routes, limit_s: float = 60.0) -> Desk:
    return Desk(f"http://127.0.0.1:{routes.server_port}", None, limit_s)


def entry(outcome: str, **more: Any) -> dict[str, Any]:
    return {"order_id": 7, "outcome": outcome, "predicted": {}, "happened": None, "problem": None, **more}


def test_a_move_has_the_times_that_the_controller_says(routes: Routes) -> None:
    done = entry("done", happened=HAPPENED, begun_ago_s=5.0, ended_ago_s=1.0)
    routes.post = (202, {"order": entry("under way")})
    # A controller that is busy is asked again.
    routes.gets = [(503, {"error": {"message": "late"}}), (200, {"under_way": [], "history": [done]})]
    made = asyncio.run(desk(routes).make(MOVE))
    assert (made.happened, made.may_come_later) == (HAPPENED, False)
    assert made.ended_s - made.begun_s == pytest.approx(4.0)
    assert routes.posted == [{"instance": "a", "layers": [1, 2], "heads": None, "source": "a", "destination": "b"}]


def test_what_may_come_later_is_told_from_what_is_wrong(routes: Routes) -> None:
    routes.post = (409, {"error": {"message": "no room"}})
    made = asyncio.run(desk(routes).make(MOVE))
    assert (made.problem, made.may_come_later) == ("no room", True)

    def failed(problem: str) -> Made:
        return Made(MOVE, 0.0, 1.0, {}, None, problem)

    assert failed("9 blocks are held by live requests; when some have ended, later, there may be room").may_come_later
    assert not failed("a worker has died").may_come_later


def test_a_move_without_an_end_and_a_worker_without_a_word_are_stuck(routes: Routes) -> None:
    routes.post = (202, {"order": entry("under way")})
    routes.gets = [(200, {"under_way": [entry("under way")], "history": [], "workers": {"a": {}}})]
    with pytest.raises(MovesStuckError, match="had no end"):
        asyncio.run(desk(routes, 0.01).make(MOVE))
    with pytest.raises(MovesStuckError, match="nothing has come of a, b"):
        asyncio.run(desk(routes, 0.01).status_of(["a", "b"]))
    routes.gets = [(200, {"under_way": [], "history": []})]
    with pytest.raises(MovesStuckError, match="knows of no such order"):
        asyncio.run(desk(routes).make(MOVE))


def test_an_application_in_which_nothing_moves(routes: Routes) -> None:
    routes.gets = [(404, {"error": {"message": "Nothing moves in mode 'static'"}})]
    with pytest.raises(UnreachableError, match="Nothing moves in mode 'static'"):
        asyncio.run(desk(routes).status())


def test_an_application_that_has_just_started_is_waited_for_but_not_one_that_refuses(routes: Routes) -> None:
    routes.gets = [(503, {"error": {"message": "no worker has told yet"}}), (200, {"under_way": []})]
    assert asyncio.run(desk(routes).first_status()) == {"under_way": []}
    routes.gets = [(503, {"error": {"message": "no worker has told yet"}})]
    with pytest.raises(NotYetError, match="no worker has told yet"):
        asyncio.run(desk(routes, 0.01).first_status())
    routes.gets = [(401, {"error": {"message": "a key is needed"}}), (200, {"under_way": []})]
    with pytest.raises(UnreachableError, match="a key is needed"):
        asyncio.run(desk(routes).first_status())
