"""What people type for workers and layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def numbers(text: str) -> list[int]:
    """`4-6` and `4,5,6` are [4, 5, 6].

    Raises:
        ValueError: anything else.
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part.strip())
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise ValueError(f"{text!r} is given; write numbers such as 5, 4-6 or 4,5,6")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found


def shown(values: Sequence[int]) -> str:
    """The shortest that `numbers` reads as these ascending ones."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][1] == value - 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def worker_called(name: str, workers: Iterable[str]) -> str:
    """The worker of this id, or the only one whose id begins so.

    Raises:
        ValueError: none, or several.
    """
    known = sorted(workers)
    if name in known:
        return name
    meant = [worker for worker in known if worker.startswith(name)]
    if len(meant) != 1:
        what = f"{', '.join(meant)} begin so" if meant else f"there are {', '.join(known) or 'none'}"
        raise ValueError(f"no single worker is called {name!r}: {what}")
    return meant[0]
