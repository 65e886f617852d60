from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from load_tests import store_bandwidth
from load_tests.page_cache import PagesKeptError, drop_pages
from load_tests.store_bandwidth import PlainFiles, Rates
from load_tests.store_rig import LAYOUT, StoreRig, StoreRigError, new_keys, payload_of

MIB = 1024 * 1024


@pytest.fixture
def rig(ray_cluster: None, tmp_path: Path) -> Iterator[StoreRig]:
    rig = StoreRig(tmp_path / "store", part_blocks=2, limit_bytes=16 * MIB)
    yield rig
    rig.close()


def pages(num_blocks: int) -> np.ndarray:
    return np.zeros_like(np.resize(payload_of(1), (num_blocks, *payload_of(1).shape[1:])))


@pytest.mark.cluster
def test_each_tier_is_read_and_no_other_passes_for_it(rig: StoreRig) -> None:
    keys, target = new_keys(8), pages(8)
    assert rig.put(keys) > 0
    assert rig.flush() > 0
    assert sum(path.stat().st_size for path in rig.files()) >= 8 * LAYOUT.block_bytes
    assert rig.read(keys, "dram", target) > 0
    np.testing.assert_array_equal(target, np.concatenate([payload_of(2)] * 4))
    with pytest.raises(StoreRigError, match="not all of them in disk"):
        rig.read(keys, "disk", target)
    rig.leave_on_disk_only()
    with pytest.raises(StoreRigError, match="not all of them in dram"):
        rig.read(keys, "dram", target)
    assert rig.read(keys, "disk", target) > 0
    np.testing.assert_array_equal(target, np.concatenate([payload_of(2)] * 4))
    with pytest.raises(StoreRigError, match="8 of 9 blocks"):
        rig.read([*keys, *new_keys(1)], "dram", pages(9))
    rig.forget(keys)
    assert rig.files() == []
    with pytest.raises(StoreRigError, match="0 of 8 blocks"):
        rig.read(keys, "dram", target)


@pytest.mark.cluster
def test_a_damaged_file_is_no_figure(rig: StoreRig) -> None:
    keys = new_keys(8)
    rig.put(keys)
    rig.flush()
    rig.leave_on_disk_only()
    damaged = rig.files()[0]
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(StoreRigError, match=r"not all of 8 blocks came: \['part_checksum'"):
        rig.read(keys, "disk", pages(8))


def test_plain_files_hold_what_is_read(tmp_path: Path) -> None:
    files = PlainFiles(tmp_path / "plain", [5000, 1, 123_456])
    assert files.write() > 0
    assert [path.stat().st_size for path in files.paths] == [5000, 1, 123_456]
    files.paths[2].write_bytes(b"\x07" * 123_456)
    assert files.read() > 0
    assert files.write() > 0  # gives back what was read
    assert files.paths[2].read_bytes() == b"\x07" * 123_456
    files.paths[0].write_bytes(b"short")
    with pytest.raises(StoreRigError, match="ends at byte 5 of 5000"):
        files.read()


def test_ratios_are_those_of_the_same_repeat() -> None:
    samples = {
        "DRAM write": [1e9, 1e9],
        "DRAM read": [2e9, 9e9],
        "memory copy": [4e9, 10e9],
        "disk write": [1e9, 1e9],
        "plain write": [2e9, 1e9],
        "disk read": [1e9, 1e9],
        "plain read": [1e9, 1e9],
    }
    rows = {row["way"]: row for row in Rates(4 * MIB, samples).rows()}
    assert rows["DRAM read"]["ratio"] == {"median": 0.7, "low": 0.5, "high": 0.9, "coverage": 0.5}
    assert rows["DRAM read"]["gb_per_s"] == {"median": 5.5, "min": 2.0, "max": 9.0}
    assert rows["disk write"]["ratio"]["median"] == 0.75
    assert rows["disk write"]["baseline"] == "plain write"
    assert rows["disk read"]["part_mib"] == 4.0


def test_a_quick_run_from_the_command_line(tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    probe.write_bytes(b"x" * MIB)
    try:
        drop_pages([probe])
    except PagesKeptError:
        pytest.skip("the temporary folder lies in memory")
    disk, results = tmp_path / "disk", tmp_path / "results"
    disk.mkdir()
    options = ["--quick", "--folder", str(disk), "--save", "rates", "--save-in", str(results)]
    done = subprocess.run(
        [sys.executable, "-m", "load_tests.store_bandwidth", *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert [row["way"] for row in figures["rates"]] == ["DRAM write", "DRAM read", "disk write", "disk read"]
    (samples,) = figures["bytes_per_s"]
    assert samples.pop("part_bytes") == MIB
    assert {len(rates) for rates in samples.values()} == {2}
    for row in figures["rates"]:
        pairs = zip(samples[row["way"]], samples[row["baseline"]], strict=True)
        assert row["ratio"]["median"] == pytest.approx(statistics.median(a / b for a, b in pairs), abs=1e-4)
    assert list(disk.iterdir()) == []
    (markdown,) = results.glob("*-rates.md")
    assert "| 1 | disk read |" in markdown.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--repeats", "0"), "at least 1"),
        (("--part-mib", "3"), "a multiple of every"),
        (("--folder", "/nowhere/at/all"), "is no folder"),
    ],
)
def test_bad_options_exit_with_code_2(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        store_bandwidth.main([*options])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        store_bandwidth.main(["--help"])
    assert "python -m load_tests.store_bandwidth --folder" in capsys.readouterr().out
