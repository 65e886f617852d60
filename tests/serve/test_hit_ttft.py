"""The program that measures first tokens by where their prefix is, against the running app."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from load_tests import hit_ttft
from load_tests.hit_states import STATES
from load_tests.page_cache import PagesKeptError, drop_pages
from tests.openai_app import OpenAIApp
from tests.running_app import Deploy, small_roles

pytestmark = pytest.mark.cluster

PREFIX_TOKENS = 320
IDS = ("--token-ids", "3", "250")


def args(folder: Path) -> dict[str, Any]:
    return {
        "model": "random/llama-8x8",  # 4 KiB of KV a token
        "engine": {"dtype": "float32", "block_tokens": 16, "kv_cache_blocks": 32, "max_batch_tokens": 64},
        **small_roles(),
        "store": {"dram_gib": 0.012, "disk": {"limit_gib": 0.08, "folder": str(folder)}},
    }


def test_every_state_is_brought_about_and_proven(
    deploy: Deploy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = tmp_path / "probe"
    probe.write_bytes(b"x" * 4096)
    try:
        drop_pages([probe])
    except PagesKeptError:
        pytest.skip("the temporary folder lies in memory")
    folder = tmp_path / "kv"
    app = deploy(args(folder))
    code = hit_ttft.main(
        [app.base_url, "--disk-folder", str(folder), "--quick", *IDS, "--save", "h", "--save-in", str(tmp_path)]
    )
    captured = capsys.readouterr()
    assert code == 0, captured.err
    figures = json.loads(captured.out.splitlines()[-1])
    assert [record["state"] for record in figures["states"]] == list(STATES)
    for record in figures["states"]:
        assert record["samples"] >= 2
        assert record["ttft_ms"]["min"] > 0
    kept = [sample for sample in figures["samples"] if sample["rejected"] is None]
    assert {(sample["state"], sample["cached_tokens"]) for sample in kept} == {
        ("recompute", 0),
        ("device hit", PREFIX_TOKENS),
        ("DRAM hit", PREFIX_TOKENS),
        ("disk hit", PREFIX_TOKENS),
    }
    (markdown,) = tmp_path.glob("*-h.md")
    assert "| disk hit |" in markdown.read_text()
    assert str(tmp_path) not in markdown.read_text()

    # A prefix that the pool does not hold cannot be measured.
    assert hit_ttft.main([app.base_url, "--disk-folder", str(folder), "--prefix-tokens", "600", *IDS]) == 1
    assert "give engine.kv_cache_blocks of at least 40" in capsys.readouterr().err


def test_an_app_without_a_disk_cannot_be_measured(
    openai_app: OpenAIApp, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hit_ttft.main([openai_app.app.base_url, "--disk-folder", str(tmp_path), "--quick", *IDS]) == 1
    assert "0 of them with a disk tier" in capsys.readouterr().err
