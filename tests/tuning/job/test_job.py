"""The whole job in this machine's processes: what it writes, and what it says of what it can't use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from app.serve_config import read_serve_config
from kv.policy.policy_file import load
from tests.tuning.job.job_runs import arguments, make_files, run
from tuning.job.job import CHOSEN, NOTHING_FEASIBLE, UNUSABLE, main

OBJECTIVES = ("ttft_mean_s", "minus_tokens_per_s", "cost")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    make_files(folder)
    make_files(folder, ".csv")
    return folder


@pytest.fixture(scope="module")
def summary(folder: Path) -> dict[str, Any]:
    """Of one run with a limit that some points break."""
    status, summary = run(folder, "--budget-per-hour", "4.2", "--choose", "fastest")
    assert status == CHOSEN
    return summary


def rows(folder: Path) -> list[dict[str, Any]]:
    return pq.read_table(folder / "out" / "front.parquet").to_pylist()  # type: ignore[no-any-return]


def test_the_front_is_what_no_other_feasible_point_beats(folder: Path, summary: dict[str, Any]) -> None:
    table = rows(folder)
    assert len(table) == summary["counts"]["evaluated"] == 10
    assert {row["feasible"] for row in table} == {True, False}
    for row in table:
        assert row["feasible"] == (row["cost_per_hour"] <= 4.2)
        mine = [row[name] for name in OBJECTIVES]
        others = [[other[name] for name in OBJECTIVES] for other in table if other["feasible"]]
        is_beaten = any(all(a <= b for a, b in zip(other, mine, strict=True)) and other != mine for other in others)
        if row["on_front"]:
            assert row["feasible"]
            assert not is_beaten
        else:
            assert not row["feasible"] or is_beaten or others.count(mine) > 1


def test_cost_is_that_of_devices_and_store_for_as_long_as_the_trace_takes(
    folder: Path, summary: dict[str, Any]
) -> None:
    for row in rows(folder):
        disk = (0.08 * row["disk_gib"] + 77000 * 0.005 + 1875 * 0.04) / 730 if row["disk_gib"] else 0.0
        assert row["cost_per_hour"] == pytest.approx(3.431 + 0.003417 * row["dram_gib"] + disk)
        assert row["cost"] == pytest.approx(row["cost_per_hour"] * row["makespan_s"] / 3600)


def test_the_fastest_feasible_point_becomes_a_configuration_that_the_app_takes(
    folder: Path, summary: dict[str, Any]
) -> None:
    fastest = min((row for row in rows(folder) if row["feasible"]), key=lambda row: float(row["ttft_mean_s"]))
    assert summary["chosen"]["point"] == {name: fastest[name] for name in ("dram_gib", "disk_gib")}
    settings = read_serve_config(str(folder / "out" / "serve_config.yaml")).settings
    assert settings.mode == "monolithic"
    assert (settings.store.dram_gib, settings.store.disk.limit_gib) == (fastest["dram_gib"], fastest["disk_gib"])
    policy = load((folder / "out" / "ttl_policy.json").read_text())
    assert settings.store.policy() == policy


def test_the_baseline_is_evaluated_and_compared_with(folder: Path, summary: dict[str, Any]) -> None:
    assert summary["baseline"]["point"] == {"dram_gib": 48, "disk_gib": 0}
    before = summary["baseline"]["objectives"]
    best = summary["extremes"]["ttft"]
    assert best["objectives"]["ttft_mean_s"] == min(row["ttft_mean_s"] for row in rows(folder) if row["on_front"])
    assert best["against_baseline"]["tokens_per_s"] == pytest.approx(
        best["objectives"]["tokens_per_s"] / before["tokens_per_s"] - 1
    )


def test_a_folder_with_another_study_is_refused(
    folder: Path, summary: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    status, _ = run(folder, "--budget-per-hour", "4.2", "--rate-factor", "2")
    assert status == UNUSABLE
    assert "begun with another rate factor: give another --out" in capsys.readouterr().err


def test_limits_that_nothing_keeps_give_the_closest_point(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run(folder, "--slo-ttft-s", "0.001", "--slo", "mean", "--evaluations", "4", out="unmet")
    assert status == NOTHING_FEASIBLE
    ttfts = [each["objectives"]["ttft_mean_s"] for each in found["evaluated"]]
    assert found["closest"]["objectives"]["ttft_mean_s"] == min(ttfts)
    assert found["closest"]["misses"] == {"ttft_mean_s": pytest.approx(min(ttfts) - 0.001)}
    assert "none of 4 points keeps the limits" in capsys.readouterr().err
    assert not (folder / "unmet" / "serve_config.yaml").exists()


def test_without_reuse_information_only_instances_are_searched(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = run(folder, "--instances", "1:3:1", "--evaluations", "3", out="azure", trace="trace.csv")
    assert status == CHOSEN
    assert [axis["name"] for axis in found["axes"]] == ["monolithic_instances"]
    assert "nothing hits, and they only cost" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--trace", "nowhere.jsonl"), "nowhere.jsonl: "),
        (("--trace", "{folder}/empty.jsonl"), "the file is empty"),
        (("--trace", "{folder}/trace.csv"), "no reuse information"),
        (("--model", "no-such-model"), "no model known by name"),
        (("--hardware", "h200", "--prices", "azure-east-us"), "has no price for 'h200'"),
        (("--disk-class", "premium-ssd"), "'premium-ssd' is not allowed: give gp3"),
        (("--dram-gib", "0:100:30"), "HIGH must be above LOW by a multiple of COARSE"),
        (("--dram-gib", "16", "--disk-gib", "0"), "no axis is open"),
        (("--instances", "0"), "monolithic_instances begins at 0"),
        (("--disk-gib", "0:131072:65536"), "131072"),
        (("--base-config", "{folder}/config.json"), "must have one application"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_simulated(
    folder: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], message: str
) -> None:
    (folder / "empty.jsonl").touch()
    given = [word.format(folder=folder) for word in more]
    assert main(arguments(folder, *given, out="refused")) == UNUSABLE
    assert message in capsys.readouterr().err
    assert not (folder / "refused").exists()


def test_an_option_that_is_not_allowed_ends_with_status_2(folder: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments(folder, "--evaluations", "0"))
    assert ended.value.code == 2
