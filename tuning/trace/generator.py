"""Traffic that was made up, for where there is no real one: sessions, shared prefixes and bursts, from a seed.

- Sessions begin by a Poisson process whose rate switches between calm and bursts, both of exponential length.
- A session has a prefix (a system prompt, a tool's description) drawn by Zipf's law, and a geometric number of turns.
- A prompt holds the prompt and the answer of the turn before and some new text. Texts, answers and the times between
  turns have log-normal lengths. A prompt shares all *full* blocks of the one before: the partial last one has other
  content by then.

Defaults are near what is published of the qwen_coder trace (62 % of requests begin a session; p50 117.7 s and
p90 941.8 s between turns), but lengths are those of chats. Nothing else in it was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tuning.trace.prefix_ids import by_first_appearance
from tuning.trace.trace import Trace

KIND: Final = "text"


def _figure(default: float, least: float, most: float, help: str) -> Any:
    return field(default=default, metadata={"least": least, "most": most, "help": help})


@dataclass(frozen=True, slots=True)
class SyntheticTraffic:
    """What to make up. The metadata of each field says what it is (`help`), and its range (`least`, `most`).

    Raises:
        ValueError: a figure is out of its range.
    """

    seed: int = _figure(0, 0, 2**32, "equal seeds make equal traces")
    requests: int = _figure(10_000, 1, 10**8, "number of requests")
    requests_per_s: float = _figure(5.0, 1e-3, 1e6, "mean rate, once as many sessions end as begin")
    block_tokens: int = _figure(16, 1, 2**16, "tokens a block")
    prefixes: int = _figure(100, 1, 10**6, "different prefixes of sessions")
    zipf_exponent: float = _figure(
        1.0, 0, 20, "the k-th prefix is drawn in proportion to k to the minus this; 0: equally"
    )
    prefix_tokens: int = _figure(600, 1, 10**6, "median length of a prefix")
    new_tokens: int = _figure(200, 1, 10**6, "median length of a turn's new text")
    output_tokens: int = _figure(250, 1, 10**6, "median length of an answer")
    length_sigma: float = _figure(0.8, 0, 3, "spread of the logarithms of these three lengths")
    turns: float = _figure(1.6, 1, 1000, "mean number of turns of a session")
    think_s: float = _figure(117.7, 1e-3, 1e6, "median time from a turn to the next")
    think_sigma: float = _figure(1.62, 0, 3, "spread of its logarithm")
    burst_factor: float = _figure(3.0, 1, 1000, "rate of new sessions in a burst, in multiples of the calm one")
    burst_share: float = _figure(0.1, 0, 0.9, "part of the time that is burst")
    burst_s: float = _figure(60.0, 1, 1e6, "mean length of a burst")
    max_input_tokens: int = _figure(
        32_768, 1, 10**7, "sessions end before a prompt grows longer; a first prompt is cut to this"
    )

    def __post_init__(self) -> None:
        for figure in fields(self):
            value, least, most = getattr(self, figure.name), figure.metadata["least"], figure.metadata["most"]
            if not least <= value <= most:
                raise ValueError(f"{figure.name}={value} is not allowed: give {least:g} to {most:g}")

    @property
    def name(self) -> str:
        """Says what it is, for whoever finds the file later."""
        return f"synthetic_seed{self.seed}_blksz_{self.block_tokens}"


@dataclass(frozen=True, slots=True)
class _Turns:
    """All turns of all sessions, those of a session one after the other."""

    session: NDArray[np.int64]
    turn: NDArray[np.int64]
    arrival_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    prefix: NDArray[np.int64]
    prefix_tokens: NDArray[np.int64]


def generate(traffic: SyntheticTraffic) -> Trace:
    """The trace of a description, always the same one."""
    num_sessions = math.ceil(traffic.requests / traffic.turns) + 100
    while True:
        turns, last_start_s = _turns(traffic, num_sessions)
        order = np.argsort(turns.arrival_s, kind="stable")[: traffic.requests]
        # Later sessions cannot matter once the last of the requests comes before them.
        if len(order) == traffic.requests and turns.arrival_s[order[-1]] <= last_start_s:
            return _trace(traffic, turns, order)
        num_sessions += num_sessions // 2


def _turns(traffic: SyntheticTraffic, num_sessions: int) -> tuple[_Turns, float]:
    """The turns of that many sessions, and when the last of these begins."""
    rng = np.random.default_rng(traffic.seed)
    start_s = _session_starts_s(traffic, num_sessions, rng)
    length = rng.geometric(1 / traffic.turns, num_sessions)
    weights = np.arange(1.0, traffic.prefixes + 1) ** -traffic.zipf_exponent
    prefix_of_session = rng.choice(traffic.prefixes, num_sessions, p=weights / weights.sum())
    prefix_tokens = _lengths(rng, traffic, traffic.prefix_tokens, traffic.prefixes)
    count = int(length.sum())
    new = _lengths(rng, traffic, traffic.new_tokens, count)
    output = _lengths(rng, traffic, traffic.output_tokens, count)
    think_s = traffic.think_s * rng.lognormal(0.0, traffic.think_sigma, count)

    session = np.repeat(np.arange(num_sessions), length)
    first = np.repeat(np.cumsum(length) - length, length)
    is_first = first == np.arange(count)
    prefix = prefix_of_session[session]
    before = np.concatenate(([0], output[:-1]))
    grown = np.cumsum(np.where(is_first, 0, before) + new)
    input_tokens = prefix_tokens[prefix] + grown - (grown - new)[first]
    input_tokens = np.where(is_first, np.minimum(input_tokens, traffic.max_input_tokens), input_tokens)
    waited_s = np.cumsum(np.where(is_first, 0.0, think_s))
    turns = _Turns(
        session=session,
        turn=np.arange(count) - first + 1,
        arrival_s=np.round(start_s[session] + waited_s - waited_s[first], 3),
        input_tokens=input_tokens,
        output_tokens=output,
        prefix=prefix,
        prefix_tokens=prefix_tokens[prefix],
    )
    return _select(turns, np.flatnonzero(input_tokens <= traffic.max_input_tokens)), float(start_s[-1])


def _session_starts_s(traffic: SyntheticTraffic, num_sessions: int, rng: np.random.Generator) -> NDArray[np.float64]:
    sessions_per_s = traffic.requests_per_s / traffic.turns
    share, factor = traffic.burst_share, traffic.burst_factor
    calm_per_s = sessions_per_s / (1 - share + share * factor)
    work = np.cumsum(rng.exponential(1.0, num_sessions))
    if share == 0:
        return work / calm_per_s
    # Sessions come at rate 1 in `work`, the integral of the rate; both ends of each phase are known in it.
    calm_s = traffic.burst_s * (1 - share) / share
    phases = 1 + int(2 * work[-1] / (calm_per_s * (calm_s + factor * traffic.burst_s)))
    lengths_s = rng.exponential(1.0, (phases, 2)) * (calm_s, traffic.burst_s)
    time_s = np.concatenate(([0.0], np.cumsum(lengths_s)))
    done = np.concatenate(([0.0], np.cumsum(lengths_s * (calm_per_s, calm_per_s * factor))))
    if done[-1] < work[-1]:  # the last phase then lasts as long as it must
        time_s[-1] += (work[-1] - done[-1]) / (calm_per_s * factor)
        done[-1] = work[-1]
    starts: NDArray[np.float64] = np.interp(work, done, time_s)
    return starts


def _lengths(rng: np.random.Generator, traffic: SyntheticTraffic, median: float, count: int) -> NDArray[np.int64]:
    tokens = np.rint(median * rng.lognormal(0.0, traffic.length_sigma, count))
    return np.clip(tokens, 1, traffic.max_input_tokens).astype(np.int64)


def _select(turns: _Turns, rows: NDArray[np.int64]) -> _Turns:
    chosen: dict[str, Any] = {column.name: getattr(turns, column.name)[rows] for column in fields(_Turns)}
    return _Turns(**chosen)


def _trace(traffic: SyntheticTraffic, turns: _Turns, order: NDArray[np.int64]) -> Trace:
    size = traffic.block_tokens
    row_of_turn = np.full(len(turns.turn), -1)
    row_of_turn[order] = np.arange(len(order))
    rows = _select(turns, order)
    parent = np.where(rows.turn > 1, row_of_turn[order - 1], -1)
    offsets = np.concatenate(([0], np.cumsum(-(-rows.input_tokens // size))))
    # The first turn shares its prefix, a later one what its parent's prompt fills.
    shared_tokens = np.where(parent >= 0, rows.input_tokens[parent], np.minimum(rows.prefix_tokens, rows.input_tokens))
    return Trace(
        name=traffic.name,
        arrival_s=rows.arrival_s - rows.arrival_s[0],
        input_tokens=rows.input_tokens,
        output_tokens=rows.output_tokens,
        block_tokens=size,
        block_offsets=offsets,
        block_ids=_block_ids(offsets, parent, rows.prefix, shared_tokens // size),
        parent_request=parent,
        turn=rows.turn.astype(np.int32),
        kind=(KIND,) * len(order),
    )


def _block_ids(
    offsets: NDArray[np.int64], parent: NDArray[np.int64], prefix: NDArray[np.int64], shared: NDArray[np.int64]
) -> NDArray[np.int64]:
    longest = np.zeros(int(prefix.max()) + 1, dtype=np.int64)
    firsts = parent < 0
    np.maximum.at(longest, prefix[firsts], shared[firsts])
    prefix_start = np.concatenate(([0], np.cumsum(longest)))
    # Blocks of prefixes come first, then those that are new with each request.
    ids = np.arange(offsets[-1]) + prefix_start[-1]
    starts = offsets[:-1].tolist()
    places = zip(starts, parent.tolist(), prefix_start[prefix].tolist(), shared.tolist(), strict=True)
    for start, parent_row, prefix_id, count in places:
        if parent_row >= 0:
            ids[start : start + count] = ids[starts[parent_row] : starts[parent_row] + count]
        else:
            ids[start : start + count] = np.arange(prefix_id, prefix_id + count)
    return by_first_appearance(ids)
