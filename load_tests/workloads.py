"""Named workloads and the prompts they are made of.

A workload says how many requests there are and how long they are; `draw_requests` turns it and a seed into prompts.
Prompts are token ids, so that their length is exact on every server, drawn at random, so that no server has them in
its prefix cache unless the workload means it to. Two runs with different seeds share no prefix that a cache could use:
each token agrees by chance with a probability of one in the number of ids to draw from.

Pure: no clock, no I/O.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

PromptKind = Literal["ids", "text"]

DEFAULT_TOKEN_IDS = range(100, 49_000)
"""Ordinary tokens of every vocabulary of 49,000 and more: special tokens mostly lie below or above."""

_WORDS = tuple(
    first + second
    for first in ("sun", "rain", "snow", "wind", "sea", "moon", "star", "fire", "wood", "stone")
    for second in ("light", "fall", "field", "house", "side", "bird", "way", "land")
)


@dataclass(frozen=True, slots=True)
class Workload:
    """The shape of a load. Raises ValueError for counts that make no workload.

    With `prefixes` > 0 each prompt starts with one of that many common prefixes of `prefix_tokens` tokens, followed by
    `unique_tokens` tokens of its own; the prefixes are used equally often.
    """

    name: str
    requests: int
    unique_tokens: int
    output_tokens: int
    prefixes: int = 0
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        for field in ("requests", "unique_tokens", "output_tokens"):
            if getattr(self, field) < 1:
                raise ValueError(f"workload {self.name!r}: {field} is {getattr(self, field)}, must be at least 1")
        if (self.prefixes < 1) != (self.prefix_tokens < 1) or min(self.prefixes, self.prefix_tokens) < 0:
            raise ValueError(
                f"workload {self.name!r}: {self.prefixes} prefixes of {self.prefix_tokens} tokens; "
                "give both as positive numbers or leave both at 0"
            )

    @property
    def prompt_tokens(self) -> int:
        """Length of each prompt in tokens."""
        return self.prefix_tokens + self.unique_tokens

    def scaled(self, factor: float) -> Workload:
        """The same shape with `factor` times the requests (at least one). The number of prefixes stays."""
        if factor <= 0:
            raise ValueError(f"scale is {factor}, must be above 0")
        return replace(self, requests=max(1, round(self.requests * factor)))


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("prefill-heavy", requests=40, unique_tokens=1024, output_tokens=16),
        Workload("decode-heavy", requests=64, unique_tokens=64, output_tokens=128),
        Workload("balanced", requests=48, unique_tokens=256, output_tokens=64),
        Workload("shared-prefix", requests=60, unique_tokens=32, output_tokens=32, prefixes=6, prefix_tokens=768),
    )
}


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send. A prompt of token ids has exactly `prompt_tokens` tokens; of a text that many words."""

    prompt: tuple[int, ...] | str
    prompt_tokens: int
    output_tokens: int


def draw_requests(
    workload: Workload, seed: int | str, *, kind: PromptKind = "ids", token_ids: range = DEFAULT_TOKEN_IDS
) -> list[PlannedRequest]:
    """The requests of `workload` for `seed`, in the order in which they are to be sent.

    The same workload and seed give the same requests on every machine. Requests that share a prefix are spread over
    the run in an order drawn from the seed. `kind="text"` draws words instead of ids, for servers and chat endpoints
    that take no ids: its lengths in tokens then depend on the tokenizer.
    """
    if len(token_ids) < 2:
        raise ValueError(f"token ids are to be drawn from {token_ids}, which holds fewer than 2")
    rng = random.Random(f"{workload}/{seed}")
    drawn_from = token_ids if kind == "ids" else range(len(_WORDS))

    def draw(count: int) -> tuple[int, ...]:
        return tuple(rng.choices(drawn_from, k=count))

    prefixes = [draw(workload.prefix_tokens) for _ in range(workload.prefixes)] or [()]
    prompts = [prefixes[number % len(prefixes)] + draw(workload.unique_tokens) for number in range(workload.requests)]
    rng.shuffle(prompts)
    return [
        PlannedRequest(
            prompt if kind == "ids" else " ".join(_WORDS[index] for index in prompt),
            workload.prompt_tokens,
            workload.output_tokens,
        )
        for prompt in prompts
    ]
