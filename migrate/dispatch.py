"""Which prefill worker, and which decode worker, a request goes to.

Policies are small deterministic classes over plain data: the same objects choose in a live ingress and in a simulator.
Choosing is only half of a dispatch. Reports are as old as the last token, so whoever chooses reserves in the same
breath (`migrate.reservations`); without that, a burst that arrives between two reports goes to one worker.
"""

from __future__ import annotations

import inspect
import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from migrate.view import DispatchRequest, NoWorkerError, WorkerView, large_enough

__all__ = [
    "POLICIES",
    "DispatchPolicy",
    "DispatchRequest",
    "LoadAware",
    "NoWorkerError",
    "PowerOfTwo",
    "PrefixAware",
    "RoundRobin",
    "WorkerView",
    "choose_decode",
    "make_policy",
]


class Rotation:
    """Takes turns among ids: the least id above the last one taken, or the least of all.

    Each id that stays is taken once between two turns of another, whatever joins or leaves. `seed` sets where the first
    turn falls, so that several ingresses that start together do not all start with the same worker.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._last: str | None = None

    def take(self, sorted_ids: Sequence[str]) -> str:
        """Return one of `sorted_ids` (ascending, not empty) and remember it."""
        start = self._seed if self._last is None else bisect_right(sorted_ids, self._last)
        self._last = sorted_ids[start % len(sorted_ids)]
        return self._last


TIE_TOLERANCE: Final = 0.05
"""Estimated ends within this share of the earliest count as equal."""


class DispatchPolicy(ABC):
    """Chooses the prefill (or monolithic) worker of a request.

    Every policy sees the same candidates: a decode worker is none; a worker too small for the request is none; a worker
    without room now is one only when all of them are full. A worker that is not in the list is never returned, whatever
    a policy remembers of it. Same seed, same calls: same choices, in whatever order the workers are listed.
    """

    def choose(self, request: DispatchRequest, workers: Sequence[WorkerView]) -> str:
        """Return the worker id for `request`. Changes nothing but the policy's own memory: the caller reserves.

        Raises:
            NoWorkerError: no prefill worker is listed, or none is large enough.
        """
        listed = [view for view in workers if view.load.role != "decode"]
        able = large_enough(request, listed, "prefill")
        candidates = [view for view in able if view.has_room(request)] or able
        return self._pick(request, sorted(candidates, key=lambda view: view.worker_id))

    @abstractmethod
    def _pick(self, request: DispatchRequest, candidates: Sequence[WorkerView]) -> str:
        """Return the id of one of `candidates` (not empty, ascending by worker id)."""


class LoadAware(DispatchPolicy):
    """The worker that would have this request's prefill done first; where the cache lies plays no part (BanaServe).

    Estimated end = (pending uncached tokens + this request's) / measured rate (ours: the paper's measure is not known).
    Ends within `tie_tolerance` of the earliest are equal, because two like workers' measured rates always differ a
    little and idle ones would otherwise never take turns. Equal ends go to the fewest requests, then by rotation.

    Args:
        seed: where the rotation starts; give each ingress its own.
        tie_tolerance: relative, 0.05 = 5 %.
    """

    def __init__(self, seed: int = 0, tie_tolerance: float = TIE_TOLERANCE) -> None:
        _require(0 <= tie_tolerance <= 1, "tie_tolerance", tie_tolerance, "0 to 1")
        self._rotation = Rotation(seed)
        self._tie_tolerance = tie_tolerance

    def _pick(self, request: DispatchRequest, candidates: Sequence[WorkerView]) -> str:
        earliest = _earliest_ends(request, candidates, self._tie_tolerance)
        return self._rotation.take([view.worker_id for view in _fewest_requests(earliest)])


class RoundRobin(DispatchPolicy):
    """Each worker in turn, whatever its load. The baseline that shows what looking at load is worth."""

    def __init__(self, seed: int = 0) -> None:
        self._rotation = Rotation(seed)

    def _pick(self, request: DispatchRequest, candidates: Sequence[WorkerView]) -> str:
        return self._rotation.take([view.worker_id for view in candidates])


class PowerOfTwo(DispatchPolicy):
    """The better of two workers drawn at random (Mitzenmacher 1996; what Ray Serve does by default, on queue lengths).

    Better is the earlier estimated end, as in `LoadAware`; of two equal ones, the first drawn.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def _pick(self, request: DispatchRequest, candidates: Sequence[WorkerView]) -> str:
        drawn = self._random.sample(candidates, min(2, len(candidates)))
        return min(drawn, key=lambda view: view.prefill_end_s(request)).worker_id


