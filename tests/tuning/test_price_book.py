from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.figure_file import FigureFileError
from tuning.price_book import DiskClass, Extra, PriceBook, read_prices
from tuning.price_steps import DiskStep, DramStep, step_at

FOLDER = Path(__file__).parents[2] / "tuning" / "prices"

BOOK = PriceBook(
    name="toy",
    currency="USD",
    as_of="2026-01-01",
    source="made up",
    hours_per_month=100.0,
    gpu_hour={"fast": 4.0, "slow": 1.5},
    dram=(DramStep(0, 512, gib_hour=0.01), DramStep(512, 2048, hour=3.0, gib_hour=0.005)),
    disk_classes={
        "tiers": DiskClass(
            (
                DiskStep(0, 128, iops=500, mb_per_s=100, month=20.0),
                DiskStep(128, 256, iops=1100, mb_per_s=125, month=38.0),
                DiskStep(256, 1024, iops=5000, mb_per_s=200, month=30.0, gib_month=0.1),
            )
        ),
        "provisioned": DiskClass(
            (DiskStep(0, 16384, iops=3000, mb_per_s=125, gib_month=0.08),),
            extra_iops=Extra(13000, 0.005),
            extra_mb_per_s=Extra(875, 0.04),
        ),
    },
)

TEXT = """\
name: mine
currency: EUR
as_of: 2026-11-29
source: our own invoices
hours_per_month: 730
gpu_hour: {a100-80g: 1.2}
dram:
  - {above_gib: 0, up_to_gib: 1024, gib_hour: 0.002}
disk_classes:
  nvme:
    steps:
      - {above_gib: 0, up_to_gib: 1000, month: 10, iops: 100000, mb_per_s: 3000}
      - {above_gib: 1000, up_to_gib: 2000, month: 20, iops: 100000, mb_per_s: 3000}
"""

amounts = st.floats(0, 1e5)
sizes = st.floats(0, 1024)


def test_a_bill_by_hand() -> None:
    # 40 device hours at 4; for 10 hours 1000 GiB of DRAM at 3 + 5 an hour, and 200 GiB of disk at 38 a month of 100.
    assert BOOK.cost(40, 1000, "tiers", 200, 10, hardware="fast") == pytest.approx(160 + 80 + 3.8)
    assert BOOK.cost(40, 0, None, 0, 10, hardware="slow") == pytest.approx(60)
    assert BOOK.cost(0, 100, None, 0, 10, hardware="slow") == pytest.approx(10)


def test_provisioned_performance_costs_whatever_the_size() -> None:
    # 13,000 more operations at 0.005, 875 MB/s at 0.04, and 0.08 for each GiB of a month of 100 hours.
    assert BOOK.disk_per_hour("provisioned", 1000) == pytest.approx((65 + 35 + 80) / 100)
    assert BOOK.disk_per_hour("provisioned", 1) == pytest.approx((65 + 35 + 0.08) / 100)
    assert BOOK.iops("provisioned", 1000) == 16000
    assert BOOK.bandwidth_bytes_per_s("provisioned", 1000) == 1e9


@pytest.mark.parametrize(
    ("size_gib", "month", "iops", "bytes_per_s"),
    [
        (0.001, 20.0, 500, 100e6),
        (128, 20.0, 500, 100e6),
        (128.001, 38.0, 1100, 125e6),
        (256, 38.0, 1100, 125e6),
        (257, 30.0 + 25.7, 5000, 200e6),
        (1024, 30.0 + 102.4, 5000, 200e6),
    ],
)
def test_a_size_at_an_edge_is_in_the_step_that_ends_there(
    size_gib: float, month: float, iops: float, bytes_per_s: float
) -> None:
    assert BOOK.disk_per_hour("tiers", size_gib) * 100 == pytest.approx(month)
    assert BOOK.iops("tiers", size_gib) == iops
    assert BOOK.bandwidth_bytes_per_s("tiers", size_gib) == bytes_per_s


def test_dram_by_steps() -> None:
    assert [BOOK.dram_per_hour(gib) for gib in (0, 512, 513, 2048)] == pytest.approx([0, 5.12, 3 + 2.565, 3 + 10.24])


def test_what_is_not_there_costs_nothing() -> None:
    assert BOOK.disk_per_hour("tiers", 0) == 0.0
    assert BOOK.disk_per_hour(None, 0) == 0.0


