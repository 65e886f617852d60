"""From totals to what was counted since the last look at them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kv.metrics.table import Series


class Growth:
    """Remembers the totals that it was shown. What is missing among them keeps its last one."""

    def __init__(self) -> None:
        self._last: dict[Series, float] = {}

    def since_last(self, totals: Mapping[Series, float]) -> dict[Series, float]:
        """By how much each total has grown; those that have not are left out.

        One that is below its last value has begun anew, with whatever counts it: all of it is new, as for Prometheus.
        """
        grown = {}
        for series, total in totals.items():
            last = self._last.get(series, 0.0)
            increment = total - last if total >= last else total
            if increment > 0:
                grown[series] = increment
        self._last.update(totals)
        return grown
