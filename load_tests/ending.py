"""Measurements that end before their time: what they have measured until then is kept, with the reason."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn, Protocol

from load_tests.measured_run import report_progress
from load_tests.server_process import ServerFailedError


class Measured(Protocol):
    """All runs that a program has made so far."""

    failure: str | None
    exit_code: int
    """Of a measurement that was told to end by a signal."""


@contextlib.contextmanager
def ending_kept(measured: Measured, failures: type[Exception]) -> Iterator[None]:
    """A server that fails, one of `failures`, or SystemExit ends what is done within, and no more; the reason is in
    `measured` then."""
    try:
        yield
    except (ServerFailedError, ConnectionError, failures) as error:
        measured.failure = str(error)
        report_progress(measured.failure)
    except SystemExit as ended:
        measured.failure, measured.exit_code = "it was told to end", int(ended.code or 0)


def exit_on_sigterm() -> None:
    """From now on SIGTERM raises SystemExit, once: its default action would end this process and leave its server
    behind."""
    signal.signal(signal.SIGTERM, _exit_on_signal)


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    # Once is enough: the way out ends the server and must not be cut short.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)
