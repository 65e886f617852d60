"""What became of the rows of a file: read, kept, dropped, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

MAX_SHOWN: Final = 10
"""Problems that are kept word for word; the others are only counted."""


def counted(number: int, noun: str) -> str:
    """A number with what it counts: "1 row", "2,000 rows"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in the file that should not be there."""

    line: int
    """From 1; in a Parquet file, the row."""
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.message}"


@dataclass(slots=True)
class ReadReport:
    """Filled while a file is read; whoever asked for the trace owns it then."""

    path: str
    format: str = ""
    """Name of the format that it was read as."""
    rows_read: int = 0
    """Rows with something in them, without a header."""
    rows_kept: int = 0
    """Requests of the trace."""
    problems: list[Problem] = field(default_factory=list)
    """The first `MAX_SHOWN`."""
    reasons: Counter[str] = field(default_factory=Counter)
    """How many problems of each sort, all of them."""
    warnings: list[str] = field(default_factory=list)
    """What is odd and was dealt with; no row is dropped for it."""
    block_tokens: int | None = None
    """Tokens a block; None without reuse information."""
    block_tokens_from: str = ""
    """Where that number is from, in words."""
    shift_s: float = 0.0
    """Clock of the first request in the file, which became 0."""

    @property
    def rows_dropped(self) -> int:
        return self.rows_read - self.rows_kept

    @property
    def num_problems(self) -> int:
        return self.reasons.total()

    def add(self, line: int, reason: str, message: str) -> None:
        """Note a problem."""
        self.reasons[reason] += 1
        if len(self.problems) < MAX_SHOWN:
            self.problems.append(Problem(line, message))

    def problem_lines(self) -> Iterator[str]:
        """The problems as text: each that is kept, then the counts where there are more."""
        for problem in self.problems:
            yield f"{self.path}: {problem}"
        if self.num_problems > len(self.problems):
            more = counted(self.num_problems - len(self.problems), "more problem")
            yield f"{self.path}: and {more}; all of them by sort:"
            for reason, count in self.reasons.most_common():
                yield f"{self.path}:   {count:,} x {reason}"
