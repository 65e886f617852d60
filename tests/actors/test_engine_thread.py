from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from actors.engine.config import EngineConfig
from actors.engine.engine import Engine, StepResult
from actors.engine.loading import load_model
from actors.engine.request import FINISH_ERROR, FINISH_LENGTH, EngineRequest, TokenEvent
from actors.engine.steps_in_flight import StageFailure
from actors.engine_thread import EngineStoppedError, EngineThread
from migrate.placement import Placement
from tests.engine.stage_hosts import Host, Threaded, put_elsewhere
from tests.engine_driver import greedy, make_prompt, run_prompts
from tests.reference import FAMILIES, make_model

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model(FAMILIES["llama"], tmp_path_factory.mktemp("model"))


class Run:
    """An engine with its thread, and what came of its turns."""

    def __init__(self, folder: Path, hosting_pause: float = 0.0) -> None:
        config = EngineConfig(device="cpu", dtype="float32", kv_cache_blocks=64, hosting_pause=hosting_pause)
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
    forward = run.engine.loaded.model.forward_sampled

    def broken(*arguments: object, **more: object) -> torch.Tensor:
        run.engine.loaded.model.forward_sampled = forward  # type: ignore[method-assign]
        raise MemoryError("no memory for the activations")

    run.engine.loaded.model.forward_sampled = broken  # type: ignore[method-assign]
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
    stage = run.thread.call_hosted(lambda engine: engine.num_live_requests)
    with pytest.raises(EngineStoppedError):
        stage.result(LIMIT_S)
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


def test_between_two_hosted_stages_there_is_a_step_of_the_engines_own(run: Run) -> None:
    may_begin = threading.Event()
    run.thread.call(lambda _: may_begin.wait(LIMIT_S))
    run.thread.call(lambda engine: engine.add(run.request("a", max_tokens=4)))

    def hosted(engine: Engine) -> tuple[int, int]:
        return engine.counters.steps, len(run.events)

    stages = [run.thread.call_hosted(hosted) for _ in range(6)]
    may_begin.set()
    # One token a step, which is out before the next stage. With nothing of its own to run, one stage follows another.
    assert [stage.result(LIMIT_S) for stage in stages] == [(1, 1), (2, 2), (3, 3), (4, 4), (4, 4), (4, 4)]


def test_decode_steps_wait_while_stages_come(folder: Path) -> None:
    run, may_begin = Run(folder, hosting_pause=1e6), threading.Event()
    run.thread.call(lambda _: may_begin.wait(LIMIT_S))
    run.thread.call(lambda engine: engine.add(run.request("a", max_tokens=4)))
    stages = [run.thread.call_hosted(lambda engine: engine.counters.steps) for _ in range(6)]
    may_begin.set()
    # The first step has a prompt, after which nothing waits. The second one was longer than a millionth of a stage.
    assert [stage.result(LIMIT_S) for stage in stages] == [1, 2, 2, 2, 2, 2]
    assert not run.ended.is_set()
    run.thread.call(lambda engine: engine.add(run.request("b", max_tokens=1)))
    assert run.ended.wait(LIMIT_S)  # a prompt waits for nothing, and takes decodes along
    assert len(run.events) == 4
    run.thread.stop()


def test_steps_go_on_by_themselves_when_the_pause_is_over(folder: Path) -> None:
    run = Run(folder, hosting_pause=1.0)
    run.thread.call(lambda engine: engine.add(run.request("a", max_tokens=6)))
    for _ in range(50):
        run.thread.call_hosted(lambda engine: engine.counters.steps).result(LIMIT_S)
    assert run.ended.wait(LIMIT_S)
    run.thread.stop()
    assert [[event.token_id for event in run.events]] == run_prompts(run.engine, [make_prompt(40)], greedy(6))


