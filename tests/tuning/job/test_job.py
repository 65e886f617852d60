"""The whole job in this machine's processes: what it writes, and what it says of what it can't use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from app.serve_config import read_serve_config
from kv.policy.policy_file import load
from tests.tuning.job.job_runs import CONFIG, arguments, make_files, run
from tuning.job.job import CHOSEN, NOTHING_FEASIBLE, UNUSABLE, main
from tuning.report.content import JobReport

OBJECTIVES = ("ttft_mean_s", "minus_tokens_per_s", "cost")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    make_files(folder)
    make_files(folder, ".csv")
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> JobReport:
    """Of one run with a limit that some points break."""
    status, report = run(folder, "--budget-per-hour", "4.2", "--choose", "fastest")
    assert status == CHOSEN
    return report


def rows(folder: Path) -> list[dict[str, Any]]:
    return pq.read_table(folder / "out" / "front.parquet").to_pylist()  # type: ignore[no-any-return]


def test_the_front_is_what_no_other_feasible_point_beats(folder: Path, report: JobReport) -> None:
    table = rows(folder)
    assert len(table) == len(report.points) == 10
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


def test_cost_is_that_of_devices_and_store_for_as_long_as_the_trace_takes(folder: Path, report: JobReport) -> None:
    for row in rows(folder):
        disk = (0.08 * max(160, row["disk_gib"]) + 77000 * 0.005 + 1875 * 0.04) / 730 if row["disk_gib"] else 0.0
        assert row["cost_per_hour"] == pytest.approx(3.431 + 0.003417 * row["dram_gib"] + disk)
        assert row["cost"] == pytest.approx(row["cost_per_hour"] * row["makespan_s"] / 3600)


def test_the_fastest_feasible_point_becomes_a_configuration_that_the_app_takes(folder: Path, report: JobReport) -> None:
    fastest = min((row for row in rows(folder) if row["feasible"]), key=lambda row: float(row["ttft_mean_s"]))
    assert report.choice.chosen is not None
    assert report.points[report.choice.chosen].point == {name: fastest[name] for name in ("dram_gib", "disk_gib")}
    settings = read_serve_config(str(folder / "out" / "serve_config.yaml")).settings
    assert settings.mode == "monolithic"
    assert (settings.store.dram_gib, settings.store.disk.limit_gib) == (fastest["dram_gib"], fastest["disk_gib"])
    policy = load((folder / "out" / "ttl_policy.json").read_text())
    assert settings.store.policy() == policy


def test_the_baseline_is_evaluated_and_reported(folder: Path, report: JobReport) -> None:
    assert report.baseline is not None
    assert report.baseline.point == {"dram_gib": 48, "disk_gib": 0}
    row = next(row for row in rows(folder) if (row["dram_gib"], row["disk_gib"]) == (48, 0))
    assert (
        report.search.simulation_settings.items()
        >= {"mode": "monolithic", "instances": "1", "time-to-live": "no limit"}.items()
    )
    assert not report.search.simulation_settings.keys() & {"DRAM", "disk"}
    assert report.baseline.objectives == (row["ttft_mean_s"], -row["minus_tokens_per_s"], row["cost"])
    assert report.baseline.bill.per_hour == pytest.approx(row["cost_per_hour"])
    assert "fixed 48 GiB of DRAM" in (folder / "out" / "report.html").read_text()


def test_gains_are_said_in_words(folder: Path, report: JobReport, capsys: pytest.CaptureFixture[str]) -> None:
    _, again = run(folder, "--budget-per-hour", "4.2", "--choose", "fastest", "--evaluations", "3")
    assert (len(again.points), again.search.budget) == (10, 10)  # never "10 of at most 3"
    said = capsys.readouterr()
    table = rows(folder)
    before = next(row for row in table if (row["dram_gib"], row["disk_gib"]) == (48, 0))
    for name, objective, words in (
        ("ttft", "ttft_mean_s", ("faster", "slower")),
        ("throughput", "minus_tokens_per_s", ("more", "less")),
        ("cost", "cost", ("cheaper", "dearer")),
    ):
        value = min(row[objective] for row in table if row["on_front"])
        share, word = abs(value / before[objective] - 1), words[value > before[objective]]
        compared = f"{share:.1%} {word} than" if round(share, 3) else "the same as"
        assert f"best {name}: {compared} 48 GiB of DRAM, with dram_gib " in said.out
    assert "cheaper than" in said.out
    assert again.choice.chosen is not None
    per_hour = again.points[again.choice.chosen].bill.per_hour
    assert f"within the limits: cost_per_hour {per_hour:.4g} of at most 4.2\n" in said.out
    # Without --base-config: one line for the settings that it would have.
    assert said.err.count("not given") == 1


@pytest.mark.parametrize(("partial_blocks", "ideal"), [("hit", 5 / 8), ("miss", 3 / 8)])
def test_what_can_hit_at_most_is_counted_as_the_simulation_counts(
    folder: Path, partial_blocks: str, ideal: float
) -> None:
    """Four prompts of the same full block and a partial one, of which the last is another: three full blocks of eight
    come again, and two partial ones."""
    lengths = [(600, [1, 2]), (600, [1, 2]), (600, [1, 2]), (600, [1, 3])]
    rows = [
        {"timestamp": 60_000 * number, "input_length": length, "output_length": 1, "hash_ids": ids}
        for number, (length, ids) in enumerate(lengths)
    ]
    (folder / "partial.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--partial-blocks", partial_blocks, "--evaluations", "1")
    _, found = run(folder, *options, out=f"partial-{partial_blocks}", trace="partial.jsonl")
    assert found.hit_curve is not None
    assert found.trace.ideal_block_hit_ratio == found.hit_curve.ideal_block_hit_ratio == ideal
    assert found.hit_curve.block_hit_ratio[-1] == ideal
    assert max(point.figures.block_hit_ratio for point in found.points) == ideal


def test_gains_are_against_a_baseline_whose_searched_instances_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else what fewer devices save would pass for what memory saves."""
    _, found = run(folder, "--instances", "1:3:1", "--evaluations", "1", "--nodes", "2", out="instances")
    assert found.baseline is not None
    assert found.baseline.point["monolithic_instances"] == 2
    assert found.baseline_title == "fixed 48 GiB of DRAM, 2 instances"
    said = capsys.readouterr().out
    assert "best cost: the same as 48 GiB of DRAM and 2 instances, with monolithic_instances 2" in said
    assert "are each node's, for 2 nodes (--nodes)" in said


