"""Other workers for tests, in this process: each runs layers with a model of its own, at the test's command or in a
thread of its own."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from actors.engine.engine import Engine, StepResult
from actors.engine.loading import LoadedModel
from actors.engine.page_io import clear_pages
from actors.engine.request import EngineRequest
from actors.engine.stage_work import (
    StageDone,
    StageWork,
    decode_done,
    decode_work,
    encode_done,
    encode_work,
)
from actors.engine.step_messages import WorkLimits
from migrate.placement import Placement
from tests.engine_driver import Answer


class Host:
    """Runs an instance's layers over pages of its own. What it is given went through a message."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.last_step_id = 0
        self.token_us = self.step_us = 0
        """What it says that a token of a stage, and a step of its own, took."""
        spec, layout = loaded.spec, loaded.layout
        self.limits = WorkLimits(
            spec.num_layers, spec.hidden_size, loaded.arena.pages.dtype, spec.vocab_size, layout.block_tokens,
            loaded.lanes.num_blocks,
        )  # fmt: skip

    @torch.inference_mode()
    def run(self, work: StageWork) -> StageDone:
        work = decode_work(*encode_work(work), self.limits)
        assert work.step_id > self.last_step_id
        self.last_step_id = work.step_id
        clear_pages(self.loaded, work.fresh_blocks.tolist())
        batch = work.step.batch(work.step.packed, self.loaded.layout.block_tokens)
        hidden = self.loaded.model.run_layers(work.hidden, work.layers, batch)
        took_us = self.token_us * len(hidden), self.step_us
        done = StageDone(work.instance, work.version, work.step_id, hidden.contiguous(), None, *took_us)
        return decode_done(*encode_done(done))

    def spoil(self) -> None:
        """Everything that it ever computed is gone."""
        lanes = self.loaded.lanes
        pages = torch.cat([lanes.pages(layer).flatten() for layer in range(self.loaded.spec.num_layers)])
        self.loaded.arena.pages[pages] = float("nan")


Done = Callable[[StageDone], None]


def failed(work: StageWork, reason: str) -> StageDone:
    return StageDone(work.instance, work.version, work.step_id, None, reason)


class HandDriven:
    """RemoteStages whose hosts run one work at a time, when they are told to."""

    def __init__(self, hosts: dict[str, Host]) -> None:
        self.hosts = hosts
        self.inboxes: dict[str, deque[tuple[StageWork, Done]]] = {name: deque() for name in hosts}

    def submit(self, worker: str, work: StageWork, done: Done) -> None:
        self.inboxes[worker].append((work, done))

    def deliver(self, worker: str) -> bool:
        if not self.inboxes[worker]:
            return False
        work, done = self.inboxes[worker].popleft()
        done(self.hosts[worker].run(work))
        return True

    def deliver_all(self) -> None:
        for worker in self.inboxes:
            self.deliver(worker)

    def fail(self, worker: str, *, has_run: bool) -> bool:
        if not self.inboxes[worker]:
            return False
        work, done = self.inboxes[worker].popleft()
        if has_run:
            self.hosts[worker].run(work)
        done(failed(work, "told to fail"))
        return True


class Threaded:
    """RemoteStages whose hosts have a thread each. A host that dies answers everything with an error."""

    def __init__(self, hosts: dict[str, Host]) -> None:
        self.hosts = hosts
        self.dead: set[str] = set()
        self._inboxes: dict[str, queue.SimpleQueue[tuple[StageWork, Done] | None]] = {}
        self._threads = []
        for name in hosts:
            self._inboxes[name] = queue.SimpleQueue()
            self._threads.append(threading.Thread(target=self._serve, args=(name,), daemon=True))
            self._threads[-1].start()

    def submit(self, worker: str, work: StageWork, done: Done) -> None:
        self._inboxes[worker].put((work, done))

    def close(self) -> None:
        for inbox in self._inboxes.values():
            inbox.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self, name: str) -> None:
        while (item := self._inboxes[name].get()) is not None:
            work, done = item
            done(failed(work, "the worker died") if name in self.dead else self.hosts[name].run(work))


def put_elsewhere(engine: Engine, placement: Placement, remote: HandDriven | Threaded) -> None:
    """The engine keeps the placement's layers at home only, and each host its own: nobody can run another's."""
    for worker, loaded in [(placement.home, engine.loaded), *((n, h.loaded) for n, h in remote.hosts.items())]:
        for layer in range(placement.num_layers):
            if placement.layer_workers[layer] != worker:
                del loaded.model.layers[layer]
    engine.use_placement(placement, remote)


def take_in(answers: dict[str, Answer], result: StepResult) -> None:
    for event in result.events:
        answer = answers[event.request_id]
        answer.events.append(event)
        if event.token_id is not None:
            answer.tokens.append(event.token_id)


def run_in_flight(
    engine: Engine, remote: HandDriven, requests: Sequence[EngineRequest], max_turns: int = 10_000
) -> tuple[dict[str, Answer], int]:
    """Adds all requests and runs them to their ends with as many steps in flight as may be. Also returns how many were
    at most."""
    answers = {request.request_id: Answer() for request in requests}
    for request in requests:
        assert engine.add(request) is None
    most = 0
    for _ in range(max_turns):
        while engine.can_begin and engine.begin_step():
            pass
        most = max(most, engine.num_in_flight)
        remote.deliver_all()
        engine.advance()
        while engine.is_step_over:
            take_in(answers, engine.end_step())
        if not engine.has_work:
            break
    assert engine.num_in_flight == 0
    assert not engine.has_work
    engine.check_idle()
    return answers, most
