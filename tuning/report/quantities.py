"""Numbers as people read them, each with its unit. The space between the two does not break."""

from __future__ import annotations

import math
import re

NOT_SEEN = "not seen"
_SPACE = "\u00a0"
_CURRENCY = re.compile("[A-Z]{3}")


def number(value: float, digits: int = 4) -> str:
    """Whole numbers in full, others with at most so many significant digits."""
    if value == int(value):
        return _signed(f"{value:,.0f}")
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    if decimals > 9:
        return _signed(f"{value:.{digits - 1}e}")
    text = f"{value:,.{max(0, decimals)}f}"
    return _signed(text.rstrip("0").rstrip(".") if "." in text else text)


def with_unit(value: float | int | str | None, unit: str) -> str:
    """A value of a setting, an objective or a figure; None was not seen.

    Three capitals are a currency. Short times are in ms.
    """
    if value is None:
        return NOT_SEEN
    if _CURRENCY.fullmatch(unit) and not isinstance(value, str):
        return money(value, unit)
    if unit == "s" and not isinstance(value, str) and 0 < abs(value) < 0.1:
        return f"{number(1000 * value)}{_SPACE}ms"
    text = value if isinstance(value, str) else number(value)
    return f"{text}{_SPACE}{unit}" if unit else text


def money(value: float, currency: str) -> str:
    """An amount: with cents below 1,000, without above, and two significant digits below 0.1."""
    if value != 0 and abs(value) < 0.1:
        return f"{currency}{_SPACE}{number(value, 2)}"
    return f"{currency}{_SPACE}{_signed(f'{value:,.2f}' if abs(value) < 1000 else f'{value:,.0f}')}"


def percent(share: float) -> str:
    """A share of something."""
    return f"{_signed(f'{100 * share:.1f}')}{_SPACE}%"


def change(value: float, before: float) -> str:
    """How much more or less than before, as a share of it; what was 0 has none."""
    if before == 0:
        return "unchanged" if value == 0 else "was 0"
    gain = 100 * (value / before - 1)
    return f"±0.0{_SPACE}%" if round(gain, 1) == 0 else f"{_signed(f'{gain:+.1f}')}{_SPACE}%"


def gib(size_bytes: float) -> str:
    """A size in GiB."""
    return f"{number(size_bytes / 2**30)}{_SPACE}GiB"


def gb_per_s(bytes_per_s: float) -> str:
    """A rate in 10^9 bytes a second."""
    return f"{number(bytes_per_s / 1e9)}{_SPACE}GB/s"


def duration(seconds: float) -> str:
    """Seconds, and hours where there are many."""
    return with_unit(seconds, "s") + (f" ({seconds / 3600:,.1f}{_SPACE}h)" if seconds >= 3600 else "")


def _signed(text: str) -> str:
    """With a minus sign that is as wide as a plus."""
    return text.replace("-", "−")
