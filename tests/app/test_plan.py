from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.known_shapes import KNOWN_CONFIGS
from app.plan import main, plan, read_shape
from app.settings import load_settings
from app.sizing import SizingError

ROOT = Path(__file__).parents[2]
LLAMA = str(ROOT / "serve_configs" / "llama13b.yaml")
OVERLAY = str(ROOT / "serve_configs" / "overlays" / "cpu-tiny.yaml")


@pytest.fixture(autouse=True)
def _no_overlay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EQUIPOISE_OVERLAY", raising=False)


def _planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def test_llama_2_13b_from_the_command_line_without_torch() -> None:
    code = "import sys; from app.plan import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    result = subprocess.run(
        [sys.executable, "-c", code, LLAMA],
        capture_output=True,
        text=True,
        check=False,
        env={key: value for key, value in os.environ.items() if key != "EQUIPOISE_OVERLAY"},
    )
    assert result.returncode == 0, result.stderr
    for figure in ("13,015,864,320 parameters", "819,200 bytes", "2 x cuda of 80 GiB, float16", "4,096 tokens"):
        assert figure in result.stdout


def test_json_has_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    planned = _planned(capsys, LLAMA)
    assert planned["parameters"] == 13_015_864_320
    assert planned["roles"].keys() == {"prefill", "decode"}
    prefill = planned["roles"]["prefill"]
    assert prefill["kv_bytes_per_token"] == 819_200
    assert (prefill["blocks"], prefill["longest_context_tokens"], prefill["longest_requests"]) == (228, 4096, 14)
    # 64 GiB and 512 GiB of 800 KiB a token.
    assert planned["store"] == {
        "dram": {"bytes": 64 * 2**30, "kv_tokens": 83_886},
        "disk": {"bytes": 512 * 2**30, "kv_tokens": 671_088},
    }


