"""Named workloads and the prompts they are made of.

A workload says how many requests there are and how long they are; `draw_requests` turns it and a seed into prompts.
Prompts are token ids, so that their length is exact on every server, drawn at random, so that no server has them in
its prefix cache unless the workload means it to. Two runs with different seeds share no prefix that a cache could use:
each token agrees by chance with a probability of one in the number of ids to draw from.

Pure: no clock, no I/O.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
class Swing:
    """A load that changes its shape again and again: so many requests of one, then all of the other's, and again."""

    stretch: int
    other: Workload

    def counts(self, requests: int) -> tuple[int, int]:
        """How many of the first `requests` are of each shape."""
        rounds, rest = divmod(requests, self.stretch + self.other.requests)
        first = min(rest, self.stretch)
        return rounds * self.stretch + first, rounds * self.other.requests + rest - first


@dataclass(frozen=True, slots=True)
class Workload:
    """The shape of a load. Raises ValueError for counts that make no workload.

    With `prefixes` > 0 each prompt starts with one of that many common prefixes of `prefix_tokens` tokens, followed by
    `unique_tokens` tokens of its own; the prefixes are used equally often, or by Zipf's law.
    """

    name: str
    requests: int
    unique_tokens: int
    output_tokens: int
    prefixes: int = 0
    prefix_tokens: int = 0
    zipf: float | None = field(default=None, repr=False)  # the repr seeds the prompts: an exponent changes none of them
    """The prefix of rank r is used in proportion to r ** -zipf. None: all are used equally often."""
    is_primed: bool = field(default=False, repr=False)
    """Each prefix is sent once before a run is measured, so that nobody's first sight of it is part of the figures."""
    swing: Swing | None = field(default=None, repr=False)
    """Requests of another shape that come in turns with these; `requests` counts both."""
    in_flight: int | None = field(default=None, repr=False)
    """Requests at a time in a closed loop, whatever others have; None: as many as the run says."""
    rate_per_s: float | None = field(default=None, repr=False)
    """Requests that arrive in a second, in an open loop; None: a closed loop, or given times."""

    def __post_init__(self) -> None:
        for name in ("requests", "unique_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"workload {self.name!r}: {name} is {getattr(self, name)}, must be at least 1")
        if (self.prefixes < 1) != (self.prefix_tokens < 1) or min(self.prefixes, self.prefix_tokens) < 0:
            raise ValueError(
                f"workload {self.name!r}: {self.prefixes} prefixes of {self.prefix_tokens} tokens; "
                "give both as positive numbers or leave both at 0"
            )
        if self.in_flight is not None and self.in_flight < 1:
            raise ValueError(f"workload {self.name!r}: {self.in_flight} requests in flight; give at least 1")
        if self.rate_per_s is not None and not 0 < self.rate_per_s < math.inf:
            raise ValueError(f"workload {self.name!r}: rate is {self.rate_per_s} requests/s, must be above 0")
        if self.swing is not None and (self.swing.stretch < 1 or self.swing.other.swing is not None):
            raise ValueError(
                f"workload {self.name!r}: stretches of {self.swing.stretch} requests; give at least 1, and another "
                "shape that does not swing itself"
            )
        if self.zipf is not None and not (0 <= self.zipf < math.inf and self.prefixes):
            raise ValueError(
                f"workload {self.name!r}: zipf={self.zipf} with {self.prefixes} prefixes; give an exponent of at least "
                "0, and prefixes"
            )

    @property
    def prompt_tokens(self) -> int:
        """Length of each prompt in tokens."""
        return self.prefix_tokens + self.unique_tokens

    @property
    def shared_tokens(self) -> int:
        """Tokens of all common prefixes together: the working set."""
        return self.prefixes * self.prefix_tokens

    def scaled(self, factor: float) -> Workload:
        """The same shape with `factor` times the requests (at least one). The number of prefixes stays."""
        if not 0 < factor < math.inf:
            raise ValueError(f"scale is {factor}, must be above 0")
        return replace(self, requests=max(1, round(self.requests * factor)))

    def at_rates(self, rates_per_s: Sequence[float], duration_s: float | None) -> list[Workload]:
        """The same shape arriving at each of these rates, named after it where there are several; with `duration_s`, as
        many requests as are to be expected in so long. One that has its own number in flight keeps to that.

        Raises:
            ValueError: a rate that is none.
        """
        if self.in_flight is not None:
            return [self]
        loads = []
        for rate_per_s in rates_per_s:
            name = self.name if len(rates_per_s) == 1 else f"{self.name} {rate_per_s:g}/s"
            requests = self.requests if duration_s is None else max(1, round(rate_per_s * duration_s))
            loads.append(replace(self, name=name, requests=requests, rate_per_s=rate_per_s))
        return loads


def working_set(
    pool_tokens: int,
    multiple: float,
    *,
    prefix_tokens: int = 512,
    unique_tokens: int = 32,
    output_tokens: int = 16,
    requests_per_prefix: int = 5,
    zipf: float = 1.0,
) -> Workload:
    """Common prefixes whose KV takes `multiple` times what a pool of `pool_tokens` tokens holds (the last one is whole,
    so it may be a little more), used by Zipf's law.

    Raises:
        ValueError: `pool_tokens` or `multiple` is not above 0, or as `Workload`.
    """
    if pool_tokens < 1 or not 0 < multiple < math.inf:
        raise ValueError(
            f"a working set of {multiple} times {pool_tokens} tokens: give the tokens that the server's KV pool holds, "
            "and a multiple above 0"
        )
    prefixes = math.ceil(multiple * pool_tokens / prefix_tokens)
    return Workload(
        WORKING_SET,
        requests=prefixes * requests_per_prefix,
        unique_tokens=unique_tokens,
        output_tokens=output_tokens,
        prefixes=prefixes,
        prefix_tokens=prefix_tokens,
        zipf=zipf,
        is_primed=True,
    )


WORKING_SET = "working-set"
SWINGING = "swinging"
ONE_AT_A_TIME = "one-at-a-time"
POOL_TOKENS, POOL_MULTIPLE = 8192, 4.0
"""The working set's pool and its multiple, unless others are given."""

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("prefill-heavy", requests=40, unique_tokens=1024, output_tokens=16),
        Workload("decode-heavy", requests=64, unique_tokens=64, output_tokens=128),
        Workload("balanced", requests=48, unique_tokens=256, output_tokens=64),
        Workload("shared-prefix", requests=60, unique_tokens=32, output_tokens=32, prefixes=6, prefix_tokens=768),
        # As long as instructions and their answers in Alpaca's data are.
        Workload("short", requests=240, unique_tokens=40, output_tokens=64),
        # What a context of 2,048 tokens takes.
        Workload("long", requests=24, unique_tokens=1920, output_tokens=64),
        Workload(ONE_AT_A_TIME, requests=8, unique_tokens=64, output_tokens=128, in_flight=1),
        working_set(POOL_TOKENS, POOL_MULTIPLE),
        # On two cores each stretch takes some 30 s.
        Workload(
            SWINGING,
            requests=240,
            unique_tokens=1024,
            output_tokens=16,
            swing=Swing(36, Workload("decode-heavy", requests=24, unique_tokens=64, output_tokens=512)),
        ),
        Workload(
            "zipf-prefixes",
            requests=480,
            unique_tokens=32,
            output_tokens=16,
            prefixes=40,
            prefix_tokens=1024,
            zipf=1.1,
            is_primed=True,
        ),
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
    if workload.swing is not None:
        return _draw_in_turns(workload, workload.swing, seed, kind, token_ids)
    rng, drawn_from = random.Random(f"{workload}/{seed}"), _drawn_from(kind, token_ids)
    prefixes = _draw_prefixes(rng, drawn_from, workload) or [()]
    order = (number % len(prefixes) for number in range(workload.requests))
    if workload.zipf is not None:
        uses = _zipf_uses(workload.requests, workload.prefixes, workload.zipf)
        order = (rank for rank, count in enumerate(uses) for _ in range(count))
    prompts = [prefixes[rank] + _draw(rng, drawn_from, workload.unique_tokens) for rank in order]
    rng.shuffle(prompts)
    return [_planned(prompt, workload, kind) for prompt in prompts]


def _draw_in_turns(
    workload: Workload, swing: Swing, seed: int | str, kind: PromptKind, token_ids: range
) -> list[PlannedRequest]:
    counts = swing.counts(workload.requests)
    shapes = (replace(workload, swing=None), swing.other)
    first, other = (
        iter(draw_requests(replace(shape, requests=count), seed, kind=kind, token_ids=token_ids) if count else ())
        for shape, count in zip(shapes, counts, strict=True)
    )
    drawn: list[PlannedRequest] = []
    while len(drawn) < workload.requests:
        drawn += itertools.islice(first, swing.stretch)
        drawn += itertools.islice(other, swing.other.requests)
    return drawn


def draw_priming(
    workload: Workload, seed: int | str, *, kind: PromptKind = "ids", token_ids: range = DEFAULT_TOKEN_IDS
) -> list[PlannedRequest]:
    """One request for each common prefix that `draw_requests` uses, the most used ones last, with an end that none of
    its prompts has."""
    drawn_from = _drawn_from(kind, token_ids)
    prefixes = _draw_prefixes(random.Random(f"{workload}/{seed}"), drawn_from, workload)
    rng = random.Random(f"{workload}/priming/{seed}")
    return [
        _planned(prefix + _draw(rng, drawn_from, workload.unique_tokens), workload, kind)
        for prefix in reversed(prefixes[: workload.requests])  # the first ones are used first
    ]


def _drawn_from(kind: PromptKind, token_ids: range) -> range:
    if len(token_ids) < 2:
        raise ValueError(f"token ids are to be drawn from {token_ids}, which holds fewer than 2")
    return token_ids if kind == "ids" else range(len(_WORDS))


def _draw(rng: random.Random, drawn_from: range, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(drawn_from, k=count))


def _draw_prefixes(rng: random.Random, drawn_from: range, workload: Workload) -> list[tuple[int, ...]]:
    return [_draw(rng, drawn_from, workload.prefix_tokens) for _ in range(workload.prefixes)]


def _zipf_uses(requests: int, prefixes: int, exponent: float) -> list[int]:
    """How often the prefix of each rank is used: whole numbers in proportion to the law, none of them 0 if there are
    enough requests, so that the working set is as large as it says (Webster's method of apportionment, with at least
    one for each)."""
    uses = [0] * prefixes
    claims = [(-math.inf, rank) for rank in range(prefixes)]
    for _ in range(requests):
        rank = claims[0][1]
        uses[rank] += 1
        heapq.heapreplace(claims, (-((rank + 1) ** -exponent) / (uses[rank] + 0.5), rank))
    return uses


def _planned(prompt: tuple[int, ...], workload: Workload, kind: PromptKind) -> PlannedRequest:
    text_or_ids = prompt if kind == "ids" else " ".join(_WORDS[index] for index in prompt)
    return PlannedRequest(text_or_ids, workload.prompt_tokens, workload.output_tokens)
