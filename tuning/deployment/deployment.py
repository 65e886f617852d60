"""What a point of a search stands for: instances and a store."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from kv.policy.policy_file import Eviction, PolicySpec
from tuning.hardware_profile import HardwareProfile
from tuning.pareto.space import Point
from tuning.price_book import PriceBook
from tuning.simulator.settings import Mode, SimulationSettings
from tuning.trace.trace import PartialBlocks
from tuning.ttl.policy import SHORTEST_TTL_S

GIB = 1 << 30
_DISK_DIRECTIONS = 2


@dataclass(frozen=True, slots=True)
class Deployment:
    """Instances, of which only those of the mode count, and one store that all of them share.

    Each field but the mode may be an axis of a search, by its name.
    """

    mode: Mode = "monolithic"
    monolithic_instances: int = 1
    prefill_instances: int = 1
    decode_instances: int = 1
    dram_gib: float = 0.0
    disk_gib: float = 0.0
    disk_class: str | None = None
    """Of the price book. It plays no part where `disk_gib` is 0."""
    ttl_s: float | None = None
    """None for no limit. 0 keeps nothing for later."""
    eviction: Eviction = "lru"

    @property
    def num_instances(self) -> int:
        return (
            self.monolithic_instances if self.mode == "monolithic" else self.prefill_instances + self.decode_instances
        )

    @property
    def policy(self) -> PolicySpec:
        """One time-to-live for everything; none where there is no room to keep anything, so that whoever makes room in
        the configuration later does not find a microsecond there."""
        has_room = self.dram_gib > 0 or self.disk_gib > 0
        ttl_s = self.ttl_s if has_room else None
        return PolicySpec(self.eviction, None if ttl_s is None else max(ttl_s, SHORTEST_TTL_S))

    def at(self, point: Point, longest_ttl_s: float = math.inf) -> Deployment:
        """This one with the values of a point.

        A `ttl_s` of `longest_ttl_s` or more becomes no limit: give the time between the first and the last arrival,
        which no time between two uses exceeds.

        Raises:
            TypeError: an axis is no field.
        """
        changes: dict[str, Any] = dict(point)
        if changes.get("ttl_s") is not None and changes["ttl_s"] >= longest_ttl_s:
            changes["ttl_s"] = None
        return replace(self, **changes)

    def cost_per_hour(self, prices: PriceBook, hardware: str) -> float:
        """In the book's currency.

        Raises:
            ValueError: the book has no price for the hardware, the disk class or a size.
        """
        return prices.cost(self.num_instances, self.dram_gib, self.disk_class, self.disk_gib, 1.0, hardware=hardware)


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """What all deployments of a search have in common."""

    partial_blocks: PartialBlocks = "hit"
    dispatch: str = "load_aware"
    max_batch_tokens: int = 8192
    max_running_requests: int = 256
    seed: int = 0


def simulation_settings(
    deployment: Deployment,
    hardware: HardwareProfile,
    prices: PriceBook,
    options: ServingOptions,
    policy: PolicySpec | None = None,
) -> SimulationSettings:
    """What the simulator is told of a deployment.

    The disk has the operations and bytes a second that the book gives a disk of its class and size. They are for reads
    and writes together, and the simulator has a queue for each: each gets half (ours). DRAM is as fast as the
    instances' links to it.

    Args:
        policy: in the place of the deployment's own.

    Raises:
        ValueError: the book has no such disk, or a value is not allowed.
    """
    disk_bytes_per_s = disk_iops = math.inf
    if deployment.disk_gib > 0:
        if deployment.disk_class is None:
            raise ValueError(f"disk_gib={deployment.disk_gib} is not allowed without a disk class: give disk_class")
        disk_bytes_per_s = prices.bandwidth_bytes_per_s(deployment.disk_class, deployment.disk_gib) / _DISK_DIRECTIONS
        disk_iops = prices.iops(deployment.disk_class, deployment.disk_gib) / _DISK_DIRECTIONS
    return SimulationSettings(
        mode=deployment.mode,
        monolithic_instances=deployment.monolithic_instances,
        prefill_instances=deployment.prefill_instances,
        decode_instances=deployment.decode_instances,
        link_bytes_per_s=hardware.host_link_bytes_per_s,
        dram_bytes=int(deployment.dram_gib * GIB),
        disk_bytes=int(deployment.disk_gib * GIB),
        disk_read_bytes_per_s=disk_bytes_per_s,
        disk_write_bytes_per_s=disk_bytes_per_s,
        disk_iops=disk_iops,
        policy=deployment.policy if policy is None else policy,
        dispatch=options.dispatch,
        partial_blocks=options.partial_blocks,
        max_batch_tokens=options.max_batch_tokens,
        max_running_requests=options.max_running_requests,
        seed=options.seed,
    )
