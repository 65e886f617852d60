"""What the job was given, read and checked before anything is simulated."""

from __future__ import annotations

import argparse
import hashlib
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

from kv.policy.policy_file import Eviction
from tuning.deployment.deployment import Deployment, ServingOptions
from tuning.deployment.evaluator import DeploymentEvaluator
from tuning.deployment.objectives import Goals
from tuning.hardware_profile import read_hardware
from tuning.job.axes import MAX_GIB, MAX_INSTANCES, choice_axis, numeric_axis, ttl_axis
from tuning.job.job_error import JobError
from tuning.job.serve_config import share_of_node
from tuning.job.trace_doubts import trace_doubts
from tuning.model_config import read_model_shape
from tuning.pareto.space import Axis, CategoricalAxis, NumericAxis, Point, SearchSpace, Value
from tuning.pareto.trials import fingerprint
from tuning.price_book import PriceBook, read_prices
from tuning.simulator.settings import Mode
from tuning.timing import Timing
from tuning.trace.reading import read_trace
from tuning.trace.trace import PartialBlocks

GOALS: Final = "goals"
"""In a study's identity, the entry that may differ: what was simulated can be judged by others."""

_INSTANCES: Final[dict[Mode, dict[str, str]]] = {
    "static": {"prefill_instances": "--prefill-instances", "decode_instances": "--decode-instances"},
    "monolithic": {"monolithic_instances": "--instances"},
}
"""Options that say how many instances a mode has, by the fields of `Deployment`."""
_INSTANCE_FIELDS = tuple(field for options in _INSTANCES.values() for field in options)


@dataclass(frozen=True, slots=True)
class JobInputs:
    """A search that can begin."""

    evaluator: DeploymentEvaluator
    space: SearchSpace
    baseline: Point | None
    """The fixed configuration to compare with, as a point of the space; None where it lies outside."""
    baseline_dram_gib: int
    trace_format: str
    identity: dict[str, str]
    """What the search depends on, by option: a study goes on with the same only."""
    warnings: tuple[str, ...]
    """What is doubtful in what was given."""


def read_inputs(options: argparse.Namespace) -> JobInputs:
    """Reads and checks everything.

    Raises:
        JobError: what is given contradicts itself, or leaves nothing to search.
        ValueError: a file is refused: as `read_trace`, `read_model_shape`, `read_hardware` and `read_prices`.
        OSError: a file can't be read.
    """
    model = read_model_shape(options.model, options.dtype)
    hardware = read_hardware(options.hardware)
    prices = read_prices(options.prices)
    prices.gpu_price(hardware.name)
    timing = Timing(model, hardware)
    timing.kv_pool_tokens()  # raises where the weights leave no room
    if options.trace.exists() and not options.trace.is_file():
        raise JobError(f"{options.trace} is no plain file, and a job reads its trace more than once: give it a file")
    trace, report = read_trace(options.trace, options.trace_format, block_tokens=options.block_size)
    warnings = [f"{options.trace}: {warning}" for warning in report.warnings]
    warnings += trace_doubts(options.trace, trace, timing)
    trace = trace.scaled(options.rate_factor)
    partial_blocks: PartialBlocks = options.partial_blocks or ("miss" if report.format == "bailian" else "hit")
    serving = ServingOptions(
        partial_blocks, options.dispatch, options.max_batch_tokens, options.max_running_requests, options.seed
    )
    goals = Goals(options.ttft, options.slo, options.slo_ttft_s, options.slo_tpot_s, options.budget_per_hour)
    parts = _parts(options, prices)
    if not trace.has_reuse:
        warnings.append(_close_cache(options.trace, parts))
    axes = tuple(part for part in parts.values() if isinstance(part, NumericAxis | CategoricalAxis))
    fixed_values: dict[str, Any] = {name: part for name, part in parts.items() if part not in axes}
    fixed = Deployment(mode=options.mode, **fixed_values)
    if not axes:
        raise JobError("no axis is open: give at least one as a range, as in --dram-gib 0:2048:512/16")
    _check_shares(parts, options.nodes)
    space = SearchSpace(axes)
    evaluator = DeploymentEvaluator(trace, model, hardware, prices, fixed, serving, goals)
    _check_prices(evaluator, space)
    identity = {
        "trace": hashlib.sha256(options.trace.read_bytes()).hexdigest(),
        "trace format": report.format,
        "block size": str(trace.block_tokens),
        "rate factor": repr(options.rate_factor),
        "model": repr(model),
        "hardware": repr(hardware),
        "prices": repr(prices),
        "fixed values": repr(fixed),
        "dispatch, batch sizes and seed": repr(serving),
        GOALS: repr(goals),
        "axes": fingerprint(space),
        "method": options.method,
    }
    baseline, off_axes = _baseline(evaluator, space, options.baseline_dram_gib)
    if off_axes and trace.has_reuse:
        warnings.append(
            f"the configuration to compare with ({options.baseline_dram_gib} GiB of DRAM, no disk, no time-to-live, "
            f"lru) is not among what is searched, for {' and '.join(off_axes)}: nothing is compared with it"
        )
    return JobInputs(evaluator, space, baseline, options.baseline_dram_gib, report.format, identity, tuple(warnings))


