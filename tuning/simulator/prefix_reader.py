"""The beginning of a prefill: what of a prompt is taken from where, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kv.fetch_choice import FetchCosts, FetchRun, tokens_to_fetch
from kv.tiers import TIERS
from tuning.simulator.device_pool import DevicePool
from tuning.simulator.lane import Lane
from tuning.simulator.outcomes import Outcomes
from tuning.simulator.overlap import exposed_fetch_s
from tuning.simulator.prompts import Prompts
from tuning.simulator.step_timing import StepTiming
from tuning.simulator.store import DRAM, STAGED, Segment, Store


@dataclass(frozen=True, slots=True)
class Begun:
    """A prefill whose blocks are held and whose fetch, if there is one, is under way."""

    row: int
    matched_blocks: int
    """That the instance had itself."""
    cached_tokens: int
    """That need not be computed."""
    new_tokens: int
    ready_s: float
    """When computing may begin so that no layer is waited for."""
    fetch_s: float
    """That bytes flow for."""


class PrefixReader:
    """Used by all instances that prefill.

    Of what the store has of a prompt, the leading part is fetched whose fetch, with the computation of the rest, takes
    the least time: `kv.fetch_choice`, as in the live workers. Where these know rates from their last fetches, the
    simulator knows what is ahead in the queues: the rate of a tier is what this fetch would get, waiting included
    (ours).
    """

    def __init__(self, prompts: Prompts, store: Store, timing: StepTiming, outcomes: Outcomes, budget: int) -> None:
        self._prompts = prompts
        self._store = store
        self._timing = timing
        self._outcomes = outcomes
        self._budget = budget

    def begin(
        self, row: int, pool: DevicePool, link: Lane, now_s: float, extra_blocks: int, batch: int, context_tokens: int
    ) -> Begun | None:
        """Begin the prefill of a request, beside `batch` decodes; None, and nothing has changed, without room for it.

        Args:
            extra_blocks: to hold beside the prompt's.
        """
        prompts, store = self._prompts, self._store
        chain, stop = prompts.chain(row), prompts.findable_blocks[row]
        matched = pool.match(chain, stop)
        if not pool.take(chain, matched, prompts.num_blocks[row] + extra_blocks):
            return None
        input_tokens, block_tokens = prompts.input_tokens[row], prompts.block_tokens
        hit, fetch_s, start_s = matched, 0.0, now_s
        fetched: Sequence[Segment] = ()
        if store.is_there:
            store.expire(now_s)
            segments, staged_ready_s = store.segments(row, chain, matched, stop)
            found = segments[-1].stop if segments else matched
            if found:
                store.use(chain, found, now_s)
            if segments:
                hit = self._worth_fetching(row, matched, segments, staged_ready_s, link, now_s)
                fetched = _up_to(segments, hit)
        if fetched:
            begin_s, end_s = store.fetch(chain, matched, fetched, staged_ready_s, link, now_s)
            start_s, fetch_s = begin_s, end_s - begin_s
        # Of a prompt that is all there, the last token is computed for what comes after it.
        cached_tokens = min(hit * block_tokens, input_tokens - 1)
        self._note(row, matched, fetched, cached_tokens)
        new_tokens = input_tokens - cached_tokens
        if fetch_s > 0:
            chunk = min(new_tokens, self._budget - batch)
            compute_s = self._timing.step_s(((chunk, cached_tokens),), batch, context_tokens)
            start_s += exposed_fetch_s(fetch_s, compute_s, self._timing.model.num_layers)
        self._outcomes.prefill_start_s[row] = now_s
        self._outcomes.hit_blocks[row] = hit
        return Begun(row, matched, cached_tokens, new_tokens, start_s, fetch_s)

    def _worth_fetching(
        self, row: int, matched: int, segments: Sequence[Segment], staged_ready_s: float, link: Lane, now_s: float
    ) -> int:
        """Up to which block of the prompt to fetch."""
        store, step_s = self._store, self._timing.step_s
        block_bytes, block_tokens = store.block_bytes, self._prompts.block_tokens
        stop = segments[-1].stop
        input_tokens = self._prompts.input_tokens[row]
        have = min(matched * block_tokens, input_tokens - 1)
        reach = min(stop * block_tokens, input_tokens - 1)
        saved_s = step_s(((input_tokens - have, have),), 0, 0) - step_s(((input_tokens - reach, reach),), 0, 0)
        disk_blocks = staged_blocks = 0
        runs = []
        first = matched
        for segment in segments:
            num_blocks = segment.stop - first
            if segment.place != DRAM:
                if segment.place == STAGED:
                    staged_blocks += num_blocks
                else:
                    disk_blocks += num_blocks
            tier = TIERS[0] if segment.place == DRAM else TIERS[1]
            runs.append(FetchRun(num_blocks * block_tokens, num_blocks * block_bytes, tier))
            first = segment.stop
        num_bytes = (stop - matched) * block_bytes
        to_device_s = max(store.dram_read.done_in_s(now_s, num_bytes), link.done_in_s(now_s, num_bytes))
        disk_s = to_device_s
        if staged_blocks:
            disk_s = max(disk_s, staged_ready_s - now_s)
        if disk_blocks:
            disk_s = max(disk_s, store.disk_read.done_in_s(now_s, disk_blocks * block_bytes))
        num_disk_bytes = (disk_blocks + staged_blocks) * block_bytes
        costs = FetchCosts(
            {
                TIERS[0]: _rate(num_bytes, to_device_s),
                TIERS[1]: _rate(num_disk_bytes, disk_s),
            },
            0.0,
            _rate((stop - matched) * block_tokens, saved_s),
        )
        return matched + tokens_to_fetch(runs, costs) // block_tokens

    def _note(self, row: int, matched: int, fetched: Sequence[Segment], cached_tokens: int) -> None:
        """Write down which tokens came from where. They and the computed ones add up to the prompt."""
        block_tokens, outcomes = self._prompts.block_tokens, self._outcomes
        tokens = outcomes.hit_tokens_device[row] = min(matched * block_tokens, cached_tokens)
        for segment in fetched:
            end = min(segment.stop * block_tokens, cached_tokens)
            column = outcomes.hit_tokens_dram if segment.place == DRAM else outcomes.hit_tokens_disk
            column[row] += end - tokens
            tokens = end
        outcomes.computed_tokens[row] = self._prompts.input_tokens[row] - cached_tokens


def _rate(amount: int, seconds: float) -> float:
    return amount / seconds if seconds > 0 else float("inf")


def _up_to(segments: Sequence[Segment], stop: int) -> list[Segment]:
    """The leading segments that end at `stop` or before; it is the end of one, or lies before them all."""
    return [segment for segment in segments if segment.stop <= stop]
