"""Where the CPU time of an engine's step goes, part by part, beside what bytes and FLOPs allow.

    python -m load_tests.step_profile [--kernels torch] [--batches 1 8 16] [--contexts 256 1024] [--prefills 512]

One thread, no Ray. Times are CPU times of that thread, the least of several steps, since other programs disturb them.
The floor of a step is the longer of two times: all weights and the KV of all contexts read once at the speed of a plain
read of as many bytes, and its multiplications at the speed of a large matrix product; both measured in the same run.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from actors.engine import answers, step_runner
from actors.engine.config import EngineConfig
from actors.engine.device_memory import zeroed_memory
from actors.engine.engine import Engine
from actors.engine.kernels.fused_layers import PARTS, FusedLayers
from actors.engine.kernels.library import load_kernels
from actors.engine.loading import load_model
from actors.engine.request import EngineRequest, SamplingParams
from actors.model_source import ensure_default_model
from kv.exit_status import status_of

_DECODES = 12
_PREFILLS = 4
_PARTS = ("linear", "attention", "norm, rotary, activation", "sampling", "scheduling", "batch", "rest")


@dataclass
class PartTimes:
    """CPU seconds by part, each without those of the parts called within it."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _inner_s: list[float] = field(default_factory=lambda: [0.0])

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """From now on the time of `owner.name` counts for `part`."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            self._inner_s.append(0.0)
            started_s = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                taken_s = time.thread_time() - started_s
                self.seconds[part] += taken_s - self._inner_s.pop()
                self._inner_s[-1] += taken_s

        setattr(owner, name, timed)

    def wrap_layers(self, fused: FusedLayers) -> None:
        """From now on the time of layers that are run in one call counts for the parts that the kernels tell apart."""
        owner: Any = fused  # mypy lets no method be replaced
        function = fused.run
        fused.seconds = seconds = torch.zeros(len(PARTS), dtype=torch.float64)

        @functools.wraps(function)
        def timed(*arguments: Any) -> Any:
            seconds.zero_()
            result = function(*arguments)
            for part, taken_s in zip(PARTS, seconds.tolist(), strict=True):
                self.seconds[part] += taken_s
            return result

        owner.run = timed

    def of(self, function: Callable[[], object]) -> dict[str, float]:
        """The seconds of one call by part, `rest` and `step`, which is all of it, included."""
        self.seconds.clear()
        started_s = time.thread_time()
        function()
        step_s = time.thread_time() - started_s
        return {**self.seconds, "rest": step_s - sum(self.seconds.values()), "step": step_s}


@dataclass(frozen=True, slots=True)
class Case:
    """A step to measure."""

    batch: int
    """Sequences that decode; 0: a prompt's prefill."""
    context: int
    """Tokens of each, or of the prompt."""

    @property
    def name(self) -> str:
        return f"decode {self.batch} x {self.context}" if self.batch else f"prefill {self.context}"


@dataclass(frozen=True, slots=True)
class Floor:
    """What memory and processor allow."""

    weight_bytes: int
    parameters: float
    head_parameters: float
    """Of `parameters`, those that only the rows that are sampled from are multiplied with: a prompt's last one."""
    kv_bytes_per_token: int
    attention_flop_per_pair: int
    """Of a query and a key, all layers and heads together."""
    bytes_per_s: float
    flop_per_s: float

    def seconds(self, case: Case) -> float:
        """The least that the step can take."""
        tokens = case.batch or case.context
        pairs = tokens * case.context / (1 if case.batch else 2)
        kv_bytes = case.batch * case.context * self.kv_bytes_per_token
        products = (self.parameters - self.head_parameters) * tokens + self.head_parameters * (case.batch or 1)
        flop = 2 * products + self.attention_flop_per_pair * pairs
        return max((self.weight_bytes + kv_bytes) / self.bytes_per_s, flop / self.flop_per_s)


