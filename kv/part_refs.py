"""Reading a part through its object reference."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ray import ObjectRef


async def part_buffer(ref: ObjectRef[Any], deadline_s: float) -> Any:
    """The value of a part's object, without a copy, and not yet verified: give it to `decode_part`.

    Args:
        deadline_s: when to stop waiting, on `time.monotonic`.

    Raises:
        TimeoutError, ray.exceptions.RayError: it did not come in time, or never will.
    """
    # Not wait_for: until Python 3.12 that can swallow the cancellation of whoever waits.
    async with asyncio.timeout(deadline_s - time.monotonic()):
        value = await ref
    # Ray spreads a returned list over its references only when there are several of them.
    return value[0] if isinstance(value, list) and len(value) == 1 else value