def _parts(options: argparse.Namespace, prices: PriceBook) -> dict[str, Value | Axis | None]:
    """By the names of `Deployment`'s fields, those that play a part: fixed values and axes."""
    parts: dict[str, Value | Axis | None] = {}
    for mode, fields in _INSTANCES.items():
        for field, option in fields.items():
            text = getattr(options, option.removeprefix("--").replace("-", "_"))
            if mode == options.mode:
                parts[field] = numeric_axis(field, "1" if text is None else text, MAX_INSTANCES)
            elif text is not None:
                raise JobError(
                    f"{option} {text} is of --mode {mode}, and the mode is {options.mode}: leave it out, or give "
                    f"{' and '.join(_INSTANCES[options.mode].values())} instead"
                )
    for name, part in parts.items():
        if (part.coarse[0] if isinstance(part, NumericAxis) else part) == 0:
            raise JobError(f"{name} begins at 0: give at least 1")
    parts["dram_gib"] = numeric_axis("dram_gib", options.dram_gib, MAX_GIB)
    if options.disk_gib is None and options.disk_class is not None:
        raise JobError(f"--disk-class {options.disk_class} needs --disk-gib, without which there is no disk")
    parts["disk_gib"] = disk = numeric_axis("disk_gib", options.disk_gib or "0", MAX_GIB)
    if disk != 0:
        if options.disk_class is None:
            raise JobError(
                f"--disk-gib needs --disk-class; {prices.name} has {', '.join(prices.disk_classes) or 'none'}"
            )
        parts["disk_class"] = choice_axis("disk_class", options.disk_class, tuple(prices.disk_classes))
    parts["ttl_s"] = ttl_axis("ttl_s", options.ttl_s)
    if parts["ttl_s"] == 0:
        raise JobError("--ttl-s 0 keeps nothing for later, whatever the sizes: give at least 1, a range, or none")
    parts["eviction"] = choice_axis("eviction", options.eviction, get_args(Eviction))
    return parts


def _close_cache(path: Path, parts: dict[str, Value | Axis | None]) -> str:
    """Without reuse information cache axes are nothing but cost, so they are fixed at nothing. Returns a warning."""
    message = f"{path} has no reuse information: whatever the sizes of DRAM and disk, nothing hits, and they only cost"
    if not any(isinstance(parts[name], NumericAxis) for name in parts if name in _INSTANCE_FIELDS):
        raise JobError(
            f"{message}. Give a trace with block hashes (mooncake, bailian, parquet), or search for numbers of "
            "instances alone, as in --mode monolithic --instances 1:8:1"
        )
    parts.pop("disk_class", None)
    parts |= {"dram_gib": 0, "disk_gib": 0, "ttl_s": None, "eviction": "lru"}
    return f"{message}; they are left out, and only numbers of instances are searched"


def _check_shares(parts: dict[str, Value | Axis | None], nodes: int) -> None:
    """Raises JobError where the smallest size of a tier, spread over the nodes, is none at all on each."""
    for name in ("dram_gib", "disk_gib"):
        part = parts[name]
        sizes = (part.coarse[0], part.coarse[0] + part.step) if isinstance(part, NumericAxis) else (part,)
        smallest = next((size for size in sizes if isinstance(size, int | float) and size > 0), None)
        if smallest is not None and share_of_node(smallest, nodes) == 0:
            raise JobError(
                f"--nodes {nodes}: {name} {smallest} is less than 0.01 GiB on each of them. Give fewer nodes, or only "
                "larger sizes"
            )


def _check_prices(evaluator: DeploymentEvaluator, space: SearchSpace) -> None:
    """Raises ValueError when the ends of the axes have no price: better now than after hours."""
    ends: list[tuple[Value, ...]] = [
        axis.choices if isinstance(axis, CategoricalAxis) else (axis.coarse[0], axis.coarse[-1]) for axis in space.axes
    ]
    for values in itertools.product(*ends):
        point = dict(zip((axis.name for axis in space.axes), values, strict=True))
        evaluator.deployment(point).cost_per_hour(evaluator.prices, evaluator.hardware.name)


def _baseline(
    evaluator: DeploymentEvaluator, space: SearchSpace, dram_gib: int
) -> tuple[Point | None, tuple[str, ...]]:
    """The point with so much DRAM, no disk, no time-to-live, LRU, and instances in the middle of their axes; None where
    it is none of the space, with what can't have its value."""
    point: dict[str, Value] = {}
    for axis in space.axes:
        if isinstance(axis, CategoricalAxis):
            point[axis.name] = "lru" if "lru" in axis.choices else axis.choices[0]
        elif axis.name in _INSTANCE_FIELDS:
            point[axis.name] = axis.coarse[len(axis.coarse) // 2]
        else:
            wanted = {"dram_gib": dram_gib, "disk_gib": 0, "ttl_s": axis.coarse[-1]}[axis.name]
            point[axis.name] = min(max(wanted, axis.coarse[0]), axis.coarse[-1])
    point = space.point(space.key(point))
    found = evaluator.deployment(point)
    wanted_values = {"dram_gib": dram_gib, "disk_gib": 0, "ttl_s": None, "eviction": "lru"}
    off_axes = tuple(name for name, value in wanted_values.items() if getattr(found, name) != value)
    return None if off_axes else point, off_axes
