"""Serve's own gRPC server with our service, over handlers of a test's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc
from ray.serve._private.grpc_util import gRPCGenericServer

from app.grpc_api.inference_pb2_grpc import InferenceServicer, InferenceStub
from app.grpc_api.servicer import add_to_server

LIMIT_S = 20.0


@asynccontextmanager
async def client_of(handler_of: Callable[..., Any]) -> AsyncGenerator[Any]:
    """A client of a server whose methods are answered by what `handler_of` gives for them, as Serve asks for it."""
    server = gRPCGenericServer(handler_of)
    add_to_server(InferenceServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield InferenceStub(channel)
    finally:
        await server.stop(None)


def within_limit(work: Coroutine[Any, Any, None]) -> None:
    """Runs a test's body."""
    asyncio.run(asyncio.wait_for(work, LIMIT_S))
