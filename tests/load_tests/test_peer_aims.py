from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.settings import load_settings
from load_tests import compare_peer
from load_tests.comparison import Comparison, compare
from load_tests.measured_run import LoadOptions
from load_tests.peer_aims import AIMS, Aim, verdicts
from load_tests.server_process import server_command
from load_tests.workloads import WORKLOADS, Workload


def rows(figures: dict[str, dict[str, float]], workload: str = "balanced") -> list[dict[str, Any]]:
    return [
        {"mode": mode, "round": 0, "workload": workload, "kept": True, "tokens_per_chunk": 1.0, **values}
        for mode, values in figures.items()
    ]


def by_figure(comparison: Comparison) -> dict[tuple[str, str], str]:
    return {(record["mode"], record["figure"]): record["verdict"] for record in verdicts(comparison)[1]}


@pytest.mark.parametrize(
    ("figure", "ratio", "verdict"),
    [
        ("output_tokens_per_s", 1.2, "met"),
        ("output_tokens_per_s", 1.19, "short"),
        ("output_tokens_per_s", 1.0, "short"),
        ("output_tokens_per_s", 0.99, "behind"),
        ("ttft_p50_ms", 1.0, "met"),
        ("ttft_p50_ms", 0.3, "met"),
        ("ttft_p50_ms", 1.01, "behind"),
    ],
)
def test_rates_are_to_be_high_and_times_low(figure: str, ratio: float, verdict: str) -> None:
    assert Aim("balanced", figure, 1.2 if figure.endswith("_per_s") else 1.0).verdict(ratio) == verdict


def test_each_of_ours_is_judged_beside_the_peer() -> None:
    figures = {
        "peer": {"output_tokens_per_s": 100.0, "ttft_p50_ms": 50.0, "itl_p99_ms": 20.0},
        "one": {"output_tokens_per_s": 130.0, "ttft_p50_ms": 60.0, "itl_p99_ms": 20.0},
        "two": {"output_tokens_per_s": 90.0, "ttft_p50_ms": 40.0, "itl_p99_ms": 30.0},
    }
    assert by_figure(Comparison(("peer", "one", "two"), rows(figures))) == {
        ("one", "output_tokens_per_s"): "met",
        ("one", "ttft_p50_ms"): "behind",
        ("one", "itl_p99_ms"): "met",
        ("two", "output_tokens_per_s"): "behind",
        ("two", "ttft_p50_ms"): "met",
        ("two", "itl_p99_ms"): "behind",
    }


def test_gaps_between_longer_chunks_are_no_win() -> None:
    """A server that sends four tokens at a time has fewer and longer gaps; those say nothing of a token's."""
    figures = {"peer": {"itl_p99_ms": 80.0, "tokens_per_chunk": 4.0}, "one": {"itl_p99_ms": 20.0}}
    assert by_figure(Comparison(("peer", "one"), rows(figures)))["one", "itl_p99_ms"] == "not comparable"


def test_a_load_without_a_pair_is_not_measured_and_one_that_was_not_run_is_not_judged() -> None:
    figures = {"peer": {"output_tokens_per_s": 100.0}, "one": {"output_tokens_per_s": 200.0}}
    comparison = Comparison(("peer", "one"), rows(figures))
    comparison.rows[1]["kept"] = False
    table, records = verdicts(comparison)
    assert {(record["workload"], record["verdict"]) for record in records} == {("balanced", "not measured")}
    assert "| balanced | output_tokens_per_s | one | - | - | - | - | - | 0 | at least 1.2 | not measured |" in table


def test_every_aim_is_of_a_load_that_there_is() -> None:
    assert {aim.workload for aim in AIMS} <= WORKLOADS.keys()


def test_servers_are_judged_by_what_they_did(server_script: Path, unused_port: int) -> None:
    """Both sides are real servers; ours is given a first token that is late and tokens that are slow."""
    url = f"http://127.0.0.1:{unused_port}"
    python = f"{sys.executable} {server_script} --port {unused_port}"
    specs = [
        server_command("peer", f"{python} --first-token-s 0.01 --token-s 0.001", url),
        server_command("slow", f"{python} --first-token-s 0.3 --token-s 0.03", url),
    ]
    shape = Workload("one-at-a-time", requests=2, unique_tokens=8, output_tokens=6, in_flight=1)
    options = LoadOptions(in_flight=4, warm_up_requests=0, foreign_limit=1.0)
    comparison = compare(specs, [shape], rounds=1, seed=1, options=options)
    assert {row["arrivals"] for row in comparison.rows} == {"1 in flight"}
    assert by_figure(comparison) == {("slow", "tpot_mean_ms"): "behind", ("slow", "ttft_p50_ms"): "behind"}


def test_each_of_ours_is_a_configuration_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(options: list[str]) -> str:
        with pytest.raises(SystemExit) as stopped:
            compare_peer.main(options)
        assert stopped.value.code == 2
        return re.sub(r"\s+", " ", capsys.readouterr().err)

    assert "--peer" in refusal(["--ours", "static"])
    assert "NAME=VALUE" in refusal(["--peer", "true"])
    assert "invalid choice: 'neither'" in refusal(["--peer", "a=true", "--ours", "neither"])
    assert "give it another name" in refusal(["--peer", "static=true", "--ours", "static"])
    # All of them are accepted, up to what is wrong here.
    assert "at least 1" in refusal(["--peer", "a=true", "--rounds", "0", "--ours", *compare_peer.OURS])


def test_haproxy_is_for_ours_only() -> None:
    arguments = argparse.Namespace(
        peer=("vllm", "vllm serve"), peer_url="http://a", url="http://b", ours=["static", "static"], haproxy=True
    )
    peer, ours = compare_peer._specs(arguments)
    assert (peer.name, peer.base_url, peer.environment) == ("vllm", "http://a", {})
    assert (ours.name, ours.base_url, ours.own_ray_session) == ("static", "http://b", True)
    assert ours.environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert ours.environment["EQUIPOISE_OVERLAY"].endswith("bfloat16.yaml")


def test_overlays_of_ours_fit_their_configurations() -> None:
    for config, overlay in compare_peer.OURS.values():
        (application,) = yaml.safe_load(Path(config).read_text())["applications"]
        settings = load_settings(application["args"], overlay)
        assert settings.engine.dtype == "bfloat16"
