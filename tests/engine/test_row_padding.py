"""How many rows linear products are given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.engine.engine import Engine
from actors.engine.request import EngineRequest
from actors.engine.row_padding import pad_rows, padded_rows
from tests.engine.conftest import MakeEngine
from tests.engine_driver import greedy, make_prompt, run_requests


@pytest.mark.parametrize(
    ("rows", "padded"),
    [(0, 0), (1, 1), (2, 2), (3, 4), (9, 16), (16, 16), (17, 32), (100, 112), (129, 144), (257, 288), (513, 576)],
)
def test_rows_are_rounded_up(rows: int, padded: int) -> None:
    assert padded_rows(rows) == padded


def test_sizes_are_few_and_padding_little() -> None:
    padded = {rows: padded_rows(rows) for rows in range(1, 8193)}
    assert all(rows <= size for rows, size in padded.items())
    assert all(size - rows < max(16, rows / 8) for rows, size in padded.items())
    assert len(set(padded.values())) < 70
    assert all(padded_rows(size) == size for size in padded.values())


def test_only_what_gains_is_padded() -> None:
    exact = torch.randn(9, 4)
    assert pad_rows(exact) is exact
    short = exact.to(torch.bfloat16)
    assert torch.equal(pad_rows(short), torch.cat((short, torch.zeros(7, 4, dtype=torch.bfloat16))))
    assert pad_rows(short[:8]).shape == (8, 4)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_padded_steps_compute_what_exact_ones_do(
    family: str, family_folders: dict[str, Path], make_engine: MakeEngine
) -> None:
    """Prompts whose lengths need padding, alone and in one step, against float32, which is never padded."""
    prompts = [make_prompt(length, 1) for length in (1, 3, 21, 39)]
    folder = family_folders[family]
    exact = [_first_logprob(make_engine(folder), [prompt])[0] for prompt in prompts]
    alone = [_first_logprob(make_engine(folder, dtype="bfloat16"), [prompt])[0] for prompt in prompts]
    together = _first_logprob(make_engine(folder, dtype="bfloat16"), prompts)
    assert alone == pytest.approx(exact, abs=0.05)
    assert together == pytest.approx(exact, abs=0.05)


def _first_logprob(engine: Engine, prompts: list[tuple[int, ...]]) -> list[float]:
    """The logprob of each prompt's most likely next token."""
    requests = [EngineRequest(f"r{i}", prompt, greedy(1, logprobs=1)) for i, prompt in enumerate(prompts)]
    logprobs = [answer.events[0].logprobs for answer in run_requests(engine, requests).values()]
    return [entry.logprob for entry in logprobs if entry is not None]
