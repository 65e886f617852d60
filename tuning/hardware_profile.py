"""What a device can do: peak figures with the shares of them that are reached, and times that were measured on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tuning.believable import Range, check_date, check_range, check_text
from tuning.figure_file import FigureError, figure_file_names, find_figure_file, read_figure_file
from tuning.model_shape import ModelShape

_FOLDER = Path(__file__).parent / "hardware"

_BELIEVED: Final = {
    "flops_per_s": Range(1e9, 1e18, "operations a second", "312 TFLOPS are written 312e12"),
    "memory_bytes": Range(1e8, 1e15, "bytes", "80 GB are written 80e9, and 80 GiB 85_899_345_920"),
    "memory_bytes_per_s": Range(1e8, 1e16, "bytes a second", "2,039 GB/s are written 2039e9"),
    "host_link_bytes_per_s": Range(1e7, 1e15, "bytes a second", "25.6 GB/s are written 25.6e9"),
    "network_bytes_per_s": Range(1e6, 1e14, "bytes a second", "200 Gb/s are 25 GB/s, written 25e9"),
    "step_overhead_s": Range(0.0, 1.0, "seconds", "2 ms are written 0.002"),
}
"""From a slow CPU to a rack of devices that work as one, with room on both sides (ours): a slip of a thousand leaves
the range of a device as they are sold."""
_IN_SECONDS: Final = "2 ms are written 0.002"
_MEASURED: Final = {
    "base_s": Range(0.0, 60.0, "seconds", _IN_SECONDS),
    "token_s": Range(0.0, 1.0, "seconds", _IN_SECONDS),
    "context_token_s": Range(0.0, 1.0, "seconds", _IN_SECONDS),
    "row_s": Range(0.0, 1.0, "seconds", _IN_SECONDS),
}


@dataclass(frozen=True, slots=True)
class FitError:
    """How far fitted times are from the measured ones, each divided by the measured one."""

    mean: float
    worst: float
    samples: int
    """How many measurements the fit was made from."""

    def __post_init__(self) -> None:
        _require(self, ("mean", "worst"), least=0.0)
        if type(self.samples) is not int or self.samples < 1:
            raise FigureError("samples", f"given {self.samples!r}; allowed: an int of at least 1")


@dataclass(frozen=True, slots=True)
class PrefillFit:
    """Seconds of a step of prompts: base_s + token_s * tokens + square_s * sum(length^2).

    Of a prompt whose first tokens are cached only the others count, and the square is that of its whole length less
    that of the cached part. Form of DistServe's estimator; the rule for cached tokens is ours.
    """

    base_s: float
    token_s: float
    square_s: float
    error: FitError

    def __post_init__(self) -> None:
        _require(self, ("base_s", "token_s", "square_s"), least=0.0)
        if self.base_s + self.token_s == 0:
            raise ValueError("base_s and token_s are both 0: a step of prompts must take time")


@dataclass(frozen=True, slots=True)
class DecodeFit:
    """Seconds of a decode step: base_s + context_token_s * context_tokens + row_s * batch. DistServe's estimator."""

    base_s: float
    context_token_s: float
    row_s: float
    error: FitError

    def __post_init__(self) -> None:
        _require(self, ("base_s", "context_token_s", "row_s"), least=0.0)
        if self.base_s + self.row_s == 0:
            raise ValueError("base_s and row_s are both 0: a decode step must take time")


