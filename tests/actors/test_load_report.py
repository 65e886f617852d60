from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.engine.config import EngineConfig
from actors.engine.engine import Engine
from actors.engine.loading import load_model
from actors.engine.request import EngineRequest
from actors.load_report import LoadSnapshot, take_snapshot
from migrate.load import WorkerLoad
from tests.engine_driver import greedy, make_prompt
from tests.reference import FAMILIES, make_model


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    torch.set_num_threads(1)
    config = EngineConfig(device="cpu", dtype="float32", kv_cache_blocks=30, max_batch_tokens=64)
    return Engine(load_model(make_model(FAMILIES["llama"], tmp_path), config), config)


def report(engine: Engine, owner: str) -> WorkerLoad:
    return take_snapshot(engine).report("w", 3, "prefill", 250.0, owner)


def request(name: str, tokens: int, owner: str, **more: object) -> EngineRequest:
    return EngineRequest(name, make_prompt(tokens, ord(name)), greedy(4), owner=owner, **more)  # type: ignore[arg-type]


def test_an_idle_engine_reports_nothing_but_its_size(engine: Engine) -> None:
    load = report(engine, "i")
    assert (load.worker_id, load.epoch, load.role, load.prefill_tokens_per_s) == ("w", 3, "prefill", 250.0)
    assert (load.total_blocks, load.live_blocks, load.steps) == (30, 0, 0)
    assert load.running_requests == load.waiting_requests == load.pending_prefill_tokens == 0


def test_before_the_first_turn_there_is_a_report_too() -> None:
    load = LoadSnapshot().report("w", 0, "decode", 1.0, "i")
    assert (load.total_blocks, load.from_this_ingress_requests) == (0, 0)


def test_pending_work_is_told_apart_by_its_owner_until_the_first_token(engine: Engine) -> None:
    engine.add(request("a", 100, "one"))
    engine.add(request("b", 50, "two"))
    engine.add(request("c", 20, "two"))
    one, two = report(engine, "one"), report(engine, "two")
    assert one.pending_prefill_tokens == two.pending_prefill_tokens == 170
    assert (one.from_this_ingress_prefill_tokens, one.from_this_ingress_requests) == (100, 1)
    assert (two.from_this_ingress_prefill_tokens, two.from_this_ingress_requests) == (70, 2)
    assert (one.waiting_requests, one.running_requests, one.live_blocks) == (3, 0, 0)

    engine.step()  # 64 tokens of the first prompt
    one = report(engine, "one")
    assert one.from_this_ingress_prefill_tokens == 36
    assert (one.running_requests, one.waiting_requests, one.live_blocks, one.steps) == (1, 2, 7, 1)

    engine.step()  # its last 36, and 28 of the second
    one, two = report(engine, "one"), report(engine, "two")
    assert (one.from_this_ingress_prefill_tokens, one.from_this_ingress_requests) == (0, 0)
    assert two.from_this_ingress_prefill_tokens == 22 + 20
    assert one.running_requests == 2


def test_what_is_to_be_fetched_is_not_to_be_computed(engine: Engine) -> None:
    engine.add(request("a", 100, "one", external_tokens=96))
    assert report(engine, "one").pending_prefill_tokens == 4
    engine.step()
    load = report(engine, "one")
    assert (load.pending_prefill_tokens, load.waiting_requests, load.live_blocks) == (4, 1, 7)
    engine.fetched("a", 32)  # the rest did not come
    assert report(engine, "one").pending_prefill_tokens == 68
    engine.abort("a")
    load = report(engine, "one")
    assert (load.pending_prefill_tokens, load.live_blocks, load.from_this_ingress_requests) == (0, 0, 0)


def test_a_handed_over_request_holds_blocks_and_is_no_pending_work(engine: Engine) -> None:
    engine.add(request("a", 50, "one", hand_over=True))
    engine.step()
    load = report(engine, "one")
    assert (load.live_blocks, load.running_requests, load.waiting_requests) == (4, 0, 0)
    assert (load.pending_prefill_tokens, load.from_this_ingress_requests) == (0, 0)
    engine.release_export("a")
    assert report(engine, "one").live_blocks == 0


def test_blocks_of_an_answer_being_published_are_room_for_others(engine: Engine) -> None:
    engine.add(request("a", 50, "one", publish_beyond_blocks=2))
    while not engine.holds_export("a"):
        engine.step()
    assert engine.blocks.num_live == 4
    assert report(engine, "one").live_blocks == 0
    engine.release_export("a")
    engine.check_idle()
