from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from load_tests import compare_modes
from load_tests.comparison import Comparison, compare, ratio_table
from load_tests.measured_run import LoadOptions
from load_tests.server_process import RAY_ENVIRONMENT, server_command
from load_tests.workloads import Workload

SMALL = Workload("small", requests=6, unique_tokens=10, output_tokens=4)


@pytest.fixture
def command(server_script: Path, unused_port: int) -> Callable[..., str]:
    def make(*options: str) -> str:
        return shlex.join([sys.executable, str(server_script), "--port", str(unused_port), *options])

    return make


def row(mode: str, round_number: int, throughput: float | None, kept: bool = True) -> dict[str, Any]:
    return {
        "mode": mode,
        "round": round_number,
        "workload": "small",
        "output_tokens_per_s": throughput,
        "kept": kept,
    }


def test_pairs_are_those_of_the_same_round_with_both_runs_kept() -> None:
    rows = [row("a", 0, 10.0), row("b", 0, 20.0), row("a", 1, 10.0, kept=False), row("b", 1, 99.0)]
    rows += [row("a", 2, 8.0), row("b", 2, 77.0, kept=False), row("b", 2, 4.0), row("a", 3, None), row("b", 3, 1.0)]
    comparison = Comparison(("a", "b"), rows)
    assert comparison.pairs("small", "output_tokens_per_s", "b") == [(10.0, 20.0), (8.0, 4.0)]
    assert comparison.pairs("other", "output_tokens_per_s", "b") == []
    table, (record,) = ratio_table(comparison)
    assert record["ratio"] == {"median": 1.25, "low": 0.5, "high": 2.0, "coverage": 0.5, "pairs": 2}
    assert table.splitlines()[2] == "| small | output_tokens_per_s | b | 1.250 | 0.500-2.000 | 50 % | 2 |"


def test_modes_take_turns_with_the_same_prompts_in_a_round_and_new_ones_in_the_next(
    command: Callable[..., str], unused_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{unused_port}"
    specs = [server_command("one", command(), url), server_command("four", command("--tokens-per-chunk", "4"), url)]
    options = LoadOptions(in_flight=2, warm_up_requests=1, foreign_limit=1.0)
    comparison = compare(specs, [SMALL], rounds=2, seed=5, options=options)
    assert comparison.failure is None
    assert [(run["mode"], run["round"], run["seed"]) for run in comparison.rows] == [
        ("one", 0, 5),
        ("four", 0, 5),
        ("one", 1, 1005),
        ("four", 1, 1005),
    ]
    # Each mode's own server answered: one sends a token a chunk, the other four.
    assert [run["tokens_per_chunk"] for run in comparison.rows] == [1.0, 4.0, 1.0, 4.0]
    assert all(run["kept"] for run in comparison.rows)
    assert all("python openai_like_server.py" in run["cpu_s"] for run in comparison.rows)
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("round")] == [
        "round 1 of 2: starting one",
        "round 1 of 2: starting four",
        "round 2 of 2: starting one",
        "round 2 of 2: starting four",
    ]


def test_modes_may_take_turns_about(command: Callable[..., str], unused_port: int) -> None:
    url = f"http://127.0.0.1:{unused_port}"
    specs = [server_command("one", command(), url), server_command("two", command(), url)]
    options = LoadOptions(in_flight=2, warm_up_requests=0, foreign_limit=1.0)
    comparison = compare(specs, [SMALL], rounds=3, seed=5, options=options, turn_about=True)
    assert [run["mode"] for run in comparison.rows] == ["one", "two", "two", "one", "one", "two"]
    assert len(comparison.pairs("small", "output_tokens_per_s", "two")) == 3


def test_runs_with_foreign_load_are_repeated_with_another_seed_and_not_kept(
    command: Callable[..., str], unused_port: int
) -> None:
    specs = [server_command("one", command(), f"http://127.0.0.1:{unused_port}")]
    # Every share is above this limit.
    options = LoadOptions(in_flight=2, warm_up_requests=0, foreign_limit=-1.0)
    comparison = compare(specs, [SMALL], rounds=1, seed=5, options=options, attempts=3)
    assert [run["seed"] for run in comparison.rows] == [5, 6, 7]
    assert comparison.kept() == []


