"""Runs prompts through an engine, and judges the answers by a transformers model."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from actors.engine.engine import Engine
from actors.engine.request import EngineRequest, SamplingParams
from load_tests.greedy_rule import GreedyMismatchError, check_greedy, logits_of


@dataclass(slots=True)
class Answer:
    """A greedy answer with the log-probability of each of its tokens."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class EngineError(RuntimeError):
    """The engine ended a request with an error, or did not end it."""


def make_prompts(lengths: Sequence[int], vocab_size: int, seed: int) -> list[tuple[int, ...]]:
    """A prompt of each length, no two alike."""
    rng = random.Random(seed)
    return [tuple(rng.randrange(3, vocab_size) for _ in range(length)) for length in lengths]


def run_greedy(engine: Engine, prompts: Sequence[tuple[int, ...]], new_tokens: int) -> list[Answer]:
    """All prompts together, `new_tokens` each. Raises EngineError; RuntimeError when blocks are held afterwards."""
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, logprobs=0)
    answers = {f"r{index}": Answer(prompt) for index, prompt in enumerate(prompts)}
    for name, answer in answers.items():
        refused = engine.add(EngineRequest(name, answer.prompt, sampling))
        if refused is not None:
            raise EngineError(f"a prompt of {len(answer.prompt)} tokens was refused: {refused.error}")
    while engine.has_work:
        result = engine.step()
        if result.is_empty:
            raise EngineError("the engine has work and cannot go on")
        for event in result.events:
            if event.token_id is None or event.logprobs is None:
                raise EngineError(f"a request ended without a token: {event.error}")
            answers[event.request_id].tokens.append(event.token_id)
            answers[event.request_id].logprobs.append(event.logprobs.logprob)
    engine.check_idle()
    return list(answers.values())


@dataclass(frozen=True, slots=True)
class Verdict:
    """`detail` is for people, whatever the outcome."""

    passed: bool
    detail: str


class Judge(Protocol):
    """Says whether answers are those of the reference."""

    logprob_tolerance: float
    """By how much two correct ways of computing may differ in a token's log-probability."""

    def judge(self, answers: Sequence[Answer]) -> Verdict:
        """Over all answers of one check."""


class GreedyJudge:
    """For float32: the answers are the reference's own, by `greedy_rule`."""

    logprob_tolerance = 1e-3

    def __init__(self, reference: Any) -> None:
        """`reference`: a transformers model in float32."""
        self._reference = reference

    def judge(self, answers: Sequence[Answer]) -> Verdict:
        """See Judge."""
        tokens = sum(len(answer.tokens) for answer in answers)
        try:
            close = check_greedy(
                self._reference, [answer.prompt for answer in answers], [answer.tokens for answer in answers]
            )
        except GreedyMismatchError as error:
            return Verdict(False, str(error))
        return Verdict(True, f"{tokens} tokens, {tokens - close} the reference's argmax, {close} close calls")


class HalfPrecisionJudge:
    """For float16 and bfloat16, in which no two programs choose the same tokens for long.

    The log-probabilities of the chosen tokens are compared with those of the float32 reference, given the same tokens.
    The engine may be off by as much as transformers is in the same dtype, times two in the root mean square and times
    four at worst (the yardstick of flash-attn's own tests; the factor for the worst case is ours).
    """

    logprob_tolerance = 0.25

    def __init__(self, reference: Any, half: Any) -> None:
        """`half`: the same transformers model in the dtype of the engine."""
        self._reference = reference
        self._half = half

    def judge(self, answers: Sequence[Answer]) -> Verdict:
        """See Judge."""
        engine_errors, half_errors, agreeing, half_agreeing = [], [], 0, 0
        for answer in answers:
            exact, half = (
                torch.log_softmax(logits_of(model, answer.prompt, answer.tokens), -1)
                for model in (self._reference, self._half)
            )
            chosen = torch.tensor(answer.tokens, device=exact.device)
            expected = exact.gather(1, chosen[:, None])[:, 0].cpu()
            engine_errors.append(torch.tensor(answer.logprobs) - expected)
            half_errors.append(half.gather(1, chosen[:, None])[:, 0].cpu() - expected)
            agreeing += int((exact.argmax(-1) == chosen).sum())
            half_agreeing += int((exact.argmax(-1) == half.argmax(-1)).sum())
        ours, theirs = torch.cat(engine_errors), torch.cat(half_errors)
        rms, their_rms = (float(errors.square().mean().sqrt()) for errors in (ours, theirs))
        worst, their_worst = (float(errors.abs().max()) for errors in (ours, theirs))
        # Written so that a NaN fails.
        passed = rms <= 2 * their_rms + 1e-2 and worst <= 4 * their_worst + 1e-2
        return Verdict(
            passed,
            f"log-probabilities off by {rms:.4f} (at worst {worst:.4f}), those of transformers in this dtype by "
            f"{their_rms:.4f} ({their_worst:.4f}); of {len(ours)} tokens {agreeing} are float32's argmax, of "
            f"transformers' {half_agreeing}",
        )


def furthest_apart(ours: Sequence[Answer], theirs: Sequence[Answer]) -> tuple[float, int]:
    """Two runs of the same prompts: the largest difference of log-probabilities up to where their tokens part, and how
    many tokens that covers."""
    largest, compared = 0.0, 0
    for mine, other in zip(ours, theirs, strict=True):
        for token, other_token, logprob, other_logprob in zip(
            mine.tokens, other.tokens, mine.logprobs, other.logprobs, strict=True
        ):
            if token != other_token:
                break
            difference = abs(logprob - other_logprob)
            largest = difference if math.isnan(difference) else max(largest, difference)
            compared += 1
    return largest, compared
