"""Whose the folder of a job is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tuning.job.job_error import JobError
from tuning.job.out_folder import taken_folder

ROOT = Path(__file__).resolve().parents[3]
IDENTITY = {"trace": "1", "model": "2"}
HOLD = """
import sys
from pathlib import Path
from tuning.job.out_folder import taken_folder
with taken_folder(Path(sys.argv[1]), {"trace": "1", "model": "2"}):
    print("taken", flush=True)
    sys.stdin.read()
"""


def test_one_job_at_a_time_until_its_process_ends(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "out")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "taken\n"
    said = r"another job is writing in .*/out: give another --out, or wait"
    with pytest.raises(JobError, match=said), taken_folder(tmp_path / "out", IDENTITY):
        pass
    other.kill()
    other.communicate()
    with taken_folder(tmp_path / "out", IDENTITY):
        pass


def test_the_end_of_a_job_gives_the_folder_back(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), taken_folder(tmp_path, IDENTITY):
        raise ZeroDivisionError
    with taken_folder(tmp_path, IDENTITY):
        pass


@pytest.mark.parametrize("name", ["report.html", "serve_config.yaml", "study.journal"])
def test_files_that_are_not_of_the_study_are_not_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(JobError, match=rf"has {name} in it, .* give another --out"), taken_folder(tmp_path, IDENTITY):
        pass
    assert (tmp_path / name).read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("out", ["notes.txt", "notes.txt/out"])
def test_a_file_is_no_folder(tmp_path: Path, out: str) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with (
        pytest.raises(JobError, match=f"{out} is no folder, .* --out is the name"),
        taken_folder(tmp_path / out, IDENTITY),
    ):
        pass
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_other_files_may_lie_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with taken_folder(tmp_path, IDENTITY):
        pass


@pytest.mark.parametrize("text", ["", "5", "{", "[" * 100_000])
def test_inputs_that_no_job_wrote_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "inputs.json").write_text(text)
    with pytest.raises(JobError, match=r"inputs\.json is not what a job wrote"), taken_folder(tmp_path, IDENTITY):
        pass
    assert (tmp_path / "inputs.json").read_text() == text
