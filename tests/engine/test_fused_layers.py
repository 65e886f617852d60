"""Layers in one call against the same layers operation by operation, to the bit: all families and instruction sets."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

import pytest
import torch

from actors.engine.attention.native import NativeAttention
from actors.engine.batch import StepBatch, build_batch
from actors.engine.kernels.layer_ops import NativeLayerOps
from actors.engine.kernels.library import InstructionSet, Kernels
from actors.engine.loading import LoadedModel
from actors.engine.model import CausalModel
from actors.engine.request import EngineRequest, SamplingParams
from actors.engine.sequence import SequenceState
from actors.engine.step_plan import Chunk
from tests.engine.conftest import MakeEngine
from tests.engine.kernel_sets import SETS, kernels_of

FAMILIES = ["llama", "qwen2", "qwen3", "opt", "opt-post-norm", "mistral-window"]


@pytest.fixture(params=SETS, ids=[each.name for each in SETS])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_of(request.param)


def load(folder: Path, make_engine: MakeEngine) -> LoadedModel:
    loaded = make_engine(folder, dtype="bfloat16", kv_cache_blocks=16).loaded
    generator = torch.Generator().manual_seed(1)
    for layer in loaded.model.layers.values():  # biases and norms of new models are zeros and ones
        for tensor in layer.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return loaded


def models(loaded: LoadedModel, kernels: Kernels) -> tuple[CausalModel, CausalModel]:
    """One that runs layers in one call, and one that does not, over the same memory."""
    fused, apart = (
        CausalModel(
            loaded.spec, {}, loaded.model.layers, loaded.arena.pages, loaded.lanes, NativeAttention(kernels),
            NativeLayerOps(loaded.spec, kernels),
        )
        for _ in range(2)
    )  # fmt: skip
    assert fused._fused is not None
    apart._fused = None
    return fused, apart


def step(
    contexts: list[int],
    loaded: LoadedModel,
    prompts: list[tuple[int, int]] | None = None,
    unfinished: Container[int] = (),
) -> StepBatch:
    """Decodes of sequences of so many tokens, and prompt chunks: tokens before each and its own. Those at the places
    `unfinished`, decodes first, have more tokens behind them. Each sequence has blocks of its own among the first
    eight."""
    block_tokens, free = loaded.layout.block_tokens, list(range(8))
    chunks = []
    for index, (before, new) in enumerate([*((context - 1, 1) for context in contexts), *(prompts or [])]):
        rest = 3 if index in unfinished else 0
        request = EngineRequest("r", tuple(range(before + new + rest)), SamplingParams(max_tokens=1))
        sequence = SequenceState(request, 0, lambda keys, tokens: [])
        sequence.num_computed = before
        sequence.block_ids = [free.pop() for _ in range(-(-(before + new) // block_tokens))]
        chunks.append(Chunk(sequence, new, before))
    return build_batch(chunks[: len(contexts)], chunks[len(contexts) :], block_tokens, torch.device("cpu"))


def check_same(loaded: LoadedModel, fused: CausalModel, apart: CausalModel, batch: StepBatch) -> None:
    """Also of a part of the layers, one by one, and what is written to pages."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(len(batch.token_ids), loaded.spec.hidden_size, generator=generator).bfloat16()
    given = x.clone()
    own = torch.cat([loaded.lanes.pages(layer).flatten() for layer in range(loaded.spec.num_layers)])
    loaded.arena.pages[own] = torch.randn(len(own), *loaded.arena.pages.shape[1:], generator=generator).bfloat16()
    before = loaded.arena.pages.clone()
    num_layers = loaded.spec.num_layers
    for layers, before_layer in [
        (range(num_layers), None),
        (range(1, num_layers), None),
        (range(num_layers), lambda layer: None),  # waits before each, so that they are run one by one
    ]:
        results = []
        for model in (fused, apart):
            loaded.arena.pages.copy_(before)
            with torch.inference_mode():
                results.append((model.run_layers(x, layers, batch, before_layer), loaded.arena.pages.clone()))
        assert torch.equal(*(hidden for hidden, _ in results))
        assert torch.equal(*(pages for _, pages in results))
        assert not torch.equal(results[0][1], before)
    assert torch.equal(x, given)