def test_a_folder_with_another_study_is_refused(
    folder: Path, report: JobReport, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--budget-per-hour", "4.2", "--rate-factor", "2")
    assert main(arguments(folder, *given)) == UNUSABLE
    assert "begun with another rate factor: give another --out" in capsys.readouterr().err


def test_limits_that_nothing_keeps_give_the_closest_point(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run(folder, "--slo-ttft-s", "0.001", "--slo", "mean", "--evaluations", "4", out="unmet")
    assert status == NOTHING_FEASIBLE
    ttfts_s = [each.objectives[0] for each in found.points]
    assert found.choice.chosen is None
    assert found.choice.closest == ttfts_s.index(min(ttfts_s))
    said = capsys.readouterr().err
    assert "none of 4 points keeps the limits" in said
    assert "Give a looser limit, or axes that reach farther" in said
    left = [folder / "unmet" / name for name in ("serve_config.yaml", "ttl_policy.json")]
    for path in left:
        path.touch()  # as of an earlier run
    run(folder, "--slo-ttft-s", "0.001", "--slo", "mean", "--evaluations", "4", out="unmet")
    assert not any(path.exists() for path in left)
    assert f"is over its limit of 0.001 by {min(ttfts_s) - 0.001:.4g}" in said


def test_without_reuse_information_only_instances_are_searched(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = run(folder, "--instances", "1:3:1", "--evaluations", "3", out="azure", trace="trace.csv")
    assert status == CHOSEN
    assert [axis.name for axis in found.axes] == ["monolithic_instances"]
    assert found.search.simulation_settings.items() >= {"DRAM": "0 GiB", "disk": "0 GiB", "eviction": "lru"}.items()
    assert "nothing hits, and they only cost" in capsys.readouterr().err


def test_a_base_that_differs_from_what_was_simulated_is_warned_of_by_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "model": "meta-llama/Llama-2-13b-hf",
        "engine": {"block_tokens": 256, "max_batch_tokens": 8192, "max_running_requests": 256},
        "monolithic": {"engine": {"max_batch_tokens": 4096}},
    }
    base = {"applications": [{"name": "equipoise", "import_path": "app.builder:build", "args": settings}]}
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    options = ("--base-config", str(folder / "base.yaml"), "--evaluations", "1")
    status, found = run(folder, *options, out="differs")
    assert status == CHOSEN
    written = (folder / "differs" / "serve_config.yaml").read_text()
    said = capsys.readouterr()
    for message in (
        f"model is 'meta-llama/Llama-2-13b-hf' in the configuration to serve with, and {folder.name} was simulated",
        "max_batch_tokens is 4096 in the configuration to serve with, and 8192 was simulated",
        f"block_tokens is 256 in the configuration to serve with, and {found.trace.block_tokens} was simulated",
    ):
        assert said.err.count(message) == 1
        assert message not in said.out  # once on the terminal is enough
        assert f"# {message}" in written
        assert any(message in warning for warning in found.warnings)

    settings |= {"model": str(folder), "monolithic": {}}
    settings["engine"] = {
        "block_tokens": found.trace.block_tokens,
        "max_batch_tokens": 8192,
        "max_running_requests": 256,
    }
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    status, found = run(folder, *options, out="agrees")
    assert status == CHOSEN
    said = capsys.readouterr()
    assert "was simulated" not in said.err + said.out
    assert not any("was simulated" in warning for warning in found.warnings)


def test_requests_longer_than_the_context_are_counted_and_more_than_half_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pq.read_table(folder / "trace.parquet").to_pylist()
    lengths = sorted(row["input_tokens"] + row["output_tokens"] for row in table)
    middle = lengths[len(lengths) // 2 - 1]
    longer = sum(length > middle for length in lengths)
    assert 2 * longer == len(lengths)  # just not more than half

    def config(context_tokens: int) -> str:
        model = folder / f"context-{context_tokens}"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": context_tokens}))
        return str(model)

    status, found = run(folder, "--model", config(middle), "--evaluations", "1", out="longer")
    assert status == CHOSEN
    message = (
        f"{longer} of {len(table)} requests are longer, prompt and answer together, than the context of "
        f"context-{middle}, {middle:,} tokens; the longest has {lengths[-1]:,}"
    )
    assert message in capsys.readouterr().err
    assert any(message in warning for warning in found.warnings)
    assert message in (folder / "longer" / "report.html").read_text()

    assert main(arguments(folder, "--model", config(middle - 1), out="too-long")) == UNUSABLE
    assert "At most half may be" in capsys.readouterr().err
    assert not (folder / "too-long").exists()


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
        (("--instances", "10001"), "numbers go up to 10000"),
        (("--dram-gib", "0:1000000000:1/1"), "64 are the most"),
        (("--disk-gib", "9" * 20), f"numbers go up to {2**30}"),
        (("--ttl-s", "9" * 20), f"numbers go up to {10**9}"),
        (("--ttl-s", "0"), "--ttl-s 0 keeps nothing for later"),
        (
            ("--prefill-instances", "2"),
            "--prefill-instances 2 is of --mode static, and the mode is monolithic: leave it out, or give --instances",
        ),
        (
            ("--mode", "static", "--instances", "1"),
            "--instances 1 is of --mode monolithic, and the mode is static: leave it out, or give --prefill-instances "
            "and --decode-instances",
        ),
        (("--disk-gib", "0:131072:65536"), "131072"),
        (("--nodes", "1000000"), "--nodes 1000000: dram_gib 4 is less than 0.01 GiB on each of them. Give fewer"),
        (("--trace", "/dev/null"), "/dev/null is no plain file, and a job reads its trace more than once"),
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


def test_a_disk_class_without_a_disk_is_a_slip(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = arguments(folder, out="refused")
    place = words.index("--disk-gib")
    assert main(words[:place] + words[place + 2 :]) == UNUSABLE
    assert "--disk-class gp3-2000 needs --disk-gib, without which there is no disk" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--out", "--trace", "--base-config"])
def test_a_name_that_is_empty_is_refused(folder: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    with pytest.raises(SystemExit):
        main(arguments(folder, option, ""))
    assert f"argument {option}: '' is not allowed: give a name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "given", "allowed"),
    [
        ("--evaluations", "0", "from 1 to 1000000"),
        ("--nodes", "9" * 400, "from 1 to 1000000"),
        ("--nodes", "9" * 5000, "from 1 to 1000000"),
        ("--block-size", "9" * 20, "from 1 to 2147483647"),
        ("--baseline-dram-gib", "9" * 20, f"from 0 to {2**30}"),
        ("--rate-factor", "1e-300", "from 1e-06 to 1e+06"),
        ("--rate-factor", "1e300", "from 1e-06 to 1e+06"),
        ("--rate-factor", "nan", "from 1e-06 to 1e+06"),
        ("--seed", str(2**32), f"from 0 to {2**32 - 1}"),
    ],
)
def test_an_option_that_is_not_allowed_ends_with_status_2_and_says_the_range(
    folder: Path, capsys: pytest.CaptureFixture[str], option: str, given: str, allowed: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments(folder, option, given, out="refused"))
    assert ended.value.code == 2
    assert f"is not allowed: give a {'number' if option == '--rate-factor' else 'whole number'} {allowed}" in (
        capsys.readouterr().err
    )
    assert not (folder / "refused").exists()
