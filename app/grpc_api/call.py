"""What every gRPC method does alike: who calls, and how it fails."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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

logger = logging.getLogger("ray.serve")


@asynccontextmanager
async def caller(context: Any) -> AsyncIterator[Principal]:
    """Whose call this is; whatever goes wrong within becomes the call's status.

    `context`: Serve's RayServegRPCContext. Serve answers with its code and details when a method raises.
    """
    try:
        metadata = dict(context.invocation_metadata())
        yield await authenticate(metadata.get("authorization"), _host(context.peer()))
    except ApiError as error:
        _fail(context, error)
        raise
    except Exception as error:
        logger.exception("a gRPC call failed")
        _fail(context, internal())
        raise internal() from error


def status_code(error: ApiError) -> grpc.StatusCode:
    """The gRPC code of an error that has an HTTP status."""
    return _CODES.get(HTTPStatus(error.status), grpc.StatusCode.UNKNOWN)


def _fail(context: Any, error: ApiError) -> None:
    context.set_code(status_code(error))
    context.set_details(str(error))


def _host(peer: str) -> str:
    """The client's address in gRPC's word for it, such as `ipv4:127.0.0.1:40000` or `ipv6:%5B::1%5D:40000`; a path for
    a Unix socket, which only this machine has."""
    kind, _, rest = unquote(peer).partition(":")
    if kind == "unix":
        return "127.0.0.1"
    return rest.rpartition(":")[0].strip("[]")
