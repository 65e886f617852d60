"""Names of files that are hardly text (bytes that are none, lines, what HTML would read), and nobody who reads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from app.serve_config import read_serve_config
from tests.tuning.job.job_runs import arguments, make_files
from tuning.job.job import CHOSEN, main

ROOT = Path(__file__).resolve().parents[3]


def test_names_that_are_hardly_text_do_no_harm(tmp_path: Path) -> None:
    make_files(tmp_path)
    trace, out = os.fsdecode(b"n\xff\nb: <i>2\xc3\xa9.parquet"), os.fsdecode(b"out\xff")
    shutil.move(tmp_path / "trace.parquet", tmp_path / trace)
    command = [sys.executable, "-m", "tuning.job", *arguments(tmp_path, "--evaluations", "1", out=out, trace=trace)]
    # A terminal that takes hardly any character.
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}, check=False
    )
    assert ran.returncode == CHOSEN, ran.stderr
    assert b"predicted: " in ran.stdout
    assert read_serve_config(str(tmp_path / out / "serve_config.yaml")).settings.mode == "monolithic"
    assert "&lt;i&gt;2é" in (tmp_path / out / "report.html").read_text(encoding="utf-8")
    with (tmp_path / out / "front.parquet").open("rb") as front:
        assert pq.read_table(front).num_rows == 1


def test_that_nobody_reads_what_is_said_does_no_harm_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_files(tmp_path)
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w", encoding="utf-8") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        assert main(arguments(tmp_path, "--evaluations", "1")) == CHOSEN
    assert (tmp_path / "out" / "report.html").exists()