def test_the_object_store_has_room_for_the_dram_tier_and_each_workers_longest_request(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    needed = 64 * 2**30 + 4 * 4096 * 819_200  # two workers of each role
    assert _planned(capsys, LLAMA)["object_store_bytes"] == needed
    config = yaml.safe_load(Path(LLAMA).read_text())
    path = tmp_path / "config.yaml"
    for size_gib, status in ((needed / 2**30, 0), (needed / 2**30 - 0.01, 2)):
        config["applications"][0]["args"]["plan"] = {"object_store_gib": size_gib}
        path.write_text(yaml.safe_dump(config))
        assert main([str(path)]) == status
    complaint = capsys.readouterr().err
    assert "plan.object_store_gib" in complaint
    assert f"--object-store-memory {needed} or more" in complaint
    assert "store.dram_gib to 63.98 or less" in complaint


def _with_dram(dram_gib: float, replicas: int) -> dict[str, Any]:
    """Of workers whose pools are of 1 GiB each."""
    args = {
        "mode": "monolithic",
        "monolithic": {"replicas": replicas},
        # 2 x 30 layers x 3 heads x 64 numbers of 4 bytes, times 16 tokens, are 720 KiB a block; 1,456 of them are less
        # than a GiB by 256 KiB.
        "engine": {"device": "cpu", "dtype": "float32", "kv_cache_gib": 1, "slab_pages": 1},
        "store": {"dram_gib": dram_gib},
    }
    planned = plan(load_settings(args), read_shape("HuggingFaceTB/SmolLM2-135M-Instruct"))
    assert planned["roles"]["monolithic"]["kv_bytes"] == 1456 * 720 * 1024
    return planned


@pytest.mark.parametrize(
    ("dram_gib", "replicas", "part"),
    [
        (3.0, 3, None),
        (2.0, 3, "on fewer than 2 nodes"),
        (1.0, 3, "on fewer than 3 nodes"),  # three tiers of 1 GiB are a little more than the three pools
        (0.5, 3, "on however many nodes"),
        (0.0, 3, None),  # none is wanted
    ],
)
def test_a_dram_tier_that_only_doubles_the_pools_is_told(dram_gib: float, replicas: int, part: str | None) -> None:
    notes = _with_dram(dram_gib, replicas)["notes"]
    assert len(notes) == (part is not None)
    assert all(str(part) in note and "take 3.00 GiB in all" in note for note in notes)


def test_the_text_has_notes_and_the_dtype_that_was_published(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([LLAMA]) == 0
    printed = capsys.readouterr().out
    assert "parameters, float16 as published" in printed
    # Four pools of 57 slabs of 838,860,800 bytes; two tiers of 64 GiB are less than that, three are more.
    assert "note: store.dram_gib is 64, and the workers' own pools take 178.12 GiB in all: on fewer than 3" in printed


def test_a_smaller_device_holds_less_and_one_that_is_too_small_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert _planned(capsys, LLAMA, "--device-memory-gib", "40")["roles"]["decode"]["longest_requests"] == 2
    assert main([LLAMA, "--device-memory-gib", "24"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "prefill: the weights take 24.24 GiB" in captured.err
    assert "a worker has one device: there is no tensor parallelism" in captured.err


def test_the_overlay_plans_for_cpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIPOISE_OVERLAY", OVERLAY)
    planned = _planned(capsys, LLAMA)
    assert planned["model"] == "random/llama-40x40"
    for role in ("prefill", "decode"):
        of = planned["roles"][role]
        assert (of["device"], of["dtype"], of["replicas"]) == ("cpu", "float32", 2)
        assert of["kv_bytes_per_token"] == 2 * 40 * 40 * 8 * 4
        assert of["kv_bytes"] <= 2**28


def test_a_model_is_known_by_its_config_file_or_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KNOWN_CONFIGS["facebook/opt-125m"]))
    expected = read_shape("facebook/opt-125m")
    assert read_shape(str(tmp_path)) == expected
    assert read_shape("any/thing", str(tmp_path / "config.json")) == expected
    assert read_shape("smollm2-135m-instruct") == read_shape("HuggingFaceTB/SmolLM2-135M-Instruct")
    with pytest.raises(SizingError, match="--config"):
        read_shape("any/thing")
    with pytest.raises(SizingError, match=r"nosuch\.json"):
        read_shape("any/thing", str(tmp_path / "nosuch.json"))
    with pytest.raises(SizingError, match="random models"):
        read_shape("random/llama")
    assert main([str(tmp_path / "nosuch.yaml")]) == 2
    assert "nosuch.yaml can't be read" in capsys.readouterr().err


def test_workers_that_share_a_device_must_share_its_memory() -> None:
    args = {"mode": "monolithic", "monolithic": {"num_gpus": 0.5}, "engine": {"device": "cuda"}}
    shape = read_shape("HuggingFaceTB/SmolLM2-135M-Instruct")
    with pytest.raises(SizingError, match="2 workers on one device"):
        plan(load_settings(args), shape)
    args["engine"] = {"device": "cuda", "gpu_memory_utilization": 0.45}
    assert plan(load_settings(args), shape)["roles"]["monolithic"]["blocks"] > 0
    assert plan(load_settings(args), shape)["store"]["dram"]["bytes"] == 1 << 30
    args["store"] = {"share_prefixes": False}  # then nothing goes through a store
    assert plan(load_settings(args), shape)["store"] is None
    assert plan(load_settings(args), shape)["object_store_bytes"] is None


def test_flash_attention_plans_with_its_own_block_size() -> None:
    args: dict[str, Any] = yaml.safe_load(Path(LLAMA).read_text())["applications"][0]["args"]
    del args["engine"]["block_tokens"]
    shape = read_shape(args["model"])
    assert plan(load_settings(args), shape)["roles"]["decode"]["block_tokens"] == 256
    args["engine"]["attention"] = "torch"
    assert plan(load_settings(args), shape)["roles"]["decode"]["block_tokens"] == 16
    args["engine"] |= {"attention": "auto", "dtype": "float32"}
    assert plan(load_settings(args), shape, 1000)["roles"]["decode"]["block_tokens"] == 16
