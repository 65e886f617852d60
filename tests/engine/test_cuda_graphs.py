"""Captured decode steps against plain ones, with recorded operators in the place of a CUDA graph.

A recording replays fixed operators over fixed memory and refuses what a CUDA graph cannot hold, so that everything but
CUDA itself is exercised: padding, table widths, reuse, invalidation and the fall-back.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from actors.engine.batch import StepBatch, build_batch
from actors.engine.cuda_graphs import DecodeGraphs, batch_sizes
from actors.engine.engine import Engine
from actors.engine.request import EngineRequest
from actors.engine.sequence import SequenceState
from actors.engine.step_plan import Chunk
from load_tests.recorded_ops import RecordedCall, RecordedOps
from migrate.waiting_line import Turn
from tests.engine.conftest import MakeEngine
from tests.engine_driver import greedy, make_prompt, run_prompts, run_requests
from tests.reference import assert_greedy, load_reference

BLOCK = 16
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture
def make_engine(make_engine: MakeEngine) -> MakeEngine:
    """With torch's operators: a recording does not see our kernels, which are for CPUs."""
    return functools.partial(make_engine, kernels="torch")


def with_graphs(engine: Engine, capture: RecordedOps | None = None) -> Engine:
    """The same model in an engine that captures."""
    return Engine(engine.loaded, engine.config, capture or RecordedOps())


def make_graphs(
    engine: Engine, forward: Callable[[StepBatch], torch.Tensor] | None = None, **more: int
) -> DecodeGraphs:
    loaded = engine.loaded
    return DecodeGraphs(
        forward or loaded.model.forward, RecordedOps(), lambda: loaded.lanes.version, block_tokens=BLOCK,
        max_rows=more.pop("max_rows", 16), device=loaded.arena.pages.device, **more,
    )  # fmt: skip


