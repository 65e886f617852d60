"""Prefill and decode apart."""

from __future__ import annotations

from tuning.simulator.decode_instance import DecodeInstance
from tuning.simulator.events import JOINED, STORED
from tuning.simulator.flow import Flow
from tuning.simulator.instance import Instance
from tuning.simulator.prefill_instance import PrefillInstance
from tuning.simulator.prefix_reader import Begun
from tuning.simulator.settings import SimulationSettings
from tuning.simulator.step_timing import StepTiming
from tuning.trace.trace import Trace


class StaticFlow(Flow):
    """A prompt's KV goes through the store: written by the prefill instance, whose blocks are held until then, and read
    by the decode instance, as far as that has not got it itself."""

    def __init__(self, trace: Trace, timing: StepTiming, settings: SimulationSettings) -> None:
        super().__init__(trace, timing, settings)
        self.prefill = [
            PrefillInstance(
                number,
                self.pool(),
                settings.link_bytes_per_s,
                timing,
                settings.max_batch_tokens,
                reader=self.reader,
                events=self.events,
                computed=self._on_computed,
            )
            for number in range(settings.prefill_instances)
        ]
        self.decode = [
            DecodeInstance(
                number,
                self.pool(),
                settings.link_bytes_per_s,
                timing,
                settings.max_batch_tokens,
                batch=self.batch(),
                events=self.events,
            )
            for number in range(settings.prefill_instances, settings.prefill_instances + settings.decode_instances)
        ]
        self.dispatching = self.dispatch_over(self.prefill, self.decode)
        self._writing: dict[int, Begun] = {}
        self._matched: dict[int, int] = {}

    def answer_ended(self, now_s: float, row: int) -> None:
        """See `Flow`."""
        self.free_and_store_answer(now_s, self._decode_of(row), row)

    def send(self, now_s: float, row: int, prefill: Instance, decode: Instance) -> None:
        """See `Flow`."""
        self.prefill[prefill.number].enqueue(now_s, row)

    def _decode_of(self, row: int) -> DecodeInstance:
        return self.decode[self.outcomes.decode_instance[row] - len(self.prefill)]

    def _on_computed(self, now_s: float, instance: PrefillInstance, begun: Begun, compute_s: float) -> None:
        row, prompts = begun.row, self.prompts
        self.note_first_token(now_s, instance, begun)
        is_over = prompts.output_tokens[row] == 1
        tail_tokens = prompts.input_tokens[row] - prompts.findable_blocks[row] * prompts.block_tokens
        if is_over:
            tail_tokens = 0
        written_s = now_s
        if not is_over or self.store.is_there:
            written_s = self.write_back(now_s, instance, begun, compute_s, max(0, tail_tokens))
        self._writing[row] = begun
        self.events.schedule(written_s, STORED, self._on_written, row)
        if is_over:
            self.dispatching.without_decode(row, self._decode_of(row))
            self.end(now_s, row)

    def _on_written(self, now_s: float, row: int) -> None:
        self.put(now_s, row)
        del self._writing[row]
        prompts = self.prompts
        chain, findable = prompts.chain(row), prompts.findable_blocks[row]
        prefill = self.prefill[self.outcomes.prefill_instance[row]]
        held = findable if self.settings.local_prefix_cache else 0
        prefill.pool.release(chain, held, prompts.num_blocks[row] - held)
        if prompts.output_tokens[row] > 1:
            self._hand_over(now_s, row)
        else:
            prompts.forget(row)
        prefill.start_next(now_s)

    def _hand_over(self, now_s: float, row: int) -> None:
        prompts, decode = self.prompts, self._decode_of(row)
        chain = prompts.chain(row)
        matched = decode.pool.match(chain, prompts.findable_blocks[row])
        if not decode.pool.take(chain, matched, prompts.lifetime_blocks[row]):
            raise RuntimeError(f"request {row} was admitted to {decode.worker_id}, which has no room for it")
        self.dispatching.on_decode(row, decode)
        self._matched[row] = matched
        self.events.schedule(self.hand_over(now_s, row, matched, decode), JOINED, self._on_joined, row)

    def _on_joined(self, now_s: float, row: int) -> None:
        prompts, decode = self.prompts, self._decode_of(row)
        decode.pool.keep(prompts.chain(row), self._matched.pop(row), prompts.findable_blocks[row])
        decode.join(now_s, row, prompts.input_tokens[row] + 1, prompts.output_tokens[row] - 1)
