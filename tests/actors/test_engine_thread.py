from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from actors.engine.config import EngineConfig
from actors.engine.engine import Engine, StepResult
from actors.engine.loading import load_model
from actors.engine.request import FINISH_ERROR, FINISH_LENGTH, EngineRequest, TokenEvent
from actors.engine_thread import EngineStoppedError, EngineThread
from tests.engine_driver import greedy, make_prompt, run_prompts
from tests.reference import FAMILIES, make_model

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model(FAMILIES["llama"], tmp_path_factory.mktemp("model"))


class Run:
    """An engine with its thread, and what came of its turns."""

    def __init__(self, folder: Path) -> None:
        config = EngineConfig(device="cpu", dtype="float32", kv_cache_blocks=64)
        self.engine = Engine(load_model(folder, config), config)
        self.events: list[TokenEvent] = []
        self.turn_fails: Exception | None = None
        self.ended, self.failed = threading.Event(), threading.Event()
        self.thread = EngineThread(self.engine, self._on_turn, self.failed.set)

    def _on_turn(self, _: Engine, result: StepResult) -> None:
        if self.turn_fails is not None:
            raise self.turn_fails
        self.events += result.events
        if any(event.finish_reason for event in result.events):
            self.ended.set()

    def request(self, name: str, max_tokens: int = 5) -> EngineRequest:
        return EngineRequest(name, make_prompt(40), greedy(max_tokens))


@pytest.fixture
def run(folder: Path) -> Run:
    return Run(folder)


def test_a_request_added_by_a_call_is_run_to_its_end(run: Run) -> None:
    run.thread.call(lambda engine: engine.add(run.request("a")))
    assert run.ended.wait(LIMIT_S)
    run.thread.stop()
    assert run.events[-1].finish_reason == FINISH_LENGTH
    assert [[event.token_id for event in run.events]] == run_prompts(run.engine, [make_prompt(40)], greedy(5))
    assert run.thread.defect is None
    assert run.thread.failure is None


def test_what_a_call_raises_goes_to_its_caller_alone(run: Run) -> None:
    with pytest.raises(KeyError):
        run.thread.call(lambda engine: engine.export_content("nobody")).result(LIMIT_S)
    assert run.thread.call(lambda engine: engine.num_live_requests).result(LIMIT_S) == 0
    run.thread.stop()


def test_calls_after_the_stop_fail_at_once(run: Run) -> None:
    run.thread.stop()
    with pytest.raises(EngineStoppedError):
        run.thread.call(lambda engine: engine.num_live_requests).result(LIMIT_S)


def test_a_step_that_breaks_ends_its_requests_and_the_engine_goes_on(run: Run) -> None:
    forward = run.engine.loaded.model.forward

    def broken(*arguments: object, **more: object) -> torch.Tensor:
        run.engine.loaded.model.forward = forward  # type: ignore[method-assign]
        raise MemoryError("no memory for the activations")

    run.engine.loaded.model.forward = broken  # type: ignore[method-assign]
    run.thread.call(lambda engine: engine.add(run.request("a")))
    assert run.ended.wait(LIMIT_S)
    assert run.events[-1].finish_reason == FINISH_ERROR
    assert "no memory" in (run.events[-1].error or "")
    run.ended.clear()
    run.thread.call(lambda engine: engine.add(run.request("b")))
    assert run.ended.wait(LIMIT_S)
    run.thread.stop()
    assert run.events[-1].finish_reason == FINISH_LENGTH
    run.engine.check_idle()


def test_a_thread_that_fails_says_so_and_takes_no_more_calls(run: Run) -> None:
    run.turn_fails = RuntimeError("cannot report")
    run.thread.call(lambda engine: engine.add(run.request("a")))
    assert run.failed.wait(LIMIT_S)
    assert "cannot report" in (run.thread.failure or "")
    with pytest.raises(EngineStoppedError):
        run.thread.call(lambda engine: engine.num_live_requests).result(LIMIT_S)


def test_a_turn_that_hangs_is_seen_and_an_idle_thread_is_not_taken_for_one(run: Run) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hang(_: Engine) -> None:
        begun.set()
        go_on.wait(LIMIT_S)

    answer = run.thread.call(hang)
    assert begun.wait(LIMIT_S)
    first_s = run.thread.stalled_s()
    while run.thread.stalled_s() <= first_s:
        pass
    go_on.set()
    answer.result(LIMIT_S)
    run.thread.call(lambda engine: engine.num_live_requests).result(LIMIT_S)
    run.thread.stop()
    assert run.thread.stalled_s() == 0.0
