"""How every `python -m` entry ends when what it prints cannot be written: in one way, that of other Unix programs."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

CLOSED_PIPE = 128 + signal.SIGPIPE
"""What a shell says of a program that went on writing to a pipe whose reader had gone (`| head`)."""
NOT_PRINTED = 2

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def status_of(main: Callable[[], int | None]) -> int:
    """The exit status of a program: that of `main` (None: 0), but `CLOSED_PIPE`, without a word, where nobody reads its
    output any more, and `NOT_PRINTED`, with a line on the error output, where there is no room for it."""
    try:
        try:
            return main() or 0
        finally:
            print(end="", flush=True)  # here and not when Python ends, which would complain in its own way
    except BrokenPipeError:
        stop_printing()
        return CLOSED_PIPE
    except OSError as error:
        if error.errno not in _FULL:
            raise
        stop_printing()
        with suppress(OSError):
            print(f"the output cannot be written: {error.strerror}", file=sys.stderr)
        return NOT_PRINTED


def stop_printing() -> None:
    """What is printed from now on, and what waits to be, goes nowhere. Else Python complains of it once more while it
    ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
