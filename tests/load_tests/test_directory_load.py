from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kv.directory_client import DirectoryClient
from load_tests import directory_load
from load_tests.directory_load import LoadedDirectory, too_large
from load_tests.index_size import IndexSize
from tests.store_cell import eventually


@pytest.fixture(params=[1, 2], ids=["1 shard", "2 shards"])
def directory(ray_cluster: None, request: pytest.FixtureRequest) -> Iterator[LoadedDirectory]:
    directory = LoadedDirectory(num_blocks=5000, seed=1, num_shards=request.param)
    yield directory
    directory.close()


def stats(directory: LoadedDirectory) -> dict[str, Any]:
    return asyncio.run(DirectoryClient(directory._shards).stats())


@pytest.mark.cluster
def test_the_directory_is_asked_so_often_and_nothing_is_left_held(directory: LoadedDirectory) -> None:
    assert stats(directory)["num_blocks"] == 5000
    window = directory.measure("lookup", rate_per_s=200.0, seconds=0.5, seed=1)
    eventually(lambda: stats(directory)["num_leases"] == 0)  # nobody waits for the releases
    after = stats(directory)
    assert window.calls == after["queries"] == 100
    assert after["queried_blocks"] > 0.9 * 100 * 250  # the last chain is shorter
    assert window.hit_share == pytest.approx(after["hit_blocks"] / after["queried_blocks"], abs=0.02)
    assert 0.6 < window.hit_share < 1.0
    assert 80 <= after["leases_granted"] <= 100  # so few blocks have not all the roots: some prompts find nothing
    assert 0 < window.p50_ms <= window.p99_ms <= window.max_ms
    assert window.cpu_share > 0

    bare = directory.measure("bare call", rate_per_s=200.0, seconds=0.1, seed=1)
    assert (bare.calls, bare.hit_share) == (20, 0.0)
    assert stats(directory)["queries"] == 100


@pytest.mark.cluster
def test_lateness_is_part_of_the_latency(directory: LoadedDirectory) -> None:
    # More calls at once than anybody can send at their time: the last ones wait for the first.
    window = directory.measure("lookup", rate_per_s=1e6, seconds=3e-4, seed=1)
    assert window.calls == 300
    assert window.max_ms > window.lateness_p99_ms > 0.5


def test_a_quick_run_from_the_command_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "load_tests.directory_load", "--quick", "--save", "d", "--save-in", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert [window["kind"] for window in figures["windows"]] == ["bare call", "lookup"]
    assert figures["lookup_to_bare_call_p50"]["pairs"] == 1
    small, middle, large = figures["index"]
    assert (small["num_extents"], small["num_blocks"]) == (20_000, 20_000)
    assert 20_000 / 30 <= large["num_extents"] < middle["num_extents"] < 2500
    # A key alone takes 65 bytes and its place in a dictionary; every extent has much more than that.
    assert large["bytes_per_block"] > 80
    assert small["both_bytes"] > small["dram_bytes"] > 1.5 * large["dram_bytes"]
    (markdown,) = tmp_path.glob("*-d.md")
    assert "| 20,000 | 30 |" in markdown.read_text()


def test_no_index_may_take_more_than_the_limit() -> None:
    sizes = [IndexSize(10**6, 10**6 // each, each, 10, 10**9 + over) for each in (1, 10, 30) for over in (0, 1)]
    assert too_large(sizes) == sizes[1::2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "0"), "argument --rate: '0' is not allowed"),
        (("--seconds", "nan"), "argument --seconds: 'nan' is not allowed"),
        (("--repeats", "0"), "must be above 0"),
    ],
)
def test_bad_options_exit_with_code_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        directory_load.main(list(arguments))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
