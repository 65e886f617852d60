"""The service in Serve's own gRPC server, over handlers that tell how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import pytest

from app.grpc_api.inference_pb2 import Choice, GenerateChunk, GenerateRequest
from tests.app.grpc_api.grpc_server import client_of, within_limit

MORE_THAN_A_WINDOW = GenerateChunk(choice=Choice(text="x" * 2**20)).SerializeToString()
"""So much that the server has to wait for the client to read before it can write more."""


@pytest.mark.parametrize("by_deadline", [False, True])
def test_a_call_that_ends_while_it_is_written_to_cancels_what_it_waits_for(by_deadline: bool) -> None:
    async def check() -> None:
        waits, cancelled = asyncio.Event(), asyncio.Event()

        async def handler(_: Any, context: Any) -> AsyncGenerator[bytes]:
            try:
                for _ in range(4):
                    yield MORE_THAN_A_WINDOW
                waits.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                context.peer()  # Serve logs it; a context whose call is gone would take the process along
                cancelled.set()
                raise

        async with client_of(lambda **_: handler) as stub:
            call = stub.GenerateStream(GenerateRequest(), timeout=2.0 if by_deadline else None)
            if not by_deadline:
                await waits.wait()  # nothing has been read
                call.cancel()
            await cancelled.wait()

    within_limit(check())


def test_a_stream_comes_in_order_and_ends_with_its_status() -> None:
    async def check() -> None:
        async def handler(_: Any, context: Any) -> AsyncGenerator[bytes]:
            for index in range(5):
                yield GenerateChunk(choice=Choice(index=index)).SerializeToString()
            context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
            context.set_details("too much")
            yield b""  # as a refusal's status comes from a replica

        async with client_of(lambda **_: handler) as stub:
            call = stub.GenerateStream(GenerateRequest())
            assert [(await call.read()).choice.index for _ in range(5)] == list(range(5))
            with pytest.raises(grpc.aio.AioRpcError):  # and no sixth one
                await call.read()
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await call.details() == "too much"

    within_limit(check())


def test_what_goes_wrong_in_the_proxy_fails_the_call() -> None:
    async def check() -> None:
        async def handler(_: Any, context: Any) -> AsyncGenerator[bytes]:
            yield GenerateChunk(id="a").SerializeToString()
            raise RuntimeError("broken")

        async with client_of(lambda **_: handler) as stub:
            call = stub.GenerateStream(GenerateRequest())
            assert await call.read() == GenerateChunk(id="a")
            assert await call.code() is grpc.StatusCode.UNKNOWN

    within_limit(check())
