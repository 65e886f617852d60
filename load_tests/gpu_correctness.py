"""The engine on one device against transformers: what `gpu_check` checks before it measures anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from actors.engine.config import EngineConfig
from actors.engine.cuda_graphs import Capture
from actors.engine.engine import Engine
from actors.engine.loading import LoadedModel, load_model
from load_tests.gpu_answers import Answer, Judge, Verdict, furthest_apart, make_prompts, run_greedy

_BATCH = 16


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was checked, with one backend in one dtype."""

    name: str
    backend: str
    dtype: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Subject:
    """What is checked: a model folder run in one way."""

    folder: Path
    device: str
    backend: str
    dtype: str
    new_tokens: int
    capture: Capture | None = None
    """Stands in for CUDA graphs where there is no CUDA."""


def check_engine(subject: Subject, judge: Judge) -> Iterator[Check]:
    """Yields a check at a time. The model is loaded once; each check has an engine of its own over it."""
    block_tokens = 256 if subject.backend == "flash" else 16
    config = EngineConfig(
        device=subject.device,
        dtype=subject.dtype,
        attention=subject.backend,
        kernels="torch",
        block_tokens=block_tokens,
        kv_cache_blocks=max(64, 6144 // block_tokens),
        max_batch_tokens=2048,
        max_running_requests=_BATCH,
        cuda_graphs=False,
    )

    def outcome(name: str, verdict: Verdict) -> Check:
        return Check(name, subject.backend, subject.dtype, verdict.passed, verdict.detail)

    try:
        loaded = load_model(subject.folder, config)
    except Exception as error:  # whatever it is, the other backends can still be checked
        yield outcome("loading", _failure(error))
        return
    for name, run in _CHECKS.items():
        try:
            for part, verdict in run(loaded, config, subject, judge):
                yield outcome(f"{name}, {part}" if part else name, verdict)
        except Exception as error:  # the same
            yield outcome(name, _failure(error))


def _failure(error: Exception) -> Verdict:
    return Verdict(False, f"{type(error).__name__}: {error}")


def _prompts(engine: Engine, lengths: list[int], subject: Subject, seed: int) -> list[tuple[int, ...]]:
    """Lengths that the model's context has no room for are left out."""
    longest = engine.max_context_tokens - subject.new_tokens
    return make_prompts([length for length in lengths if length <= longest], engine.loaded.spec.vocab_size, seed)


Verdicts = Iterator[tuple[str, Verdict]]


def _check_borders(loaded: LoadedModel, config: EngineConfig, subject: Subject, judge: Judge) -> Verdicts:
    engine, block = Engine(loaded, config), loaded.layout.block_tokens
    prompts = _prompts(engine, [1, block - 1, block, block + 1, 2 * block], subject, 1)
    for part in ("cold", "with a prefix hit"):
        before = engine.counters.cached_prompt_tokens
        answers = [run_greedy(engine, [prompt], subject.new_tokens)[0] for prompt in prompts]
        hits = engine.counters.cached_prompt_tokens - before
        expected = 0 if part == "cold" else sum((len(prompt) - 1) // block * block for prompt in prompts)
        verdict = judge.judge(answers)
        yield (
            part,
            replace(
                verdict,
                passed=verdict.passed and hits == expected,
                detail=f"{hits} prompt tokens cached, {expected} expected; {verdict.detail}",
            ),
        )


def _check_batch(loaded: LoadedModel, config: EngineConfig, subject: Subject, judge: Judge) -> Verdicts:
    engine, block = Engine(loaded, config), loaded.layout.block_tokens
    lengths = [1, block - 1, block, block + 1, 2 * block, 2 * block + 5] * 3
    yield "", judge.judge(run_greedy(engine, _prompts(engine, lengths[:_BATCH], subject, 2), subject.new_tokens))


def _check_chunks(loaded: LoadedModel, config: EngineConfig, subject: Subject, judge: Judge) -> Verdicts:
    block = loaded.layout.block_tokens
    for budget in (block + 1, 3 * block - 2):
        engine = Engine(loaded, replace(config, max_batch_tokens=budget, max_running_requests=8))
        prompts = _prompts(engine, [5, block + 3, 3 * block, 4 * block + 7], subject, budget)
        yield f"{budget} tokens a step", judge.judge(run_greedy(engine, prompts, subject.new_tokens))


def _check_preemption(loaded: LoadedModel, config: EngineConfig, subject: Subject, judge: Judge) -> Verdicts:
    """Two answers grow into a second block each, and there is room for three."""
    engine, block = Engine(loaded, config), loaded.layout.block_tokens
    engine.blocks.shrink(engine.blocks.num_blocks - 3)
    prompts = make_prompts([block - 4, block - 4], loaded.spec.vocab_size, 3)
    verdict = judge.judge(run_greedy(engine, prompts, max(subject.new_tokens, 8)))
    preemptions = engine.scheduler.num_preemptions
    yield (
        "",
        replace(
            verdict, passed=verdict.passed and preemptions > 0, detail=f"{preemptions} preemptions; {verdict.detail}"
        ),
    )


def _check_graphs(loaded: LoadedModel, config: EngineConfig, subject: Subject, judge: Judge) -> Verdicts:
    """Batches of several sizes whose contexts grow over the border between two widths of block tables."""
    for size in (1, 3, _BATCH):
        engine = Engine(loaded, replace(config, cuda_graphs=True), subject.capture)
        plain = Engine(loaded, config)
        # The longest crosses the border at 256 after six tokens, whatever number of tokens the other checks make.
        tokens = max(subject.new_tokens, 10)
        longest = min(250, engine.max_context_tokens - tokens)
        prompts = make_prompts([longest - 3 * index for index in range(size)], loaded.spec.vocab_size, 4)
        answers: list[list[Answer]] = [run_greedy(each, prompts, tokens) for each in (engine, plain)]
        verdict = judge.judge(answers[0])
        difference, compared = furthest_apart(*answers)
        graphs = engine.graphs
        if graphs is None:
            yield f"batch of {size}", Verdict(False, "nothing was captured")
            continue
        yield (
            f"batch of {size}",
            Verdict(
                verdict.passed
                and difference <= judge.logprob_tolerance
                and graphs.num_replays > 0
                and graphs.num_failures == 0,
                f"{graphs.num_captures} captured, {graphs.num_failures} failed, {graphs.num_replays} steps replayed; "
                f"log-probabilities differ from plain steps by at most {difference:.1e} over {compared} tokens; "
                f"{verdict.detail}",
            ),
        )


_CHECKS: dict[str, Callable[[LoadedModel, EngineConfig, Subject, Judge], Verdicts]] = {
    "block borders": _check_borders,
    "batch of 16": _check_batch,
    "chunked prefill": _check_chunks,
    "preemption": _check_preemption,
    "captured decode steps": _check_graphs,
}
