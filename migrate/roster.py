"""Who is alive: the members of one application, by worker id and epoch."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from migrate.load import ROLES, Role

REMEMBERED_DEPARTURES: Final = 1024
"""Departed worker ids whose last epoch is kept, so that a late `join` of a dead worker is recognised as such."""


class RosterError(ValueError):
    """A member that cannot be let in. The message says what was given, what is allowed and what to do."""


class StaleEpochError(RosterError):
    """The member's epoch is over: a later life of the same worker is known, or this one has left."""


@dataclass(frozen=True, slots=True)
class Member:
    """One life of one worker. A restart is a new member with the same worker id and a higher epoch.

    Raises:
        ValueError: an unknown role, or a number out of its range.
    """

    worker_id: str
    epoch: int
    role: Role
    node_id: str
    model_fingerprint: bytes
    """Of weights, dtype and layout. KV blocks of different fingerprints are of no use to each other."""
    block_tokens: int
    total_blocks: int
    max_context_tokens: int
    handle: object = field(default=None, compare=False, repr=False)
    """How to reach the worker. Never looked at here."""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role is {self.role!r}; allowed are {', '.join(ROLES)}")
        if self.epoch < 0:
            raise ValueError(f"epoch of worker {self.worker_id!r} is {self.epoch}; it must be 0 or more")
        for name in ("block_tokens", "total_blocks", "max_context_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} of worker {self.worker_id!r} is {value}; it must be 1 or more")


class Roster:
    """Members by worker id. `version` grows with every change, so a reader sees at a glance that it is up to date.

    Its size is that of what is alive, plus a bounded memory of who left, whatever number of restarts it has seen.
    """

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._suspects: set[str] = set()
        self._departed: OrderedDict[str, int] = OrderedDict()
        self._version = 0

    @property
    def version(self) -> int:
        """Number of changes so far."""
        return self._version

    def join(self, member: Member) -> int:
        """Let `member` in, in the place of an earlier life of the same worker, and return the version.

        Joining twice with the same facts changes nothing, so a join may be repeated when its answer was lost.

        Raises:
            StaleEpochError: a life of this worker with this epoch or a later one has left, or a later one is alive.
            RosterError: same epoch but other facts, or another model or block size than the other members'.
        """
        current = self._members.get(member.worker_id)
        if current is not None and member.epoch == current.epoch:
            if member != current:
                raise RosterError(
                    f"worker {member.worker_id!r} joined again in epoch {member.epoch} with other facts; they are "
                    "fixed for one epoch: raise the epoch with every restart"
                )
            return self._version
        last = current.epoch if current is not None else self._departed.get(member.worker_id, -1)
        if member.epoch <= last:
            raise StaleEpochError(
                f"worker {member.worker_id!r} joined with epoch {member.epoch}; epoch {last} is known already, and "
                "only a higher one may join: take a new epoch and join again"
            )
        self._check_same_model(member)
        self._departed.pop(member.worker_id, None)
        self._members[member.worker_id] = member
        self._suspects.discard(member.worker_id)
        return self._changed()

    def leave(self, worker_id: str, epoch: int) -> bool:
        """Take out the life `epoch` of a worker, and any earlier one. Returns whether a member was taken out.

        Word of the death of an earlier life leaves the present one where it is.
        """
        current = self._members.get(worker_id)
        if current is not None and current.epoch > epoch:
            return False
        self._departed[worker_id] = max(epoch, self._departed.get(worker_id, -1))
        if len(self._departed) > REMEMBERED_DEPARTURES:
            self._departed.popitem(last=False)
        if current is None:
            return False
        del self._members[worker_id]
        self._suspects.discard(worker_id)
        self._changed()
        return True

    def suspect(self, worker_id: str, epoch: int) -> bool:
        """Stop listing a worker that failed to answer, until it is cleared, leaves or rejoins. Returns if it was new.

        One failed call is enough reason: to wait for a health check's verdict means to send more requests to a dead
        worker, and a suspicion costs nothing when it is wrong.
        """
        if not self.is_current(worker_id, epoch) or worker_id in self._suspects:
            return False
        self._suspects.add(worker_id)
        self._changed()
        return True

    def clear(self, worker_id: str, epoch: int) -> bool:
        """List a suspect again, because it has answered. Returns whether it was one."""
        if not self.is_current(worker_id, epoch) or worker_id not in self._suspects:
            return False
        self._suspects.remove(worker_id)
        self._changed()
        return True

    def members(self, role: Role | None = None, *, suspects: bool = False) -> tuple[Member, ...]:
        """Return the members of one role (None: of all), by worker id. Suspects are left out unless asked for."""
        return tuple(
            member
            for worker_id, member in sorted(self._members.items())
            if (role is None or member.role == role) and (suspects or worker_id not in self._suspects)
        )

    def get(self, worker_id: str) -> Member | None:
        """Return the present life of a worker, suspected or not."""
        return self._members.get(worker_id)

    def is_current(self, worker_id: str, epoch: int) -> bool:
        """Whether `epoch` is the life of `worker_id` that is a member now. Messages of any other are to be refused."""
        member = self._members.get(worker_id)
        return member is not None and member.epoch == epoch

    def __len__(self) -> int:
        return len(self._members)

    def _check_same_model(self, member: Member) -> None:
        # Any other member will do: they are all alike. A worker that comes back is not compared with its earlier life.
        other = next((m for m in self._members.values() if m.worker_id != member.worker_id), None)
        if other is None:
            return
        if member.model_fingerprint != other.model_fingerprint:
            raise RosterError(
                f"worker {member.worker_id!r} has model fingerprint {member.model_fingerprint.hex()}; the members of "
                f"this application have {other.model_fingerprint.hex()}: start it with the same weights, dtype and "
                "layout, or as an application of its own"
            )
        if member.block_tokens != other.block_tokens:
            raise RosterError(
                f"worker {member.worker_id!r} has blocks of {member.block_tokens} tokens; the members of this "
                f"application have {other.block_tokens}: give all workers the same block_tokens"
            )

    def _changed(self) -> int:
        self._version += 1
        return self._version
