"""KV of layers that other workers have: handed over, stored and fetched as if all were at home, whatever moves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from actors.engine.request import EngineRequest, SamplingParams
from actors.moves.layer_moves import LayerMoves
from migrate.links.memory_network import MemoryNetwork
from tests.actors.moves.divided_cell import PROMPTS, Cell, alone, config_of, run
from tests.actors.moves.storing_worker import StoringWorker
from tests.engine_driver import greedy, make_prompt
from tests.reference import assert_greedy, load_reference

SEEDED = SamplingParams(12, temperature=0.8, seed=5, ignore_eos=True)
FolderOf = Callable[[str], Path]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("sampling", [greedy(12), SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("with_heads", [False, True])
def test_kv_goes_from_one_divided_worker_to_another(
    family: str, sampling: SamplingParams, with_heads: bool, family_folder: FolderOf, network: MemoryNetwork
) -> None:
    """Divided in different places, and nothing of it is computed again."""
    folder = family_folder(family)

    async def body(cell: Cell) -> None:
        await cell.move_out(cell.prefill, 1, 2)
        if with_heads:
            await cell.move_heads_out(cell.prefill, 0)
            await cell.move_heads_out(cell.decode, 0, 2)
        else:
            await cell.move_out(cell.decode, 2, 1)
        answers = await cell.answers(PROMPTS, sampling)
        if sampling.temperature == 0:
            assert_greedy(load_reference(folder), PROMPTS, answers)
        else:
            assert answers == alone(folder, sampling)
        assert (cell.shelf.refusals, cell.decode.exchange.misses) == ([], {})
        assert cell.decode.engine.counters.fetched_tokens == sum(map(len, PROMPTS))
        for worker in (cell.prefill, cell.decode):
            assert [cell.num_checked(worker, prompt) for prompt in PROMPTS] == [len(prompt) // 16 for prompt in PROMPTS]
        assert cell.decode.engine.counters.early_starts == 0

    run(folder, network, body)


def test_half_precision_goes_the_same_way(family_folder: FolderOf, network: MemoryNetwork) -> None:
    """Not a token is computed from other bits: with prompts of one chunk each even rounding is the same."""
    folder = family_folder("llama")

    async def body(cell: Cell) -> None:
        await cell.move_out(cell.prefill, 1, 2)
        await cell.move_out(cell.decode, 2, 1)
        tokens = await cell.answer("r", PROMPTS[1], greedy(6))
        assert tokens == alone(folder, greedy(6), "bfloat16")[1]
        assert cell.decode.engine.counters.fetched_tokens == len(PROMPTS[1])

    run(folder, network, body, config_of("bfloat16"))


@pytest.mark.parametrize("seed", range(6))
def test_moves_at_any_moment_of_exports_and_fetches(seed: int, family_folder: FolderOf, network: MemoryNetwork) -> None:
    """There and back at both ends, begun before some of the parts, which then come a little later."""
    folder, rng = family_folder("llama"), random.Random(seed)
    sampling = greedy(12) if seed % 2 else SEEDED
    has_room = seed % 3 == 0

    async def body(cell: Cell) -> None:
        moves: list[asyncio.Task[None]] = []

        async def there_and_back(worker: StoringWorker) -> None:
            placement, host = worker.engine.placement, cell.host_of(worker).name
            if placement is None and rng.random() < 0.5:
                await cell.move_heads_out(worker, *sorted(rng.sample(range(3), rng.randint(1, 3))))
            elif placement is None:
                first = rng.choice([1, 2])
                await cell.move_out(worker, first, 3 - first)
            elif layers := placement.layers_on(host):
                await cell.move_back(worker, layers[0], rng.randint(1, len(layers)))
            else:
                layers = tuple(layer for layer, _ in placement.lanes_on(host))
                await cell.move_heads_back(worker, *layers[: rng.randint(1, len(layers))])

        async def before(_: int) -> None:
            if rng.random() < 0.3 and all(move.done() for move in moves):
                moves.append(asyncio.create_task(there_and_back(rng.choice([cell.prefill, cell.decode]))))
                for _ in range(rng.choice([0, 10, 100, 1000])):
                    await asyncio.sleep(0)

        cell.shelf.before = before
        answers = await cell.answers(PROMPTS, sampling)
        for failure in await asyncio.gather(*moves, return_exceptions=True):
            # A pool can't shrink while copies hold blocks at its end; that is said, and a later move may do it.
            assert failure is None or "later they will not be" in str(failure), failure
        assert moves
        if sampling.temperature == 0:
            assert_greedy(load_reference(folder), PROMPTS, answers)
        else:
            assert answers == alone(folder, sampling)
        assert (cell.shelf.refusals, cell.decode.exchange.misses) == ([], {})
        assert cell.prefill.failures == cell.decode.failures == []
        for worker in (cell.prefill, cell.decode):
            checked = [cell.num_checked(worker, prompt) for prompt in PROMPTS]
            if has_room:  # for all prompts at home: what went to blocks that a move added is all that may be forgotten
                assert checked == [len(prompt) // 16 for prompt in PROMPTS]

    run(folder, network, body, config_of(blocks=96 if has_room else 24, exports_early=seed % 4 > 1))


class Pause:
    """Has moves wait after the copies that they make while the instance serves."""

    def __init__(self, moves: LayerMoves) -> None:
        self.has_copied, self.may_switch = asyncio.Event(), asyncio.Event()
        for name in ("_send_pages", "_fetch_pages"):
            setattr(moves, name, self._after(getattr(moves, name)))

    def _after(self, copy: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def copy_and_wait(*arguments: object) -> None:
            await copy(*arguments)
            self.has_copied.set()
            await self.may_switch.wait()

        return copy_and_wait


@pytest.mark.parametrize("direction", ["out", "back"])
def test_blocks_that_were_copied_early_and_then_given_to_a_fetch_are_copied_again(
    direction: str, family_folder: FolderOf, network: MemoryNetwork
) -> None:
    """The fetch has written to them before the switch, and ends after it."""
    folder = family_folder("llama")
    later = make_prompt(200, 100)

    async def body(cell: Cell) -> None:
        cell.decode.tokens_per_s = 1e9  # no early start, whose step the move would wait for
        if direction == "back":
            await cell.move_out(cell.decode, 1, 2)
        blocks = cell.decode.engine.blocks
        while not blocks.num_evictions:  # until every block has content
            name = f"earlier {blocks.num_cached}"
            await cell.decode.serve(EngineRequest(name, make_prompt(200, blocks.num_cached), greedy(4), owner=name))
        evicted = blocks.num_evictions
        pause = Pause(cell.decode.moves)
        move = asyncio.create_task((cell.move_out if direction == "out" else cell.move_back)(cell.decode, 1, 2))
        await pause.has_copied.wait()
        may_come, all_others_came = asyncio.Event(), asyncio.Event()

        async def before(number: int) -> None:
            if number == 12:  # the last part of the last of four extents
                all_others_came.set()
                await may_come.wait()

        cell.shelf.before = before
        answering = asyncio.create_task(cell.answer("later", later, greedy(8)))
        await all_others_came.wait()
        while cell.decode.pages.num_written < 12:  # the tail, and all parts but one
            await asyncio.sleep(0)
        pause.may_switch.set()
        await move
        assert cell.decode.exchange.misses == {}
        may_come.set()
        assert_greedy(load_reference(folder), [later], [await answering])
        assert blocks.num_evictions > evicted
        assert cell.num_checked(cell.decode, later) == len(later) // 16
        assert cell.decode.engine.counters.fetched_tokens == len(later)

    run(folder, network, body, config_of(blocks=20))


def test_a_step_that_waits_for_its_kv_ends_before_its_layers_leave(
    family_folder: FolderOf, network: MemoryNetwork
) -> None:
    """Nobody waits in a circle: the move waits for the step, and the step for a fetch that does not wait for the
    move."""
    folder = family_folder("llama")

    async def body(cell: Cell) -> None:
        may_come = asyncio.Event()

        async def before(number: int) -> None:
            if number > 0 and number % 3 != 1:  # those of the first layer come
                await may_come.wait()

        cell.shelf.before = before
        answering = asyncio.create_task(cell.answer("r", PROMPTS[2], greedy(8)))
        while not cell.decode.engine.counters.early_starts:
            await asyncio.sleep(0)
        move = asyncio.create_task(cell.move_out(cell.decode, 1, 2))
        for _ in range(200):
            await asyncio.sleep(0)
        assert not move.done()
        may_come.set()
        await move
        assert_greedy(load_reference(folder), [PROMPTS[2]], [await answering])
        assert cell.decode.engine.counters.fetched_tokens == len(PROMPTS[2])

    run(folder, network, body)