def sequences_in_blocks(engine: Engine, contexts: Sequence[int], blocks: Sequence[int]) -> list[SequenceState]:
    """Sequences whose first `context` tokens count as computed; their blocks are dealt from `blocks`, and all pages of
    the lanes hold random numbers."""
    pages, lanes = engine.loaded.arena.pages, engine.loaded.lanes
    of_lanes = torch.cat([lanes.pages(layer).flatten() for layer in {layer for layer, _ in lanes.lanes}])
    noise = torch.randn(len(of_lanes), *pages.shape[1:], generator=torch.Generator().manual_seed(len(contexts)))
    pages.index_copy_(0, of_lanes, noise)
    deal = iter(blocks)
    sequences = []
    for index, context in enumerate(contexts):
        request = EngineRequest(f"r{index}", make_prompt(context + 1, index), greedy(1))
        sequence = SequenceState(request, Turn(0.0, index), lambda keys, tokens: [])
        sequence.num_computed = context
        sequence.block_ids = [next(deal) for _ in range(context // BLOCK + 1)]
        sequences.append(sequence)
    return sequences


def assert_equals_plain(
    engine: Engine, graphs: DecodeGraphs, decodes: list[Chunk], forward: Callable[[StepBatch], torch.Tensor]
) -> None:
    """Hidden states equal those of the plain path, and no number outside the rows' own places changes."""
    pages = engine.loaded.arena.pages
    before = pages.clone()
    replayed = graphs.run(decodes)
    assert replayed is not None
    hidden, sampled_rows = replayed
    assert sampled_rows.tolist() == list(range(len(decodes)))
    written = (pages != before).any(-1).any(1)
    captured_kv = pages.clone()

    pages.copy_(before)
    batch = build_batch(decodes, [], BLOCK, pages.device)
    torch.testing.assert_close(hidden, forward(batch), **TOLERANCE)
    torch.testing.assert_close(captured_kv, pages, **TOLERANCE)
    assert torch.equal(written, (pages != before).any(-1).any(1))
    assert int(written.sum()) % len(decodes) == 0


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen3", "opt", "opt-post-norm"])
def test_every_batch_size_equals_the_plain_path(
    family: str, family_folders: dict[str, Path], make_engine: MakeEngine
) -> None:
    engine = make_engine(family_folders[family])
    graphs = make_graphs(engine, max_rows=6)
    forward = engine.loaded.model.forward
    with torch.inference_mode():
        order = torch.Generator().manual_seed(0)
        for num_rows in (1, 2, 3, 4, 5, 6, 3, 1):
            contexts = [(7 * row + 11 * num_rows) % 90 for row in range(num_rows)]
            sequences = sequences_in_blocks(engine, contexts, torch.randperm(256, generator=order).tolist())
            assert_equals_plain(
                engine, graphs, [Chunk(sequence, 1, sequence.num_computed) for sequence in sequences], forward
            )
    assert graphs.num_captures == len(batch_sizes(6)) == 4
    assert graphs.num_replays == 8


def test_context_grows_over_the_widths_of_the_tables(llama_folder: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(llama_folder)
    graphs, forward = make_graphs(engine), engine.loaded.model.forward
    with torch.inference_mode():
        for context in (14, 15, 16, 254, 255, 256, 257, 300, 511 - 1, 40):
            sequences = sequences_in_blocks(engine, [context, context // 2, 0], list(range(255, -1, -1)))
            assert_equals_plain(
                engine, graphs, [Chunk(sequence, 1, sequence.num_computed) for sequence in sequences], forward
            )
    # Tables of 16 blocks and of 32 blocks; the 256th token still fits the first.
    assert graphs.num_captures == 2


def test_sequences_that_grow_together_give_the_reference_tokens(llama_folder: Path, make_engine: MakeEngine) -> None:
    engine = with_graphs(make_engine(llama_folder, max_running_requests=5, max_batch_tokens=64))
    prompts = [make_prompt(length, length) for length in (1, 15, 16, 31, 120, 245, 7, 33, 64)]
    outputs = run_prompts(engine, prompts, greedy(24))
    assert_greedy(load_reference(llama_folder), prompts, outputs)
    assert engine.graphs is not None
    # Some steps hold prompt chunks and are not replayed; the others are, and mostly from graphs captured before.
    assert 24 < engine.graphs.num_replays < engine.counters.steps
    assert engine.graphs.num_captures <= 2 * len(batch_sizes(5))


def test_preempted_sequences_go_on_in_captured_steps(llama_folder: Path, make_engine: MakeEngine) -> None:
    engine = with_graphs(make_engine(llama_folder, kv_cache_blocks=10))
    prompts = [make_prompt(30, 1), make_prompt(30, 2)]
    outputs = run_prompts(engine, prompts, greedy(100))
    assert engine.scheduler.num_preemptions >= 1
    assert_greedy(load_reference(llama_folder), prompts, outputs)


def test_sampled_requests_and_logprobs_are_those_of_the_plain_engine(
    llama_folder: Path, make_engine: MakeEngine
) -> None:
    plain = make_engine(llama_folder)

    def run(engine: Engine) -> dict[str, list[int]]:
        requests = [
            EngineRequest(f"r{seed}", make_prompt(20, seed), greedy(12, temperature=0.8, seed=seed, logprobs=1))
            for seed in range(5)
        ]
        return {name: answer.tokens for name, answer in run_requests(engine, requests).items()}

    assert run(with_graphs(plain)) == run(plain)


@pytest.mark.parametrize("leaving", [1, 2])
def test_lanes_that_change_void_what_was_captured(leaving: int, llama_folder: Path, make_engine: MakeEngine) -> None:
    """Layers leave, the others get their memory: new blocks lie in pages that the old tables do not know."""
    engine = make_engine(llama_folder, kv_cache_blocks=12, slab_pages=1)
    staying = range(engine.loaded.spec.num_layers - leaving)

    def forward(batch: StepBatch) -> torch.Tensor:
        model = engine.loaded.model
        return model.run_layers(model.embed(batch), staying, batch)

    def check(blocks: list[int]) -> None:
        sequences = sequences_in_blocks(engine, [20, 5, 33], blocks)
        assert_equals_plain(
            engine, graphs, [Chunk(sequence, 1, sequence.num_computed) for sequence in sequences], forward
        )

    graphs = make_graphs(engine, forward)
    with torch.inference_mode():
        check(list(range(12)))
        captured = graphs.num_captures
        grown = engine.lanes_departed([], layers=range(staying.stop, engine.loaded.spec.num_layers))
        assert grown >= 6
        check(list(range(11 + grown, -1, -1)))
    assert graphs.num_captures == captured + 1
    assert graphs.num_graphs == 1


def test_number_of_graphs_is_limited_and_the_oldest_goes(llama_folder: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(llama_folder)
    graphs, forward = make_graphs(engine, max_graphs=2), engine.loaded.model.forward

    def run(num_rows: int) -> int:
        before = graphs.num_captures
        sequences = sequences_in_blocks(engine, [9] * num_rows, list(range(20)))
        assert_equals_plain(
            engine, graphs, [Chunk(sequence, 1, sequence.num_computed) for sequence in sequences], forward
        )
        assert graphs.num_graphs <= 2
        return graphs.num_captures - before

    with torch.inference_mode():
        # Sizes 1, 2, 4: capturing the third drops the one that was used longest ago.
        assert [run(rows) for rows in (1, 2, 1, 4, 1, 2, 4)] == [1, 1, 0, 1, 0, 1, 1]


class NotAtFirst(RecordedOps):
    """Fails as a capture fails that runs out of memory."""

    def __init__(self) -> None:
        self.tries = 0
        self.forgotten = 0

    def capture(self, function: Callable[[], torch.Tensor]) -> RecordedCall:
        self.tries += 1
        if self.tries == 1:
            raise torch.OutOfMemoryError("no memory is left")
        return super().capture(function)

    def forget(self) -> None:
        self.forgotten += 1


def test_step_that_cannot_be_captured_runs_plainly(
    llama_folder: Path, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    capture = NotAtFirst()
    engine = with_graphs(make_engine(llama_folder), capture)
    prompts = [make_prompt(20, 1)]
    with caplog.at_level(logging.WARNING, "equipoise.engine"):
        outputs = [run_prompts(engine, prompts * count, greedy(10)) for count in (1, 1, 2)]
    for output in outputs:
        assert_greedy(load_reference(llama_folder), prompts * len(output), output)
    assert engine.graphs is not None
    assert (engine.graphs.num_failures, engine.graphs.num_captures) == (1, 1)
    assert capture.forgotten == 1
    assert [record.getMessage() for record in caplog.records] == [
        "a decode step of 1 rows and 16 blocks a table could not be captured; such steps run without a CUDA graph: no "
        "memory is left"
    ]


def test_decode_row_that_is_not_sampled(llama_folder: Path, make_engine: MakeEngine) -> None:
    """With one token of budget left, one token of a longer prompt runs as a decode row and gives no token yet."""
    engine = make_engine(llama_folder)
    graphs = make_graphs(engine)
    with torch.inference_mode():
        sequences = sequences_in_blocks(engine, [2, 30, 9], list(range(20)))
        sequences[1].tokens += [5, 6]
        sequences[2].tokens += [7]
        replayed = graphs.run([Chunk(sequence, 1, sequence.num_computed) for sequence in sequences])
        assert replayed is not None
        assert replayed[1].tolist() == [0]
        assert replayed[0].shape[0] == 3


def test_nothing_is_captured_on_a_cpu(llama_folder: Path, make_engine: MakeEngine) -> None:
    assert make_engine(llama_folder, cuda_graphs=True).graphs is None


def test_more_rows_than_the_largest_size_are_left_to_the_plain_path(
    llama_folder: Path, make_engine: MakeEngine
) -> None:
    engine = make_engine(llama_folder)
    sequences = sequences_in_blocks(engine, [3] * 5, list(range(9)))
    with torch.inference_mode():
        assert (
            make_graphs(engine, max_rows=4).run([Chunk(sequence, 1, sequence.num_computed) for sequence in sequences])
            is None
        )
        assert make_graphs(engine, max_rows=4).run([]) is None


@pytest.mark.parametrize(
    ("max_rows", "sizes"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (48, (1, 2, 4, 8, 16, 32, 48))]
)
def test_batch_sizes(max_rows: int, sizes: tuple[int, ...]) -> None:
    assert batch_sizes(max_rows) == sizes


@pytest.mark.parametrize("function", ["item", "mask", "from_host", "branch"])
def test_recorded_operators_refuse_what_no_graph_can_hold(function: str) -> None:
    x, one = torch.arange(6.0), torch.tensor(1)
    functions: dict[str, Callable[[], torch.Tensor]] = {
        "item": lambda: x[: int(one)],
        "mask": lambda: x[x > 2],
        "from_host": lambda: x[:2] + torch.tensor([1.0, 2.0]),
        "branch": lambda: x if one else -x,
    }
    with torch.inference_mode(), pytest.raises(RuntimeError, match="cannot be captured"):
        RecordedOps().capture(functions[function])


def test_recorded_operators_keep_what_the_host_knew_and_follow_the_memory() -> None:
    x, seen = torch.arange(4.0), []

    def function() -> torch.Tensor:
        seen.append(1)
        doubled = (x * len(seen)).view(2, 2).t().contiguous()
        doubled[0].add_(1)
        return torch.nn.functional.linear(doubled, doubled)

    with torch.inference_mode():
        recording = RecordedOps().capture(function)
        times = len(seen)
        for _ in range(2):
            x.add_(1)
            recording.replay()
            seen[:] = [1] * (times - 1)
            assert torch.equal(recording.output, function())
