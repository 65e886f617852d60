"""How workers and the store are reached: plain actor handles, with what is known of the actor behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from actors.messages import WorkerFacts
from migrate.roster import Member


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """The `handle` of a roster member."""

    actor: Any
    """Handle of the `Worker` actor."""
    facts: WorkerFacts


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """The global store as a worker on one node sees it. Of the moment it was given: a worker asks again now and then,
    and until it does, blocks in the store of a new node are a miss."""

    directory: tuple[Any, ...]
    """Handles of the `DirectoryActor`s, for `DirectoryClient`."""
    stores: dict[str, Any]
    """Handles of the `NodeStore` actors by id (their node's): what a reader may have to fetch from."""
    local_store_id: str
    """The store of the worker's own node, which pulls from it."""
    version: int = 0
    """Of what the control deployment has said of stores: another number when one has come or gone."""


@dataclass(frozen=True, slots=True)
class RosterView:
    """The roster at one version, without suspects."""

    version: int
    members: tuple[Member, ...]
    directory: tuple[Any, ...]
    """Handles of the `DirectoryActor`s, for `DirectoryClient`; none without a global store."""


def address_of(member: Member) -> WorkerAddress:
    """The address a member joined with. Raises TypeError when it joined with something else."""
    if not isinstance(member.handle, WorkerAddress):
        given = type(member.handle).__name__
        raise TypeError(f"member {member.worker_id!r} joined without a WorkerAddress; got {given}")
    return member.handle
