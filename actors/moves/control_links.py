"""Moves as the control deployment orders them: it links the two workers, and asks the home.

It keeps nothing of where layers lie: the workers' own word is the truth, before and after a restart.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from actors.addresses import address_of
from actors.worker_settings import TURN_S, MoveLimits
from migrate.move_report import MoveFailedError, MoveReport
from migrate.moves import Move
from migrate.placement_state import PlacementState
from migrate.roster import Roster

T = TypeVar("T")

logger = logging.getLogger("ray.serve")


class ControlLinks:
    """Used from one event loop at a time.

    Args:
        roster: who is alive.
        limits: those of the workers.
    """

    def __init__(self, roster: Roster, limits: MoveLimits) -> None:
        self._roster = roster
        self._limit_s = limits.order_s
        self._busy: dict[str, Move] = {}
        """By worker: the move that it is in."""
        self._epochs: dict[frozenset[str], int] = {}
        self._rendezvous: asyncio.Task[Any] | None = None
        """Makes the store and its address, which live as long as this does."""
        self._partings: set[asyncio.Task[Any]] = set()

    async def order(self, move: Move, home: str) -> MoveReport:
        """Has a move made; returns when it is. Raises MoveFailedError: it was refused or came to nothing."""
        workers = {home, move.source, move.destination}
        if unknown := sorted(worker for worker in workers if self._roster.get(worker) is None):
            known = [member.worker_id for member in self._roster.members(suspects=True)]
            raise MoveFailedError(f"{move}: {unknown[0]!r} is not a worker that is alive; these are: {known}")
        if move.instance != home or home not in (move.source, move.destination):
            raise MoveFailedError(
                f"{move}: it was ordered of {home!r}; a move is ordered of the home of its instance, and begins or "
                "ends there"
            )
        for worker in sorted(workers & self._busy.keys()):
            raise MoveFailedError(f"{move}: worker {worker!r} is in another move, {self._busy[worker]}")
        self._busy |= dict.fromkeys(workers, move)
        try:
            async with asyncio.timeout(self._limit_s):
                await self._link(move.source, move.destination)
                made = self._worker(home).move.remote(move)
                try:
                    report: MoveReport = await made
                except asyncio.CancelledError:
                    ray.cancel(made)  # else it would go on there without anybody who waits for it
                    raise
                return report
        except TimeoutError:
            raise MoveFailedError(
                f"{move}: no answer within {self._limit_s:g} s; the placement says where it is"
            ) from None
        except RayTaskError as error:
            raise MoveFailedError(str(error.cause)) from error
        except RayActorError as error:
            raise MoveFailedError(f"{move}: a worker has died") from error
        finally:
            for worker in workers:
                del self._busy[worker]

    async def placements(self) -> dict[str, PlacementState | None]:
        """What each worker says of itself, by its id; None where one that is alive does not answer."""
        members = self._roster.members(suspects=True)
        states = await asyncio.gather(*(_answer(self._worker(m.worker_id).placement_state.remote()) for m in members))
        return {member.worker_id: state for member, state in zip(members, states, strict=True)}

    def prepare(self) -> None:
        """Begins what links need. Does not wait: it imports torch, which takes seconds, and the first move would."""
        if self._rendezvous is None:
            self._rendezvous = asyncio.create_task(asyncio.to_thread(_make_rendezvous))

    def left(self, worker: str) -> None:
        """A worker has left: those that were linked to it are told, and do not wait for its links to fall silent."""
        for pair in [pair for pair in self._epochs if worker in pair]:
            del self._epochs[pair]
            (peer,) = pair - {worker}
            if self._roster.get(peer) is not None:
                parting = asyncio.create_task(_answer(self._worker(peer).unlink.remote(worker)))
                self._partings.add(parting)
                parting.add_done_callback(self._partings.discard)

    def _worker(self, worker: str) -> Any:
        member = self._roster.get(worker)
        if member is None:
            raise MoveFailedError(f"worker {worker!r} has left")
        return address_of(member).actor

    async def _link(self, first: str, second: str) -> None:
        """They have a link that lives."""
        epochs = await asyncio.gather(
            self._worker(first).link_epoch.remote(second), self._worker(second).link_epoch.remote(first)
        )
        if None not in epochs and len(set(epochs)) == 1:
            return
        pair = frozenset((first, second))
        # Above those that were given before a restart of this process, too.
        epoch = self._epochs[pair] = max(self._epochs.get(pair, 0) + 1, time.time_ns() // 1_000_000)
        _, address = await self._made_rendezvous()
        await asyncio.gather(
            self._worker(first).link.remote(second, epoch, address),
            self._worker(second).link.remote(first, epoch, address),
        )

    async def _made_rendezvous(self) -> Any:
        self.prepare()
        making = self._rendezvous
        assert making is not None
        try:
            return await asyncio.shield(making)  # an order that is given up is no reason to begin anew
        except Exception:
            self._rendezvous = None  # the next order tries again
            raise


def _make_rendezvous() -> Any:
    from migrate.links.rendezvous import make_rendezvous  # with torch, which takes seconds

    return make_rendezvous(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


async def _answer(question: Awaitable[T]) -> T | None:
    """What a worker answers; None where it does not."""
    try:
        async with asyncio.timeout(TURN_S):
            return await question
    except (RayError, TimeoutError) as error:
        logger.warning("a worker has not answered: %s", type(error).__name__)
        return None
