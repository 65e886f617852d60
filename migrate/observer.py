"""From what workers say, period by period, to what a controller plans from."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from migrate.controller import Observation
from migrate.cost_model import CostModel, MeasuredTimes
from migrate.fleet import Fleet
from migrate.link_estimates import LinkEstimates
from migrate.placement import Placement
from migrate.step_times import StepTimes
from migrate.worker_figures import WorkerFigures
from migrate.worker_reading import WorkerReading, figures_between, figures_of

_HALF_LIFE_STEPS: Final = 2000.0
"""Steps, of all workers together, after which older ones count half: contexts grow and clocks throttle."""


class Observer:
    """Remembers each worker's last readings, and how long steps have taken."""

    def __init__(self) -> None:
        self.links = LinkEstimates()
        self._readings: dict[str, deque[WorkerReading]] = {}
        """By worker: the newest that is as old as the window, or older, and those after it."""
        self._placements: dict[str, Placement] = {}
        """By worker, what it said last."""
        self._silent: frozenset[str] = frozenset()
        """At the last look."""
        self._times = StepTimes()

    def look(
        self,
        readings: Iterable[WorkerReading],
        placements: Mapping[str, Placement | None],
        asked_s: float,
        window_s: float,
    ) -> Observation | str:
        """What is seen now; a string says why nothing is. To be called once a period.

        A worker of which only one of the two is told is silent: it is taken to be as it was when it told both, so that
        nobody is sent more to those who have layers of it. One that never did is left out.

        Args:
            readings: of those who answered.
            placements: by worker that is alive; None where it has not said. What is known of others is forgotten.
            asked_s: on the controller's clock, before the first worker was asked.
            window_s: traffic is that of the last so many seconds, and nothing is planned before they have passed: the
                first requests of a busy hour look like an imbalance, and so does a single long prompt.
        """
        told = {name: placement for name, placement in placements.items() if placement is not None}
        known = {reading.worker: reading for reading in readings if reading.worker in told}
        if not known:
            return "no worker has told yet what it does and where its layers are"
        self._take_in(known, window_s)
        self._silent = frozenset(placements.keys() - known.keys())
        self._readings = {name: kept for name, kept in self._readings.items() if name in placements}
        by_home = {name: placement for name, placement in (self._placements | told).items() if name in placements}
        self._placements = by_home
        sizes = next(iter(known.values())).sizes
        full_batch = max(reading.full_batch for reading in known.values())
        measured = self._times.measured(sizes.num_layers, full_batch)
        cost = CostModel(
            sizes,
            measured or MeasuredTimes(0.0, 0.0, 0.0, full_batch),
            self.links.usual,
            self.links.speeds,
            self.links.loaded_byte_s,
            self.links.switch_s,
            _longest([reading.hosted_slice_s for reading in known.values()]),
        )
        self.links.forget(frozenset(placements))
        newcomers = sorted(name for name in known if self._span_s(name) < window_s)
        figures = [self._figures(name) for name in sorted(self._readings)]
        not_planned = ""
        if newcomers:
            not_planned = (
                f"nothing is known yet of {window_s:g} s of traffic of {', '.join(newcomers)}; wait until they have "
                "passed"
            )
        elif measured is None or self._is_unmeasured(figures):
            not_planned = "too few steps were run to know what they cost; wait for traffic"
        fleet = Fleet.of(figures, [by_home[item.worker] for item in figures], cost)
        return Observation(fleet, asked_s, not_planned, silent=self._silent)

    def _is_unmeasured(self, figures: Sequence[WorkerFigures]) -> bool:
        """Whether there is work of a kind that has not been measured, and would seem to cost nothing beside the
        other: a worker's first steps are not measured, and some have run theirs long before others."""
        has_prompts = any(item.prefilled_tokens_per_s or item.pending_prefill_tokens for item in figures)
        has_decodes = any(item.running or item.pending_decode_tokens for item in figures)
        return (has_prompts and not self._times.knows_prompts) or (has_decodes and not self._times.knows_decodes)

    def _figures(self, name: str) -> WorkerFigures:
        kept = self._readings[name]
        return figures_of(kept[-1]) if len(kept) == 1 else figures_between(kept[0], kept[-1])

    def _span_s(self, name: str) -> float:
        kept = self._readings[name]
        return kept[-1].taken_s - kept[0].taken_s

    def _take_in(self, known: dict[str, WorkerReading], window_s: float) -> None:
        """Adds what steps took since the last look; all steps of a worker that is new, or was started again, count. One
        that was silent for longer than the window is watched anew: what it did meanwhile is no rate of now."""
        fresh = StepTimes()
        for name, reading in known.items():
            kept = self._readings.setdefault(name, deque())
            if kept and kept[-1].epoch != reading.epoch:
                kept.clear()
            fresh = fresh.plus(reading.step_times)
            if kept:
                fresh = fresh.plus(kept[-1].step_times, -1.0)
                passed_s = reading.taken_s - kept[-1].taken_s
                if passed_s <= 0 or (name in self._silent and passed_s > window_s):
                    kept.clear()
            kept.append(reading)
            while len(kept) > 2 and reading.taken_s - kept[1].taken_s >= window_s:
                kept.popleft()
        remains = 0.5 ** (max(0.0, fresh.layers.count) / _HALF_LIFE_STEPS)
        self._times = self._times.scaled(remains).plus(fresh)


def _longest(slices_s: Sequence[float | None]) -> float | None:
    """None where one of them is not bounded."""
    bounded = [slice_s for slice_s in slices_s if slice_s is not None]
    return max(bounded) if len(bounded) == len(slices_s) else None
