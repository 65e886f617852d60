"""Figures of the whole public traces, which are not part of the project: EQUIPOISE_TRACES names their folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tuning.trace.reading import read_trace
from tuning.trace.reuse import ideal_hits
from tuning.trace.statistics import describe
from tuning.trace.trace import Trace


@pytest.fixture(scope="module")
def folder() -> Path:
    name = os.environ.get("EQUIPOISE_TRACES")
    if not name:
        pytest.skip("EQUIPOISE_TRACES does not name a folder with the public traces")
    return Path(name)


@pytest.fixture(scope="module")
def mooncake(folder: Path) -> Trace:
    trace, report = read_trace(folder / "mooncake_conversation.jsonl")
    assert (report.rows_read, report.num_problems, report.warnings) == (12_031, 0, [])
    return trace


def test_mooncake_conversation(mooncake: Trace) -> None:
    assert len(mooncake) == 12_031
    assert mooncake.block_tokens == 512
    assert mooncake.num_ids == 182_790
    assert len(mooncake.block_ids) == 288_500
    assert round(ideal_hits(mooncake).ratio, 4) == 0.3664
    assert len(np.unique(mooncake.arrival_s)) == 1180
    assert mooncake.arrival_s[-1] == 3536.999
    assert (mooncake.input_tokens.min(), mooncake.input_tokens.max()) == (891, 126_195)
    assert (mooncake.output_tokens.min(), mooncake.output_tokens.max()) == (1, 2000)


def test_every_id_of_mooncake_has_one_predecessor(folder: Path, mooncake: Trace) -> None:
    predecessor: dict[int, int] = {}
    number: dict[int, int] = {}
    expected = []
    for line in (folder / "mooncake_conversation.jsonl").read_text().splitlines():
        before = -1
        for block in json.loads(line)["hash_ids"]:
            assert predecessor.setdefault(block, before) == before
            expected.append(number.setdefault(block, len(number)))
            before = block
    assert mooncake.block_ids.tolist() == expected


def test_azure_conversation(folder: Path) -> None:
    trace, _ = read_trace(folder / "azure_llm_2023_conv.csv")
    figures = describe(trace)
    assert figures.requests == 19_366
    assert (figures.input_tokens.least, figures.input_tokens.most) == (2, 14_050)
    assert (figures.output_tokens.least, figures.output_tokens.most) == (7, 1000)
    assert figures.reuse is None
