"""The folder that a job writes into: one job at a time, one study, and nothing of anybody else."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tuning.job.inputs import GOALS
from tuning.job.job_error import JobError

LOCK = "job.lock"
_WRITTEN = ("study.journal", "front.parquet", "ttl_policy.json", "serve_config.yaml", "summary.json", "report.html")
"""By jobs, beside inputs.json."""


@contextmanager
def taken_folder(out: Path, identity: dict[str, str]) -> Iterator[bool]:
    """Makes the folder for this study, or finds it begun with the same inputs; no other job may write there until the
    end of the block. The lock ends with the process, however that ends; its file stays.

    Gives whether the study there was begun for other goals: its simulations are the same, but the search is another.

    Raises:
        JobError: another job is writing there, or it holds a study of other inputs, or files that would be overwritten.
        OSError: it can't be made.
    """
    _refuse_files_of_others(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise JobError(
            f"{out} is no folder, or lies in a file: --out is the name of a folder, made if need be"
        ) from error
    with (out / LOCK).open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise JobError(
                f"another job is writing in {out}: give another --out, or wait for it (`fuser {out / LOCK}` tells its "
                "process)"
            ) from error
        yield _begin_or_go_on(out, identity)


def _refuse_files_of_others(out: Path) -> None:
    """Before the lock, which is a file, too. A job writes inputs.json first, so that one that begins is not refused."""
    others = [name for name in _WRITTEN if (out / name).exists()]
    if others and not (out / "inputs.json").exists():
        raise JobError(
            f"{out} has {', '.join(others)} in it, and no inputs.json of a job that wrote that: nothing is "
            "overwritten; give another --out"
        )


def _begin_or_go_on(out: Path, identity: dict[str, str]) -> bool:
    path = out / "inputs.json"
    if not path.exists():
        part = out / "inputs.json.part"  # a job that is killed here leaves no half of the file
        part.write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
        return False
    try:
        begun = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise JobError(f"{path} is not what a job wrote ({error}): give another --out") from error
    different = [name for name in identity if begun.get(name) != identity[name]]
    if set(different) - {GOALS}:
        raise JobError(
            f"{out} holds a study that was begun with another {', '.join(different)}: give another --out, or what it "
            "was begun with"
        )
    return GOALS in different
