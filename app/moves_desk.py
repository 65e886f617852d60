"""The routes of moves, without HTTP: what people may ask the controller, and what becomes of its answers."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from app.openai_errors import INVALID_REQUEST, NOT_FOUND, ApiError, invalid_request, unavailable
from app.request_parsing import must_be

_ANSWER_TIMEOUT_S = 20.0
"""The controller asks the workers first, each of which may be in the middle of a long step."""
_MOST_NUMBERS = 4096


def _numbers(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    wrong = not isinstance(value, list) or not 0 < len(value) <= _MOST_NUMBERS
    if wrong or any(type(item) is not int or not 0 <= item < 1 << 31 for item in value):
        raise must_be(f"a list of 1 to {_MOST_NUMBERS} numbers, none below 0")
    return tuple(value)


def _some_numbers(value: Any) -> tuple[int, ...]:
    numbers = _numbers(value)
    if numbers is None:
        raise must_be(f"a list of 1 to {_MOST_NUMBERS} numbers, none below 0")
    return numbers


class MoveOrder(BaseModel):
    """A move that a person wants."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    instance: str = Field(min_length=1, description="the id of the worker that is the instance's home")
    layers: Annotated[tuple[int, ...], PlainValidator(_some_numbers, json_schema_input_type=list[int])] = Field(
        description="a list of the layers to move, or whose heads are to move"
    )
    heads: Annotated[tuple[int, ...] | None, PlainValidator(_numbers, json_schema_input_type=list[int] | None)] = Field(
        None, description="a list of KV heads, or null for whole layers"
    )
    source: str = Field(min_length=1, description="the id of the worker that has them")
    destination: str = Field(min_length=1, description="the id of the worker that is to have them")


class MovesDesk:
    """`controller`: Serve handle of the controller's deployment; None where nothing moves."""

    def __init__(self, controller: Any, mode: str) -> None:
        self._controller = controller
        self._mode = mode

    async def status(self) -> dict[str, Any]:
        """Who has what, how loaded everybody is, and what has moved. Raises ApiError, as all of these."""
        return await self._ask("status")

    async def plan(self) -> dict[str, Any]:
        """What would move now, with a verdict on every candidate; nothing is begun."""
        return await self._ask("plan")

    async def order(self, order: MoveOrder) -> dict[str, Any]:
        """Begins a move, and does not wait for its end."""
        return await self._ask("order", order.instance, order.layers, order.heads, order.source, order.destination)

    async def home(self) -> dict[str, Any]:
        """Begins to send everything home."""
        return await self._ask("home")

    async def _ask(self, method: str, *arguments: Any) -> dict[str, Any]:
        if self._controller is None:
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"Nothing moves in mode '{self._mode}'; the mode in which layers move is 'balanced'.",
                NOT_FOUND,
                None,
                "no_controller",
            )
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                answer: dict[str, Any] = await getattr(self._controller, method).remote(*arguments)
        except (RayError, RayServeException, TimeoutError) as error:
            raise unavailable("the controller of moves does not answer", retry_after_s=2.0) from error
        if "unavailable" in answer:
            raise unavailable(answer["unavailable"], retry_after_s=2.0)
        if "invalid" in answer:
            raise invalid_request(f"This is no move: {answer['invalid']}.")
        if "refused" in answer:
            verdict = answer["refused"]
            message = f"The move of {verdict['move']['text']} is refused, {verdict['reason']}: {verdict['detail']}."
            raise ApiError(HTTPStatus.CONFLICT, message, INVALID_REQUEST, None, "move_refused")
        return answer
