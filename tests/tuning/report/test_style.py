"""Colours against WCAG 2.2: text at least 4.5 to 1, marks in plots at least 3 to 1."""

from __future__ import annotations

import pytest

from tuning.report.cache_plots import TIERS
from tuning.report.style import MARKS, PALETTES


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG defines it."""
    shares = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_black_on_white_is_21() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("palette", PALETTES.values(), ids=PALETTES)
@pytest.mark.parametrize("name", ["ink", "soft", "accent", "good", "bad"])
def test_text_can_be_read(palette: dict[str, str], name: str) -> None:
    assert contrast(palette[name], palette["page"]) >= 4.5
    assert contrast(palette[name], palette["surface"]) >= 4.5


@pytest.mark.parametrize("palette", PALETTES.values(), ids=PALETTES)
@pytest.mark.parametrize("colour", [*MARKS.values(), *(tier[2] for tier in TIERS)])
def test_marks_stand_out(palette: dict[str, str], colour: str) -> None:
    assert contrast(colour, palette["page"]) >= 3
