"""Eviction policies by brute force: a list of all entries, sorted by the documented key when an order is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv.policy.interface import EvictionPolicy
from kv.policy.lfu import LfuPolicy
from kv.policy.lru import LruPolicy
from kv.policy.policy_file import GroupTtl, PolicySpec, make_policy
from kv.policy.ttl import TtlPolicy


@dataclass
class Entry:
    handle: int
    group: int
    last_use_s: float
    order: int
    uses: int = 0


class ReferencePolicy:
    """`by_uses` is LFU, else LRU; without `ttls_s` nothing expires."""

    def __init__(self, by_uses: bool, ttls_s: Sequence[float | None] = (None,)) -> None:
        self.by_uses = by_uses
        self.ttls_s = list(ttls_s)
        self.entries: list[Entry] = []
        self.clock_s = -math.inf
        self.calls = 0

    def at(self, now_s: float) -> float:
        self.clock_s = max(self.clock_s, now_s)
        return self.clock_s

    def handles(self) -> list[int]:
        return [entry.handle for entry in self.entries]

    def insert(self, handle: int, group: int, now_s: float) -> None:
        self.calls += 1
        self.entries.append(Entry(handle, group, self.at(now_s), self.calls))

    def use(self, handle: int, now_s: float) -> None:
        self.calls += 1
        entry = next(entry for entry in self.entries if entry.handle == handle)
        entry.last_use_s, entry.order, entry.uses = self.at(now_s), self.calls, entry.uses + 1

    def remove(self, handle: int) -> None:
        self.entries = [entry for entry in self.entries if entry.handle != handle]

    def ttl_s(self, entry: Entry) -> float:
        ttl_s = self.ttls_s[entry.group] if entry.group < len(self.ttls_s) else self.ttls_s[0]
        return math.inf if ttl_s is None else ttl_s

    def expired(self, now_s: float) -> list[int]:
        now_s = self.at(now_s)
        late = [entry for entry in self.entries if now_s - entry.last_use_s > self.ttl_s(entry)]
        late.sort(key=lambda entry: (entry.last_use_s + self.ttl_s(entry), entry.order))
        return [entry.handle for entry in late]

    def victims(self, now_s: float) -> list[int]:
        expired = self.expired(now_s)
        others = [entry for entry in self.entries if entry.handle not in expired]
        others.sort(key=lambda entry: (entry.uses if self.by_uses else 0, entry.order))
        return expired + [entry.handle for entry in others]


TTLS_S: tuple[float | None, ...] = (4.0, None, 0.3)
"""Of the policies below that have any: for the rest, and for groups 1 and 2."""


def _from_file() -> EvictionPolicy:
    groups = tuple(GroupTtl(f"g{number}", bytes([number]) * 32, TTLS_S[number]) for number in (1, 2))
    return make_policy(PolicySpec("lfu", TTLS_S[0], groups))


IMPLEMENTATIONS: dict[str, tuple[Callable[[], EvictionPolicy], Callable[[], ReferencePolicy]]] = {
    "lru": (LruPolicy, lambda: ReferencePolicy(by_uses=False)),
    "lfu": (LfuPolicy, lambda: ReferencePolicy(by_uses=True)),
    "ttl over lru": (lambda: TtlPolicy(LruPolicy(), TTLS_S), lambda: ReferencePolicy(False, TTLS_S)),
    "ttl over lfu": (lambda: TtlPolicy(LfuPolicy(), TTLS_S), lambda: ReferencePolicy(True, TTLS_S)),
    "ttl over ttl": (
        lambda: TtlPolicy(TtlPolicy(LruPolicy(), [None]), TTLS_S),
        lambda: ReferencePolicy(False, TTLS_S),
    ),
    "from a policy file's spec": (_from_file, lambda: ReferencePolicy(True, TTLS_S)),
}
"""Every policy beside its reference. A new policy is added here, and the contract suite runs over it."""
