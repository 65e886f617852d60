"""The corner in which service takes no time and there is one pool is a plain LRU cache: figures that can be had without
a simulator."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

import pytest

from tuning.model_config import read_model_shape
from tuning.simulator.corner import simulate_cache
from tuning.trace.reading import read_trace
from tuning.trace.trace import Trace

HEAD = Path(__file__).parents[2] / "fixtures" / "traces" / "mooncake_conversation_head.jsonl"


def lru_hits(trace: Trace, capacity_blocks: int) -> int:
    """Blocks of a prompt that are there with all before them, where each of its blocks is then used in turn."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for row in range(len(trace)):
        blocks = trace.block_ids[trace.block_offsets[row] : trace.block_offsets[row + 1]].tolist()
        hits += next((i for i, block in enumerate(blocks) if block not in cache), len(blocks))
        for block in blocks:
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > capacity_blocks:
                cache.popitem(last=False)
    return hits


@pytest.mark.parametrize("capacity_blocks", [100, 300, 1000, 3000, 10_000])
def test_the_first_rows_of_a_public_trace(capacity_blocks: int) -> None:
    trace, _ = read_trace(HEAD)
    result = simulate_cache(trace, capacity_blocks)
    assert result.hit_blocks == lru_hits(trace, capacity_blocks)
    assert result.prompt_blocks == len(trace.block_ids)


@pytest.fixture(scope="module")
def conversation() -> Trace:
    folder = os.environ.get("EQUIPOISE_TRACES")
    if not folder:
        pytest.skip("EQUIPOISE_TRACES does not name a folder with the public traces")
    return read_trace(Path(folder) / "mooncake_conversation.jsonl")[0]


@pytest.mark.parametrize(
    ("capacity_blocks", "hit_ratio"),
    [(7_281, 0.1646), (14_563, 0.2527), (29_127, 0.3240), (58_254, 0.3588), (182_790, 0.3664)],
)
def test_golden_values_of_the_whole_trace(conversation: Trace, capacity_blocks: int, hit_ratio: float) -> None:
    result = simulate_cache(conversation, capacity_blocks)
    assert round(result.block_hit_ratio, 4) == hit_ratio
    assert result.prompt_blocks == 288_500


def test_1024_gib_hold_14_563_blocks_of_qwen3_8b() -> None:
    assert (1024 << 30) // (512 * read_model_shape("qwen3-8b").kv_bytes_per_token) == 14_563
