"""What every gRPC method does alike: who calls, and how it fails."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import grpc

from app.api_keys import Principal
from app.http_guard import authenticate
from app.openai_errors import ApiError, internal

_CODES = {
    HTTPStatus.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.UNAUTHORIZED: grpc.StatusCode.UNAUTHENTICATED,
    HTTPStatus.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    HTTPStatus.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    HTTPStatus.TOO_MANY_REQUESTS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    HTTPStatus.SERVICE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    HTTPStatus.INTERNAL_SERVER_ERROR: grpc.StatusCode.INTERNAL,
}
"""After google.rpc.Code, which says of each code which HTTP status it is."""
_MOST_DETAILS_CHARS = 4096
"""As Serve cuts what a method raises: the status travels in a trailer, whose size is limited."""

logger = logging.getLogger("ray.serve")


class Telling:
    """A block whose errors become the call's status.

    What a client is to be told ends the block and goes no further: the method then gives an empty message, with which
    Serve sends the status. Of a method that raises Serve would send it too, and write two tracebacks into its log; so
    only what is our own fault is raised.

    `context`: Serve's RayServegRPCContext, which travels with each message.
    """

    def __init__(self, context: Any) -> None:
        self._context = context

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, ApiError):
            _fail(self._context, error)
            return True
        if isinstance(error, Exception):
            logger.error("a gRPC call failed", exc_info=error)
            _fail(self._context, internal())
            raise internal() from error
        return False


async def caller(context: Any) -> Principal:
    """Whose call this is. Raises ApiError 401 or 403 when nobody's who may come in."""
    metadata = dict(context.invocation_metadata())
    return await authenticate(metadata.get("authorization"), _host(context.peer()))


def status_code(error: ApiError) -> grpc.StatusCode:
    """The gRPC code of an error that has an HTTP status."""
    return _CODES.get(HTTPStatus(error.status), grpc.StatusCode.UNKNOWN)


def _fail(context: Any, error: ApiError) -> None:
    context.set_code(status_code(error))
    context.set_details(str(error)[:_MOST_DETAILS_CHARS])


def _host(peer: str) -> str:
    """The client's address in gRPC's word for it, such as `ipv4:127.0.0.1:40000` or `ipv6:%5B::1%5D:40000`; a path for
    a Unix socket, which only this machine has."""
    kind, _, rest = unquote(peer).partition(":")
    if kind == "unix":
        return "127.0.0.1"
    return rest.rpartition(":")[0].strip("[]")
