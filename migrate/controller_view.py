"""What a controller knows, as JSON for people and their programs; and a move from such JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any, Final

from migrate.controller import Controller, Observation
from migrate.move_history import Entry, kind_of
from migrate.moves import HeadMove, LayerMove, Move
from migrate.placement import Placement
from migrate.planner import Plan
from migrate.prediction import Prediction
from migrate.utilisation import Utilisation, utilisation
from migrate.verdict import Verdict
from migrate.worker_figures import WorkerFigures

SHOWN_ENTRIES: Final = 50
"""Of the history: whoever waits for a move asks twice a second."""

Json = dict[str, Any]


def status_view(controller: Controller, seen: Observation, now_s: float) -> Json:
    """Where everything is, how loaded the workers are and what that was made from, what is under way and, newest first,
    what came of orders."""
    fleet, planner = seen.fleet, controller.settings.planner
    return {
        "workers": {
            name: {
                **_utilisation(utilisation(fleet, name, planner)),
                "busy": seen.busy.get(name),
                "figures": _figures(fleet.figures[name]),
            }
            for name in sorted(fleet.figures)
        },
        "silent": sorted(seen.silent),
        "times": asdict(fleet.model.times),
        "placements": [placement_view(fleet.placements[home]) for home in sorted(fleet.placements)],
        "modules_away": modules_away(fleet.placements.values()),
        "not_planned": seen.not_planned or None,
        "automatic": controller.settings.automatic,
        "bringing_home": controller.is_bringing_home,
        "under_way": [entry_view(entry, now_s) for entry in controller.history.under_way],
        "history": [entry_view(entry, now_s) for entry in controller.history.ended[: -SHOWN_ENTRIES - 1 : -1]],
        "counts": [
            {"kind": kind, "outcome": outcome, "moves": count}
            for (kind, outcome), count in sorted(controller.history.counts.items())
        ],
        "settings": controller.settings.flat(),
    }


def plan_view(plan: Plan) -> Json:
    """A plan with all that was considered."""
    return {
        "moves": [move_view(move) for move in plan.moves],
        "utilisation": {name: _utilisation(load) for name, load in plan.utilisation.items()},
        "mean": plan.mean,
        "verdicts": [verdict_view(verdict) for verdict in plan.verdicts],
    }


def verdict_view(verdict: Verdict) -> Json:
    """What became of one candidate."""
    return {
        "move": move_view(verdict.move),
        "accepted": verdict.accepted,
        "reason": verdict.reason,
        "detail": verdict.detail,
        "prediction": None if verdict.prediction is None else _prediction(verdict.prediction),
    }


def entry_view(entry: Entry, now_s: float) -> Json:
    """One order, with its age instead of times of a clock that nobody else has."""
    order = entry.order
    return {
        "order_id": order.order_id,
        "move": move_view(order.move),
        "cause": order.cause,
        "why": order.why,
        "begun_ago_s": now_s - order.begun_s,
        "ended_ago_s": None if entry.ended_s is None else now_s - entry.ended_s,
        "outcome": entry.outcome,
        "problem": entry.problem or None,
        "predicted": _prediction(order.prediction),
        "happened": None if entry.happened is None else asdict(entry.happened),
    }


def move_view(move: Move) -> Json:
    """What `move_from` takes, and the same in words."""
    return {
        "instance": move.instance,
        "layers": list(move.layers),
        "heads": list(move.heads) if isinstance(move, HeadMove) else None,
        "source": move.source,
        "destination": move.destination,
        "kind": kind_of(move),
        "text": str(move),
    }


def move_from(instance: str, layers: Sequence[int], heads: Sequence[int] | None, source: str, destination: str) -> Move:
    """A move of layers, or with `heads` of these heads in each of the layers.

    Raises:
        ValueError: layers that are no contiguous run where whole layers are to move, or what the moves themselves
            refuse.
    """
    if heads is not None:
        return HeadMove(instance, tuple(layers), tuple(heads), source, destination)
    if not layers or list(layers) != list(range(layers[0], layers[0] + len(layers))):
        raise ValueError(f"layers {list(layers)} were to move; give a contiguous ascending run, at least one")
    return LayerMove(instance, layers[0], len(layers), source, destination)


def placement_view(placement: Placement) -> Json:
    """Who has which layers of an instance, and which heads lie apart from their layer."""
    apart = []
    alike = groupby(
        range(placement.num_layers), key=lambda layer: (placement.layer_workers[layer], placement.lane_workers[layer])
    )
    for (owner, _), run in alike:
        layers = list(run)
        for worker in sorted(set(placement.lane_workers[layers[0]]) - {owner}):
            heads = list(placement.local_heads(layers[0], worker))
            apart.append({"worker": worker, "layers": layers, "heads": heads})
    return {
        "instance": placement.home,
        "version": placement.version,
        "layers": {worker: list(placement.layers_on(worker)) for worker in sorted(set(placement.layer_workers))},
        "heads": apart,
    }


def modules_away(placements: Iterable[Placement]) -> dict[str, int]:
    """How many layers, and lanes that lie apart from their layer, are not where they belong."""
    layers = lanes = 0
    for placement in placements:
        layers += placement.num_layers - len(placement.layers_on(placement.home))
        for owner, workers in zip(placement.layer_workers, placement.lane_workers, strict=True):
            lanes += sum(worker != owner for worker in workers)
    return {"layers": layers, "heads": lanes}


def _prediction(prediction: Prediction) -> Json:
    return {
        "before": {name: _utilisation(load) for name, load in prediction.before.items()},
        "after": {name: _utilisation(load) for name, load in prediction.after.items()},
        "itl_before_s": dict(prediction.itl_before_s),
        "itl_after_s": dict(prediction.itl_after_s),
        "weight_bytes": prediction.weight_bytes,
        "kv_bytes": prediction.kv_bytes,
        "transfer_s": prediction.transfer_s,
        "waiting_s": prediction.waiting_s,
        "turns_s": prediction.turns_s,
        "needed_bytes": prediction.needed_bytes,
        "free_bytes": prediction.free_bytes,
        "grant_blocks": prediction.grant_blocks,
    }


def _figures(figures: WorkerFigures) -> Json:
    return {name: value for name, value in asdict(figures).items() if name != "worker"}


def _utilisation(load: Utilisation) -> Mapping[str, float]:
    return asdict(load)
