"""What one ingress replica counts of requests and their times, the same for HTTP and gRPC.

A choice is what others call a request: a sequence with a queue, a first token and an end of its own. TTFT and
inter-token latencies are counted as tokens come; the times of the stages with the end of a choice that ends by itself,
so that they add up to its end-to-end time and are as many. Times that priorities change are counted for those below,
at and above 0 apart. Requests and tokens are counted by API key too: there are as many keys as the operator has named.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Literal, TypeAlias, get_args

from app.sequence_times import SequenceTimes
from kv.metrics import table
from kv.metrics.histogram import Histogram
from kv.metrics.table import Metric, Readings

Ending: TypeAlias = Literal["stop", "length", "tool_calls", "abort", "timeout", "refused", "error"]
Turn: TypeAlias = Literal["sooner", "usual", "later"]
_BY_ITSELF = frozenset({"stop", "length", "tool_calls"})


class RequestMetrics:
    """Used from one event loop. `model`: the name that it is served by."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._prompt_tokens: Counter[str] = Counter()
        self._generation_tokens: Counter[str] = Counter()
        self._endings: Counter[tuple[str, Ending]] = Counter()
        self._ttft = _by_turn(table.TTFT, model)
        self._itl = Histogram(table.ITL, (model,))
        self._e2e = Histogram(table.E2E, (model,))
        self._queue = _by_turn(table.QUEUE_TIME, model)
        self._prefill = Histogram(table.PREFILL_TIME, (model,))
        self._transfer = Histogram(table.TRANSFER_TIME, (model,))
        self._decode = Histogram(table.DECODE_TIME, (model,))

    def prompt(self, num_tokens: int, times: SequenceTimes) -> None:
        """A prompt has its first answer, in the choice of `times`. To be called once a prompt."""
        self._prompt_tokens[times.key] += num_tokens

    def token(self, times: SequenceTimes) -> None:
        """A token of a choice has come; notes when."""
        now_s = time.perf_counter()
        self._generation_tokens[times.key] += 1
        if times.last_token_s is None:
            times.first_token_s = now_s
            self._ttft[_turn(times)].observe(now_s - times.arrived_s)
        else:
            self._itl.observe(now_s - times.last_token_s)
        times.last_token_s = now_s

    def ended(self, times: SequenceTimes, reason: Ending) -> None:
        """A choice has ended. To be called once a choice."""
        self._endings[times.key, reason] += 1
        if reason not in _BY_ITSELF:
            return
        self._e2e.observe(time.perf_counter() - times.arrived_s)
        if times.admitted_s is None or times.first_token_s is None or times.last_token_s is None:
            return  # it asked for no token
        self._queue[_turn(times)].observe(times.admitted_s - times.arrived_s)
        self._prefill.observe(times.first_token_s - times.admitted_s)
        decode_from_s = times.first_token_s
        if times.taken_over_s is not None:
            self._transfer.observe(times.taken_over_s - times.first_token_s)
            decode_from_s = times.taken_over_s
        self._decode.observe(times.last_token_s - decode_from_s)

    def readings(self, *, queued: int, inflight: int) -> Readings:
        """All of it. `queued`, `inflight`: choices that wait to be admitted, and that are."""
        model = self._model
        readings: Readings = {
            (table.PROMPT_TOKENS, (model,)): self._prompt_tokens.total(),
            (table.GENERATION_TOKENS, (model,)): self._generation_tokens.total(),
            (table.QUEUED, (model,)): queued,
            (table.INFLIGHT, (model,)): inflight,
        }
        for (key, reason), count in self._endings.items():
            series = (table.REQUESTS, (model, reason))
            readings[series] = readings.get(series, 0) + count
            readings[table.KEY_REQUESTS, (model, key, reason)] = count
        for metric, counts in (
            (table.KEY_PROMPT_TOKENS, self._prompt_tokens),
            (table.KEY_GENERATION_TOKENS, self._generation_tokens),
        ):
            readings |= {(metric, (model, key)): count for key, count in counts.items()}
        for histogram in (
            *self._ttft.values(),
            self._itl,
            self._e2e,
            *self._queue.values(),
            self._prefill,
            self._transfer,
            self._decode,
        ):
            readings |= histogram.readings()
        return readings


def _by_turn(metric: Metric, model: str) -> dict[Turn, Histogram]:
    return {turn: Histogram(metric, (model, turn)) for turn in get_args(Turn)}


def _turn(times: SequenceTimes) -> Turn:
    return "usual" if times.priority == 0 else "sooner" if times.priority < 0 else "later"
