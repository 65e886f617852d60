"""How fast moves copy, and what a move takes beside copying, as moves that were made have shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from migrate.cost_model import LinkSpeed
from migrate.load import RateEstimate
from migrate.move_history import Happened

FIRST_GUESS: Final = LinkSpeed(bytes_per_s=1e9, latency_s=0.0005)
"""Before the first move: about 10 Gbit/s. Too much begins moves that take longer than they may; too little would begin
none, and none would ever be measured."""
FIRST_LOADED_BYTES_PER_S: Final = 5e7
"""The same between workers that are busy all the time, where a page waits for a step of both. Two small CPU workers
copied 2e7 to 1e8."""
_HALF_LIFE_BYTES: Final = float(64 << 20)
_LEAST_BYTES: Final = 1 << 20
"""A move of less is all latency, and says nothing of the bandwidth."""
_TELLING_BYTES: Final = 16 << 20
"""From so much on the first move of a pair, or under load, stands in place of the guess. Less is weighed against it: a
move of two mebibytes that waited a quarter of a second makes no link of 10 MB/s."""
_SWITCH_WEIGHT: Final = 0.25
"""Of the newest move's switch."""
_FIRST_SWITCH_S: Final = 1.0
"""As much as the first one counts, at most; later ones as four times what is known."""
_RESTED: Final = 0.25
"""Share of its time up to which a worker's own work hardly delays a move."""


class LinkEstimates:
    """By pair of workers, and by how busy these were. Bandwidth is that of whole moves, the switch included:
    predictions err on the long side, and contain what reading and writing pages takes. Latency is not measured (ours).

    A byte takes `1 / bandwidth` seconds between workers at rest, which differs by link, and `busy * loaded_byte_s` more
    where the busier one works for a share `busy` of its time, which is the workers' doing and hence one figure.
    """

    def __init__(self) -> None:
        self._rates: dict[frozenset[str], RateEstimate] = {}
        self._loaded: RateEstimate | None = None
        self.switch_s = 0.0
        """Time of a move that is not copying: for so long the instance began no step, waiting for one left out."""

    @property
    def speeds(self) -> Mapping[frozenset[str], LinkSpeed]:
        """Of the pairs that were measured."""
        return {pair: LinkSpeed(rate.per_s, FIRST_GUESS.latency_s) for pair, rate in self._rates.items()}

    @property
    def usual(self) -> LinkSpeed:
        """Of a pair that was not measured: as long a byte as it takes between others, on average."""
        if not self._rates:
            return FIRST_GUESS
        seconds_per_byte = [1 / rate.per_s for rate in self._rates.values()]
        return LinkSpeed(len(seconds_per_byte) / sum(seconds_per_byte), FIRST_GUESS.latency_s)

    @property
    def loaded_byte_s(self) -> float:
        """Seconds that a byte takes longer where one of the two is busy all the time."""
        return 1 / (FIRST_LOADED_BYTES_PER_S if self._loaded is None else self._loaded.per_s)

    def moved(self, one: str, other: str, took: Happened, busy: float, turns_s: float = 0.0) -> None:
        """Takes in a move that was made between the two, the busier of which had work for a share `busy` of its
        time. `turns_s`: for so long it is taken to have waited for steps, however much it copied."""
        # One long wait for one step must not make every later move look longer than it may be.
        switch_s = min(max(0.0, took.held_s - turns_s), max(_FIRST_SWITCH_S, 4 * self.switch_s))
        self.switch_s += (switch_s - self.switch_s) * (_SWITCH_WEIGHT if self.switch_s else 1.0)
        num_bytes = took.weight_bytes + took.kv_bytes
        if num_bytes < _LEAST_BYTES or took.duration_s <= 0:
            return
        # Steps may have been shorter than was thought when it began.
        copied_s = max(took.duration_s - turns_s, took.duration_s / 100)
        pair = frozenset((one, other))
        rested_s = num_bytes / self.speeds.get(pair, self.usual).bytes_per_s
        if busy > _RESTED:
            longer_s = max(copied_s - rested_s, took.duration_s / 100)
            self._loaded = _weighed(self._loaded, FIRST_LOADED_BYTES_PER_S, int(num_bytes * min(busy, 1.0)), longer_s)
        # A link is no faster under load than at rest: a move that was quicker shows that it was taken for too slow.
        if busy <= _RESTED or copied_s < rested_s:
            self._rates[pair] = _weighed(self._rates.get(pair), self.usual.bytes_per_s, num_bytes, copied_s)

    def forget(self, alive: frozenset[str]) -> None:
        """Drops pairs with a worker that is gone."""
        for pair in [pair for pair in self._rates if not pair <= alive]:
            del self._rates[pair]


def _weighed(rate: RateEstimate | None, guess_per_s: float, num_bytes: int, seconds: float) -> RateEstimate:
    """What is known with one more move: a first one that tells enough, or else weighed against what was known or
    guessed."""
    if rate is None and num_bytes >= _TELLING_BYTES:
        return RateEstimate(num_bytes / seconds, _HALF_LIFE_BYTES)
    rate = rate or RateEstimate(guess_per_s, _HALF_LIFE_BYTES)
    rate.update(num_bytes, seconds)
    return rate
