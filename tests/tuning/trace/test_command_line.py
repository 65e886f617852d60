from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tuning.trace.__main__ import main

ROOT = Path(__file__).resolve().parents[3]
FIXTURES = ROOT / "tests" / "fixtures" / "traces"
MOONCAKE = str(FIXTURES / "mooncake_conversation_head.jsonl")
AZURE = str(FIXTURES / "azure_llm_2023_conv_head.csv")


@pytest.fixture
def broken(tmp_path: Path) -> str:
    """A trace with one bad row of three."""
    lines = Path(MOONCAKE).read_text().splitlines()[:2]
    path = tmp_path / "broken.jsonl"
    path.write_text("\n".join([lines[0], "{}", lines[1]]))
    return str(path)


def test_stats(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["stats", MOONCAKE, "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "requests        200, of which 0 follow another" in out
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert main(["stats", MOONCAKE, "--html", str(page)]) == 2
    assert "is there already" in capsys.readouterr().err


def test_stats_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", MOONCAKE, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["requests"] == 200
    assert figures["reuse"]["block_tokens"] == 512
    assert main(["stats", AZURE, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reuse"] is None


def test_validate(capsys: pytest.CaptureFixture[str], broken: str) -> None:
    assert main(["validate", MOONCAKE]) == 0
    assert "200 rows, 200 kept, 0 problems, blocks of 512 tokens" in capsys.readouterr().out
    assert main(["validate", AZURE]) == 0
    assert "no reuse information" in capsys.readouterr().out
    assert main(["validate", broken]) == 1
    captured = capsys.readouterr()
    assert "line 2: timestamp is missing" in captured.err
    assert "3 rows, 2 kept, 1 problem, " in captured.out


def test_problems_end_a_strict_command_and_not_a_lenient_one(
    capsys: pytest.CaptureFixture[str], broken: str, tmp_path: Path
) -> None:
    out = tmp_path / "out.parquet"
    assert main(["convert", broken, str(out)]) == 1
    assert not out.exists()
    assert main(["stats", broken]) == 1
    assert "3 rows, 0 kept, 1 problem" in capsys.readouterr().err
    assert main(["convert", "--lenient", broken, str(out)]) == 0
    captured = capsys.readouterr()
    assert "line 2: timestamp is missing" in captured.err
    assert "2 requests in the format parquet" in captured.out
    assert main(["stats", str(out)]) == 0


def test_convert_says_what_is_lost(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["convert", MOONCAKE, str(tmp_path / "out.csv")]) == 0
    assert "warning: azure has no place for block hashes" in capsys.readouterr().err
    assert main(["convert", AZURE, str(tmp_path / "out.jsonl"), "--to", "mooncake"]) == 2
    assert main(["convert", MOONCAKE, str(tmp_path / "out.jsonl")]) == 2
    assert "--to" in capsys.readouterr().err


def test_generate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "synthetic.jsonl.gz"
    assert main(["generate", str(out), "--requests", "50", "--seed", "7", "--turns", "3"]) == 0
    assert main(["validate", str(out)]) == 0
    assert "read as bailian, 50 rows, 50 kept, 0 problems, blocks of 16 tokens" in capsys.readouterr().out
    assert main(["generate", str(tmp_path / "real.jsonl")]) == 2
    assert "the word synthetic" in capsys.readouterr().err
    assert main(["generate", str(out), "--overwrite", "--turns", "0"]) == 2
    assert "turns=0.0 is not allowed: give 1 to 1000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["stats", "/does/not/exist"], 2),
        (["stats", "/"], 2),
        (["stats", "/dev/null"], 1),
        (["stats", MOONCAKE, "--block-size", "0"], 2),
        (["stats", MOONCAKE, "--block-size", str(2**31)], 2),
        (["stats", MOONCAKE, "--block-size", "9" * 20], 2),
        (["stats", MOONCAKE, "--block-size", "16"], 1),
        (["stats", MOONCAKE, "--format", "azure"], 1),
        (["stats", AZURE, "--format", "bailian"], 1),
        (["stats", AZURE, "--format", "parquet"], 1),
        (["validate", MOONCAKE, "--block-size", "513"], 1),
        (["convert", MOONCAKE, "/does/not/exist.parquet"], 2),
    ],
)
def test_exit_status_says_whose_fault_it_is(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int
) -> None:
    assert main(arguments) == status
    assert capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["describe"], ["stats"], ["stats", MOONCAKE, "--block-size", "many"]])
def test_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2


@pytest.mark.parametrize("command", ["stats", "validate", "convert", "generate"])
def test_help_has_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as exited:
        main([command, "--help"])
    assert exited.value.code == 0
    assert f"example: python -m tuning.trace {command} " in capsys.readouterr().out


def test_nothing_is_said_when_the_reader_goes_away() -> None:
    command = f'"{sys.executable}" -m tuning.trace stats "{MOONCAKE}" | true; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (141, "")
