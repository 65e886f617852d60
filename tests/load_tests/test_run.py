from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from load_tests import run

CUSTOM = ("-w", "custom", "--requests", "12", "--prompt-tokens", "20", "--output-tokens", "5")


def last_line(printed: str) -> Any:
    return json.loads(printed.splitlines()[-1])


def test_a_closed_loop_run_from_the_command_line(start_server: Callable[..., Any], tmp_path: Path) -> None:
    server = start_server("--token-s", "0.002")
    out = tmp_path / "runs.jsonl"
    command = [sys.executable, "-m", "load_tests.run", server.url, *CUSTOM, "--seed", "4", "--repeat", "2"]
    done = subprocess.run(
        [*command, "--in-flight", "3", "--warm-up", "2", "--cpu-of", "openai_like_server", "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = last_line(done.stdout)
    assert [row["seed"] for row in figures["runs"]] == [4, 5]
    for row in figures["runs"]:
        assert (row["requests"], row["failed"], row["short"]) == (12, 0, 0)
        assert (row["prompt_tokens"], row["output_tokens"]) == (12 * 20, 12 * 5)
        assert row["tokens_per_chunk"] == 1.0
        assert row["arrivals"] == "3 in flight"
        assert row["cpu_s"].keys() == {"load generator", "python openai_like_server.py"}
        assert row["foreign_cpu_share"] is not None
    assert [json.loads(line) for line in out.read_text().splitlines()] == figures["runs"]
    assert done.stdout.startswith("| workload | runs |")
    assert figures["medians"][0]["runs"] == 2
    assert "seed 4" in done.stderr
    # What the server saw: two requests to warm up, two runs of twelve, all different, three at once at most.
    seen = server.seen()
    prompts = [tuple(body["prompt"]) for body in seen["bodies"]]
    assert len(prompts) == 2 + 24
    assert len({prompt[:4] for prompt in prompts}) == 26
    assert {len(prompt) for prompt in prompts} == {20}
    assert seen["peak_in_flight"] == 3


def test_a_working_set_is_sent_once_before_it_is_measured(
    start_server: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server()
    size = ("-w", "working-set", "--pool-tokens", "512", "--pool-multiple", "4", "--warm-up", "0")
    assert run.main([server.url, *size, "--seed", "3"]) == 0
    (row,) = last_line(capsys.readouterr().out)["runs"]
    assert (row["requests"], row["prompt_tokens"]) == (20, 20 * 544)
    prefixes = [tuple(body["prompt"][:512]) for body in server.seen()["bodies"]]
    assert len(prefixes) == 4 + 20
    assert len(set(prefixes)) == len(set(prefixes[:4])) == 4


def test_an_open_loop_run(start_server: Callable[..., Any], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    times = tmp_path / "times"
    times.write_text("0\n0.01\n0.01\n0.05\n")
    server = start_server()
    code = run.main([server.url, *CUSTOM, "--times", str(times), "--slo-ttft-s", "60", "--slo-tpot-s", "60"])
    captured = capsys.readouterr()
    (row,) = last_line(captured.out)["runs"]
    assert code == 0
    assert (row["requests"], row["arrivals"], row["slo_attainment"]) == (4, "at given times", 1.0)
    assert row["foreign_cpu_share"] is None
    assert "server_cpu_ms_per_output_token" not in row


def test_failed_requests_give_exit_code_1(start_server: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    server = start_server("--fail-every", "4")
    code = run.main([server.url, *CUSTOM, "--warm-up", "0", "--in-flight", "2"])
    (row,) = last_line(capsys.readouterr().out)["runs"]
    assert code == 1
    assert row["failed"] == 3
    assert row["output_tokens"] == 9 * 5
    assert "out of order" in row["errors"]


def test_a_server_that_is_not_there(unused_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{unused_port}"
    assert run.main([url, *CUSTOM]) == 1
    assert "start the server first" in capsys.readouterr().err
    # With the model named, each request fails by itself and the run ends in good order.
    assert run.main([url, *CUSTOM, "--model", "tiny"]) == 1
    (row,) = last_line(capsys.readouterr().out)["runs"]
    assert row["failed"] == 12
    assert row["ttft_mean_ms"] is None


def test_text_prompts_over_the_chat_endpoint(
    start_server: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server()
    assert run.main([server.url, *CUSTOM, "--api", "chat", "--prompt", "text", "--warm-up", "0"]) == 0
    (row,) = last_line(capsys.readouterr().out)["runs"]
    assert row["output_tokens"] == 60
    assert {len(body["messages"][0]["content"].split()) for body in server.seen()["bodies"]} == {20}


def test_results_are_saved(
    start_server: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = start_server()
    assert run.main([server.url, *CUSTOM, "--seed", "9", "--save", "small", "--save-in", str(tmp_path)]) == 0
    (markdown,) = tmp_path.glob("*-small.md")
    (saved,) = tmp_path.glob("*-small.json")
    assert "--seed 9 --save small" in markdown.read_text()
    assert json.loads(saved.read_text())["figures"] == last_line(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--repeat", "0"), "--repeat is 0"),
        (("--cpu-of", "ray::("), "no regular expression"),
        (("--scale", "0"), "argument --scale: '0' is not allowed"),
        (("-w", "nonsense"), "invalid choice"),
    ],
)
def test_bad_options_exit_with_code_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run.main(["http://127.0.0.1:1", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run.main(["--help"])
    assert stopped.value.code == 0
    assert "python -m load_tests.run http://127.0.0.1:8000 -w prefill-heavy" in capsys.readouterr().out
