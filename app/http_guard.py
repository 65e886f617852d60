"""What stands before every route: who may come in, and the form of every error.

Keys are checked in one place for all routes, those of the framework included, so that a route added later is guarded
too. Without keys only this machine's own clients are served.
"""

from __future__ import annotations

import ipaddress
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from app.api_keys import PUBLIC, Principal
from app.key_file import KeyFile
from app.openai_errors import ApiError, forbidden, from_http_status, internal, unauthorized

OPEN_PATHS = frozenset({"/health"})
"""Liveness says nothing that needs a key."""
_POLICY_VIOLATION = 1008
"""RFC 6455, section 7.4.1."""


class _Access:
    """Who may come in to this process's app. Serve serves a frozen copy of the app object, made before a replica knows
    its settings, so this lives beside the app. `keys` None: nobody but this machine's own clients."""

    keys: KeyFile | None = None


_ACCESS = _Access()

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

logger = logging.getLogger("ray.serve")


def use_keys(keys: KeyFile | None) -> None:
    """The keys to check from now on, in this process; None: serve this machine's own clients only."""
    _ACCESS.keys = keys


class KeyGuard:
    """ASGI middleware: puts the principal in the request's state, or answers 401 or 403."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "lifespan" and _route_path(scope) not in OPEN_PATHS:
            try:
                header = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), None)
                authorization = None if header is None else header.decode("latin-1")
                client_host = (scope.get("client") or ("", 0))[0]
                scope.setdefault("state", {})["principal"] = await authenticate(authorization, client_host)
            except ApiError as error:
                if scope["type"] == "websocket":
                    await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": error.type})
                else:
                    await _send_error(error, send)
                return
        await self._app(scope, receive, send)


class HeadAsGet:
    """ASGI middleware: answers HEAD as it would GET, without the body (RFC 9110, section 9.3.2), on every route: load
    balancers and watchers of a service ask so."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: MutableMapping[str, Any]) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_without_body)


async def authenticate(authorization: str | None, client_host: str) -> Principal:
    """Whose request this is, by its `Authorization` header and its address; raises ApiError 401 or 403."""
    if _ACCESS.keys is None:
        if not _is_loopback(client_host):
            raise forbidden(
                "This server has no API keys and serves only its own machine. Set ingress.api_keys_file to serve "
                "others."
            )
        return PUBLIC
    principal = (await _ACCESS.keys.current()).authenticate(authorization)
    if principal is None:
        raise unauthorized()
    return principal


def install_error_handlers(app: FastAPI) -> None:
    """Every error leaves in OpenAI's form, the framework's own included."""

    @app.exception_handler(ApiError)
    async def _api_error(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), error.status, error.headers())

    @app.exception_handler(HTTPException)
    async def _http_error(_: Request, error: HTTPException) -> JSONResponse:
        wrapped = from_http_status(error.status_code, str(error.detail))
        return JSONResponse(wrapped.body(), wrapped.status, {**(error.headers or {}), **wrapped.headers()})

    @app.exception_handler(Exception)
    async def _unexpected(_: Request, error: Exception) -> JSONResponse:
        logger.error("a request failed", exc_info=error)
        wrapped = internal()
        return JSONResponse(wrapped.body(), wrapped.status)


def _route_path(scope: Scope) -> str:
    """The path within the app, wherever the app is mounted."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


async def _send_error(error: ApiError, send: Send) -> None:
    body = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers().items()]
    await send({"type": "http.response.start", "status": int(error.status), "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
