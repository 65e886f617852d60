from __future__ import annotations

import datetime
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from load_tests.results_file import clean, cpu_model, describe_commit, describe_machine, without_places, write_results

REPOSITORY = Path(__file__).parent.parent.parent
DAY = datetime.date(2026, 11, 29)


def write(folder: Path, name: str = "modes") -> tuple[Path, Path]:
    return write_results(
        name,
        command=["python", "-m", "load_tests.run", "http://gpu-7.example.org:8000", "--out", "/tmp/a b/runs.jsonl"],
        tables=[("Medians", "| a |\n| --- |\n| 1 |")],
        figures={"runs": [{"workload": "balanced", "errors": f"lost /tmp/x/y.log on {socket.gethostname()}"}]},
        folder=folder,
        today=DAY,
    )


def test_both_files_say_how_the_figures_were_made(tmp_path: Path) -> None:
    markdown_path, json_path = write(tmp_path / "results")
    assert markdown_path.name == "2026-11-29-modes.md"
    assert json_path.name == "2026-11-29-modes.json"
    saved = json.loads(json_path.read_text())
    assert saved["date"] == "2026-11-29"
    assert saved["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert saved["machine"]["cores"] >= 1
    assert saved["machine"]["memory_gib"] > 0
    assert saved["figures"]["runs"][0]["workload"] == "balanced"
    markdown = markdown_path.read_text()
    for text in ("# modes", "2026-11-29", saved["machine"]["cpu"], saved["commit"], saved["command"], "## Medians"):
        assert text in markdown


def test_neither_names_a_host_or_a_folder(tmp_path: Path) -> None:
    for path in write(tmp_path):
        text = path.read_text()
        assert "gpu-7" not in text
        assert "/tmp" not in text
        assert str(REPOSITORY) not in text
        assert str(Path.home()) not in text
        assert "runs.jsonl" in text or "y.log" in text


def test_an_earlier_result_is_never_overwritten(tmp_path: Path) -> None:
    first, second, third = write(tmp_path), write(tmp_path), write(tmp_path)
    assert [path.name for path, _ in (first, second, third)] == [
        "2026-11-29-modes.md",
        "2026-11-29-modes-2.md",
        "2026-11-29-modes-3.md",
    ]


def test_the_name_must_be_a_file_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use letters"):
        write(tmp_path, "../elsewhere")


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        (f"--serve a={REPOSITORY}/serve_configs/local.yaml", "--serve a=serve_configs/local.yaml"),
        ("'/tmp/some/where/x.yaml'", "'x.yaml'"),
        ("serve_configs/local.yaml ./x/y", "serve_configs/local.yaml ./x/y"),
        ("POST /v1/completions", "POST /v1/completions"),
        ("http://127.0.0.1:8000/v1/models", "http://127.0.0.1:8000/v1/models"),
        ("https://user:secret@box.internal:8443/v1", "https://HOST:8443/v1"),
        ("Cannot connect to host box.internal:80", "Cannot connect to host HOST:80"),
        ("Cannot connect to host 127.0.0.1:80", "Cannot connect to host 127.0.0.1:80"),
        ("12 tokens/s and 3 / 4", "12 tokens/s and 3 / 4"),
    ],
)
def test_places_are_taken_out(text: str, cleaned: str) -> None:
    assert without_places(text) == cleaned


def test_cleaning_reaches_every_string() -> None:
    assert clean({"a": ["/tmp/x/y", 1, None, {"b": ("/tmp/z",)}]}) == {"a": ["y", 1, None, {"b": ["z"]}]}


def test_the_cpu_model() -> None:
    named = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC 9R14\n\nmodel name\t: B\n"
    assert cpu_model(named) == "AMD EPYC 9R14 (family 25 model 17)"
    assert cpu_model("processor : 0\n") != ""
    assert describe_machine()["cpu"]


def test_the_commit_is_gits() -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if head.returncode == 0:
        assert re.fullmatch(r"[0-9a-f]{40}( with changes)?", describe_commit())
    else:
        assert describe_commit() == "unknown"