class ProfiledEngine:
    """An engine and its steps."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        self.loaded = load_model(folder, config)
        self.engine = Engine(self.loaded, config)
        self._seeds = itertools.count()

    @property
    def kernels_name(self) -> str:
        """What the engine computes with."""
        kernels = load_kernels() if self.loaded.backend_name == "native" else None
        return "torch's operators" if kernels is None else f"our kernels with {kernels.instructions.name}"

    def floor(self) -> Floor:
        """Measures the rates."""
        spec, dtype = self.loaded.spec, self.loaded.arena.pages.dtype
        outer = self.loaded.model._outer
        weights = [tensor for layer in self.loaded.model.layers.values() for tensor in layer.values()]
        # An embedding that is not also the head is looked up, not multiplied.
        weights += [tensor for role, tensor in outer.items() if spec.tied_embeddings or role != "embedding.weight"]
        parameters = sum(tensor.numel() for tensor in weights)
        return Floor(
            parameters * dtype.itemsize,
            parameters,
            outer["head.weight" if "head.weight" in outer else "embedding.weight"].numel(),
            self.loaded.layout.kv_bytes_per_token,
            4 * spec.num_layers * spec.num_heads * spec.head_dim,
            read_bytes_per_s(parameters * dtype.itemsize),
            product_flop_per_s(dtype),
        )

    def measure(self, case: Case, times: PartTimes) -> dict[str, float]:
        """The least CPU seconds of each part over several steps."""
        if not case.batch:
            return least([self._prefill(case.context, times) for _ in range(_PREFILLS)])
        for index in range(case.batch):
            self._add(f"d{index}", case.context, external_tokens=case.context - 1)
        for fetch in self.engine.step().fetches:  # KV is taken as it lies in the pages
            self.engine.fetched(fetch.sequence.request_id, case.context - 1)
        while self.engine.step().decode_tokens < case.batch:
            pass
        steps = [times.of(self.engine.step) for _ in range(_DECODES)]
        for index in range(case.batch):
            self.engine.abort(f"d{index}")
        return least(steps)

    def time_parts(self) -> PartTimes:
        """From now on; a step takes a little longer so."""
        times, model = PartTimes(), self.loaded.model
        times.wrap(model.ops, "linear", "linear")
        for name in ("norm", "add_norm", "rotate", "activate"):
            times.wrap(model.ops, name, "norm, rotary, activation")
        times.wrap(model._backend, "attend", "attention")
        if model._fused is not None:
            times.wrap_layers(model._fused)
        times.wrap(answers, "sample", "sampling")
        times.wrap(self.engine.scheduler, "schedule", "scheduling")
        times.wrap(step_runner, "build_batch", "batch")
        return times

    def _prefill(self, tokens: int, times: PartTimes) -> dict[str, float]:
        self._add("p", tokens, max_tokens=1)
        return times.of(self.engine.step)

    def _add(self, name: str, tokens: int, max_tokens: int = 100, external_tokens: int = 0) -> None:
        generator = random.Random(next(self._seeds))
        prompt = tuple(generator.randrange(3, 500) for _ in range(tokens))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        refused = self.engine.add(EngineRequest(name, prompt, sampling, external_tokens=external_tokens))
        if refused is not None:
            raise SystemExit(f"a prompt of {len(prompt)} tokens was refused: {refused.error}")


def least(times: Sequence[dict[str, float]]) -> dict[str, float]:
    """The least of each part, in seconds."""
    return {part: min(one.get(part, 0.0) for one in times) for part in (*_PARTS, "step")}


def read_bytes_per_s(num_bytes: int) -> float:
    """A plain read of as many bytes as a step reads, by one thread, in memory of the same kind."""
    data = zeroed_memory(num_bytes // 8 * 8, torch.device("cpu")).view(torch.int64)
    return num_bytes / _least_s(lambda: data.max())


def product_flop_per_s(dtype: torch.dtype) -> float:
    """A large product by one thread."""
    left, right = torch.randn(1024, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    return 2 * 1024 * 2048 * 2048 / _least_s(lambda: torch.nn.functional.linear(left, right))


def _least_s(function: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        started_s = time.thread_time()
        function()
        times.append(time.thread_time() - started_s)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m load_tests.step_profile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="a folder; default: the default model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kernels", default="auto", choices=["auto", "torch"])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 16])
    parser.add_argument("--contexts", type=int, nargs="*", default=[256, 1024])
    parser.add_argument("--prefills", type=int, nargs="*", default=[512], help="prompt tokens, 512 at most")
    parser.add_argument("--kv-gib", type=float, default=2.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = EngineConfig(
        device="cpu", dtype=arguments.dtype, kernels=arguments.kernels, kv_cache_bytes=int(arguments.kv_gib * 2**30)
    )
    profiled = ProfiledEngine(arguments.model or ensure_default_model(), config)
    floor = profiled.floor()
    cases = [Case(batch, context) for context in arguments.contexts for batch in arguments.batches]
    cases += [Case(0, tokens) for tokens in arguments.prefills]
    whole = [profiled.measure(case, PartTimes())["step"] for case in cases]
    times = profiled.time_parts()
    rows = []
    for case, step_s in zip(cases, whole, strict=True):
        parts = profiled.measure(case, times)
        figures_s = (step_s, floor.seconds(case), *(parts[part] for part in _PARTS))
        rows.append((case.name, *(f"{1e3 * seconds:.2f}" for seconds in figures_s)))
    print(
        f"{profiled.kernels_name}, {floor.weight_bytes / 1e6:.0f} MB of weights, reads of "
        f"{floor.bytes_per_s / 1e9:.1f} GB/s, products of {floor.flop_per_s / 1e9:.0f} GFLOP/s\n"
    )
    print("\n".join(table(("CPU ms a step", "step", "floor", *_PARTS), rows)))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of Markdown."""
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


if __name__ == "__main__":
    sys.exit(status_of(main))
