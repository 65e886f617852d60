"""From a controller's books to readings of the metrics."""

from __future__ import annotations

from kv.metrics import table
from kv.metrics.table import Readings
from migrate.controller import Controller, Observation
from migrate.controller_view import modules_away
from migrate.utilisation import utilisation


def controller_readings(controller: Controller, seen: Observation | None) -> Readings:
    """`seen`: None as long as nothing was."""
    history = controller.history
    readings: Readings = {(table.MOVES, key): count for key, count in history.counts.items()}
    readings |= {(table.MOVE_BYTES, key): count for key, count in history.moved_bytes.items()}
    readings[table.MOVE_HELD, ()] = history.held_s
    readings[table.MOVES_UNDER_WAY, ()] = len(history.under_way)
    if seen is not None:
        away = modules_away(seen.fleet.placements.values())
        readings |= {(table.MODULES_AWAY, (kind,)): count for kind, count in away.items()}
        # Not by worker: a gauge of one that has left would stay as it was.
        loads = [utilisation(seen.fleet, name, controller.settings.planner).weighted for name in seen.fleet.figures]
        if loads:
            of = {"highest": max(loads), "mean": sum(loads) / len(loads), "lowest": min(loads)}
            readings |= {(table.WORKER_LOADS, (which,)): load for which, load in of.items()}
    return readings
