"""What a simulation is made with, beside the trace and the model's timing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from kv.policy.admission import DiskAdmission
from kv.policy.policy_file import PolicySpec
from migrate.dispatch import POLICIES
from tuning.trace.trace import PartialBlocks

Mode = Literal["static", "monolithic"]
TouchOrder = Literal["back_to_front", "front_to_back"]


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """A deployment. Rates are in bytes/s, one way, and may be infinite.

    Raises:
        ValueError: a setting that is not allowed.
    """

    mode: Mode = "static"
    """static: prefill and decode apart. monolithic: each instance does both."""
    prefill_instances: int = 1
    decode_instances: int = 1
    monolithic_instances: int = 1
    """Only those of the mode count."""
    device_pool_blocks: int | None = None
    """KV blocks of an instance. None: what fits beside the weights, from the timing."""
    local_prefix_cache: bool = True
    """Blocks that were released can be found on the instance, as long as nothing needs their room."""
    link_bytes_per_s: float = math.inf
    """Between one instance and the DRAM tier."""
    dram_bytes: int = 0
    dram_read_bytes_per_s: float = math.inf
    dram_write_bytes_per_s: float = math.inf
    disk_bytes: int = 0
    disk_read_bytes_per_s: float = math.inf
    disk_write_bytes_per_s: float = math.inf
    disk_iops: float = math.inf
    """For reads, and as many for writes."""
    disk_operation_bytes: int = 1 << 18
    """That one operation moves at most."""
    disk_write_queue_bytes: int = 4 << 30
    """That wait to be written. What comes when there are more is not written."""
    disk_admission: DiskAdmission = DiskAdmission.ALWAYS
    policy: PolicySpec = field(default_factory=PolicySpec)
    """Of both tiers, for each by itself. Groups' roots are blocks of the trace: `group_roots.root_key`."""
    dispatch: str = "load_aware"
    """A name of `migrate.dispatch.POLICIES`."""
    partial_blocks: PartialBlocks = "miss"
    """Whether a prompt's last block can hit where it is not full."""
    max_batch_tokens: int = 8192
    """Of a step."""
    max_running_requests: int = 256
    """That decode on one instance."""
    prefetch: bool = True
    """What only the disk has is read from the arrival on. Else from the beginning of the prefill."""
    store_answers: bool = True
    """The full blocks that decode fills are stored too."""
    touch_order: TouchOrder = "back_to_front"
    """Of blocks used together. back_to_front: a prompt's first block is the most recent one, as in the live store."""
    seed: int = 0
    """Of dispatch."""

    def __post_init__(self) -> None:
        for name, values in (("mode", Mode), ("partial_blocks", PartialBlocks), ("touch_order", TouchOrder)):
            allowed = get_args(values)
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not allowed: give one of {', '.join(allowed)}")
        if self.dispatch not in POLICIES:
            raise ValueError(f"dispatch={self.dispatch!r} is not allowed: give one of {', '.join(POLICIES)}")
        for name, least in (
            ("prefill_instances", 1),
            ("decode_instances", 1),
            ("monolithic_instances", 1),
            ("dram_bytes", 0),
            ("disk_bytes", 0),
            ("disk_operation_bytes", 1),
            ("disk_write_queue_bytes", 0),
            ("max_batch_tokens", 1),
            ("max_running_requests", 1),
        ):
            _require_int(name, getattr(self, name), least)
        if self.device_pool_blocks is not None:
            _require_int("device_pool_blocks", self.device_pool_blocks, 1)
        if type(self.seed) is not int:
            raise ValueError(f"seed={self.seed!r} is not allowed: give an int")
        for name in (
            "link_bytes_per_s",
            "dram_read_bytes_per_s",
            "dram_write_bytes_per_s",
            "disk_read_bytes_per_s",
            "disk_write_bytes_per_s",
            "disk_iops",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} is not allowed: give a number above 0")
        if self.max_running_requests > self.max_batch_tokens:
            raise ValueError(
                f"max_running_requests={self.max_running_requests} is not allowed with max_batch_tokens="
                f"{self.max_batch_tokens}: each of them takes a token of a step"
            )


def _require_int(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name}={value!r} is not allowed: give an int of at least {least}")