def test_a_mode_that_does_not_start_keeps_the_runs_made_so_far(command: Callable[..., str], unused_port: int) -> None:
    url = f"http://127.0.0.1:{unused_port}"
    specs = [server_command("good", command(), url), server_command("bad", command("--nonsense"), url)]
    options = LoadOptions(in_flight=2, warm_up_requests=0, foreign_limit=1.0)
    comparison = compare(specs, [SMALL], rounds=2, seed=5, options=options)
    assert [run["mode"] for run in comparison.rows] == ["good"]
    assert comparison.failure is not None
    assert "'bad'" in comparison.failure


def test_from_the_command_line(
    command: Callable[..., str], unused_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    code = compare_modes.main(
        [
            *("--command", f"steady={command()}", "--command", f"failing={command('--fail-every', '3')}"),
            *("--url", f"http://127.0.0.1:{unused_port}", "--rounds", "1", "--warm-up", "0", "--foreign-limit", "1"),
            *("-w", "custom", "--requests", "6", "--prompt-tokens", "10", "--output-tokens", "4", "--seed", "3"),
        ]
    )
    printed = capsys.readouterr().out
    figures = json.loads(printed.splitlines()[-1])
    assert code == 1
    assert [(run["mode"], run["failed"], run["kept"]) for run in figures["runs"]] == [
        ("steady", 0, True),
        ("failing", 2, False),
    ]
    # A run in which requests failed is nothing to compare with.
    assert figures["ratios"] == []
    assert [record["mode"] for record in figures["medians"]] == ["steady"]
    assert "ratio to steady" in printed


def test_ending_the_comparison_ends_the_server(
    command: Callable[..., str], unused_port: int, until: Callable[..., None], tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    arguments = [
        *("--command", f"a={command('--stray', str(pid_file), '--first-token-s', '600')}", "--command", "b=true"),
        *("--url", f"http://127.0.0.1:{unused_port}", "--rounds", "1", "-w", "balanced"),
    ]
    command_line = [sys.executable, "-m", "load_tests.compare_modes", *arguments]
    process = subprocess.Popen(command_line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        until(lambda: pid_file.exists() and pid_file.read_text() != "")
        (server,) = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert json.loads(out.splitlines()[-1])["failure"] == "it was told to end"
    assert not server.is_running()
    stray = int(pid_file.read_text())
    assert not psutil.pid_exists(stray) or psutil.Process(stray).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--command", "a=true"], "at least two"),
        (["--command", "a=true", "--command", "a=false"], "each with its own name"),
        (["--command", "true"], "not of the form NAME=VALUE"),
        (["--command", "a=true", "--serve", "b=no/such.yaml"], "there is no Serve config"),
        (["--command", "a=true", "--command", "b=true", "--url-of", "c=http://x"], "none of the modes"),
        (["--command", "a=true", "--command", "b=true", "--url-of", "c"], "NAME=VALUE"),
        (["--command", "a=true", "--command", "b=true", "--overlay-of", "a=x"], "none of the modes of --serve"),
        (["--command", "a=true", "--command", "b=true", "--rounds", "0"], "at least 1"),
    ],
)
def test_bad_options_exit_with_code_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        compare_modes.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_modes_keep_their_order_and_their_addresses(tmp_path: Path) -> None:
    config = tmp_path / "local.yaml"
    config.write_text("applications: []\n")
    arguments = argparse.Namespace(
        modes=[("command", "vllm", "python -m vllm"), ("serve", "mine", str(config))],
        url="http://127.0.0.1:8000",
        url_of=[("vllm", "http://127.0.0.1:8100")],
        overlay_of=[("mine", str(config))],
    )
    first, second = compare_modes._specs(arguments)
    assert (first.name, first.base_url, first.own_ray_session) == ("vllm", "http://127.0.0.1:8100", False)
    assert (second.name, second.base_url, second.own_ray_session) == ("mine", "http://127.0.0.1:8000", True)
    assert os.path.basename(second.command[-1]) == "local.yaml"
    assert first.environment == {}
    assert second.environment == {**RAY_ENVIRONMENT, "EQUIPOISE_OVERLAY": str(config)}
