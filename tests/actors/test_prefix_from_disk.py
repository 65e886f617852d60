"""What lies on a node's disk only is brought in while its request waits, and is the same (real workers, no Serve)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from actors.addresses import address_of
from actors.engine.config import EngineConfig
from kv.disk.settings import DiskSettings
from kv.metrics import table
from migrate.load import Role
from tests.engine_driver import greedy, make_prompt
from tests.exported_metrics import assert_exported, process_of
from tests.reference import FAMILIES, assert_greedy, load_reference, make_model
from tests.store_cell import eventually, get, stats_of
from tests.worker_cell import worker_cell

pytestmark = pytest.mark.cluster

BLOCK = 16
ENGINE = EngineConfig(dtype="float32", block_tokens=BLOCK, kv_cache_blocks=64, max_batch_tokens=128)
ROLES: dict[Role, int] = {"prefill": 2, "decode": 1}
DRAM_BYTES = 100 << 20


def test_a_prefix_that_lies_on_disk_only_is_prefetched_and_used(ray_cluster: None, tmp_path: Path) -> None:
    folder = make_model(FAMILIES["llama"], tmp_path / "model")
    disk = DiskSettings(str(tmp_path / "kv"), 100 << 20)
    with worker_cell(str(folder), ROLES, ENGINE, store_bytes=DRAM_BYTES, disk=disk) as cell:
        prefill = [member for member in cell.members if member.role == "prefill"]
        decode = [member for member in cell.members if member.role == "decode"]
        prompts = [make_prompt(length, length) for length in (33, 70, 200)]
        first = replace(cell, members=(prefill[0], *decode)).run(prompts, greedy(20), together=True)
        for member in cell.members:  # answers are published, too
            actor = address_of(member).actor
            eventually(lambda actor=actor: get(actor.stats.remote())["tracked_requests"] == 0)
        assert get(cell.store.flush.remote(30.0))
        get(cell.store.set_limits.remote(0, None))
        eventually(lambda: stats_of(cell.store).num_extents == 0)  # readers may still hold some
        get(cell.store.set_limits.remote(DRAM_BYTES, None))

        again = replace(cell, members=(prefill[1], *decode)).run(prompts, greedy(20), together=False)
        known = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts]
        assert [answer.cached_tokens for answer in again] == known
        worker = get(address_of(prefill[1]).actor.stats.remote())
        assert worker["fetched_tokens"] == sum(known)
        assert stats_of(cell.store).num_prefetched_extents >= len(prompts)
        assert worker["store_hit_tokens"] == {"disk": sum(known)}
        assert_exported(
            {
                (table.PREFIX_QUERIES, ("prefill",)): worker["prompt_tokens"],
                (table.PREFIX_HITS, ("prefill", "disk")): sum(known),
                (table.LOOKUPS, ("prefill",)): worker["store_lookups"],
                (table.QUERIED, ("prefill",)): sum(known),
                (table.FOUND, ("prefill", "disk")): sum(known),
            },
            of=[process_of(address_of(prefill[1]).actor)],
        )
        answers = [answer.tokens for answer in first + again]
        assert_greedy(load_reference(folder), prompts * 2, answers)
