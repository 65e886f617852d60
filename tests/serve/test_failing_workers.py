"""Workers that are alive and not well: their errors reach clients at once, and a hang shows in /health."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from safetensors.torch import load_file, save_file

from actors.addresses import address_of
from actors.random_model import parse_random_name, write_random_model
from migrate.roster import Member
from tests.app_insides import stopped, wait_free
from tests.asked import SERVED, Asked, ask
from tests.engine_driver import make_prompt
from tests.judge import Judge
from tests.running_app import Deploy, RunningApp, small_roles, wait_until

pytestmark = pytest.mark.cluster

DAMAGED_FROM = 1000
"""Positions from here on give NaN."""
STALL_TIMEOUT_S = 4.0
NOTICE_LIMIT_S = 40.0
REPLACE_LIMIT_S = 150.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose later positions are damaged, as overflows are in half precision: for some inputs only."""
    folder = tmp_path_factory.mktemp("damaged")
    model = parse_random_name("random/opt-4x8")
    assert model is not None
    write_random_model(model, folder)
    (path,) = folder.glob("*.safetensors")
    weights = load_file(path)
    (name,) = [name for name in weights if name.endswith("embed_positions.weight")]
    weights[name][DAMAGED_FROM + 2 :] = torch.nan  # OPT counts positions from 2
    save_file(weights, path, metadata={"format": "pt"})
    return folder


@pytest.fixture
def app(deploy: Deploy, folder: Path) -> Iterator[RunningApp]:
    app = deploy(
        {
            "model": str(folder),
            "served_model_name": SERVED,
            "engine": {"dtype": "float32", "block_tokens": 32, "kv_cache_blocks": 384, "max_batch_tokens": 64},
            **small_roles(),
            "ingress": {"num_cpus": 0.1, "stall_timeout_s": STALL_TIMEOUT_S},
        }
    )
    yield app
    wait_until(lambda: app.get("/health")[0] == 200, REPLACE_LIMIT_S, "the app is not well again")
    wait_free(app)


@pytest.fixture(scope="module")
def judge(folder: Path) -> Judge:
    return Judge(str(folder))


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return make_prompt(length, seed, vocab=250)


@pytest.mark.parametrize("options", [{}, {"echo": True, "logprobs": 2}], ids=["plain", "echoed"])
@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_an_error_in_prefill_is_an_error_at_once(
    app: RunningApp, judge: Judge, stream: bool, options: dict[str, Any]
) -> None:
    members = app.members()
    well = Asked(app.base_url, prompt(50, 1), 500)
    started = well.wait_tokens(5)
    answered = ask(app.base_url, prompt(DAMAGED_FROM + 20, 2), 16, stream=stream, **options)
    assert answered.status == 500
    assert answered.error is not None
    assert answered.error["type"] == "server_error"
    assert answered.tokens == []
    other = well.answer()
    other.tokens[:0] = started
    judge.check([prompt(50, 1)], [other], 500)
    assert app.members() == members


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_an_error_in_decode_ends_the_answer_with_an_error(app: RunningApp, judge: Judge, stream: bool) -> None:
    tokens = prompt(DAMAGED_FROM - 40, 3)
    answered = ask(app.base_url, tokens, 200, stream=stream)
    assert answered.error is not None
    assert answered.error["type"] == "server_error"
    assert answered.finish_reason is None
    # A stream had its status before; what came until then was right.
    assert answered.status == (200 if stream else 500)
    assert len(answered.tokens) == (41 if stream else 0)
    good = ask(app.base_url, tokens, 40)
    judge.check([tokens], [good], 40)
    assert answered.tokens == (good.tokens + answered.tokens[40:] if stream else [])


def process_of(member: Member) -> psutil.Process:
    stats: dict[str, Any] = ray.get(address_of(member).actor.stats.remote(), timeout=30)
    return psutil.Process(stats["pid"])


def is_reported(app: RunningApp, member: Member) -> bool:
    status, answer = app.get("/health")
    return status == 503 and any(member.worker_id in problem for problem in answer["problems"])


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
def test_a_worker_that_stands_still_makes_health_fail_and_goes_on_where_it_was(
    app: RunningApp, judge: Judge, role: str, busy: bool
) -> None:
    members = app.members()
    (member,) = app.members(role)
    tokens = prompt(50, 4)
    asked, begun = None, []
    if busy and role == "decode":
        asked = Asked(app.base_url, tokens, 800)
        begun = asked.wait_tokens(5)
    with stopped(process_of(member)):
        if busy and role == "prefill":
            asked = Asked(app.base_url, tokens, 800)
        wait_until(lambda: is_reported(app, member), NOTICE_LIMIT_S, "health does not show the stall")
    wait_until(lambda: app.get("/health")[0] == 200, NOTICE_LIMIT_S, "health does not recover")
    if asked is not None:
        answered = asked.answer()
        answered.tokens[:0] = begun
        judge.check([tokens], [answered], 800)
    assert app.members() == members


def test_a_worker_that_stands_still_for_good_is_replaced_and_its_requests_go_on(app: RunningApp, judge: Judge) -> None:
    (member,) = app.members("decode")
    process = process_of(member)
    tokens = prompt(50, 5)
    asked = Asked(app.base_url, tokens, 600)
    begun = asked.wait_tokens(5)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: is_reported(app, member), NOTICE_LIMIT_S, "health does not show the stall")
        answered = asked.answer()
        answered.tokens[:0] = begun
        judge.check([tokens], [answered], 600)
        assert app.members("decode") != [member]
        wait_until(lambda: not process.is_running(), REPLACE_LIMIT_S, "the process that stood still is still there")
    finally:
        if process.is_running():
            os.kill(process.pid, signal.SIGCONT)