def test_a_hosted_stage_that_fails_is_its_callers_matter(run: Run) -> None:
    broken = run.thread.call_hosted(lambda engine: engine.export_content("nobody"))
    with pytest.raises(KeyError):
        broken.result(LIMIT_S)
    assert run.thread.call_hosted(lambda engine: engine.num_live_requests).result(LIMIT_S) == 0
    run.thread.stop()
    with pytest.raises(EngineStoppedError):
        run.thread.call_hosted(lambda _: None).result(LIMIT_S)


HOME = Placement.at_home("home", 3, 2)


class RunApart(Run):
    """A run whose last two layers another worker has."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.host = Host(load_model(folder, self.engine.config))
        self.remote = Threaded({"x": self.host})
        self.most_in_flight = 0
        self.failures: list[StageFailure] = []
        self.lost = threading.Event()
        placement = HOME.with_layers_moved(1, 2, "x")
        self.thread.call(lambda engine: put_elsewhere(engine, placement, self.remote)).result(LIMIT_S)

    def _on_turn(self, engine: Engine, result: StepResult) -> None:
        super()._on_turn(engine, result)
        self.most_in_flight = max(self.most_in_flight, engine.num_in_flight)
        if result.failure is not None:
            self.failures.append(result.failure)
            self.lost.set()

    def tokens(self, name: str) -> list[int | None]:
        return [event.token_id for event in self.events if event.request_id == name]

    def wait_for(self, names: Sequence[str]) -> None:
        """Until all of them have ended."""
        while True:
            ended = {event.request_id for event in self.events if event.finish_reason}
            if ended.issuperset(names):
                return
            assert self.ended.wait(LIMIT_S)
            self.ended.clear()

    def stop(self) -> None:
        self.thread.stop()
        self.remote.close()
        assert self.thread.failure is None
        assert self.thread.defect is None


@pytest.fixture
def apart(folder: Path) -> Iterator[RunApart]:
    run = RunApart(folder)
    yield run
    run.stop()


def requests(count: int) -> list[EngineRequest]:
    return [EngineRequest(f"r{index}", make_prompt(30 + index, index), greedy(12)) for index in range(count)]


def alone(folder: Path, asked: Sequence[EngineRequest]) -> dict[str, list[int]]:
    config = EngineConfig(device="cpu", dtype="float32", kv_cache_blocks=64)
    engine = Engine(load_model(folder, config), config)
    return dict(
        zip(
            [request.request_id for request in asked],
            run_prompts(engine, [request.prompt_token_ids for request in asked], greedy(12)),
            strict=True,
        )
    )


def test_steps_begin_while_another_worker_runs_earlier_ones(apart: RunApart, folder: Path) -> None:
    asked = requests(4)
    for request in asked:
        apart.thread.call(lambda engine, request=request: engine.add(request))  # type: ignore[misc]
    apart.wait_for([request.request_id for request in asked])
    assert {request.request_id: apart.tokens(request.request_id) for request in asked} == alone(folder, asked)
    assert apart.most_in_flight == 2
    assert apart.engine.counters.awaited_s > 0


def test_a_drained_call_finds_no_step_in_flight_and_may_move_layers(apart: RunApart, folder: Path) -> None:
    asked = requests(3)
    for request in asked:
        apart.thread.call(lambda engine, request=request: engine.add(request))  # type: ignore[misc]

    def come_home(engine: Engine) -> int:
        for layer in (1, 2):  # both arenas are dealt alike
            engine.loaded.model.layers[layer] = apart.host.loaded.model.layers[layer]
            pages = engine.loaded.lanes.pages(layer).flatten()
            engine.loaded.arena.pages[pages] = apart.host.loaded.arena.pages[pages]
        engine.use_placement(Placement("home", HOME.layer_workers, HOME.lane_workers, 2))
        return engine.num_in_flight

    assert apart.thread.call_drained(come_home).result(LIMIT_S) == 0
    apart.wait_for([request.request_id for request in asked])
    assert {request.request_id: apart.tokens(request.request_id) for request in asked} == alone(folder, asked)


def test_a_worker_that_dies_ends_no_request(apart: RunApart, folder: Path) -> None:
    """Who repairs the placement, here the test, has all requests computed anew."""
    apart.remote.dead.add("x")
    asked = requests(3)
    for request in asked:
        apart.thread.call(lambda engine, request=request: engine.add(request))  # type: ignore[misc]
    assert apart.lost.wait(LIMIT_S)
    assert (apart.failures[0].worker, apart.failures[0].reason) == ("x", "the worker died")
    assert apart.events == []

    def repair(engine: Engine) -> None:
        assert engine.failure is not None
        for layer in (1, 2):
            engine.loaded.model.layers[layer] = apart.host.loaded.model.layers[layer]
        engine.use_placement(Placement("home", HOME.layer_workers, HOME.lane_workers, 2))
        engine.recompute_lost(all_content=True)

    apart.thread.call_drained(repair).result(LIMIT_S)
    apart.wait_for([request.request_id for request in asked])
    assert {request.request_id: apart.tokens(request.request_id) for request in asked} == alone(folder, asked)


def test_calls_that_wait_for_steps_end_with_the_thread(run: Run) -> None:
    run.thread.stop()
    with pytest.raises(EngineStoppedError):
        run.thread.call_drained(lambda engine: engine.num_live_requests).result(LIMIT_S)


class Copier:
    """Copies pages as long as it is told to."""

    def __init__(self, engine: Engine) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self._engine = engine
        self.thread = threading.Thread(target=self._copy)
        self.thread.start()

    def _copy(self) -> None:
        with self._engine.copy_gate.copying(LIMIT_S):
            self.begun.set()
            assert self.may_end.wait(LIMIT_S)

    def end(self) -> None:
        self.may_end.set()
        self.thread.join(LIMIT_S)


def test_a_hold_waits_for_copies_and_copies_for_its_end(run: Run) -> None:
    first = Copier(run.engine)
    assert first.begun.wait(LIMIT_S)
    holds = [run.thread.hold_steps() for _ in range(2)]
    run.thread.call_drained(lambda _: None).result(LIMIT_S)
    assert not any(hold.done() for hold in holds)
    second = Copier(run.engine)
    first.end()
    for hold in holds:
        hold.result(LIMIT_S)
    run.thread.resume_steps()
    assert not second.begun.is_set()
    run.thread.resume_steps()
    assert second.begun.wait(LIMIT_S)
    second.end()
    run.thread.stop()


def test_a_hold_that_is_given_up_before_it_was_had_keeps_nobody_waiting(run: Run) -> None:
    in_call, go_on = threading.Event(), threading.Event()

    def hang(_: Engine) -> None:
        in_call.set()
        assert go_on.wait(LIMIT_S)

    run.thread.call(hang)
    assert in_call.wait(LIMIT_S)
    assert run.thread.hold_steps().cancel()
    run.thread.resume_steps()
    go_on.set()
    run.thread.call_drained(lambda _: None).result(LIMIT_S)
    copier = Copier(run.engine)
    assert copier.begun.wait(LIMIT_S)
    copier.end()
    run.thread.call(lambda engine: engine.add(run.request("a"))).result(LIMIT_S)
    assert run.ended.wait(LIMIT_S)
    run.thread.stop()


def test_a_placement_does_not_change_while_pages_are_copied(run: Run) -> None:
    copier = Copier(run.engine)
    assert copier.begun.wait(LIMIT_S)
    with pytest.raises(RuntimeError, match="1 copies of pages are under way; close the gate first"):
        run.thread.call_drained(lambda engine: engine.use_placement(HOME)).result(LIMIT_S)
    copier.end()
    run.thread.call_drained(lambda engine: engine.use_placement(HOME)).result(LIMIT_S)
    run.thread.stop()
