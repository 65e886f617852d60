"""Moves that are ordered of a running application's control deployment, as its controller does."""

from __future__ import annotations

from typing import Any

from ray import serve

from migrate.move_report import MoveReport
from migrate.moves import LayerMove
from migrate.placement_state import PlacementState
from tests.running_app import APP_NAME

_LIMIT_S = 120.0


def control() -> Any:
    return serve.get_deployment_handle("ControlServer", APP_NAME)


def placements() -> dict[str, PlacementState | None]:
    """By worker; None where it does not answer."""
    states: dict[str, PlacementState | None] = control().placements.remote().result(timeout_s=60)
    return states


def state_of(worker: str) -> PlacementState:
    state = placements()[worker]
    assert state is not None
    return state


def order(move: LayerMove) -> MoveReport:
    report: MoveReport = control().order_move.remote(move, move.instance).result(timeout_s=_LIMIT_S)
    return report