class PrefixAware(DispatchPolicy):
    """Where the longest prefix was sent before, as long as that does not unbalance the workers.

    The three steps of Ray's prefix-aware router and SGLang's gateway: when request counts differ by more than
    `imbalance_threshold`, the fewest requests; else the longest known prefix, if it is at least `match_rate_threshold`
    of the prompt's blocks; else the worker with the fewest remembered keys. A prompt without a full block, and equals
    in any of these, go by load as in `LoadAware`. So no choice makes counts differ by more than the threshold and one.

    What it knows is what *it* sent: each ingress has a view of its own, which says nothing about what a worker has
    evicted since. The memory of a worker that leaves the list, or comes back with another epoch, is dropped.

    Args:
        seed: where rotation among equals starts.
        imbalance_threshold: requests, most loaded minus least loaded (Ray's default is 10).
        match_rate_threshold: matched blocks / full blocks of the prompt, 0 to 1 (Ray's default is 0.1).
        max_keys_per_worker: block keys remembered for each worker; the least recently used go first.
    """

    def __init__(
        self,
        seed: int = 0,
        imbalance_threshold: int = 10,
        match_rate_threshold: float = 0.1,
        max_keys_per_worker: int = 65_536,
    ) -> None:
        _require(imbalance_threshold >= 0, "imbalance_threshold", imbalance_threshold, "0 or more")
        _require(0 <= match_rate_threshold <= 1, "match_rate_threshold", match_rate_threshold, "0 to 1")
        _require(max_keys_per_worker >= 1, "max_keys_per_worker", max_keys_per_worker, "1 or more")
        self._rotation = Rotation(seed)
        self._imbalance_threshold = imbalance_threshold
        self._match_rate_threshold = match_rate_threshold
        self._max_keys = max_keys_per_worker
        self._sent: dict[str, tuple[int, OrderedDict[bytes, None]]] = {}

    def choose(self, request: DispatchRequest, workers: Sequence[WorkerView]) -> str:
        """As in `DispatchPolicy`; remembers the chosen worker as the holder of the request's blocks."""
        before = self._sent
        self._sent = {}
        for view in workers:
            epoch, keys = before.get(view.worker_id, (-1, OrderedDict()))
            if epoch != view.load.epoch:
                keys = OrderedDict()
            self._sent[view.worker_id] = (view.load.epoch, keys)
        return super().choose(request, workers)

    def _pick(self, request: DispatchRequest, candidates: Sequence[WorkerView]) -> str:
        earliest = _earliest_ends(request, self._best(request, candidates), TIE_TOLERANCE)
        chosen = self._rotation.take([view.worker_id for view in _fewest_requests(earliest)])
        self._remember(chosen, request.block_keys)
        return chosen

    def _best(self, request: DispatchRequest, candidates: Sequence[WorkerView]) -> Sequence[WorkerView]:
        counts = [view.requests for view in candidates]
        if max(counts) - min(counts) > self._imbalance_threshold:
            return _fewest_requests(candidates)
        if not request.block_keys:
            return candidates
        matched = [self._matched_blocks(view.worker_id, request.block_keys) for view in candidates]
        longest = max(matched)
        if longest > 0 and longest >= self._match_rate_threshold * len(request.block_keys):
            return [view for view, blocks in zip(candidates, matched, strict=True) if blocks == longest]
        filled = [len(self._sent[view.worker_id][1]) for view in candidates]
        least = min(filled)
        return [view for view, keys in zip(candidates, filled, strict=True) if keys == least]

    def _matched_blocks(self, worker_id: str, block_keys: Sequence[bytes]) -> int:
        keys = self._sent[worker_id][1]
        return next((i for i, key in enumerate(block_keys) if key not in keys), len(block_keys))

    def _remember(self, worker_id: str, block_keys: Sequence[bytes]) -> None:
        keys = self._sent[worker_id][1]
        # Last block first: a block is of no use without those before it, so the first ones must be forgotten last.
        for key in reversed(block_keys):
            keys[key] = None
            keys.move_to_end(key)
        while len(keys) > self._max_keys:
            keys.popitem(last=False)


POLICIES: Final[dict[str, Callable[..., DispatchPolicy]]] = {
    "load_aware": LoadAware,
    "round_robin": RoundRobin,
    "power_of_two": PowerOfTwo,
    "prefix_aware": PrefixAware,
}


def make_policy(name: str, **settings: object) -> DispatchPolicy:
    """Build the dispatch policy called `name` in a configuration file. All of them take `seed`.

    Raises:
        ValueError: an unknown name, a setting that this policy does not have, or a value out of its range.
    """
    if name not in POLICIES:
        raise ValueError(f"dispatch policy is {name!r}; allowed are {', '.join(POLICIES)}")
    allowed = inspect.signature(POLICIES[name]).parameters
    for setting, value in settings.items():
        if setting not in allowed:
            raise ValueError(f"dispatch policy {name!r} has no setting {setting!r}; allowed are {', '.join(allowed)}")
        kind = (int,) if isinstance(allowed[setting].default, int) else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ValueError(f"{setting} is {value!r}; it must be {' or '.join(k.__name__ for k in kind)}")
    return POLICIES[name](**settings)


def choose_decode(request: DispatchRequest, workers: Sequence[WorkerView], *, turn: int = 0) -> str:
    """Return the id of the decode (or monolithic) worker with the most room for `request`.

    That is the one whose share of live and promised blocks is least once the request is added (ours); then the one with
    the fewest requests. Workers equal in both are taken by `turn`, a number that the caller counts up per request and
    starts elsewhere in each ingress. Whether there is room *now* is admission's question, not asked here.

    Raises:
        NoWorkerError: no decode worker is listed, or none is large enough to bring the request to its end.
    """
    able = large_enough(request, [view for view in workers if view.load.role != "prefill"], "decode")

    def rank(view: WorkerView) -> tuple[float, int]:
        filled = (view.used_blocks + request.decode_blocks) / view.load.total_blocks
        return filled, view.load.running_requests + view.load.waiting_requests + view.reserved_decode_requests

    best = min(rank(view) for view in able)
    equal = sorted(view.worker_id for view in able if rank(view) == best)
    return equal[turn % len(equal)]


def _earliest_ends(request: DispatchRequest, views: Sequence[WorkerView], tolerance: float) -> list[WorkerView]:
    limit_s = min(view.prefill_end_s(request) for view in views) * (1.0 + tolerance)
    return [view for view in views if view.prefill_end_s(request) <= limit_s]


def _fewest_requests(views: Sequence[WorkerView]) -> list[WorkerView]:
    fewest = min(view.requests for view in views)
    return [view for view in views if view.requests == fewest]


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name} is {value}; allowed is {allowed}")