@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits_as_operation_by_operation(
    family: str, family_folders: dict[str, Path], make_engine: MakeEngine, kernels: Kernels
) -> None:
    loaded = load(family_folders[family], make_engine)
    for contexts in ([1], [33], [5, 16, 17], [40, 1, 2, 30, 9]):
        check_same(loaded, *models(loaded, kernels), step(contexts, loaded))
    for contexts, prompts in [([], [(0, 33)]), ([20, 3], [(17, 20), (0, 5)])]:
        check_same(loaded, *models(loaded, kernels), step(contexts, loaded, prompts))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("contexts", "prompts", "unfinished"),
    [
        ([], [(0, 33)], []),
        ([], [(16, 5)], [0]),
        ([20, 3], [(17, 20), (0, 5)], []),
        ([7], [(3, 9), (0, 5), (30, 2)], [1]),
        ([2, 40], [(17, 20)], [2]),
        ([1, 9], [(0, 7)], [0]),  # a prompt's first token alone is laid out as a decode
        ([9, 1, 5, 1], [(0, 4), (2, 7), (0, 3)], [1, 3, 5]),
        ([1], [], [0]),
    ],
)
def test_rows_that_are_sampled_from_alone(
    family: str,
    contexts: list[int],
    prompts: list[tuple[int, int]],
    unfinished: list[int],
    family_folders: dict[str, Path],
    make_engine: MakeEngine,
    kernels: Kernels,
) -> None:
    """They are those of all rows, to the bit, and so is what is written to pages."""
    loaded = load(family_folders[family], make_engine)
    batch = step(contexts, loaded, prompts, unfinished)
    assert batch.sampled_rows.shape[0] == len(contexts) + len(prompts) - len(unfinished)
    x = torch.randn(
        len(batch.token_ids), loaded.spec.hidden_size, generator=torch.Generator().manual_seed(3)
    ).bfloat16()
    before = loaded.arena.pages.clone()
    for wait in (None, lambda layer: None):
        for model in models(loaded, kernels):
            results = []
            for rows in (None, batch.sampled_rows):
                loaded.arena.pages.copy_(before)
                with torch.inference_mode():
                    layers = range(loaded.spec.num_layers)
                    hidden = model.run_layers(x, layers, batch, wait, sampled_rows=rows)
                results.append((hidden, loaded.arena.pages.clone()))
            (every, pages), (sampled, pages_of_sampled) = results
            assert torch.equal(sampled, every[batch.sampled_rows])
            assert torch.equal(pages, pages_of_sampled)


def test_weights_and_pages_may_come_to_lie_elsewhere(llama_folder: Path, make_engine: MakeEngine) -> None:
    """As they do when layers and heads move."""
    loaded = load(llama_folder, make_engine)
    fused, apart = models(loaded, kernels_of(InstructionSet.AVX2))
    batch = step([20, 3], loaded)
    check_same(loaded, fused, apart, batch)
    loaded.model.layers[1] = {role: tensor.clone() * 2 for role, tensor in loaded.model.layers[1].items()}
    check_same(loaded, fused, apart, batch)
    loaded.lanes.give_up(2)  # of four slabs of four blocks
    (slab,) = loaded.arena.take(1)
    loaded.lanes.relocate({((1, 0), 0): slab})
    check_same(loaded, fused, apart, batch)


def test_more_threads_change_nothing(llama_folder: Path, make_engine: MakeEngine) -> None:
    loaded = load(llama_folder, make_engine)
    fused, apart = models(loaded, kernels_of(InstructionSet.AVX2))
    torch.set_num_threads(2)
    try:
        check_same(loaded, fused, apart, step([9] * 4, loaded, [(3, 40)]))
    finally:
        torch.set_num_threads(1)


def test_many_rows_and_float32_are_run_operation_by_operation(llama_folder: Path, make_engine: MakeEngine) -> None:
    loaded = load(llama_folder, make_engine)
    ops = NativeLayerOps(loaded.spec, kernels_of(InstructionSet.AVX2))
    fused = ops.fused_layers()
    assert fused is not None
    assert fused.takes(torch.zeros(1, 8, dtype=torch.bfloat16))
    assert not fused.takes(torch.zeros(1, 8))
    assert not fused.takes(torch.zeros(1000, 8, dtype=torch.bfloat16))
