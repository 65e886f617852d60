"""The program runs to its end and counts what the trace has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from load_tests import simulator_speed

HEAD = Path(__file__).parents[1] / "fixtures" / "traces" / "mooncake_conversation_head.jsonl"


@pytest.mark.parametrize("mode", ["static", "monolithic"])
def test_a_trace(mode: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["simulator_speed", "--trace", str(HEAD), "--mode", mode, "--repeats", "2"])
    simulator_speed.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("200 requests, ")
    assert len(lines[1].split(":")[1].split(";")[0].split(",")) == 2


def test_generated_requests(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["simulator_speed", "--synthetic", "100", "--ttl-s", "60", "--repeats", "1"])
    simulator_speed.main()
    assert capsys.readouterr().out.startswith("100 requests, ")
