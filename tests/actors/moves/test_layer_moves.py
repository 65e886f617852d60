"""Layers that move while their instance answers: nobody notices, the memory really moves, and a move that fails was
none."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.engine.request import SamplingParams
from migrate.links.memory_network import MemoryNetwork
from migrate.move_report import MoveFailedError, MoveReport
from migrate.moves import HeadMove, LayerMove
from tests.actors.moves.conftest import MakeWorker
from tests.actors.moves.linked_worker import LinkedWorker, join, moves_of
from tests.actors.moves.unnoticed import PROMPTS, assert_nobody_notices
from tests.engine_driver import greedy
from tests.link_ends import WAIT_S
from tests.reference import assert_greedy, load_reference

FolderOf = Callable[[str], Path]


def out(first: int, count: int) -> LayerMove:
    return LayerMove("home", first, count, "home", "host")


def back(first: int, count: int) -> LayerMove:
    return LayerMove("home", first, count, "host", "home")


def books(worker: LinkedWorker) -> tuple[int, int, int]:
    """Blocks, free slabs and layers of weights."""
    return worker.thread.call(
        lambda engine: (
            engine.blocks.num_blocks,
            engine.loaded.arena.num_free_slabs,
            len(engine.loaded.layer_memory.weights),
        )
    ).result(WAIT_S)


THERE_AND_BACK = [out(2, 1), out(1, 1), back(1, 2)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
@pytest.mark.parametrize("sampling", [greedy(40), SamplingParams(40, temperature=0.8, seed=5, ignore_eos=True)])
def test_nobody_notices(
    family: str, sampling: SamplingParams, family_folder: FolderOf, make_worker: MakeWorker
) -> None:
    """There and back in the middle of answers, and of a prompt of several chunks."""
    folder = family_folder(family)
    assert_nobody_notices(THERE_AND_BACK, family, sampling, folder, make_worker, books, tokens_between=20)


def test_memory_really_moves(make_worker: MakeWorker) -> None:
    home, host = make_worker("home"), make_worker("host")
    join(home, host)
    before, hosts = books(home), books(host)
    (report,) = asyncio.run(make_all(home, [out(1, 2)]))
    blocks, _, layers = books(home)
    # A third of the weights and lanes stays: the pool is what the host granted, and the rest of the slabs are free.
    assert layers == before[2] - 2
    assert books(host)[0] < hosts[0]
    assert report.pool_blocks == blocks >= before[0]
    memory = home.engine.loaded.layer_memory
    assert report.weight_bytes == 0  # the other one has the same model
    assert [memory.holders(layer) for layer in range(3)] == [{""}, frozenset(), frozenset()]


async def make_all(home: LinkedWorker, wanted: list[LayerMove]) -> list[MoveReport]:
    moves = moves_of(home)
    return [await moves.make(each) for each in wanted]


def test_weights_come_home_over_the_link(family_folder: FolderOf, make_worker: MakeWorker) -> None:
    """Home keeps none of what it has given away, so they cross."""
    home, host = make_worker("home"), make_worker("host")
    join(home, host)
    memory = home.engine.loaded.layer_memory
    whole = [memory.bytes_of(layer).clone() for layer in (1, 2)]
    _, report = asyncio.run(make_all(home, [out(1, 2), back(1, 2)]))
    assert report.weight_bytes == sum(layer.nbytes for layer in whole)
    assert all((memory.bytes_of(layer) == data).all() for layer, data in zip((1, 2), whole, strict=True))
    home.start(PROMPTS, greedy(10))
    assert_greedy(load_reference(family_folder("llama")), PROMPTS, home.wait())


def test_a_worker_whose_own_layers_are_away_takes_no_others(make_worker: MakeWorker) -> None:
    home, host, third = make_worker("home"), make_worker("host"), make_worker("third")
    join(home, host)
    join(host, third)
    asyncio.run(moves_of(host).make(LayerMove("host", 2, 1, "host", "third")))
    with pytest.raises(MoveFailedError, match="own layers or heads lie elsewhere"):
        asyncio.run(moves_of(home).make(out(2, 1)))


@pytest.mark.parametrize("messages", [0, 1, 2, 3])
def test_a_link_that_dies_during_a_move_leaves_all_as_it_was(
    messages: int, family_folder: FolderOf, make_worker: MakeWorker, network: MemoryNetwork
) -> None:
    home, host = make_worker("home"), make_worker("host")
    join(home, host)
    before = books(home)
    home.start(PROMPTS, greedy(30))
    home.wait_for_tokens(10)
    network.faults("home", "host").die_after(messages)
    moves = moves_of(home)
    with pytest.raises(MoveFailedError):
        asyncio.run(moves.make(out(1, 2)))
    assert home.home.placement == home.at_home
    assert_greedy(load_reference(family_folder("llama")), PROMPTS, home.wait())
    assert books(home) == before


def test_a_host_without_room_refuses_and_nothing_changes(make_worker: MakeWorker) -> None:
    home, host = make_worker("home"), make_worker("host", kv_cache_blocks=16)
    join(home, host)
    before = books(home), books(host)
    with pytest.raises(MoveFailedError, match="slabs are needed"):
        asyncio.run(moves_of(home).make(out(1, 2)))
    assert (books(home), books(host)) == before


def test_heads_of_a_layer_elsewhere_do_not_come_home_without_it(make_worker: MakeWorker) -> None:
    """No engine runs a layer like that, and whoever has begun such a move could not go back after the switch."""
    home, host = make_worker("home"), make_worker("host")
    join(home, host)
    at_first = books(home), books(host)
    asyncio.run(moves_of(home).make(out(2, 1)))
    before, placement = (books(home), books(host)), home.home.placement
    with pytest.raises(ValueError, match=r"layers \[2\] are not at home"):
        asyncio.run(moves_of(home).make(HeadMove("home", (2,), (1,), "host", "home")))
    assert ((books(home), books(host)), home.home.placement) == (before, placement)
    asyncio.run(moves_of(home).make(back(2, 1)))
    assert (books(home), books(host)) == at_first


def test_what_is_no_move_is_refused(make_worker: MakeWorker) -> None:
    home = make_worker("home")
    moves = moves_of(home)
    for wrong in (out(0, 3), back(1, 1), dataclasses.replace(out(1, 1), instance="other"), out(2, 5)):
        with pytest.raises(ValueError, match=r"layer|move of .other."):
            asyncio.run(moves.make(wrong))
    with pytest.raises(MoveFailedError, match="has no link to 'host'"):
        asyncio.run(moves.make(out(1, 1)))


def test_a_move_that_is_given_up_twice_leaves_the_pool_free_to_grow(
    make_worker: MakeWorker, network: MemoryNetwork
) -> None:
    home, host = make_worker("home"), make_worker("host")
    join(home, host)
    before = books(home), books(host)

    async def run() -> None:
        network.faults("host", "home").hold()
        moving = asyncio.create_task(moves_of(home).make(out(1, 2)))
        while "home" not in host.engine.grants.instances:
            await asyncio.sleep(0)
        for _ in range(2):  # the second one while what was granted is given back
            moving.cancel()
            for _ in range(20):
                await asyncio.sleep(0)
        network.faults("host", "home").release()
        with pytest.raises(asyncio.CancelledError):
            await moving

    asyncio.run(run())
    assert (books(home), books(host), dict(home.engine.grants.limits)) == (*before, {})
