"""The study's journal as a run that was cut off left it: a line that is not whole is dropped, other damage is said."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from tuning.job.job_error import JobError

_LOCK_SUFFIX: Final = ".lock"
"""Of the symbolic link that Optuna makes while it writes."""


def open_journal(path: Path) -> JournalStorage:
    """The storage in that file, which is made where there is none. The caller sees to it that nobody else writes there.

    A power cut or a full disk leaves a last line without its end. It is dropped, and what it was about is done again:
    Optuna by itself would append to it, which makes a line that it can never read.

    Optuna's own lock beside it can then only be that of a job that was killed. It is removed: Optuna would wait 30 s
    for it.

    Raises:
        JobError: another line is damaged. Nothing was written then.
        OSError: it can't be read or written.
    """
    path.with_name(path.name + _LOCK_SUFFIX).unlink(missing_ok=True)
    content = path.read_bytes() if path.exists() else b""
    whole, line_end, _ = content.rpartition(b"\n")
    for number, line in enumerate(whole.split(b"\n") if line_end else (), start=1):
        try:
            json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _damaged(path, number, error) from error
    backend = _CountedLines(str(path))
    try:
        storage = JournalStorage(backend)
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:  # as Optuna's replay meets it
        raise _damaged(path, backend.line, error) from error
    if len(content) > len(whole) + len(line_end):
        os.truncate(path, len(whole) + len(line_end))
    return storage


class _CountedLines(JournalFileBackend):
    """Knows which line is being replayed."""

    line = 0

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        for self.line, log in enumerate(super().read_logs(log_number_from), start=log_number_from + 1):
            yield log


def _damaged(path: Path, line: int, error: Exception) -> JobError:
    return JobError(
        f"{path}, line {line}: damaged, no entry of a study ({error!r}): give another --out, or put back a copy of the "
        "file"
    )
