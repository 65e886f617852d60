"""Workers that carry out orders on simulated time, well or badly. They alone know where things lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from migrate.controller import Observation
from migrate.cost_model import CostModel
from migrate.fleet import Fleet
from migrate.move_history import Happened, Order
from migrate.moves import Move
from migrate.placement import Placement
from migrate.worker_figures import WorkerFigures
from tests.migrate.fleets import at_home

Fate = Literal["done", "fails", "hangs", "stubborn", "late"]
"""What becomes of an order. `hangs` ends when it is told to stop; `stubborn` never does; `late` is done long after it
was given up, and cannot be stopped either."""


@dataclass
class Begun:
    order: Order
    ends_s: float
    fate: Fate


@dataclass
class SimulatedFleet:
    """`traffic(now_s)`: figures of the workers that are alive, by id. A worker that is gone takes along what is at home
    there; its moves end, and its guests are at home again."""

    cost: CostModel
    traffic: Callable[[float], Mapping[str, WorkerFigures]]
    fate: Callable[[Order], Fate] = lambda _: "done"
    late_s: float = 100.0
    placements: dict[str, Placement] = field(default_factory=dict)
    begun: list[Begun] = field(default_factory=list)

    def observe(self, now_s: float) -> Observation:
        """What is told at this moment."""
        figures = self.traffic(now_s)
        for gone in self.placements.keys() - figures.keys():
            del self.placements[gone]
        for name in figures:
            placement = self.placements.setdefault(name, at_home(name, self.cost))
            if not placement.workers() <= figures.keys():
                self.placements[name] = Placement(
                    name, at_home(name, self.cost).layer_workers, at_home(name, self.cost).lane_workers,
                    placement.version + 1,
                )  # fmt: skip
        return Observation(Fleet.of(figures.values(), self.placements.values(), self.cost), now_s)

    def begin(self, order: Order, now_s: float) -> str | None:
        """Why a worker refuses it; None: it is under way. As real workers do: one move at a time, and only what fits
        where things lie."""
        busy = {end for begun in self.begun for end in (begun.order.move.source, begun.order.move.destination)}
        if busy & {order.move.source, order.move.destination}:
            return "a worker is in another move"
        try:
            order.move.after(self.placements[order.move.instance])
        except (KeyError, ValueError) as error:
            return f"refused: {error}"
        fate = self.fate(order)
        seconds = self.late_s if fate == "late" else order.prediction.transfer_s
        self.begun.append(Begun(order, now_s + seconds, fate))
        return None

    def stop(self, order: Order) -> None:
        """As somebody who gave the order up."""
        for begun in self.begun:
            if begun.order is order and begun.fate == "hangs":
                begun.fate, begun.ends_s = "fails", 0.0

    def ended(self, now_s: float) -> list[tuple[Order, Happened | str]]:
        """Orders that end up to now, which changes where things lie."""
        alive, results = self.traffic(now_s).keys(), list[tuple[Order, Happened | str]]()
        for begun in list(self.begun):
            move: Move = begun.order.move
            if not {move.instance, move.source, move.destination} <= alive:
                results.append((begun.order, "a worker is gone"))
            elif begun.ends_s > now_s or begun.fate in ("hangs", "stubborn"):
                continue
            elif begun.fate == "fails":
                results.append((begun.order, "the link died"))
            else:
                self.placements[move.instance] = move.after(self.placements[move.instance])
                predicted = begun.order.prediction
                happened = Happened(predicted.weight_bytes, predicted.kv_bytes, predicted.transfer_s, 0.1)
                results.append((begun.order, happened))
            self.begun.remove(begun)
        return results
