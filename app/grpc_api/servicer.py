"""Adds the service to the gRPC server of Serve's proxy: what `grpc_servicer_functions` of a configuration names.

Serve's own way loses the end of some streams. When a call is cancelled or its deadline passes, the task that serves it
in the proxy is cancelled, and Serve tells the replica where that task was waiting for the replica's next message. Where
it was writing one to the client instead, the stream's generator is just dropped, and the replica makes the answer to
its end (Ray 2.60: `ProxyResponseGenerator` cancels within `__anext__` only). So here a task of its own reads each
stream. It waits for nothing but the replica, and is cancelled with the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from ray.serve._private.proxy_request_response import gRPCStreamingType

from app.grpc_api.inference_pb2_grpc import add_InferenceServicer_to_server


def add_to_server(servicer: Any, server: Any) -> None:
    """`server` is Serve's gRPCGenericServer, which puts its own handlers in the place of the `servicer`'s methods."""
    serves_handler = server.service_handler_factory

    def handler(*, service_method: str, streaming_type: gRPCStreamingType) -> Any:
        plain = serves_handler(service_method=service_method, streaming_type=streaming_type)
        return read_aside(plain) if streaming_type is gRPCStreamingType.UNARY_STREAM else plain

    server.service_handler_factory = handler
    try:
        add_InferenceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]  # generated
    finally:
        server.service_handler_factory = serves_handler


def read_aside(
    messages_of: Callable[[Any, Any], AsyncIterator[bytes]],
) -> Callable[[Any, Any], Coroutine[Any, Any, None]]:
    """A handler for grpc.aio that writes what the generator `messages_of(request, context)` yields. When the call ends
    early, the generator is cancelled at what it waits for, and has ended before the call's context goes.

    An empty message is not written: it has only brought a refusal's status along (`app.grpc_api.call`). What the client
    does not read in time is kept here; otherwise it would be kept as objects of Ray's, as many.
    """

    async def stream(request: Any, context: Any) -> None:
        messages: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def read() -> None:
            try:
                async for message in messages_of(request, context):
                    if message:
                        messages.put_nowait(message)
            finally:
                messages.put_nowait(None)

        reader = asyncio.create_task(read())
        try:
            while (message := await messages.get()) is not None:
                await context.write(message)
        finally:
            reader.cancel()
            await asyncio.wait({reader})
        reader.result()

    return stream