@settings(max_examples=100)
@given(
    gpu_hours=amounts,
    more=amounts,
    dram=sizes,
    disk=sizes,
    hours=amounts,
    name=st.sampled_from(["tiers", "provisioned"]),
)
def test_the_bill_never_falls_when_there_are_more_device_hours_or_hours(
    gpu_hours: float, more: float, dram: float, disk: float, hours: float, name: str
) -> None:
    bill = BOOK.cost(gpu_hours, dram, name, disk, hours, hardware="fast")
    assert bill >= 0
    assert BOOK.cost(gpu_hours + more, dram, name, disk, hours, hardware="fast") >= bill
    assert BOOK.cost(gpu_hours, dram, name, disk, hours + more, hardware="fast") >= bill


@given(edges=st.lists(st.integers(1, 10_000), min_size=1, max_size=8, unique=True), size=st.integers(1, 10_000))
def test_exactly_one_step_holds_a_size(edges: list[int], size: int) -> None:
    edges.sort()
    steps = [DramStep(low, high, hour=1) for low, high in zip([0, *edges], edges, strict=False)]
    holding = [step for step in steps if step.above_gib < size <= step.up_to_gib]
    if size <= edges[-1]:
        assert [step_at(steps, size, "DRAM")] == holding
    else:
        with pytest.raises(ValueError, match=f"DRAM of {size} GiB has no price: sizes end at {edges[-1]} GiB"):
            step_at(steps, size, "DRAM")


@pytest.mark.parametrize("amount", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("which", range(4))
def test_impossible_amounts_are_refused(amount: float, which: int) -> None:
    amounts = [1.0, 1.0, 1.0, 1.0]
    amounts[which] = amount
    gpu_hours, dram_gib, disk_gib, hours = amounts
    with pytest.raises(ValueError, match="is not allowed: give a finite number of at least 0"):
        BOOK.cost(gpu_hours, dram_gib, "tiers", disk_gib, hours, hardware="fast")


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match="toy has no price for 'h200'; it has fast, slow"):
        BOOK.cost(1, 0, None, 0, 1, hardware="h200")
    with pytest.raises(ValueError, match="toy has no disk class 'tier'; it has provisioned, tiers"):
        BOOK.disk_per_hour("tier", 10)
    with pytest.raises(ValueError, match="toy has no disk class None"):
        BOOK.disk_per_hour(None, 10)
    with pytest.raises(ValueError, match="toy has no disk class 'tiers'; it has none"):
        replace(BOOK, disk_classes={}).disk_per_hour("tiers", 10)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    book = read(tmp_path, TEXT)
    assert (book.currency, book.as_of) == ("EUR", "2026-11-29")
    assert book.cost(10, 100, "nvme", 1500, 73, hardware="a100-80g") == pytest.approx(12 + 0.2 * 73 + 2.0)