@dataclass(frozen=True, slots=True)
class MeasuredTiming:
    """Times of one model on one machine, fitted to measurements."""

    model: str
    """Name of the `ModelShape` that they hold for."""
    dtype_bytes: int
    """Of that shape."""
    machine: str
    date: str
    """When it was measured, as YYYY-MM-DD."""
    prefill: PrefillFit
    decode: DecodeFit


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """A device, or several that work as one: then the figures are those of all of them together.

    Raises:
        ValueError: a figure is not a finite number above 0 (`step_overhead_s`: at least 0), a share is above 1, or two
            entries of `measured` are for one model and dtype.
    """

    name: str
    flops_per_s: float
    """Peak of dense products in the model's dtype."""
    memory_bytes: int
    memory_bytes_per_s: float
    """Peak rate at which the device reads its own memory."""
    host_link_bytes_per_s: float
    """Between the device and its host's DRAM, one way, as reached."""
    network_bytes_per_s: float
    """Between this device's host and another, one way, as reached, for this device alone."""
    prefill_efficiency: float
    """Share of `flops_per_s` that is reached where computing is what takes the time."""
    decode_efficiency: float
    """Share of `memory_bytes_per_s` that is reached where reading is what takes the time."""
    step_overhead_s: float
    """What a step takes beside computing and reading: launches, scheduling, sampling."""
    memory_share: float
    """Share of `memory_bytes` for weights and KV."""
    measured: tuple[MeasuredTiming, ...] = ()
    """Models whose times come from measurements instead of peak figures."""

    def __post_init__(self) -> None:
        if type(self.memory_bytes) is not int or self.memory_bytes < 1:
            raise FigureError("memory_bytes", f"given {self.memory_bytes!r}; allowed: an int of at least 1")
        rates = ("flops_per_s", "memory_bytes_per_s", "host_link_bytes_per_s", "network_bytes_per_s")
        _require(self, rates, above=0.0)
        _require(self, ("prefill_efficiency", "decode_efficiency", "memory_share"), above=0.0, most=1.0)
        _require(self, ("step_overhead_s",), least=0.0)
        seen: set[tuple[str, int]] = set()
        for number, timing in enumerate(self.measured):
            key = (timing.model, timing.dtype_bytes)
            if key in seen:
                raise FigureError(
                    f"measured.{number}", f"{timing.model} of {timing.dtype_bytes} bytes was there before"
                )
            seen.add(key)

    def measured_for(self, model: ModelShape) -> MeasuredTiming | None:
        """The measured times of a model in its dtype; None where there are none."""
        key = (model.name, model.dtype_bytes)
        return next((timing for timing in self.measured if (timing.model, timing.dtype_bytes) == key), None)


def hardware_names() -> list[str]:
    """The profiles that come along."""
    return figure_file_names(_FOLDER)


def read_hardware(name_or_path: str) -> HardwareProfile:
    """A profile of `tuning/hardware/` by name, or of a YAML file by its path.

    Raises:
        FigureFileError: there is none, or it is refused, also for figures that must be in another unit; the message
            names the line.
    """
    return read_figure_file(find_figure_file(name_or_path, _FOLDER), HardwareProfile, _check_slips)


def _check_slips(profile: HardwareProfile) -> None:
    """Raises FigureError where a figure is beside what any device can be, so in another unit; of other slips too."""
    check_text("name", profile.name)
    for field, allowed in _BELIEVED.items():
        check_range(field, getattr(profile, field), allowed)
    for number, timing in enumerate(profile.measured):
        place = f"measured.{number}"
        check_date(f"{place}.date", timing.date)
        for field in ("base_s", "token_s"):
            check_range(f"{place}.prefill.{field}", getattr(timing.prefill, field), _MEASURED[field])
        for field in ("base_s", "context_token_s", "row_s"):
            check_range(f"{place}.decode.{field}", getattr(timing.decode, field), _MEASURED[field])


def _require(
    owner: object, fields: Sequence[str], *, least: float = -math.inf, above: float = -math.inf, most: float = math.inf
) -> None:
    """Raises FigureError where a field is no finite number within the limits."""
    for field in fields:
        value = getattr(owner, field)
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not (above < value and least <= value <= most):
            low = f"above {above:g}" if above > -math.inf else f"of at least {least:g}"
            high = f" and at most {most:g}" if most < math.inf else ""
            raise FigureError(field, f"given {value!r}; allowed: a finite number {low}{high}")
