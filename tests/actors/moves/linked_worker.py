"""What a Worker actor has of moves, without Ray: an engine in its thread, links in memory, and its requests' tokens."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from actors.engine.config import EngineConfig
from actors.engine.engine import Engine, StepResult
from actors.engine.loading import load_model
from actors.engine.request import EngineRequest, SamplingParams
from actors.engine_thread import EngineThread
from actors.moves.host import MoveHost
from actors.moves.instance_home import InstanceHome
from actors.moves.layer_moves import LayerMoves
from actors.moves.work_links import WorkLinks
from migrate.links.calls import LinkCalls
from migrate.links.memory_network import MemoryNetwork
from migrate.placement import Placement
from tests.link_ends import WAIT_S

TIMEOUT_S = 600.0


class LinkedWorker:
    def __init__(self, name: str, folder: Path, config: EngineConfig, network: MemoryNetwork) -> None:
        self.name = name
        self.engine = Engine(load_model(folder, config), config)
        self.tokens: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.failures: list[str] = []
        self._changed = threading.Condition()
        self.thread = EngineThread(self.engine, self._on_turn, lambda: None)
        self.host = MoveHost(self.thread)
        self.calls = LinkCalls(name, network.connector(name), self.host.serve, lambda *_: None)
        self.stages = self.heads = WorkLinks(self.calls, TIMEOUT_S)
        self.lost: list[str] = []
        self.home = InstanceHome(
            self.thread,
            self.calls,
            self.stages,
            self.heads,
            self.at_home,
            TIMEOUT_S,
            lambda host, _: self.lost.append(host),
        )

    @property
    def at_home(self) -> Placement:
        spec = self.engine.loaded.spec
        return Placement.at_home(self.name, spec.num_layers, spec.num_kv_heads)

    def start(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> None:
        for prompt in prompts:
            name = str(len(self.tokens))
            request = EngineRequest(name, tuple(prompt), sampling)
            self.tokens[name] = []
            assert self.thread.call(lambda engine, request=request: engine.add(request)).result(WAIT_S) is None

    def wait_for_tokens(self, count: int) -> None:
        """So many in all."""
        self._wait(lambda: sum(map(len, self.tokens.values())) >= count)

    def wait(self) -> list[list[int]]:
        """The answers, once all have ended."""
        self._wait(lambda: len(self.ended) == len(self.tokens))
        return [self.tokens[str(number)] for number in range(len(self.tokens))]

    def wait_for_failure(self) -> None:
        self._wait(lambda: bool(self.failures))

    def stop(self) -> None:
        self.calls.close(WAIT_S)
        self.host.close()
        self.thread.stop()

    def _wait(self, condition: object) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), self.failures  # type: ignore[arg-type]

    def _on_turn(self, _: Engine, result: StepResult) -> None:
        with self._changed:
            for event in result.events:
                assert event.error is None
                if event.token_id is not None:
                    self.tokens[event.request_id].append(event.token_id)
                if event.finish_reason is not None:
                    self.ended.add(event.request_id)
            if result.failure is not None:
                self.failures.append(result.failure.reason)
            self._changed.notify_all()


def join(first: LinkedWorker, second: LinkedWorker, epoch: int = 0) -> None:
    for future in (first.calls.connect(second.name, epoch), second.calls.connect(first.name, epoch)):
        future.result(WAIT_S)


def moves_of(worker: LinkedWorker, *, drops_cached: bool = False) -> LayerMoves:
    return LayerMoves(worker.home, drops_cached=drops_cached)