def test_the_book_in_the_documentation(tmp_path: Path) -> None:
    page = (FOLDER.parents[1] / "docs" / "hardware-and-prices.md").read_text(encoding="utf-8")
    book = read(tmp_path, page.split("```yaml\n")[1].split("```")[0])
    # DRAM that came with the devices is free, and the first step beyond it is not.
    assert book.cost(10, 1024, "nvme", 3840, 730, hardware="a100-80g") == pytest.approx(12 + 25)
    assert book.dram_per_hour(2048) == pytest.approx(0.5 + 2.048)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("above_gib: 1000,", "above_gib: 1001,", r"line 13: .*steps.1: above_gib is 1001, .*ends at 1000 GiB: a gap"),
        ("above_gib: 1000,", "above_gib: 900,", r"line 13: .*steps.1: .*: an overlap; give above_gib: 1000"),
        ("up_to_gib: 2000", "up_to_gib: 1000", r"line 13: .*steps.1: up_to_gib is 1000; allowed: more than above_gib"),
        ("up_to_gib: 2000", "up_to_gib: .nan", r"line 13: .*steps.1: up_to_gib is nan"),
        ("above_gib: 0, up_to_gib: 1024", "above_gib: 1, up_to_gib: 1024", r"line 8: dram.0: .*begin at 0 GiB: a gap"),
        ("month: 20", "month: -20", r"line 13: .*steps.1.month: given -20.0; allowed: a finite number of at least 0"),
        ("gib_hour: 0.002", "gib_hour: .inf", r"line 8: dram.0.gib_hour: given inf"),
        ("a100-80g: 1.2", "a100-80g: -1.2", r"line 6: gpu_hour.a100-80g: given -1.2"),
        ("{a100-80g: 1.2}", "{}", r"line 6: gpu_hour: no device has a price"),
        ("hours_per_month: 730", "hours_per_month: 0", r"line 5: hours_per_month: given 0.0; allowed: .* above 0"),
        ("month: 20, iops: 100000", "month: 20, iops: 0", r"line 13: .*steps.1: iops or mb_per_s is 0"),
        (
            "up_to_gib: 2000, month",
            "up_to_gib: 2000, months",
            r"line 13: .*steps.1.months: unknown key; allowed: above",
        ),
        ("currency: EUR\n", "", r"'currency' is missing"),
        ("currency: EUR", "currency: ' '", r"line 2: currency: given ' '; allowed: text that says something"),
        ("source: our own invoices", "source: ''", r"line 4: source: given ''; allowed: text"),
        (
            ", gib_hour: 0.002",
            "",
            r"line 8: dram.0: the step has no price: give hour, gib_hour or both, and 0 for what",
        ),
        (", gib_hour: 0.002", ", hour: null", r"line 8: dram.0: the step has no price"),
        (
            "month: 20, ",
            "",
            r"line 13: disk_classes.nvme.steps.1: the step has no price: give month, gib_month or both",
        ),
        ("hours_per_month: 730", "hours_per_month: 8760", r"line 5: hours_per_month: given 8760; allowed: 672 to 744"),
        ("as_of: 2026-11-29", "as_of: last spring", r"line 3: as_of: given 'last spring', no date .*as YYYY-MM-DD"),
        ("as_of: 2026-11-29", "as_of: 2026-11", r"line 3: as_of: given '2026-11', no date .*as YYYY-MM-DD"),
        ("as_of: 2026-11-29", "as_of: 2026-02-30", r"line 3: as_of: given '2026-02-30', no date \(day is out of range"),
        (
            "as_of: 2026-11-29",
            "as_of: 9999-01-01",
            r"line 3: as_of: given 9999-01-01, which is to come; allowed: a day",
        ),
        ("  - {above_gib: 0, up_to_gib: 1024, gib_hour: 0.002}", "  []", r"line 7: dram: there are no steps"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_line(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in TEXT
    with pytest.raises(FigureFileError, match=message):
        read(tmp_path, TEXT.replace(old, new))


@pytest.mark.parametrize("days", [-1, 0, 2])
def test_a_day_is_to_come_when_it_is_today_nowhere(days: int, tmp_path: Path) -> None:
    day = str((datetime.now(UTC) + timedelta(days=days)).date())
    text = TEXT.replace("as_of: 2026-11-29", f"as_of: {day}")
    if days > 1:
        with pytest.raises(FigureFileError, match=f"given {day}, which is to come"):
            read(tmp_path, text)
    else:
        assert read(tmp_path, text).as_of == day


def test_a_step_may_say_that_it_is_free(tmp_path: Path) -> None:
    book = read(tmp_path, TEXT.replace("gib_hour: 0.002", "gib_hour: 0"))
    assert (book.dram_per_hour(0), book.dram_per_hour(100)) == (0, 0)


def test_an_amount_of_performance_is_checked(tmp_path: Path) -> None:
    with pytest.raises(FigureFileError, match=r"line 14: disk_classes.nvme.extra_iops.amount: given -1.0"):
        read(tmp_path, TEXT + "    extra_iops: {amount: -1, each_month: 1}\n")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_books_that_come_along_price_every_class_and_device(path: Path) -> None:
    book = read_prices(path.stem)
    assert book.name == path.stem
    for hardware in book.gpu_hour:
        for name in book.disk_classes:
            assert book.cost(1, 1024, name, 1024, 1, hardware=hardware) > 0
            assert book.iops(name, 1024) >= 3000
            assert book.bandwidth_bytes_per_s(name, 1024) >= 100e6


def test_the_bill_of_a_large_disk_at_each_cloud() -> None:
    # 2 TiB: gp3 at 0.08 a GiB, with all that can be provisioned for 385 and 75; a P40.
    aws, azure = read_prices("aws-us-east-1"), read_prices("azure-east-us")
    assert aws.disk_per_hour("gp3", 2048) * 730 == pytest.approx(163.84)
    assert aws.disk_per_hour("gp3-2000", 2048) * 730 == pytest.approx(163.84 + 385 + 75)
    assert (aws.iops("gp3-2000", 2048), aws.bandwidth_bytes_per_s("gp3-2000", 2048)) == (80_000, 2e9)
    assert azure.disk_per_hour("premium-ssd", 2048) * 730 == pytest.approx(259.05)
    assert azure.disk_per_hour("premium-ssd", 2049) * 730 == pytest.approx(495.57)


def read(folder: Path, text: str) -> PriceBook:
    path = folder / "prices.yaml"
    path.write_text(text, encoding="utf-8")
    return read_prices(str(path))
