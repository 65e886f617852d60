"""A time-to-live for each group of entries, over any other policy."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kv.policy.interface import EvictionPolicy


class _Group:
    __slots__ = ("last_uses", "ttl_s")

    def __init__(self, ttl_s: float | None) -> None:
        self.ttl_s = ttl_s
        # Handle -> (when, how many uses of any entry came before), in the order of last use. No deadlines: so a new
        # ttl_s applies to all of them at once, and whatever it is, those that have expired come first.
        self.last_uses: OrderedDict[int, tuple[float, int]] = OrderedDict()

    def next_deadline_s(self) -> float:
        """The earliest last use plus TTL; infinite when nothing here can expire."""
        if self.ttl_s is None or not self.last_uses:
            return math.inf
        return next(iter(self.last_uses.values()))[0] + self.ttl_s

    def expired(self, now_s: float) -> Iterator[tuple[float, int, int]]:
        """(deadline, order of last use, handle) of what has expired, in rising order; looks at one entry more."""
        if self.ttl_s is None:
            return
        for handle, (last_s, order) in self.last_uses.items():
            if now_s - last_s <= self.ttl_s:
                return
            yield last_s + self.ttl_s, order, handle


class TtlPolicy:
    """An `EvictionPolicy` with a time-to-live by group, counted from an entry's last use.

    An entry has expired when `now_s - last_use_s > ttl_s`: one that is used again after exactly `ttl_s` is a hit, which
    is how re-use intervals are counted when TTLs are chosen. Group TTLs are Kareto's (arXiv 2603.08739); that they are
    a preference, so that a full store can still evict what has not expired, follows SGLang's soft retention; the order
    of victims is ours.

    A clock that was set back stands still for this policy until it has caught up with the latest time seen: meanwhile
    nothing ages, and nothing is lost.

    Args:
        inner: empty, and from now on driven by this policy alone. It orders what has not expired.
        ttls_s: as for `set_ttls`.

    Raises:
        ValueError: `inner` is not empty; or as `set_ttls`.
    """

    def __init__(self, inner: EvictionPolicy, ttls_s: Sequence[float | None]) -> None:
        if len(inner) > 0:
            raise ValueError(f"the inner policy has {len(inner)} entries: give an empty one")
        self._inner = inner
        self._ttls_s: tuple[float | None, ...] = ()
        self._groups: dict[int, _Group] = {}
        self._group_of: dict[int, _Group] = {}
        self._latest_s = -math.inf
        self._num_uses = 0
        # Nothing has expired before this time; it may be too early, never too late. In most calls it is all there is to
        # look at.
        self._quiet_until_s = math.inf
        self.set_ttls(ttls_s)

    @property
    def ttls_s(self) -> tuple[float | None, ...]:
        """The TTLs in force, as given to `set_ttls`."""
        return self._ttls_s

    def set_ttls(self, ttls_s: Sequence[float | None]) -> None:
        """Change the TTLs, also of the entries that are here; their last uses stay.

        Args:
            ttls_s: seconds for each group, by its number; None for no limit. A group beyond the last one follows group
                0, "the rest".

        Raises:
            ValueError: there is none for group 0, or one is not finite or not above 0. Then nothing has changed.
        """
        if not ttls_s:
            raise ValueError("no TTLs were given: give at least that of group 0, in seconds, or None for no limit")
        for number, ttl_s in enumerate(ttls_s):
            if ttl_s is not None and not 0 < ttl_s < math.inf:
                raise ValueError(f"ttls_s[{number}]={ttl_s} is not allowed: give seconds above 0, or None for no limit")
        self._ttls_s = tuple(ttls_s)
        for number, group in self._groups.items():
            group.ttl_s = self._ttl_of(number)
        self._quiet_until_s = -math.inf

    def insert(self, handle: int, group: int, now_s: float) -> None:
        """See `EvictionPolicy`.

        Raises:
            ValueError: `group` is below 0; or as there.
        """
        if group < 0:
            raise ValueError(f"group={group} is not allowed: give 0 or more")
        self._inner.insert(handle, group, now_s)
        members = self._groups.get(group)
        if members is None:
            members = self._groups[group] = _Group(self._ttl_of(group))
        self._group_of[handle] = members
        self._note_use(handle, members, now_s)
        if members.ttl_s is not None:
            self._quiet_until_s = min(self._quiet_until_s, self._latest_s + members.ttl_s)

    def use(self, handle: int, now_s: float) -> None:
        """See `EvictionPolicy`."""
        self._inner.use(handle, now_s)
        self._note_use(handle, self._group_of[handle], now_s)

    def remove(self, handle: int) -> None:
        """See `EvictionPolicy`."""
        self._inner.remove(handle)
        del self._group_of.pop(handle).last_uses[handle]

    def victims(self, now_s: float) -> Iterator[int]:
        """First what has expired, in the order of `expired`; then the others, in the inner policy's order."""
        now_s = self._latest(now_s)
        others = (handle for handle in self._inner.victims(now_s) if not self._has_expired(handle, now_s))
        return itertools.chain(self._expired(now_s), others)

    def expired(self, now_s: float, limit: int) -> list[int]:
        """By deadline (last use plus TTL), the earliest first; equal ones by last use, the oldest first.

        Costs one look at an entry for each that is returned and each group, and a heap of the groups that have any.
        """
        return list(itertools.islice(self._expired(self._latest(now_s)), limit))

    def __len__(self) -> int:
        return len(self._group_of)

    def _ttl_of(self, group: int) -> float | None:
        return self._ttls_s[group if group < len(self._ttls_s) else 0]

    def _latest(self, now_s: float) -> float:
        if now_s > self._latest_s:
            self._latest_s = now_s
        return self._latest_s

    def _note_use(self, handle: int, group: _Group, now_s: float) -> None:
        self._num_uses += 1
        group.last_uses[handle] = (self._latest(now_s), self._num_uses)
        group.last_uses.move_to_end(handle)

    def _has_expired(self, handle: int, now_s: float) -> bool:
        group = self._group_of[handle]
        return group.ttl_s is not None and now_s - group.last_uses[handle][0] > group.ttl_s

    def _expired(self, now_s: float) -> Iterator[int]:
        late: list[_Group] = []
        if now_s >= self._quiet_until_s:
            deadlines_s = [(group.next_deadline_s(), group) for group in self._groups.values()]
            self._quiet_until_s = min((deadline_s for deadline_s, _ in deadlines_s), default=math.inf)
            late = [group for deadline_s, group in deadlines_s if deadline_s <= now_s]
        return (handle for _, _, handle in heapq.merge(*(group.expired(now_s) for group in late)))
