from __future__ import annotations

import dataclasses

import pytest

from tests.tuning.report.small_job import FAST, FRUGAL, small_job
from tuning.report.content import LeftOut
from tuning.report.findings import by_reason, extremes, per_million_tokens
from tuning.report.quantities import change, duration, money, number, percent, with_unit
from tuning.report.wording import capital

JOB = small_job()


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (number(0), "0"),
        (number(8_190_735_360), "8,190,735,360"),
        (number(1234.56), "1,235"),
        (number(12.3456), "12.35"),
        (number(1.1), "1.1"),
        (number(0.00012345), "0.0001234"),
        (number(1.5e-12), "1.500e−12"),
        (number(-2.5), "−2.5"),
        (with_unit(None, "s"), "not seen"),
        (with_unit(2.0, "s"), "2 s"),
        (with_unit(0.0215, "s"), "21.5 ms"),
        (with_unit(0.1, "s"), "0.1 s"),
        (with_unit("nvme", ""), "nvme"),
        (with_unit(4.72, "EUR"), "EUR 4.72"),
        (money(999.5, "USD"), "USD 999.50"),
        (money(12_345.6, "USD"), "USD 12,346"),
        (money(0.0123, "USD"), "USD 0.012"),
        (money(0, "USD"), "USD 0.00"),
        (percent(0.3664), "36.6 %"),
        (change(0.8, 2.0), "−60.0 %"),
        (change(5500, 5000), "+10.0 %"),
        (change(1.0001, 1.0), "±0.0 %"),
        (change(0, 0), "unchanged"),
        (change(21.865, 1.0), "+2,086.5 %"),
        (change(1, 0), "was 0"),
        (duration(5400), "5,400 s (1.5 h)"),
    ],
)
def test_numbers_as_they_are_shown(shown: str, expected: str) -> None:
    assert shown.replace("\u00a0", " ") == expected


def test_extreme_points_are_the_best_of_the_front_in_each_objective() -> None:
    # Both of the front have the same throughput: what it costs is what the cheaper one costs.
    latency, throughput, cost = (point for _, point in extremes(JOB))
    assert latency is JOB.points[FAST]
    assert throughput is cost is JOB.points[FRUGAL]


def test_tokens_cost_what_an_hour_costs_over_those_of_an_hour() -> None:
    # EUR 4.72 for 5,500 * 3,600 = 19.8 million tokens.
    assert per_million_tokens(JOB.points[FRUGAL]) == pytest.approx(4.72 / 19.8)
    idle = dataclasses.replace(JOB.points[FRUGAL].figures, tokens_per_s=None)
    assert per_million_tokens(dataclasses.replace(JOB.points[FRUGAL], figures=idle)) is None


def test_reasons_that_differ_in_numbers_are_one() -> None:
    reasons = [
        "gain 0.10% and 2e-05",
        "budget",
        "gain 0.05% and 1e-05",
        "no # 7 here",
        "gain 0.07% and 3e-05",
        "budget",
    ]
    assert by_reason([LeftOut({}, reason) for reason in reasons]) == [
        ("gain 0.05 to 0.10% and 1e-05 to 3e-05", 3),
        ("budget", 2),
        ("no # # here", 1),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("block_tokens is 256", "block_tokens is 256"),
        ("the clock of max_batch_tokens", "The clock of max_batch_tokens"),
        ("", ""),
    ],
)
def test_a_sentence_begins_with_a_capital_unless_with_the_name_of_a_setting(text: str, expected: str) -> None:
    assert capital(text) == expected
