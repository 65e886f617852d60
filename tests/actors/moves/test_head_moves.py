"""KV heads that move while their instance answers: nobody notices, and workers that attend for each other go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.engine.request import SamplingParams
from actors.moves.layer_moves import LayerMoves
from migrate.links.memory_network import MemoryNetwork
from migrate.move_report import MoveFailedError
from migrate.moves import HeadMove, LayerMove, Move
from tests.actors.moves.conftest import MakeWorker
from tests.actors.moves.linked_worker import LinkedWorker, join, moves_of
from tests.actors.moves.unnoticed import PROMPTS, assert_nobody_notices
from tests.engine_driver import greedy
from tests.link_ends import WAIT_S
from tests.reference import assert_greedy, load_reference

FolderOf = Callable[[str], Path]


def out(*layers: int, head: int = 1, home: str = "home", host: str = "host") -> HeadMove:
    return HeadMove(home, layers, (head,), home, host)


def back(*layers: int, head: int = 1) -> HeadMove:
    return HeadMove("home", layers, (head,), "host", "home")


def books(worker: LinkedWorker) -> tuple[int, int, int]:
    """Blocks, free slabs and lanes of its own."""
    return worker.thread.call(
        lambda engine: (
            engine.blocks.num_blocks,
            engine.loaded.arena.num_free_slabs,
            len(engine.loaded.lanes.lanes),
        )
    ).result(WAIT_S)


HEADS_ALONE: list[Move] = [out(0, 2), out(1), back(0), back(1, 2)]
WITH_LAYERS: list[Move] = [
    out(0),
    LayerMove("home", 2, 1, "home", "host"),
    out(1),
    LayerMove("home", 2, 1, "host", "home"),
    back(0, 1),
]

BEFORE_LAYERS: list[Move] = [
    out(1, 2, head=0),
    LayerMove("home", 2, 1, "home", "host"),
    LayerMove("home", 1, 1, "home", "host"),
    LayerMove("home", 1, 2, "host", "home"),
]
"""Layers follow heads of theirs."""


@pytest.mark.parametrize(
    "wanted", [HEADS_ALONE, WITH_LAYERS, BEFORE_LAYERS], ids=["heads alone", "with layers", "before layers"]
)
@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
@pytest.mark.parametrize("sampling", [greedy(40), SamplingParams(40, temperature=0.8, seed=5, ignore_eos=True)])
def test_nobody_notices(
    wanted: list[Move], family: str, sampling: SamplingParams, family_folder: FolderOf, make_worker: MakeWorker
) -> None:
    """There and back in the middle of answers, and of a prompt of several chunks."""
    folder = family_folder(family)
    assert_nobody_notices(wanted, family, sampling, folder, make_worker, books, tokens_between=16)


async def make_all(worker: LinkedWorker, wanted: list[Move]) -> LayerMoves:
    moves = moves_of(worker)
    for each in wanted:
        await moves.make(each)
    return moves


def test_two_workers_that_attend_for_each_other(family_folder: FolderOf, make_worker: MakeWorker) -> None:
    """Each waits for the other in the middle of its layers."""
    first, second = make_worker("first"), make_worker("second")
    join(first, second)
    first.start(PROMPTS, greedy(30))
    second.start(PROMPTS, greedy(30))
    asyncio.run(make_all(first, [out(0, 1, 2, home="first", host="second")]))
    with pytest.raises(MoveFailedError, match="own layers or heads lie elsewhere"):
        asyncio.run(make_all(second, [out(0, home="second", host="first")]))
    reference = load_reference(family_folder("llama"))
    assert_greedy(reference, PROMPTS, first.wait())
    assert_greedy(reference, PROMPTS, second.wait())


def test_a_move_makes_room_for_tokens(make_worker: MakeWorker) -> None:
    home, host = make_worker("home"), make_worker("host", kv_cache_blocks=400)
    join(home, host)
    blocks, _, lanes = books(home)
    asyncio.run(make_all(home, [out(0, 1, 2)]))
    more, _, fewer = books(home)
    assert (lanes, fewer) == (6, 3)
    assert more >= blocks


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
    with pytest.raises(MoveFailedError):
        asyncio.run(make_all(home, [out(0, 1)]))
    assert_greedy(load_reference(family_folder("llama")), PROMPTS, home.wait())
    assert books(home) == before


def test_a_link_that_dies_in_the_middle_of_a_layer_is_a_step_that_failed(
    make_worker: MakeWorker, network: MemoryNetwork
) -> None:
    home, host = make_worker("home"), make_worker("host")
    join(home, host)
    asyncio.run(make_all(home, [out(0, 1, 2)]))
    network.faults("home", "host").die_after(20)
    home.start(PROMPTS, greedy(30))
    home.wait_for_failure()


def test_heads_stay_where_they_were_when_their_layer_does_not_follow(
    family_folder: FolderOf, make_worker: MakeWorker, network: MemoryNetwork
) -> None:
    home, host = make_worker("home"), make_worker("host")
    join(home, host)

    async def run() -> None:
        moves = await make_all(home, [out(1, 2)])
        home.start(PROMPTS, greedy(30))
        home.wait()
        before = books(home), books(host)
        hosted = host.engine.grants.instances["home"]
        network.faults("host", "home").hold()
        moving = asyncio.create_task(moves.make(LayerMove("home", 1, 2, "home", "host")))
        while hosted.layers != {1, 2}:
            await asyncio.sleep(0)
        moving.cancel()
        network.faults("host", "home").release()
        with pytest.raises(asyncio.CancelledError):
            await moving
        assert (set(hosted.lanes.lanes), hosted.layers) == ({(1, 1), (2, 1)}, set())
        assert (books(home), books(host)) == before
        # Their KV too: the prompts are found again.
        home.start(PROMPTS, greedy(30))
        assert_greedy(load_reference(family_folder("llama")), PROMPTS * 2, home.wait())

    asyncio.run(run())


def test_what_is_no_move_is_refused(make_worker: MakeWorker) -> None:
    home, host, third = make_worker("home"), make_worker("host"), make_worker("third")
    join(home, host)
    join(home, third)
    moves = moves_of(home)
    for wrong, words in (
        (out(5), "do not exist"),
        (back(0), "is on 'home' already"),
        (HeadMove("home", (0,), (0, 1), "home", "host"), "no lane there"),
    ):
        with pytest.raises(ValueError, match=words):
            asyncio.run(moves.make(wrong))
    asyncio.run(moves.make(out(2, host="third")))
    with pytest.raises(ValueError, match="bring it there first"):
        asyncio.run(moves.make(LayerMove("home", 2, 1, "home", "host")))
