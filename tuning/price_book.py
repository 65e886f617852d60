"""What a deployment costs: C = c_hw * GPU_hours + sum over media k of phi_k(size_k), Kareto's equation 2.

phi may be a step function, as cloud prices are. Each phi is a price per hour here, and is multiplied with the hours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tuning.believable import Range, check_date, check_range, check_text
from tuning.figure_file import FigureError, figure_file_names, find_figure_file, read_figure_file
from tuning.price_steps import DiskStep, DramStep, check_prices, check_steps, step_at

_FOLDER = Path(__file__).parent / "prices"
_HOURS_PER_MONTH: Final = Range(28 * 24, 31 * 24, "hours", "A month has 28 to 31 days, and 730 hours in the mean")


@dataclass(frozen=True, slots=True)
class Extra:
    """Performance bought beside what comes with a disk's size."""

    amount: float
    each_month: float

    def __post_init__(self) -> None:
        check_prices(self, ("amount", "each_month"))


_NOTHING = Extra(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class DiskClass:
    """A kind of disk: what its sizes cost, and what is provisioned on top, whatever the size.

    Raises:
        FigureError: the steps have a gap or overlap, or a step has no operations or no bytes a second.
    """

    steps: tuple[DiskStep, ...]
    extra_iops: Extra = _NOTHING
    extra_mb_per_s: Extra = _NOTHING

    def __post_init__(self) -> None:
        check_steps(self.steps, "steps")
        for number, step in enumerate(self.steps):
            if step.iops + self.extra_iops.amount == 0 or step.mb_per_s + self.extra_mb_per_s.amount == 0:
                raise FigureError(
                    f"steps.{number}", "iops or mb_per_s is 0 and nothing is provisioned: nothing could move"
                )

    def month_price(self, size_gib: float) -> float:
        """Of a disk of this size, above 0."""
        extra = self.extra_iops.amount * self.extra_iops.each_month
        extra += self.extra_mb_per_s.amount * self.extra_mb_per_s.each_month
        return step_at(self.steps, size_gib, "a disk").month_price(size_gib) + extra


@dataclass(frozen=True, slots=True)
class PriceBook:
    """Prices of one place, as its file has them. Sizes are in GiB, money in `currency`.

    Raises:
        FigureError: a price is negative or not finite, steps have a gap or overlap, or no GPU has a price.
    """

    name: str
    currency: str
    as_of: str
    """When these were the prices, as YYYY-MM-DD."""
    source: str
    """Where they come from."""
    hours_per_month: float
    """How many hours the seller's month has."""
    gpu_hour: dict[str, float]
    """Price of one device for an hour, by the name of its hardware profile."""
    dram: tuple[DramStep, ...]
    """Memory of hosts that is bought for KV."""
    disk_classes: dict[str, DiskClass]

    def __post_init__(self) -> None:
        if not 0 < self.hours_per_month < math.inf:
            raise FigureError("hours_per_month", f"given {self.hours_per_month!r}; allowed: a finite number above 0")
        if not self.gpu_hour:
            raise FigureError(
                "gpu_hour", "no device has a price; allowed: names of hardware profiles with their prices"
            )
        for name, price in self.gpu_hour.items():
            if not 0 <= price < math.inf:
                raise FigureError(f"gpu_hour.{name}", f"given {price!r}; allowed: a finite number of at least 0")
        check_steps(self.dram, "dram")

    def gpu_price(self, hardware: str) -> float:
        """Of one device for an hour.

        Raises:
            ValueError: this book has no price for it.
        """
        if hardware not in self.gpu_hour:
            raise ValueError(f"{self.name} has no price for {hardware!r}; it has {', '.join(sorted(self.gpu_hour))}")
        return self.gpu_hour[hardware]

    def dram_per_hour(self, dram_gib: float) -> float:
        """phi of DRAM: the price of an hour of this much; 0 for none."""
        _check_amount("dram_gib", dram_gib)
        if dram_gib == 0:
            return 0.0
        return step_at(self.dram, dram_gib, "DRAM").hour_price(dram_gib)

    def disk_per_hour(self, disk_class: str | None, disk_gib: float) -> float:
        """phi of disk: the price of an hour of one disk of this size; 0 for none, whatever the class."""
        _check_amount("disk_gib", disk_gib)
        return 0.0 if disk_gib == 0 else self._disk(disk_class).month_price(disk_gib) / self.hours_per_month

    def iops(self, disk_class: str, disk_gib: float) -> float:
        """Reads and writes a second that a disk of this class and size (above 0) does."""
        disk = self._disk(disk_class)
        return step_at(disk.steps, disk_gib, "a disk").iops + disk.extra_iops.amount

    def bandwidth_bytes_per_s(self, disk_class: str, disk_gib: float) -> float:
        """Bytes a second that a disk of this class and size (above 0) moves, reads and writes together."""
        disk = self._disk(disk_class)
        return (step_at(disk.steps, disk_gib, "a disk").mb_per_s + disk.extra_mb_per_s.amount) * 1e6

    def cost(
        self, gpu_hours: float, dram_gib: float, disk_class: str | None, disk_gib: float, hours: float, *, hardware: str
    ) -> float:
        """What a run costs.

        Args:
            gpu_hours: of all devices together. A slow configuration needs more of them for the same trace.
            dram_gib, disk_gib: of the store, for all the time.
            disk_class: of `disk_classes`; None only without a disk.
            hours: how long the store is there.
            hardware: name of the profile of the devices.

        Raises:
            ValueError: an amount is negative or not finite, a size is beyond what has a price, or a name is not known.
        """
        _check_amount("gpu_hours", gpu_hours)
        _check_amount("hours", hours)
        storage_per_hour = self.dram_per_hour(dram_gib) + self.disk_per_hour(disk_class, disk_gib)
        return self.gpu_price(hardware) * gpu_hours + storage_per_hour * hours

    def _disk(self, disk_class: str | None) -> DiskClass:
        if disk_class is None or disk_class not in self.disk_classes:
            raise ValueError(
                f"{self.name} has no disk class {disk_class!r}; it has {', '.join(sorted(self.disk_classes)) or 'none'}"
            )
        return self.disk_classes[disk_class]


def price_book_names() -> list[str]:
    """The books that come along."""
    return figure_file_names(_FOLDER)


def read_prices(name_or_path: str) -> PriceBook:
    """A price book of `tuning/prices/` by name, or of a YAML file by its path.

    Raises:
        FigureFileError: there is none, or it is refused; the message names the line.
    """
    return read_figure_file(find_figure_file(name_or_path, _FOLDER), PriceBook, _check_slips)


def _check_slips(book: PriceBook) -> None:
    for field in ("name", "currency", "source"):
        check_text(field, getattr(book, field))
    check_date("as_of", book.as_of)
    check_range("hours_per_month", book.hours_per_month, _HOURS_PER_MONTH)


def _check_amount(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}={value!r} is not allowed: give a finite number of at least 0")
