"""How a call is told what is wrong, over gRPC, with the context that Serve has for it."""

from __future__ import annotations

import logging
import pickle
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from ray.serve._private.grpc_util import set_grpc_code_and_details
from ray.serve._private.proxy_request_response import ResponseStatus, gRPCStreamingType
from ray.serve.grpc_util import RayServegRPCContext

from app.grpc_api.call import Telling
from app.grpc_api.inference_pb2 import GenerateChunk, GenerateRequest, GenerateResponse
from app.openai_errors import ApiError, invalid_request, model_not_found, over_key_limit, unauthorized
from tests.app.grpc_api.grpc_server import client_of, within_limit


@asynccontextmanager
async def stub_of(error: Exception, contexts: list[RayServegRPCContext] | None = None) -> AsyncGenerator[Any]:
    """A client of a server whose methods meet `error`; a stream does after its first message. `contexts` gets those of
    calls of one message."""

    def tell(told: RayServegRPCContext, context: Any) -> None:
        pickle.loads(pickle.dumps(told))._set_on_grpc_context(context)  # it comes from the replica, with a message

    async def unary(_: Any, context: Any) -> bytes:
        told = RayServegRPCContext(context)
        if contexts is not None:
            contexts.append(told)
        async with Telling(told):
            raise error
        tell(told, context)
        set_grpc_code_and_details(context, ResponseStatus(code=grpc.StatusCode.OK))
        return bytes(GenerateResponse().SerializeToString())

    async def stream(_: Any, context: Any) -> AsyncGenerator[bytes]:
        told = RayServegRPCContext(context)
        async with Telling(told):
            yield GenerateChunk(id="first").SerializeToString()
            raise error
        tell(told, context)
        yield GenerateChunk().SerializeToString()
        set_grpc_code_and_details(context, ResponseStatus(code=grpc.StatusCode.OK))

    def handler(*, streaming_type: gRPCStreamingType, **_: Any) -> Any:
        return stream if streaming_type is gRPCStreamingType.UNARY_STREAM else unary

    async with client_of(handler) as stub:
        yield stub


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (unauthorized(), grpc.StatusCode.UNAUTHENTICATED),
        (model_not_found("a", "b"), grpc.StatusCode.NOT_FOUND),
        (over_key_limit("this key may have 1", retry_after_s=1.0), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (invalid_request("no " * 5000), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_a_refusal_is_told_and_not_raised(
    error: ApiError, code: grpc.StatusCode, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with stub_of(error) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(GenerateRequest())
            assert (caught.value.code(), caught.value.details()) == (code, str(error)[:4096])
            call = stub.GenerateStream(GenerateRequest())
            assert (await call.read()).id == "first"
            with pytest.raises(grpc.aio.AioRpcError):  # and no empty message before it
                await call.read()
            assert (await call.code(), await call.details()) == (code, str(error)[:4096])

    within_limit(check())
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_our_own_fault_is_raised_and_says_nothing_of_itself() -> None:
    async def check() -> None:
        contexts: list[RayServegRPCContext] = []
        async with stub_of(RuntimeError("secret"), contexts) as stub:
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Generate(GenerateRequest())
        (told,) = contexts
        assert told.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in told.details()

    within_limit(check())
