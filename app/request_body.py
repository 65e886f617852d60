"""A request's body, up to a limit: what is longer is refused before it is read to its end, let alone tokenized."""

from __future__ import annotations

from fastapi import Request

from app.openai_errors import request_too_large

MAX_BODY_BYTES = 4 * 1024 * 1024
"""Far above any prompt that fits a context, and seconds of tokenizing at most."""


async def read_body(request: Request) -> bytes:
    """Raises ApiError 413 when it is longer than `MAX_BODY_BYTES`."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise request_too_large(MAX_BODY_BYTES)
        chunks.append(chunk)
    return b"".join(chunks)
