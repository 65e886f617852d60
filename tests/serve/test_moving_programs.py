"""The programs that order moves under load, against the running app."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ray

from load_tests import cycle_soak, moves_under_load, short_memory
from tests.running_app import Deploy, small_roles

pytestmark = pytest.mark.cluster

MODEL = "random/llama-8x8"
LOAD = (
    *("--model-source", MODEL, "--token-ids", "3", "250", "--in-flight", "3", "--prompt-tokens", "40"),
    *("--output-tokens", "60", "--settle-s", "0.5", "--dwell-s", "0.5"),
)


def args(prefill: int) -> dict[str, Any]:
    return {
        "mode": "balanced",
        "model": MODEL,
        "engine": {
            "dtype": "float32",
            "block_tokens": 32,
            "slab_pages": 1,
            "kv_cache_blocks": 1024,
            "max_context_tokens": 1024,
        },
        "moves": {"automatic": False, "period_s": 0.5},
        **small_roles(prefill),
    }


def test_moves_there_and_back_are_seen_and_nobody_notices(
    deploy: Deploy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app = deploy(args(1))
    code = moves_under_load.main([app.base_url, *LOAD, "--moves", "8", "--save", "m", "--save-in", str(tmp_path)])
    captured = capsys.readouterr()
    assert code == 0, captured
    figures = json.loads(captured.out.splitlines()[-1])
    moves = figures["moves"]
    assert [move["is_out"] for move in moves] == [True, True, False, False] * 2
    assert {move["kind"] for move in moves} == {"layers", "heads"}
    assert figures["likeness"]["answers"] == figures["with_moves"]["requests"] > 0
    assert (figures["failed"], figures["likeness"]["wrong"], figures["repairs"]) == ([], [], 0)
    for move in moves:
        freed, happened = move["freed"], move["happened"]
        assert move["link_bytes"] >= happened["weight_bytes"] + happened["kv_bytes"]
        assert freed["weights"] == freed["weights_expected"]
        assert freed["kv"] >= 0.9 * freed["kv_expected"] > 0
        if move["kind"] == "layers":
            assert move["steps_after"]["moved_at_source"] == 0
    assert sum(move["steps_after"]["moved_at_destination"] or 0 for move in moves) > 0
    assert any(move["freed"]["weights"] for move in moves)
    (markdown,) = tmp_path.glob("*-m.md")
    assert "| layers out |" in markdown.read_text()


def test_three_workers_go_round(deploy: Deploy, capsys: pytest.CaptureFixture[str]) -> None:
    app = deploy(args(2))
    code = cycle_soak.main([app.base_url, *LOAD, "--duration-s", "0"])
    captured = capsys.readouterr()
    assert code == 0, captured
    figures = json.loads(captured.out.splitlines()[-1])
    assert [move["is_out"] for move in figures["moves"]] == [True] * 3 + [False] * 3
    assert figures["longest_silence_s"] < 30


def test_long_requests_where_memory_is_short(deploy: Deploy, capsys: pytest.CaptureFixture[str]) -> None:
    """A request of 300 and 80 tokens takes 12 blocks: the decode worker's 24 are enough for two."""
    app = deploy({**args(1), "decode": {"replicas": 1, "num_cpus": 0.1, "engine": {"kv_cache_blocks": 24}}})
    address = ray.get_runtime_context().gcs_address
    options = ("--model-source", MODEL, "--token-ids", "3", "250", "--ray-address", address, "--rounds", "1")
    code = short_memory.main(
        [app.base_url, *options, "--in-flight", "1", "4", "--prompt-tokens", "300", "--output-tokens", "80"]
    )
    captured = capsys.readouterr()
    assert code == 0, captured
    figures = json.loads(captured.out.splitlines()[-1])
    runs = {(run["heads"], run["in_flight"]): run for run in figures["runs"]}
    assert [run["requests"] for run in runs.values()] == [1, 4, 1, 4]
    assert {run["failed"] for run in runs.values()} == {0}
    for heads in (short_memory.AT_HOME, short_memory.HEADS_AWAY):
        assert (runs[heads, 1]["at_once"], runs[heads, 1]["preemptions"]) == (1, 0)
    assert figures["sustained"][short_memory.AT_HOME] <= 2
    assert app.get("/debug/moves")[1]["modules_away"] == {"layers": 0, "heads": 0}

    # One more head than there are can't move.
    assert short_memory.main([app.base_url, *options, "--in-flight", "1", "--heads", "9", "--prompt-tokens", "40"]) == 1
    assert "move fewer heads than there are" in capsys.readouterr().err
