"""A gRPC client of the app under test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from app.grpc_api.inference_pb2_grpc import InferenceStub

LIMIT_S = 120.0


@contextmanager
def grpc_client(target: str) -> Iterator[Any]:
    """A stub of the service."""
    with grpc.insecure_channel(target) as channel:
        yield InferenceStub(channel)


def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """The status and the message of a call that must fail. A stream is read to its end."""
    try:
        answer = call()
        if hasattr(answer, "__iter__"):
            list(answer)
    except grpc.RpcError as error:
        return error.code(), error.details()
    raise AssertionError("the call was answered")
