from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from load_tests import link_speed
from load_tests.link_speed import bandwidth_table, round_trip_table

ROOT = Path(__file__).resolve().parents[2]


def test_a_quick_run_measures_every_way(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "load_tests.link_speed", "--quick", "--save", "tried", "--save-in", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *table, figures = done.stdout.splitlines()
    assert [line.split(" | ")[0] for line in table if line.startswith("| link")] == ["| link"]
    measured = json.loads(figures)
    assert {way: len(times) for way, times in measured["round_trip_s"].items()} == {"link": 40, "socket": 40}
    assert all(len(rates) == 2 and min(rates) > 0 for rates in measured["bytes_per_s"]["1"].values())
    assert set(measured["bytes_per_s"]["1"]) == {"link", "socket", "memory copy"}
    assert len(list(tmp_path.iterdir())) == 2


def test_tables_by_hand() -> None:
    # 0, 1, ... 100 ms: each percentile is its own rank.
    times = [index / 1000 for index in range(101)]
    assert round_trip_table({"link": times}).splitlines()[-1] == "| link | 101 | 10.000 | 50.000 | 99.000 |"
    rows = bandwidth_table({4: {"link": [1e9, 2e9, 3e9], "socket": [2e9, 2e9, 2e9], "memory copy": [1e10] * 3}})
    # Ratios 0.5, 1, 1.5 and 0.1, 0.2, 0.3; extremes of three hold the median with 1 - 2 / 8.
    assert rows.splitlines()[-2:] == [
        "| 4 | 2.00 (1.00-3.00) | socket | 2.00 (2.00-2.00) | 1.00 | 0.50-1.50 | 75 % |",
        "| 4 | 2.00 (1.00-3.00) | memory copy | 10.00 (10.00-10.00) | 0.20 | 0.10-0.30 | 75 % |",
    ]


@pytest.mark.parametrize("arguments", [["--repeats", "0"], ["--mib", "129"], ["--small-bytes", "2000000"]])
def test_what_cannot_be_measured_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        link_speed.main(arguments)
    assert arguments[0] in capsys.readouterr().err
