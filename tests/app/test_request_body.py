from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from fastapi import Request

from app.openai_errors import ApiError
from app.request_body import MAX_BODY_BYTES, read_body


def read(chunks: Sequence[bytes]) -> tuple[bytes, int]:
    """(body, chunks that were read)"""
    left = list(chunks)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    body = asyncio.run(read_body(Request({"type": "http", "headers": []}, receive)))
    return body, len(chunks) - len(left)


def test_chunks_are_joined() -> None:
    assert read([b"ab", b"", b"c"]) == (b"abc", 3)


def test_body_of_the_limit_is_read() -> None:
    assert len(read([b"x" * (MAX_BODY_BYTES - 1), b"y"])[0]) == MAX_BODY_BYTES


def test_longer_body_is_refused_before_its_end() -> None:
    chunks = iter([b"x" * MAX_BODY_BYTES, b"y", b"never read"])
    taken = []

    async def receive() -> dict[str, Any]:
        taken.append(next(chunks))
        return {"type": "http.request", "body": taken[-1], "more_body": True}

    with pytest.raises(ApiError) as caught:
        asyncio.run(read_body(Request({"type": "http", "headers": []}, receive)))
    assert (caught.value.status, caught.value.code) == (413, "request_too_large")
    assert b"never read" not in taken
