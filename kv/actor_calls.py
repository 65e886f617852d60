"""Calling the store's actors: what a handle is, and how long the directory may take."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeAlias

Actor: TypeAlias = Any
"""An actor's handle. Ray's own type for it knows no remote methods."""

_DIRECTORY_TIMEOUT_S = 5.0


async def ask(answer: Awaitable[Any]) -> Any:
    """What the directory answers. Raises TimeoutError when it does not in time."""
    async with asyncio.timeout(_DIRECTORY_TIMEOUT_S):
        return await answer
