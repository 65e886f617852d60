"""The program on the head of the trace: what it prints, and that it goes on from what it remembers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from load_tests.kareto_search import main

TRACE = Path(__file__).resolve().parents[1] / "fixtures" / "traces" / "mooncake_conversation_head.jsonl"


def figures(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    words = ["--trace", str(TRACE), "--requests", "12", "--cases", "one", "--methods", "pareto", "random"]
    assert main([*words, "--budget", "8", "--remember", str(folder)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found["one"]  # type: ignore[no-any-return]


def test_curves_and_gains_come_from_remembered_evaluations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = figures(tmp_path, capsys)
    for curve in (first["curves"]["pareto"][0], first["curves"]["random"][0]):
        assert len(curve) == 8
        assert curve == sorted(curve)
    cheapest = min(first["front"], key=lambda each: each["objectives"][2])
    assert first["best"]["best cost"]["point"] == cheapest["point"]

    kept = tmp_path / "one-12.jsonl"
    lines = kept.read_text().splitlines()
    assert len(lines) == len(set(lines)) > 100
    kept.write_text("\n".join(lines[:80]) + "\n")
    assert figures(tmp_path, capsys) == first
    assert sorted(kept.read_text().splitlines()) == sorted(lines)
