"""Prices and measured times in round figures, for cases worked out by hand."""

from __future__ import annotations

import math

from tuning.hardware_profile import DecodeFit, FitError, MeasuredTiming, PrefillFit
from tuning.price_book import DiskClass, PriceBook
from tuning.price_steps import DiskStep, DramStep

_ERROR = FitError(mean=0.01, worst=0.02, samples=9)


def prices_for(hardware: str) -> PriceBook:
    """3 EUR for an hour of the device, 0.5 for one of a GiB of DRAM."""
    return PriceBook(
        name="ours",
        currency="EUR",
        as_of="2026-01-01",
        source="made up",
        hours_per_month=720.0,
        gpu_hour={hardware: 3.0},
        dram=(DramStep(above_gib=0, up_to_gib=math.inf, gib_hour=0.5),),
        disk_classes={"ssd": DiskClass((DiskStep(above_gib=0, up_to_gib=1000, month=72, iops=500, mb_per_s=80),))},
    )


def measured(model: str) -> MeasuredTiming:
    """Times of a model in half precision."""
    return MeasuredTiming(
        model=model,
        dtype_bytes=2,
        machine="a machine",
        date="2026-11-29",
        prefill=PrefillFit(base_s=0.5, token_s=0.01, square_s=0.001, error=_ERROR),
        decode=DecodeFit(base_s=0.2, context_token_s=0.003, row_s=0.04, error=_ERROR),
    )
