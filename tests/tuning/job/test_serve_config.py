"""Configurations that the job writes are taken by the app, whatever they start from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from app.serve_config import deployments_in, read_serve_config
from kv.policy.policy_file import GroupTtl, PolicySpec, dump
from tuning.deployment.deployment import Deployment
from tuning.job.job_error import JobError
from tuning.job.serve_config import dump_config, read_base, serve_config, share_of_node

ROOT = Path(__file__).resolve().parents[3]
BASES = [None, *sorted((ROOT / "serve_configs").glob("*.yaml"))]
STATIC = Deployment("static", prefill_instances=2, decode_instances=3, dram_gib=33.31, disk_gib=50, ttl_s=60)
MONOLITHIC = Deployment("monolithic", 4, dram_gib=10, eviction="lfu")


@pytest.mark.parametrize("deployment", [STATIC, MONOLITHIC], ids=lambda deployment: deployment.mode)
@pytest.mark.parametrize("base", BASES, ids=lambda base: "none" if base is None else base.stem)
def test_the_app_reads_back_what_was_chosen(base: Path | None, deployment: Deployment, tmp_path: Path) -> None:
    path = tmp_path / "serve_config.yaml"
    path.write_text(dump_config(serve_config(read_base(base), deployment, 2, None), ["about: this"]))
    settings = read_serve_config(str(path)).settings
    assert settings.mode == deployment.mode
    for role in settings.roles:
        assert settings.role(role).replicas == getattr(deployment, f"{role}_instances")
    assert settings.store.dram_gib == int(deployment.dram_gib * 50) / 100
    assert settings.store.disk.limit_gib == deployment.disk_gib / 2
    assert settings.store.policy() == deployment.policy
    if base is not None:
        before = read_serve_config(str(base)).settings
        assert (settings.model, settings.engine) == (before.model, before.engine)


@pytest.mark.parametrize("deployment", [STATIC, MONOLITHIC], ids=lambda deployment: deployment.mode)
def test_entries_of_deployments_stay_where_the_mode_has_them(deployment: Deployment, tmp_path: Path) -> None:
    base = read_base(None)
    names = sorted({name for mode in ("static", "balanced", "monolithic") for name in deployments_in(mode)})
    entries = base["applications"][0]["deployments"] = [{"name": name, "max_ongoing_requests": 7} for name in names]
    path = tmp_path / "serve_config.yaml"
    path.write_text(dump_config(serve_config(base, deployment, 1, None), []))
    kept = read_serve_config(str(path)).content["applications"][0]["deployments"]
    assert kept == [entry for entry in entries if entry["name"] in deployments_in(deployment.mode)]


def test_a_policy_file_takes_the_place_of_eviction_and_time_to_live(tmp_path: Path) -> None:
    policy = PolicySpec("lru", 5.0, (GroupTtl("group-1", bytes(32), None),))
    (tmp_path / "ttl_policy.json").write_text(dump(policy))
    base = serve_config(read_base(None), STATIC, 1, None)
    path = tmp_path / "serve_config.yaml"
    path.write_text(dump_config(serve_config(base, STATIC, 1, tmp_path / "ttl_policy.json"), []))
    assert read_serve_config(str(path)).settings.store.policy() == policy


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "applications: []",
        "applications: [{import_path: 'other:app'}]",
        "a: [",
        "[" * 5000,
        "a: " + "9" * 5000,
    ],
)
def test_what_is_no_configuration_of_ours_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "base.yaml"
    path.write_text(text)
    with pytest.raises(JobError, match=r"base\.yaml"):
        read_base(path)


@pytest.mark.parametrize(
    ("args", "place"),
    [
        ("[1]", "args"),
        ("text", "args"),
        ("{store: 5}", "args.store"),
        ("{store: {disk: [1]}}", "args.store.disk"),
        ("{prefill: 2}", "args.prefill"),
        ("{monolithic: many}", "args.monolithic"),
    ],
)
def test_what_stands_in_the_place_of_a_block_is_refused(args: str, place: str, tmp_path: Path) -> None:
    path = tmp_path / "base.yaml"
    path.write_text(f"applications: [{{import_path: 'app.builder:build', args: {args}}}]")
    with pytest.raises(
        JobError, match=rf"base\.yaml: {re.escape(place)} of the application is .* a mapping of settings"
    ):
        read_base(path)


def test_comments_stay_comments_whatever_is_in_them() -> None:
    text = dump_config({"a": 1}, ["one\nb: 2", "bell \x07 and \udcff", "line\u2028c: 3"])
    assert yaml.safe_load(text) == {"a": 1}
    assert text.startswith("# one?b: 2\n# bell ? and ?\n# line?c: 3\n")


def test_a_key_that_a_base_gives_twice_is_refused_with_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "base.yaml"
    path.write_text("applications:\n  - import_path: app.builder:build\n    args: {mode: static}\n    args: {}\n")
    with pytest.raises(JobError, match=r"base\.yaml: applications\.0\.args: given twice, in line 3 and in line 4"):
        read_base(path)


def test_shares_of_nodes_lose_nothing_to_rounding() -> None:
    for hundredths in range(1, 2000):
        assert share_of_node(hundredths, 100) == share_of_node(hundredths / 100, 1) == hundredths / 100
    assert share_of_node(100, 3) == 33.33


def test_a_store_of_which_nothing_is_known_stays_as_it_was(tmp_path: Path) -> None:
    base = read_base(None)
    store = {"dram_gib": 64.0, "disk": {"limit_gib": 100.0}, "eviction": "lfu", "ttl_s": 60.0}
    base["applications"][0]["args"] = {"mode": "monolithic", "store": store}
    path = tmp_path / "serve_config.yaml"
    config = serve_config(base, Deployment("static", prefill_instances=3), 1, None, keeps_store=True)
    path.write_text(dump_config(config, []))
    settings = read_serve_config(str(path)).settings
    assert (settings.mode, settings.role("prefill").replicas) == ("static", 3)
    assert settings.store.model_dump(exclude_unset=True) == store
