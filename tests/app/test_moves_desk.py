"""What becomes of what people ask the controller. Its good answers are in test_ctl.py."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from ray.exceptions import RayActorError

from app.moves_desk import MoveOrder, MovesDesk
from app.openai_errors import ApiError
from app.request_parsing import parse_request

ORDER = {"instance": "a", "layers": [1, 2], "heads": None, "source": "a", "destination": "b"}


def refused(**changes: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        parse_request(json.dumps({**ORDER, **changes}).encode(), MoveOrder)
    return error.value


def test_an_order_is_read() -> None:
    order = parse_request(json.dumps({**ORDER, "heads": [0]}).encode(), MoveOrder)
    assert (order.layers, order.heads, order.destination) == ((1, 2), (0,), "b")
    without = {name: value for name, value in ORDER.items() if name != "heads"}
    assert parse_request(json.dumps(without).encode(), MoveOrder).heads is None


@pytest.mark.parametrize("value", [None, [], "1", [1.0], [True], [-1], [1 << 40], list(range(5000)), 3])
def test_layers_are_numbers(value: object) -> None:
    error = refused(layers=value)
    assert (error.status, error.param) == (400, "layers")
    assert "a list of 1 to 4096 numbers, none below 0" in error.message


@pytest.mark.parametrize(
    ("changes", "param"),
    [({"heads": []}, "heads"), ({"instance": ""}, "instance"), ({"to": "b"}, "to"), ({"source": 1}, "source")],
)
def test_the_rest_is_checked_too(changes: dict[str, Any], param: str) -> None:
    error = refused(**changes)
    assert (error.status, error.param) == (400, param)


class Gone:
    """A handle whose replica is gone."""

    def __getattr__(self, name: str) -> Gone:
        return self

    async def remote(self, *_: Any) -> None:
        raise RayActorError


@pytest.mark.parametrize("name", ["status", "plan", "home"])
def test_a_controller_that_is_gone_is_to_be_asked_again_later(name: str) -> None:
    with pytest.raises(ApiError) as error:
        asyncio.run(getattr(MovesDesk(Gone(), "balanced"), name)())
    assert (error.value.status, error.value.retry_after_s) == (503, 2.0)
    assert "the controller of moves does not answer" in error.value.message


@pytest.mark.parametrize("mode", ["static", "monolithic"])
def test_other_modes_have_no_controller(mode: str) -> None:
    with pytest.raises(ApiError) as error:
        asyncio.run(MovesDesk(None, mode).status())
    assert (error.value.status, error.value.code) == (404, "no_controller")
    assert f"mode '{mode}'" in error.value.message
