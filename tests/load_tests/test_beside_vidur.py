"""Our side of the comparison, and what is given to Vidur's. Vidur itself runs where two variables say where it is."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np
import pytest

from load_tests import beside_vidur
from load_tests.vidur_run import GRANULARITY, Times, tables
from tuning.hardware_profile import read_hardware
from tuning.model_config import read_model_shape
from tuning.timing import Timing
from tuning.trace.reading import read_trace

HEAD = Path(__file__).parents[1] / "fixtures" / "traces" / "mooncake_conversation_head.jsonl"


def test_vidur_gets_the_same_arrivals_and_lengths(tmp_path: Path) -> None:
    trace = read_trace(HEAD)[0].head(50)
    beside_vidur.write_vidur_trace(tmp_path / "trace.csv", trace)
    with (tmp_path / "trace.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for arrival, prompt, answer in (
        ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
        ("Time", "PromptTokenCount", "CompletionTokenCount"),
    ):
        assert [float(row[arrival]) for row in rows] == trace.arrival_s.tolist()
        assert [int(row[prompt]) for row in rows] == trace.input_tokens.tolist()
        assert [int(row[answer]) for row in rows] == trace.output_tokens.tolist()


def test_nothing_is_reused_in_a_trace_without_blocks() -> None:
    trace = beside_vidur.without_reuse(read_trace(HEAD)[0])
    assert not trace.has_reuse
    assert trace.num_ids == 0
    assert np.array_equal(trace.block_offsets, np.zeros(len(trace) + 1))


@pytest.mark.parametrize("version", ["repository", "wheel"])
def test_tables_hold_the_times_of_ours(version: str) -> None:
    """All operations of a layer, times the layers, are a step of ours but for what any step takes."""
    timing = Timing(read_model_shape("llama-3.1-8b"), read_hardware("a100-80g"))
    trace = read_trace(HEAD)[0]
    job = beside_vidur.vidur_job(trace, timing, {"max_batch_tokens": 2048, "max_running_requests": 8}, 1)
    filled = tables(Times(**job["times"]), job | {"version": version})
    chunk, cached = 1024, 4 * GRANULARITY
    products_ms = sum(table[(chunk,)] for name, table in filled.items() if not name.endswith(("_prefill", "_decode")))
    prefill_key = (cached + chunk, chunk) if version == "wheel" else (cached, chunk**2)
    layers = timing.model.num_layers
    base_s = timing.prefill_base_s
    assert layers * (products_ms + filled["attn_prefill"][prefill_key]) / 1e3 == pytest.approx(
        timing.step_s([(chunk, cached)], 0, 0) - base_s
    )
    decode_ms = sum(table[(8,)] for name, table in filled.items() if not name.endswith(("_prefill", "_decode")))
    assert layers * (decode_ms + filled["attn_decode"][(8, cached)]) / 1e3 == pytest.approx(
        timing.decode_step_s(8, 8 * cached) - timing.decode_base_s
    )


@pytest.mark.skipif(
    not {"EQUIPOISE_VIDUR_PYTHON", "EQUIPOISE_VIDUR"} <= os.environ.keys(),
    reason="EQUIPOISE_VIDUR_PYTHON and EQUIPOISE_VIDUR don't say where Vidur and its Python are",
)
def test_beside_vidur_itself(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    python, folder = os.environ["EQUIPOISE_VIDUR_PYTHON"], os.environ["EQUIPOISE_VIDUR"]
    given = ["--trace", str(HEAD), "--vidur-python", python, "--repository", folder, "--requests", "30"]
    saved = ["--save", "v", "--save-in", str(tmp_path)]
    assert beside_vidur.main([*given, "--repeats", "1", *saved]) == 0
    lines = capsys.readouterr().out.splitlines()
    makespan_s = {line.split("|")[1].strip(): float(line.split("|")[5]) for line in lines if "| ours, w" in line[:9]}
    theirs = next(line for line in lines if line.startswith("| Vidur, repository"))
    assert float(theirs.split("|")[5]) == pytest.approx(makespan_s["ours, without reuse"], rel=0.15)
    (markdown,) = tmp_path.glob("*-v.md")
    assert theirs in markdown.read_text()
