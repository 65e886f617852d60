"""The table of a step's parts."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

from actors.engine.config import EngineConfig
from load_tests import step_profile
from load_tests.step_profile import Case, Floor, PartTimes, ProfiledEngine
from tests.reference import FAMILIES, make_model


class Work:
    """A part that calls another one."""

    def outer(self) -> str:
        _burn(0.02)
        return self.inner()

    def inner(self) -> str:
        _burn(0.01)
        return "done"


def test_a_part_is_counted_without_those_within_it() -> None:
    work, times = Work(), PartTimes()
    times.wrap(work, "outer", "a")
    times.wrap(work, "inner", "b")
    measured = times.of(lambda: (work.outer(), work.inner(), _burn(0.01)))
    assert set(measured) == {"a", "b", "rest", "step"}
    assert measured["step"] == pytest.approx(measured["a"] + measured["b"] + measured["rest"])
    assert measured["a"] >= 0.02
    assert measured["b"] >= 0.02
    assert measured["rest"] >= 0.01
    assert work.outer() == "done"


def test_floor_is_the_longer_of_bytes_and_flops() -> None:
    floor = Floor(1000, 500, 100, 10, 8, bytes_per_s=100.0, flop_per_s=1000.0)
    assert floor.seconds(Case(2, 30)) == pytest.approx((1000 + 2 * 30 * 10) / 100)
    assert floor.seconds(Case(0, 100)) == pytest.approx((2 * (400 * 100 + 100) + 8 * 100 * 100 / 2) / 1000)


def test_table_has_a_row_for_each_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_model(FAMILIES["llama"], tmp_path / "model", seed=0)
    options = [
        "--model",
        str(folder),
        "--batches",
        "1",
        "3",
        "--contexts",
        "20",
        "--prefills",
        "30",
        "--kv-gib",
        "0.01",
    ]
    monkeypatch.setattr(sys, "argv", ["step_profile", *options])
    monkeypatch.setattr(step_profile, "product_flop_per_s", lambda dtype: 1e9)
    threads = torch.get_num_threads()
    step_profile.main()
    torch.set_num_threads(threads)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[2:]] == ["| decode 1 x 20", "| decode 3 x 20", "| prefill 30"]
    assert all(float(row[1]) > 0 for row in rows[2:])


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_parts_of_layers_are_told_apart_however_they_are_run(tmp_path: Path, kernels: str) -> None:
    folder = make_model(FAMILIES["llama"], tmp_path / "model", seed=0)
    config = EngineConfig(device="cpu", dtype="bfloat16", kernels=kernels, kv_cache_bytes=10 << 20)
    profiled = ProfiledEngine(folder, config)
    times = profiled.time_parts()
    for case in (Case(3, 20), Case(0, 30)):
        parts = profiled.measure(case, times)
        assert all(parts[part] > 0 for part in ("linear", "attention", "norm, rotary, activation", "rest"))
        assert sum(parts.values()) - parts["step"] <= parts["step"]


def _burn(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass
