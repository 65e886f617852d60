"""The routes of moves over HTTP, before simulated workers: the application's own parts without Ray.

A second goes by with every request, so that whoever polls sees moves end.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from actors.moves.controller_loop import ControllerLoop
from app.moves_desk import MoveOrder, MovesDesk
from app.openai_errors import ApiError, from_http_status
from app.request_parsing import parse_request
from migrate.controller_settings import ControllerSettings
from migrate.verdict import Abilities
from tests.actors.moves.simulated_cell import SimulatedCell


class Handle:
    """A Serve handle's way of being called."""

    def __init__(self, loop: ControllerLoop) -> None:
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return _Remote(getattr(self._loop, name))


@dataclass
class _Remote:
    remote: Any


@dataclass
class MovesApp:
    url: str
    cell: SimulatedCell
    loop: ControllerLoop
    desk: MovesDesk
    keys: set[str] = field(default_factory=set)
    """Of those who may come in; empty: everybody."""

    async def answer(self, method: str, path: str, body: bytes, authorization: str | None) -> tuple[int, Any]:
        """(status, content), as the ingress's routes have it."""
        try:
            if self.keys and authorization not in self.keys:
                raise from_http_status(401, "a wrong key")
            self.cell.advance(1.0)
            await asyncio.sleep(0)
            await self.loop.turn()
            if (method, path) == ("GET", "/debug/moves"):
                return 200, await self.desk.status()
            if (method, path) == ("GET", "/debug/moves/plan"):
                return 200, await self.desk.plan()
            if (method, path) == ("POST", "/debug/moves"):
                content = await self.desk.order(parse_request(body, MoveOrder))
                await asyncio.sleep(0)
                return 202, content
            if (method, path) == ("POST", "/debug/moves/home"):
                return 202, await self.desk.home()
            raise from_http_status(404, "Not Found")
        except ApiError as error:
            return error.status, error.body()


@contextmanager
def moves_app(cell: SimulatedCell, settings: ControllerSettings, mode: str = "balanced") -> Iterator[MovesApp]:
    """Serves until the end of the block. In another mode than balanced there is no controller."""
    loop = asyncio.new_event_loop()
    controller = ControllerLoop(cell, settings, abilities=Abilities(), clock=cell.clock)
    desk = MovesDesk(Handle(controller) if mode == "balanced" else None, mode)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            work = app.answer(self.command, self.path, body, self.headers.get("Authorization"))
            status, content = asyncio.run_coroutine_threadsafe(work, loop).result()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    app = MovesApp(f"http://127.0.0.1:{server.server_port}", cell, controller, desk)
    threads = [threading.Thread(target=loop.run_forever), threading.Thread(target=server.serve_forever)]
    for thread in threads:
        thread.start()
    try:
        yield app
    finally:
        server.shutdown()
        server.server_close()
        asyncio.run_coroutine_threadsafe(controller.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        for thread in threads:
            thread.join()
        loop.close()
