"""The guard and the form of errors over bare ASGI, where a client can be anybody."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse

from app.api_keys import PUBLIC, new_key
from app.http_guard import HeadAsGet, KeyGuard, install_error_handlers, use_keys
from app.key_file import KeyFile
from app.openai_errors import overloaded

HERE = "127.0.0.1"
ELSEWHERE = "192.0.2.7"


@pytest.fixture
def app() -> Iterator[FastAPI]:
    """A small app behind the guard. The keys in use are the process's, so they are taken away again."""
    app = FastAPI()
    app.add_middleware(KeyGuard)
    app.add_middleware(HeadAsGet)
    install_error_handlers(app)

    @app.get("/health")
    async def health() -> str:
        return "ok"

    @app.get("/who")
    async def who(request: Request) -> JSONResponse:
        principal = request.state.principal
        return JSONResponse([principal.name, principal.salt.hex()])

    @app.get("/busy")
    async def busy() -> None:
        raise overloaded("2 requests are in flight", retry_after_s=3.2)

    @app.get("/broken")
    async def broken() -> None:
        raise KeyError("the secret prompt")

    @app.websocket("/socket")
    async def socket(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_json(websocket.state.principal.name)
        await websocket.close()

    yield app
    use_keys(None)


@pytest.fixture
def key(tmp_path: Path, app: FastAPI) -> str:
    """The one key that is let in."""
    key, line = new_key("alice")
    file = tmp_path / "keys"
    file.write_text(line)
    use_keys(KeyFile(file))
    return key


Answer = tuple[int, dict[str, str], Any]


def call(app: FastAPI, path: str, *, client: Any = (HERE, 5000), method: str = "GET", **more: Any) -> Answer:
    """(status, headers, parsed body; None for HEAD, which has none)"""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": [],
        "client": client, "server": (HERE, 8000), **more,
    }  # fmt: skip
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    with contextlib.suppress(KeyError):  # the framework hands what nobody expected on to the server, after its answer
        asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    body = b"".join(message["body"] for message in sent[1:])
    if method == "HEAD":
        assert body == b""
        return sent[0]["status"], headers, None
    assert int(headers["content-length"]) == len(body)
    return sent[0]["status"], headers, json.loads(body)


def bearer(key: str) -> dict[str, Any]:
    return {"headers": [(b"host", b"x"), (b"authorization", f"Bearer {key}".encode())]}


def error_of(answer: Answer, status: int, code: str) -> dict[str, str]:
    """The headers of an error in OpenAI's form."""
    got, headers, body = answer
    assert got == status
    assert headers["content-type"] == "application/json"
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["code"] == code
    return headers


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1"])
def test_without_keys_this_machine_is_served(app: FastAPI, host: str) -> None:
    assert call(app, "/who", client=(host, 1)) == (200, call(app, "/who")[1], [PUBLIC.name, PUBLIC.salt.hex()])


@pytest.mark.parametrize(
    "client",
    [("192.0.2.7", 1), ("10.0.0.1", 1), ("::ffff:192.0.2.7", 1), ("2001:db8::1", 1), ("localhost.evil", 1), None],
)
@pytest.mark.parametrize("path", ["/who", "/docs", "/openapi.json", "/nowhere", "/health/", "//health"])
def test_without_keys_nobody_else_is(app: FastAPI, client: Any, path: str) -> None:
    error_of(call(app, path, client=client), 403, "permission_denied")


def test_a_key_lets_in_from_anywhere(app: FastAPI, key: str) -> None:
    status, _, (name, salt) = call(app, "/who", client=(ELSEWHERE, 1), **bearer(key))
    assert (status, name) == (200, "alice")
    assert salt != PUBLIC.salt.hex()


@pytest.mark.parametrize("path", ["/who", "/docs", "/nowhere", "/health/", "/HEALTH"])
@pytest.mark.parametrize("headers", [{}, bearer("wrong"), bearer(""), {"headers": [(b"authorization", b"\xff\xfe")]}])
def test_with_keys_a_key_is_asked_for_even_here(app: FastAPI, key: str, path: str, headers: dict[str, Any]) -> None:
    answer = error_of(call(app, path, **headers), 401, "invalid_api_key")
    assert answer["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("mounted", [{}, {"path": "/llm/health", "root_path": "/llm"}])
def test_liveness_is_open_wherever_the_app_is_mounted(app: FastAPI, key: str, mounted: dict[str, str]) -> None:
    assert call(app, **{"path": "/health"} | mounted, client=(ELSEWHERE, 1))[::2] == (200, "ok")


def test_a_path_that_only_looks_mounted_is_guarded(app: FastAPI, key: str) -> None:
    error_of(call(app, "/llm/health"), 401, "invalid_api_key")


def test_the_frameworks_own_errors_have_the_same_form(app: FastAPI) -> None:
    error_of(call(app, "/nowhere"), 404, "not_found")
    assert error_of(call(app, "/who", method="DELETE"), 405, "method_not_allowed")["allow"] == "GET"


@pytest.mark.parametrize("path", ["/health", "/who", "/busy", "/nowhere", "/openapi.json"])
@pytest.mark.parametrize("client", [(HERE, 1), (ELSEWHERE, 1)])
def test_head_is_get_without_its_body(app: FastAPI, path: str, client: Any) -> None:
    assert call(app, path, client=client, method="HEAD")[:2] == call(app, path, client=client)[:2]


def test_an_overload_says_when_to_come_again(app: FastAPI) -> None:
    assert error_of(call(app, "/busy"), 429, "server_overloaded")["retry-after"] == "4"


def test_what_nobody_expected_says_nothing_of_its_cause(app: FastAPI) -> None:
    answer = call(app, "/broken")
    error_of(answer, 500, "internal_error")
    assert "secret" not in str(answer)


def open_socket(app: FastAPI, **more: Any) -> list[dict[str, Any]]:
    scope = {
        "type": "websocket", "asgi": {"version": "3.0"}, "scheme": "ws", "path": "/socket", "root_path": "",
        "query_string": b"", "headers": [], "client": (ELSEWHERE, 1), "server": (HERE, 8000), "subprotocols": [],
        **more,
    }  # fmt: skip
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
    return sent


def test_a_socket_is_guarded_too(app: FastAPI, key: str) -> None:
    assert [message["type"] for message in open_socket(app)] == ["websocket.close"]
    accepted = open_socket(app, **bearer(key))
    assert json.loads(accepted[1]["text"]) == "alice"
