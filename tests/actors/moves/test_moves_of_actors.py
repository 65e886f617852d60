"""Layers move between real Worker actors over gloo, as the control deployment orders it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.addresses import address_of
from actors.engine.config import EngineConfig
from actors.moves.control_links import ControlLinks
from actors.worker_settings import MoveLimits
from migrate.move_report import MoveFailedError, MoveReport
from migrate.moves import LayerMove
from migrate.placement_state import PlacementState
from migrate.roster import Roster
from tests.engine_driver import greedy, make_prompt
from tests.flow_client import FlowAnswer, FlowClient
from tests.reference import assert_greedy, load_reference
from tests.running_app import wait_until
from tests.worker_cell import worker_cell

pytestmark = pytest.mark.cluster

ENGINE = EngineConfig(
    dtype="float32", block_tokens=16, slab_pages=1, kv_cache_blocks=80, max_context_tokens=320, max_batch_tokens=64
)
LIMITS = MoveLimits()
PROMPTS = [make_prompt(length, length) for length in (5, 33, 90, 17, 64)]
ANSWER = 220
WAIT_S = 60.0


class Pair:
    """Two workers; all requests go to the first."""

    def __init__(self, cell: FlowClient) -> None:
        self.home, self.host = (member.worker_id for member in cell.members)
        self.actors = {member.worker_id: address_of(member).actor for member in cell.members}
        self.roster = Roster()
        for member in cell.members:
            self.roster.join(member)
        self.links = ControlLinks(self.roster, LIMITS)
        self._client = replace(cell, members=cell.members[:1])
        self._pool = ThreadPoolExecutor(1)

    def ask(self) -> Future[list[FlowAnswer]]:
        return self._pool.submit(self._client.run, PROMPTS, greedy(ANSWER), together=True)

    def wait_for_tokens(self, count: int) -> None:
        """So many more than now."""
        wanted = self.generated + count
        wait_until(lambda: self.generated >= wanted, WAIT_S, "answers do not go on")

    @property
    def generated(self) -> int:
        return int(self.stats(self.home)["generated_tokens"])

    def stats(self, worker: str) -> dict[str, Any]:
        stats: dict[str, Any] = ray.get(self.actors[worker].stats.remote(), timeout=30)
        return stats

    def order(self, first: int, count: int, *, back: bool = False) -> MoveReport:
        ends = (self.host, self.home) if back else (self.home, self.host)
        return asyncio.run(self.links.order(LayerMove(self.home, first, count, *ends), self.home))

    def states(self) -> tuple[PlacementState, PlacementState]:
        states = asyncio.run(self.links.placements())
        home, host = states[self.home], states[self.host]
        assert home is not None
        assert host is not None
        return home, host

    def home_state_when(self, condition: Callable[[PlacementState], bool]) -> PlacementState:
        def state() -> PlacementState:
            state: PlacementState = ray.get(self.actors[self.home].placement_state.remote(), timeout=30)
            return state

        wait_until(lambda: condition(state()), WAIT_S, "the home did not get there")
        return state()


@pytest.fixture
def pair(ray_cluster: None, family_folder: Callable[[str], Path]) -> Iterator[Pair]:
    with worker_cell(str(family_folder("llama")), {"monolithic": 2}, ENGINE, moves=LIMITS) as cell:
        yield Pair(cell)


def assert_whole(folder: Path, answers: list[FlowAnswer]) -> None:
    assert [len(answer.tokens) for answer in answers] == [ANSWER] * len(PROMPTS)
    assert_greedy(load_reference(folder), PROMPTS, [answer.tokens for answer in answers])


def test_layers_move_in_the_middle_of_answers_and_home_again(pair: Pair, family_folder: Callable[[str], Path]) -> None:
    before, there_before = pair.states()
    asked = pair.ask()
    pair.wait_for_tokens(50)
    report = pair.order(1, 2)
    after, there = pair.states()
    pair.wait_for_tokens(50)
    later, there_later = pair.states()
    assert pair.order(1, 2, back=True).weight_bytes == before.weight_bytes * 2 // 3
    home_again, there_again = pair.states()
    assert_whole(family_folder("llama"), asked.result(WAIT_S))

    assert after.placement.layers_on(pair.host) == (1, 2)
    # What left is gone from here: two thirds of the weights; and what the pages of the rest took is more tokens now.
    assert after.weight_bytes == before.weight_bytes // 3
    assert after.pool_blocks == report.pool_blocks > before.pool_blocks
    assert after.granted_blocks == {pair.host: there.hosted[0].num_blocks}
    assert there.pool_blocks < there_before.pool_blocks
    # It runs there and not here.
    steps = later.layer_steps[0] - after.layer_steps[0]
    assert steps > 0
    assert later.layer_steps[1:] == after.layer_steps[1:]
    hosted, hosted_later = there.hosted[0].layer_steps, there_later.hosted[0].layer_steps
    assert hosted_later[1] == hosted_later[2] > hosted.get(1, 0)
    # What a report says has crossed the link, and hidden states and answers beside it.
    assert after.links[pair.host].bytes_sent > report.kv_bytes > 0
    assert home_again.links[pair.host].bytes_received > before.weight_bytes * 2 // 3
    assert home_again.placement.is_home
    for now, then in ((home_again, before), (there_again, there_before)):
        assert (now.pool_blocks, now.weight_bytes, now.kv_bytes, now.hosted) == (
            then.pool_blocks, then.weight_bytes, then.kv_bytes, then.hosted,
        )  # fmt: skip
    assert [pair.stats(worker)["failed_requests"] for worker in pair.actors] == [0, 0]


def test_a_host_is_killed_in_the_middle_of_answers(pair: Pair, family_folder: Callable[[str], Path]) -> None:
    before, _ = pair.states()
    asked = pair.ask()
    pair.wait_for_tokens(50)
    pair.order(1, 2)
    pair.wait_for_tokens(50)
    os.kill(pair.stats(pair.host)["pid"], signal.SIGKILL)
    assert_whole(family_folder("llama"), asked.result(WAIT_S))
    state = pair.home_state_when(lambda state: state.repairs == 1 and state.under_way is None)
    assert state.placement.is_home
    assert (state.pool_blocks, state.weight_bytes, state.kv_bytes) == (
        before.pool_blocks, before.weight_bytes, before.kv_bytes,
    )  # fmt: skip
    ray.get(pair.actors[pair.home].check_health.remote(30.0), timeout=30)
    with pytest.raises(MoveFailedError, match="a worker has died"):
        pair.order(1, 2)
    pair.roster.leave(pair.host, 0)
    with pytest.raises(MoveFailedError, match="is not a worker that is alive"):
        pair.order(1, 2)


def test_a_home_is_killed(pair: Pair) -> None:
    _, before = pair.states()
    pair.order(1, 2)
    os.kill(pair.stats(pair.home)["pid"], signal.SIGKILL)

    def has_let_go() -> bool:
        state: PlacementState = ray.get(pair.actors[pair.host].placement_state.remote(), timeout=30)
        return (state.pool_blocks, state.weight_bytes, state.hosted) == (before.pool_blocks, before.weight_bytes, ())

    wait_until(has_let_go, WAIT_S, "the host keeps what it has for a dead worker")


def test_a_worker_is_in_one_move_at_a_time(pair: Pair) -> None:
    async def both() -> list[Any]:
        moves = [LayerMove(pair.home, 2, 1, pair.home, pair.host), LayerMove(pair.host, 2, 1, pair.host, pair.home)]
        return await asyncio.gather(*(pair.links.order(move, move.instance) for move in moves), return_exceptions=True)

    made, refused = asyncio.run(both())
    assert made.move.layers == range(2, 3)
    assert isinstance(refused, MoveFailedError)
    assert "is in another move, layer 2 of" in str(refused)
