"""From what workers say, period by period, to what a controller plans from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from migrate.controller import Observation
from migrate.cost_model import CostModel, MeasuredTimes
from migrate.fleet import Fleet
from migrate.link_estimates import LinkEstimates
from migrate.placement import Placement
from migrate.step_times import StepTimes
from migrate.worker_reading import WorkerReading, figures_between, figures_of

_HALF_LIFE_STEPS: Final = 2000.0
"""Steps, of all workers together, after which older ones count half: contexts grow and clocks throttle."""


class Observer:
    """Remembers each worker's last reading, and how long steps have taken."""

    def __init__(self) -> None:
        self.links = LinkEstimates()
        self._last: dict[str, WorkerReading] = {}
        self._times = StepTimes()

    def look(
        self, readings: Iterable[WorkerReading], placements: Iterable[Placement], asked_s: float
    ) -> Observation | str:
        """What is seen now; a string says why nothing is. To be called once a period, with those who answered.

        A worker of which only one of the two is known is left out, and so is, for others, what lies there.

        Args:
            asked_s: on the controller's clock, before the first worker was asked.
        """
        by_home = {placement.home: placement for placement in placements}
        known = {reading.worker: reading for reading in readings if reading.worker in by_home}
        if not known:
            return "no worker has told yet what it does and where its layers are"
        newcomers = self._take_in(known)
        sizes = next(iter(known.values())).sizes
        full_batch = max(reading.full_batch for reading in known.values())
        figures = [
            figures_of(reading) if name in newcomers else figures_between(self._last[name], reading)
            for name, reading in known.items()
        ]
        measured = self._times.measured(sizes.num_layers, full_batch)
        cost = CostModel(
            sizes,
            measured or MeasuredTimes(0.0, 0.0, 0.0, full_batch),
            self.links.usual,
            self.links.speeds,
            self.links.switch_s,
        )
        self._last = {name: reading for name, reading in {**self._last, **known}.items() if name in by_home}
        self.links.forget(frozenset(by_home))
        not_planned = ""
        if newcomers:
            not_planned = f"nothing is known yet of the traffic of {', '.join(sorted(newcomers))}; wait for a period"
        elif measured is None:
            not_planned = "too few steps were run to know what they cost; wait for traffic"
        fleet = Fleet.of(figures, [by_home[name] for name in known], cost)
        return Observation(fleet, asked_s, not_planned)

    def _take_in(self, known: dict[str, WorkerReading]) -> set[str]:
        """Adds what steps took since the last look; returns the workers that are new, whose steps all count."""
        newcomers = set[str]()
        fresh = StepTimes()
        for name, reading in known.items():
            last = self._last.get(name)
            if last is None or not reading.taken_s > last.taken_s:
                newcomers.add(name)
            fresh = fresh.plus(reading.step_times)
            if last is not None:
                fresh = fresh.plus(last.step_times, -1.0)
        kept = 0.5 ** (max(0.0, fresh.layers.count) / _HALF_LIFE_STEPS)
        self._times = self._times.scaled(kept).plus(fresh)
        return newcomers
