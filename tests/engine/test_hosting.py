"""Layers and heads that a second engine runs, and moves of them in the middle of answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.engine.batch import StepBatch, rows_of
from actors.engine.engine import Engine
from actors.engine.request import EngineRequest
from migrate.placement import Placement
from tests.engine.conftest import MakeEngine
from tests.engine.two_workers import HOME, HOST, TwoWorkers, fill_with_nan
from tests.engine_driver import greedy, make_prompt, run_prompts
from tests.reference import assert_greedy, load_reference

CHUNKED = {"max_batch_tokens": 24, "max_running_requests": 4}
PROMPTS = [make_prompt(70, 1), make_prompt(33, 2), make_prompt(16, 3)]


def bare_host(make_engine: MakeEngine, folder: Path, layers: list[int], **settings: object) -> Engine:
    """An engine that has no weights of `layers`, and NaN wherever nobody has written."""
    host = make_engine(folder, **settings)
    host.lanes_departed([], layers)
    lanes = host.loaded.lanes
    fill_with_nan(host, {slab for _, slab in lanes.places()})
    return host


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_layers_elsewhere_give_the_same_hidden_states_and_tokens(
    family: str, family_folders: dict[str, Path], make_engine: MakeEngine
) -> None:
    folder = family_folders[family]
    alone = make_engine(folder, **CHUNKED)
    alone_hidden, model = [], alone.loaded.model

    def of_all_rows(batch: StepBatch, before_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        hidden = model.forward(batch, before_layer)
        alone_hidden.append(hidden.clone())
        return rows_of(hidden, batch.sampled_rows)

    model.forward_sampled = of_all_rows  # type: ignore[method-assign]
    expected = run_prompts(alone, PROMPTS, greedy(20))

    pair = TwoWorkers(make_engine(folder, **CHUNKED), bare_host(make_engine, folder, [1, 2], kv_cache_blocks=512))
    pair.move(pair.place.with_layers_moved(1, 2, HOST))
    assert run_prompts(pair.home, PROMPTS, greedy(20)) == expected
    assert pair.num_remote_stages == len(pair.hidden) == len(alone_hidden)
    for mine, theirs in zip(pair.hidden, alone_hidden, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert_greedy(load_reference(folder), PROMPTS, expected)


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
@pytest.mark.parametrize("what", ["layers", "heads"])
def test_modules_move_there_and_back_in_the_middle_of_answers(
    what: str, family: str, family_folders: dict[str, Path], make_engine: MakeEngine
) -> None:
    """Five moves each way. Weights and KV cross every time: whoever gives a layer away keeps nothing of it."""
    folder = family_folders[family]
    pair = TwoWorkers(make_engine(folder, **CHUNKED), bare_host(make_engine, folder, [1, 2], kv_cache_blocks=512))
    last = pair.place.num_kv_heads - 1
    moves: dict[str, list[Callable[[Placement], Placement]]] = {
        "layers": [
            lambda place: place.with_layers_moved(2, 1, HOST),
            lambda place: place.with_layers_moved(1, 1, HOST),
            lambda place: place.with_layers_moved(1, 2, HOME),
            lambda place: place.with_layers_moved(0, 3, HOST),
            lambda place: place.with_layers_moved(0, 3, HOME),
        ],
        "heads": [
            lambda place: place.with_heads_moved([0, 2], [last], HOST),
            lambda place: place.with_heads_moved([2], [last], HOME),
            lambda place: place.with_heads_moved([1], [0], HOST),
            lambda place: place.with_heads_moved([0], [last], HOME),
            lambda place: place.with_heads_moved([1], [0], HOME),
        ],
    }
    outputs: dict[str, list[int]] = {f"r{i}": [] for i in range(len(PROMPTS))}
    for i, prompt in enumerate(PROMPTS):
        assert pair.home.add(EngineRequest(f"r{i}", prompt, greedy(40))) is None

    def step() -> None:
        for event in pair.home.step().events:
            outputs[event.request_id].append(event.token_id or 0)

    for following in moves[what] * 2:
        step()
        pair.move(following(pair.place), between=step)
        step()
        assert pair.home.has_work
        if what == "layers":
            whole = {HOME: pair.home.loaded.layer_memory.slabs.keys(), HOST: pair.host.loaded.layer_memory.slabs.keys()}
            assert all((layer in whole[HOST]) == (pair.place.layer_workers[layer] == HOST) for layer in (1, 2))
            assert whole[HOME] == set(pair.place.layers_on(HOME))
    while pair.home.has_work:
        step()
    pair.home.check_idle()
    assert pair.place.is_home
    assert pair.host.grants.instances == {}
    assert (pair.num_remote_stages if what == "layers" else pair.num_remote_heads) > 10
    assert_greedy(load_reference(folder), PROMPTS, list(outputs.values()))
