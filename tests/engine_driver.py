"""Drives an engine in tests: requests in, whole answers out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.engine.engine import Engine
from actors.engine.request import EngineRequest, SamplingParams, TokenEvent


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)

    @property
    def finish_reason(self) -> str | None:
        return self.events[-1].finish_reason


def greedy(max_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True} | more)  # type: ignore[arg-type]


def make_prompt(length: int, seed: int = 0, vocab: int = 500) -> tuple[int, ...]:
    rng = random.Random(f"{seed}/{length}")
    return tuple(rng.randrange(3, vocab) for _ in range(length))


def run_requests(engine: Engine, requests: Sequence[EngineRequest], max_steps: int = 10_000) -> dict[str, Answer]:
    """Adds all requests, steps until none is left, and checks the engine's own books at the end."""
    answers = {request.request_id: Answer() for request in requests}
    for request in requests:
        refused = engine.add(request)
        if refused is not None:
            answers[request.request_id].events.append(refused)
    for _ in range(max_steps):
        if not engine.has_work:
            break
        for event in engine.step().events:
            answer = answers[event.request_id]
            answer.events.append(event)
            if event.token_id is not None:
                answer.tokens.append(event.token_id)
    assert not engine.has_work, f"work is left after {max_steps} steps"
    engine.check_idle()
    return answers


def run_prompts(engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[list[int]]:
    """The answers' tokens, in the order of the prompts."""
    requests = [EngineRequest(f"r{i}", tuple(prompt), sampling) for i, prompt in enumerate(prompts)]
    return [answer.tokens for answer in run_requests(engine, requests).values()]
