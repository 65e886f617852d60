"""Which times-to-live a chosen deployment is served with.

One prompt comes back every 10 s, and the 19 between two of its uses are never seen again. LRU in 100 blocks forgets it;
times-to-live by groups keep its 10 blocks.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tuning.round_figures import prices_for
from tests.tuning.simulator.tiny import BLOCK_BYTES, BLOCK_TOKENS, MODEL, make_timing
from tuning.deployment.deployment import GIB, Deployment, ServingOptions
from tuning.deployment.evaluator import DeploymentEvaluator
from tuning.deployment.objectives import Goals
from tuning.job.ttl_choice import TtlChoice, choose_ttls
from tuning.trace.own_parquet import schema
from tuning.trace.reading import read_trace

HARDWARE = replace(make_timing().hardware, host_link_bytes_per_s=1e9)
PRICES = prices_for(HARDWARE.name)


def key(block: int) -> bytes:
    return hashlib.sha256(str(block).encode()).digest()


def choice(path: Path, blocks: int, hash_bytes: int = 32, hot_until: int = 200) -> TtlChoice:
    """For DRAM of so many blocks and 200 prompts, of which the hot one comes until that row."""
    firsts = [0 if row % 20 == 0 and row < hot_until else 100 * (row + 1) for row in range(200)]
    columns = {
        "arrival_s": [0.5 * row for row in range(200)],
        "input_tokens": [10 * BLOCK_TOKENS] * 200,
        "output_tokens": [1] * 200,
        "block_hashes": [[key(first + place)[:hash_bytes] for place in range(10)] for first in firsts],
        "parent_request": [-1] * 200,
        "turn": [1] * 200,
    }
    pq.write_table(pa.Table.from_pydict(columns, schema=schema(BLOCK_TOKENS, hash_bytes, with_kind=False)), path)
    trace, report = read_trace(path)
    evaluator = DeploymentEvaluator(trace, MODEL, HARDWARE, PRICES, Deployment(), ServingOptions(), Goals())
    deployment = Deployment(dram_gib=blocks * BLOCK_BYTES / GIB)
    return choose_ttls(evaluator, deployment, evaluator.evaluate(deployment), path, report.format)


def test_groups_that_pay_are_served_with_by_their_live_keys(tmp_path: Path) -> None:
    found = choice(tmp_path / "trace.parquet", 100)
    assert found.reason.startswith("group")
    assert [(group.root, group.ttl_s) for group in found.policy.groups] == [(key(0), pytest.approx(10.0))]
    assert found.policy.default_ttl_s == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("blocks", "hash_bytes", "hot_until", "reason"),
    [
        (100, 8, 200, "has not the keys of a live store"),
        (100, 32, 100, "no better than LRU on the second"),
        (150, 32, 20, "no better"),
        (5000, 32, 200, "everything is kept"),
        (0, 32, 200, "no room to keep anything"),
    ],
)
def test_else_one_time_to_live_is_served_with(
    blocks: int, hash_bytes: int, hot_until: int, reason: str, tmp_path: Path
) -> None:
    found = choice(tmp_path / "trace.parquet", blocks, hash_bytes, hot_until)
    assert reason in found.reason
    assert found.policy.groups == ()
    assert found.policy.default_ttl_s is None
