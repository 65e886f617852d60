"""A request's way through the instances, from its arrival to its last token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tuning.simulator.decode_batch import DecodeBatch, TokenGaps
from tuning.simulator.device_pool import DevicePool
from tuning.simulator.dispatching import Dispatching
from tuning.simulator.events import STORED, EventQueue
from tuning.simulator.group_roots import groups_of_trace
from tuning.simulator.instance import Instance
from tuning.simulator.outcomes import Outcomes
from tuning.simulator.overlap import first_layer_done_s
from tuning.simulator.prefix_reader import Begun, PrefixReader
from tuning.simulator.prompts import Prompts
from tuning.simulator.settings import SimulationSettings
from tuning.simulator.step_timing import StepTiming
from tuning.simulator.store import Store
from tuning.trace.trace import Trace


class Flow(ABC):
    """What both modes share: arrival, the end of a prefill, the store, the end of an answer."""

    def __init__(self, trace: Trace, timing: StepTiming, settings: SimulationSettings) -> None:
        self.events = EventQueue()
        self.outcomes = Outcomes(len(trace))
        self.gaps = TokenGaps()
        self.prompts = Prompts(trace, settings.partial_blocks)
        self._token_bytes = timing.model.kv_bytes_per_token
        block_bytes = self.prompts.block_tokens * self._token_bytes
        self.store = Store(settings, block_bytes, groups_of_trace(trace, settings.policy), self.events)
        self.timing = timing
        self.settings = settings
        self.reader = PrefixReader(self.prompts, self.store, timing, self.outcomes, settings.max_batch_tokens)
        self.dispatching: Dispatching
        self.refused: list[int] = []
        self._answers: dict[int, tuple[list[int], int]] = {}

    def pool(self) -> DevicePool:
        """An empty KV pool of an instance."""
        num_blocks = self.settings.device_pool_blocks
        if num_blocks is None:
            num_blocks = max(1, self.timing.kv_pool_tokens() // self.prompts.block_tokens)
        return DevicePool(num_blocks, keeps_prefixes=self.settings.local_prefix_cache)

    def batch(self) -> DecodeBatch:
        """An empty batch of an instance that decodes."""
        return DecodeBatch(self.timing, self.gaps, self.outcomes.first_token_s, self.answer_ended)

    def arrive(self, now_s: float, row: int) -> None:
        """A request comes in."""
        self.outcomes.enter(now_s)
        if not self.dispatching.can_ever_run(row):
            self.refused.append(row)
            self.outcomes.leave(now_s)
            return
        store = self.store
        matched = 0
        if store.is_there:
            store.expire(now_s)
            chain = self.prompts.chain(row)
            matched = store.matched(chain, 0, self.prompts.findable_blocks[row])
            store.prefetch(row, chain, matched, now_s)
        self.dispatching.offer(now_s, row, matched)

    def dispatch_over(self, prefill: Sequence[Instance], decode: Sequence[Instance]) -> Dispatching:
        """Who chooses among these instances, as the settings say."""
        settings = self.settings
        return Dispatching(
            self.prompts,
            self.outcomes,
            prefill,
            decode,
            policy=settings.dispatch,
            seed=settings.seed,
            max_running_requests=settings.max_running_requests,
            send=self.send,
        )

    @abstractmethod
    def send(self, now_s: float, row: int, prefill: Instance, decode: Instance) -> None:
        """A request goes to the instances that were chosen for it."""

    @abstractmethod
    def answer_ended(self, now_s: float, row: int) -> None:
        """A batch has generated a request's last token."""

    def note_first_token(self, now_s: float, instance: Instance, begun: Begun) -> None:
        """A prefill is done: its blocks can be found on the instance."""
        prompts = self.prompts
        instance.pool.keep(prompts.chain(begun.row), begun.matched_blocks, prompts.findable_blocks[begun.row])
        self.outcomes.first_token_s[begun.row] = now_s
        self.dispatching.first_token(begun.row)

    def write_back(self, now_s: float, instance: Instance, begun: Begun, compute_s: float, tail_tokens: int) -> float:
        """Bring what a prefill has computed to the store, layer by layer; when all is there."""
        prompts, store = self.prompts, self.store
        num_layers = self.timing.model.num_layers
        chain, findable = prompts.chain(begun.row), prompts.findable_blocks[begun.row]
        num_bytes = store.missing_blocks(chain, findable) * store.block_bytes + tail_tokens * self._token_bytes
        if not num_bytes:
            return now_s
        alone_s = max(store.dram_write.duration_s(num_bytes), instance.link_out.duration_s(num_bytes))
        earliest_s = first_layer_done_s(now_s, compute_s, begun.fetch_s, num_layers)
        return max(store.write(num_bytes, instance.link_out, earliest_s), now_s + alone_s / num_layers)

    def free_and_store_answer(self, now_s: float, instance: Instance, row: int) -> None:
        """A request has had its last token on `instance`, which holds its blocks."""
        prompts, store, pool = self.prompts, self.store, instance.pool
        chain, findable = prompts.chain(row), prompts.findable_blocks[row]
        lifetime = prompts.lifetime_blocks[row]
        ids, num_nameless = prompts.answer_blocks(row)
        start = prompts.input_tokens[row] // prompts.block_tokens
        if ids and findable == start and self.settings.local_prefix_cache:
            pool.keep(ids, findable, len(ids))
            pool.release(ids, len(ids), lifetime - len(ids))
        else:
            held = findable if self.settings.local_prefix_cache else 0
            pool.release(chain, held, lifetime - held)
        num_blocks = max(0, len(ids) - start) + num_nameless
        if self.settings.store_answers and num_blocks and store.is_there:
            written_s = store.write(num_blocks * store.block_bytes, instance.link_out, now_s)
            self._answers[row] = list(ids), num_nameless
            self.events.schedule(written_s, STORED, self._on_answer_written, row)
        self.dispatching.off_decode(instance)
        self.end(now_s, row)

    def end(self, now_s: float, row: int) -> None:
        """A request has its last token."""
        self.outcomes.end_s[row] = now_s
        self.outcomes.leave(now_s)
        self.prompts.forget(row)
        self.dispatching.room_was_made(now_s)

    def put(self, now_s: float, row: int) -> None:
        """A prompt's blocks have been written."""
        if self.store.is_there:
            self.store.put(self.prompts.chain(row), self.prompts.findable_blocks[row], 0, now_s)

    def hand_over(self, now_s: float, row: int, matched_blocks: int, instance: Instance) -> float:
        """Bring a prompt to `instance`, which has its first blocks; when it is there."""
        tokens = self.prompts.input_tokens[row] - matched_blocks * self.prompts.block_tokens
        return self.store.hand_over(max(0, tokens) * self._token_bytes, instance.link_in, now_s)

    def _on_answer_written(self, now_s: float, row: int) -> None:
        ids, num_nameless = self._answers.pop(row)
        self.store.put(ids, len(ids), num_nameless, now_s)
