"""What is said of inputs before anything is simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tuning.job.job_runs import arguments, make_files
from tuning.job.inputs import read_inputs
from tuning.job.options import make_parser


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_files(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (("--baseline-dram-gib", "1024"), "dram_gib"),
        (("--disk-gib", "32:64:32/16", "--baseline-dram-gib", "5"), "dram_gib and disk_gib"),
        (("--ttl-s", "0:2:1"), "ttl_s"),  # the trace is longer, so that no time-to-live of the axis is no limit
    ],
)
def test_what_keeps_the_baseline_off_the_axes_is_named(folder: Path, more: tuple[str, ...], what: str) -> None:
    inputs = read_inputs(make_parser().parse_args(arguments(folder, *more)))
    assert inputs.baseline is None
    assert any(f"is not among what is searched, for {what}: nothing is compared" in each for each in inputs.warnings)
