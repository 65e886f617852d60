"""What bounds llguidance's work on one grammar, and what is told of its errors. Without torch: the ingress's check of a
grammar and the workers' use of it share this."""

from __future__ import annotations

from llguidance import LLParserLimits

LIMITS = LLParserLimits(verbose_errors=False)
"""llguidance's own, which bound a step's time to tens of milliseconds. Verbose errors would have the grammar and the
answer so far in them, and errors reach logs."""
_LONGEST_REASON_CHARS = 300


def reason_of(error: str) -> str:
    """llguidance's error as one line, without the lines of the grammar that it quotes."""
    first, *others = error.splitlines() or [""]
    # Of a regular expression the first line only quotes it; what is wrong with it stands below.
    wrong = next((line.removeprefix("error: ") for line in others if line.startswith("error: ")), None)
    reason = first if wrong is None else f"a regular expression in it: {wrong}"
    return reason if len(reason) <= _LONGEST_REASON_CHARS else reason[:_LONGEST_REASON_CHARS] + "..."
