from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from load_tests import soak
from load_tests.soak import SoakPlan, draw_soak

SMALL = ("--requests", "60", "--in-flight", "6", "--prompt-tokens", "4", "40", "--output-tokens", "1", "30")


def run(capsys: pytest.CaptureFixture[str], url: str, *options: str) -> tuple[int, Any, str]:
    code = soak.main([url, *SMALL, "--seed", "1", *options])
    printed = capsys.readouterr().out
    return code, json.loads(printed.splitlines()[-1]), printed


def test_a_sound_server_passes(start_server: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    server = start_server("--first-token-s", "0.01", "--token-s", "0.001")
    code, figures, printed = run(
        capsys,
        server.url,
        *("--abort-share", "0.4", "--abort-within-s", "0.02", "--settle-s", "30"),
        *("--memory-of", "openai_like_server", "--sample-every-s", "0.02"),
    )
    assert code == 0, printed
    assert (figures["requests"], figures["failed"], figures["short"]) == (60, 0, 0)
    assert 0 < figures["aborted"] < 40
    assert figures["blocks"]["all_free"]
    assert figures["blocks"]["workers"][0]["free_blocks"] == 1000
    memory = figures["memory"]["python openai_like_server.py"]
    assert memory["first"]["rss_bytes"] > 0
    assert memory["last"]["rss_bytes"] > 0
    assert "all free" in printed
    # The server saw exactly the planned requests, and that clients went away.
    seen = server.seen()
    planned = [request for request, _ in draw_soak(SoakPlan(60, 6, (4, 40), (1, 30), 0.4, 0.02), seed=1)]
    assert {tuple(body["prompt"]) for body in seen["bodies"]} <= {request.prompt for request in planned}
    assert seen["disconnects"] > 0


def test_leaked_blocks_are_found(start_server: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    server = start_server("--leak", "--token-s", "0.002")
    code, figures, printed = run(capsys, server.url, "--abort-share", "0.4", "--settle-s", "0.2")
    assert code == 1
    assert figures["failed"] == 0
    assert not figures["blocks"]["all_free"]
    assert figures["blocks"]["waited_s"] >= 0.2
    assert figures["blocks"]["workers"][0]["live_blocks"] > 0
    assert "still held" in printed


def test_blocks_that_cannot_be_counted_are_no_pass(
    start_server: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server()
    code, figures, _ = run(capsys, server.url, "--blocks", "/no/such/route")
    assert code == 1
    assert "gave no block counts" in figures["blocks_error"]
    code, figures, printed = run(capsys, server.url, "--blocks", "")
    assert code == 0
    assert figures["blocks"] is None
    assert "not looked at" in printed


def test_failed_requests_are_no_pass(start_server: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    code, figures, _ = run(capsys, start_server("--fail-every", "20").url, "--abort-share", "0")
    assert code == 1
    assert figures["failed"] == 3
    assert figures["blocks"]["all_free"]


def test_the_plan_is_the_seeds_and_covers_its_ranges() -> None:
    plan = SoakPlan(requests=4000)
    drawn = draw_soak(plan, seed=1)
    assert drawn == draw_soak(plan, seed=1)
    assert drawn != draw_soak(plan, seed=2)
    prompts = [len(request.prompt) for request, _ in drawn]
    outputs = [request.output_tokens for request, _ in drawn]
    assert (min(prompts), max(outputs), min(outputs)) == (16, 128, 1)
    assert 1000 <= max(prompts) <= 1024
    # Even on a logarithmic scale: the median is the geometric mean of the ends.
    assert sorted(prompts)[2000] == pytest.approx(math.sqrt(16 * 1024), rel=0.1)
    aborts = [(request, abort) for request, abort in drawn if abort is not None]
    assert len(aborts) / 4000 == pytest.approx(0.1, abs=0.02)
    by_time = [abort.after_s for _, abort in aborts if abort.after_s is not None]
    assert len(by_time) / len(aborts) == pytest.approx(0.5, abs=0.1)
    assert max(by_time) <= 2.0
    for request, abort in aborts:
        assert (abort.after_s is None) != (abort.after_chunks is None)
        assert abort.after_chunks is None or 1 <= abort.after_chunks <= request.output_tokens


@pytest.mark.parametrize(
    "fields",
    [{"requests": 0}, {"in_flight": 0}, {"prompt_tokens": (5, 4)}, {"output_tokens": (0, 4)}, {"abort_share": 1.5}],
)
def test_impossible_plans_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|shortest|within 0 and 1"):
        SoakPlan(**fields)


def test_a_server_that_is_not_there(unused_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main([f"http://127.0.0.1:{unused_port}", *SMALL]) == 1
    assert "start the server first" in capsys.readouterr().err
