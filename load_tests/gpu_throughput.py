"""Prefill and decode speed of the engine beside transformers and beside what the device's memory allows.

Contenders take turns in every repeat, with prompts that none has seen, and medians are reported. What the device allows
is measured in the same run and said before anything is compared with it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from actors.engine.config import EngineConfig
from actors.engine.engine import Engine
from actors.engine.loading import LoadedModel
from actors.engine.request import EngineRequest, SamplingParams
from load_tests.device_rates import DeviceRates, ModelCosts, now_s
from load_tests.gpu_answers import EngineError, make_prompts

_WARM_UP_STEPS = 8

Prompts = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Workload:
    """What is measured. All prompts of a measurement are equally long, since transformers would pad them otherwise."""

    prefill_prompts: int = 8
    prefill_tokens: int = 1024
    decode_context: int = 520
    """Just above 512: the block tables stay between two widths for the length of a measurement."""
    decode_steps: int = 48
    decode_batches: tuple[int, ...] = (1, 8, 32, 128)
    repeats: int = 5
    max_batch_tokens: int = 2048
    """The engine's token budget of a step."""

    @property
    def mean_decode_context(self) -> float:
        """Tokens that a sequence has in the middle of the measured steps, if it starts decoding at once."""
        return self.decode_context + _WARM_UP_STEPS + self.decode_steps / 2

    def kv_blocks(self, block_tokens: int) -> int:
        """Blocks that an engine needs for all of it. The first of a batch decode while the last are still prefilled."""
        most = max(self.decode_batches)
        waiting_steps = -(-most * self.decode_context // self.max_batch_tokens) + 1
        decoding = self.decode_context + waiting_steps + _WARM_UP_STEPS + self.decode_steps
        blocks = max(
            most * -(-decoding // block_tokens), self.prefill_prompts * -(-self.prefill_tokens // block_tokens)
        )
        # Admission keeps a block in reserve for each running sequence.
        return blocks + max(most, self.prefill_prompts)


class Contender(Protocol):
    """A program that runs the model."""

    name: str

    def prefill_s(self, prompts: Prompts) -> float:
        """Time from the prompts to the first token of every answer."""

    def decode_step_s(self, prompts: Prompts, steps: int) -> float:
        """Time of a step that gives one token to each prompt, over `steps` of them."""


class EngineContender:
    """Our engine over a loaded model."""

    def __init__(self, name: str, loaded: LoadedModel, config: EngineConfig) -> None:
        self.name = name
        self._engine = Engine(loaded, config)
        self._device = loaded.arena.pages.device

    def prefill_s(self, prompts: Prompts) -> float:
        """See Contender."""
        started_s = now_s(self._device)
        self._add(prompts, max_tokens=1)
        while self._engine.has_work:
            self._engine.step()
        return now_s(self._device) - started_s

    def decode_step_s(self, prompts: Prompts, steps: int) -> float:
        """See Contender. Steps are counted from when all prompts decode together."""
        self._add(prompts, max_tokens=self._engine.max_context_tokens - len(prompts[0]))
        while True:
            result = self._engine.step()
            if result.decode_tokens == len(prompts) and result.prefill_tokens == 0:
                break
            if result.is_empty:
                raise EngineError(f"{len(prompts)} prompts of {len(prompts[0])} tokens do not run together")
        for _ in range(_WARM_UP_STEPS):
            self._engine.step()
        started_s = now_s(self._device)
        decoded = sum(self._engine.step().decode_tokens for _ in range(steps))
        elapsed_s = now_s(self._device) - started_s
        for index in range(len(prompts)):
            self._engine.abort(f"r{index}")
        if decoded != steps * len(prompts):
            raise EngineError(f"{decoded} tokens came from {steps} steps of {len(prompts)} sequences")
        return elapsed_s / steps

    def _add(self, prompts: Prompts, max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            refused = self._engine.add(EngineRequest(f"r{index}", prompt, sampling))
            if refused is not None:
                raise EngineError(f"a prompt of {len(prompt)} tokens was refused: {refused.error}")


class TransformersContender:
    """`generate` of a transformers model."""

    name = "transformers"

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device = next(model.parameters()).device

    def prefill_s(self, prompts: Prompts) -> float:
        """See Contender."""
        return self._generate_s(prompts, 1)

    def decode_step_s(self, prompts: Prompts, steps: int) -> float:
        """See Contender: the time that `steps` more tokens take."""
        return (self._generate_s(prompts, 1 + steps) - self._generate_s(prompts, 1)) / steps

    def _generate_s(self, prompts: Prompts, new_tokens: int) -> float:
        tokens = torch.tensor(prompts, device=self._device)
        started_s = now_s(self._device)
        output = self._model.generate(
            tokens, attention_mask=torch.ones_like(tokens), min_new_tokens=new_tokens, max_new_tokens=new_tokens,
            do_sample=False, use_cache=True, pad_token_id=0,
        )  # fmt: skip
        elapsed_s = now_s(self._device) - started_s
        if output.shape[1] != tokens.shape[1] + new_tokens:
            raise EngineError(f"generate gave {output.shape[1] - tokens.shape[1]} tokens, {new_tokens} were asked for")
        return elapsed_s


@dataclass(frozen=True, slots=True)
class Throughput:
    """One figure: tokens per second of one contender, and what the device allows."""

    phase: str
    batch: int
    contender: str
    tokens_per_s: float
    allowed_tokens_per_s: float

    @property
    def share(self) -> float:
        """Of what the device allows."""
        return self.tokens_per_s / self.allowed_tokens_per_s


def measure_throughput(
    contenders: Sequence[Contender],
    workload: Workload,
    costs: ModelCosts,
    rates: DeviceRates,
    vocab_size: int,
    say: Callable[[str], None],
) -> list[Throughput]:
    """All phases. Each phase's ceiling is said before it is measured."""
    tokens = workload.prefill_prompts * workload.prefill_tokens
    measurements: list[tuple[str, int, int, int, float]] = [
        ("prefill", workload.prefill_prompts, workload.prefill_tokens, tokens, costs.prefill_floor_s(rates, tokens))
    ]
    for batch in workload.decode_batches:
        floor_s = costs.decode_floor_s(rates, batch, workload.mean_decode_context)
        measurements.append(("decode", batch, workload.decode_context, batch, floor_s))
    results = []
    for seed, (phase, batch, length, step_tokens, floor_s) in enumerate(measurements):
        say(f"{phase} of {batch} x {length} tokens: at most {step_tokens / floor_s:,.0f} tokens/s")

        def once(contender: Contender, prompts: Prompts, phase: str = phase) -> float:
            if phase == "prefill":
                return contender.prefill_s(prompts)
            return contender.decode_step_s(prompts, workload.decode_steps)

        times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        # The first round warms up: kernels are chosen, graphs captured.
        for repeat in range(workload.repeats + 1):
            for contender in contenders:
                prompts = make_prompts([length] * batch, vocab_size, seed=1000 * seed + repeat)
                elapsed_s = once(contender, prompts)
                if repeat:
                    times[contender.name].append(elapsed_s)
        for name, samples in times.items():
            result = Throughput(phase, batch, name, step_tokens / statistics.median(samples), step_tokens / floor_s)
            say(f"  {name:<14} {result.tokens_per_s:>12,.0f} tokens/s, {result.share:.0%} of what is allowed")
            results.append(result)
    return results
