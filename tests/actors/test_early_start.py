"""A request is computed while the last layers of its prefix are still being fetched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.addresses import address_of
from actors.early_start import EarlyStart
from actors.engine.config import EngineConfig
from actors.engine.layer_arrival import LayerArrival
from actors.model_source import resolve_model
from migrate.load import Role
from tests.engine_driver import greedy, make_prompt
from tests.reference import assert_greedy, load_reference
from tests.store_cell import eventually, get
from tests.worker_cell import worker_cell


class Begun:
    """What was begun, and with what."""

    def __init__(self, compute_s: float) -> None:
        self.calls: list[tuple[int, LayerArrival]] = []
        self.early = EarlyStart(8, compute_s, 5.0, lambda *call: self.calls.append(call))


def test_computing_begins_once_when_the_rest_takes_no_longer() -> None:
    begun = Begun(compute_s=8.0)  # the last layer is needed after 7 s
    begun.early.arrived(0, 0.5, 64)
    begun.early.arrived(2, 2.5, 64)  # 7.5 s for the other six
    assert begun.calls == []
    begun.early.arrived(4, 5.0, 64)  # 5 s for the other four
    begun.early.arrived(6, 7.0, 64)
    begun.early.arrived(8, 9.0, 64)
    assert [num_tokens for num_tokens, _ in begun.calls] == [64]
    assert not begun.calls[0][1].has_failed


def test_what_arrives_whole_is_not_begun_early() -> None:
    begun = Begun(compute_s=100.0)
    begun.early.arrived(8, 1.0, 64)
    assert begun.calls == []


def test_nothing_is_begun_after_a_failure_and_what_was_learns_of_it() -> None:
    begun = Begun(compute_s=100.0)
    begun.early.fail()
    begun.early.arrived(4, 1.0, 64)
    assert begun.calls == []
    begun = Begun(compute_s=100.0)
    begun.early.arrived(4, 1.0, 64)
    begun.early.fail()
    assert begun.calls[0][1].has_failed


MODEL = "random/llama-8x8"
ENGINE = EngineConfig(dtype="float32", block_tokens=16, kv_cache_blocks=160, max_batch_tokens=128)
ROLES: dict[Role, int] = {"prefill": 2, "decode": 1}


@pytest.mark.cluster
def test_the_same_tokens_come_of_prefixes_that_arrive_while_they_are_used(ray_cluster: None) -> None:
    folder = resolve_model(MODEL).path
    prefix = make_prompt(640, 1, vocab=250)
    prompts = [(*prefix, *make_prompt(length, length, vocab=250)) for length in (100, 37, 64)]
    with worker_cell(MODEL, ROLES, ENGINE, layer_groups=4) as cell:
        prefill = [member for member in cell.members if member.role == "prefill"]
        decode = [member for member in cell.members if member.role == "decode"]
        first = replace(cell, members=(prefill[0], *decode)).run(prompts[:1], greedy(8), together=True)
        again = replace(cell, members=(prefill[1], *decode)).run(prompts, greedy(8), together=True)
        for member in cell.members:
            actor = address_of(member).actor
            eventually(lambda actor=actor: get(actor.stats.remote())["tracked_requests"] == 0)
        stats = [get(address_of(member).actor.stats.remote()) for member in (prefill[1], *decode)]
        assert stats[0]["early_starts"] > 0
        assert stats[0]["fetched_tokens"] > 0
        assert all(counts["live_blocks"] == 0 for counts in stats)
        assert stats[1]["computed_prompt_tokens"] == 0
        answers = [answer.tokens for answer in first + again]
        assert_greedy(load_reference(folder), [prompts[0], *prompts], answers)
