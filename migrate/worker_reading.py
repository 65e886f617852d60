"""What a worker says of its work when a controller asks, and what two such answers make of the time between them."""

from __future__ import annotations

from dataclasses import dataclass, field

from migrate.cost_model import ModelSizes
from migrate.step_times import StepTimes
from migrate.utilisation import offered_per_s
from migrate.worker_figures import WorkerFigures


@dataclass(frozen=True, slots=True)
class WorkerReading:
    """One worker's counters, which only grow while it lives, and its state, both of its own instance."""

    worker: str
    taken_s: float
    """On the worker's own clock: differences between its readings say how long they are apart."""
    sizes: ModelSizes
    memory_bytes: int
    """For weights of layers and for KV."""
    full_batch: int
    """Requests that it runs at a time at most."""
    total_blocks: int
    live_blocks: int = 0
    cached_blocks: int = 0
    """Others with content that a move takes along."""
    epoch: int = 0
    """Of the worker's life: it is another one where it was started again, and has counted from 0."""
    pending_prefill_tokens: int = 0
    """Prompt tokens that are still to be computed, of requests that are here."""
    waiting_answers: int = 0
    """Requests of which no token was generated here yet, without those that are to be handed over."""
    waiting_answer_tokens: int = 0
    """The most that these may generate."""
    finished_requests: int = 0
    generated_tokens: int = 0
    prefill_steps: int = 0
    """Steps that had prompt tokens."""
    prefill_tokens: int = 0
    decode_steps: int = 0
    """Steps that had decodes."""
    decode_rows: int = 0
    decoding_requests: int = 0
    """Over steps that had decodes: requests that took turns in them. More than the rows where the step was one of
    several in flight."""
    step_times: StepTimes = field(default_factory=StepTimes)
    hosted_slice_s: float | None = None
    """See `CostModel`: what stages of its instance may take elsewhere."""

    @property
    def pending_decode_tokens(self) -> float:
        """What requests that wait are likely to generate: as much as those before them; 0 when there were none."""
        likely = self.waiting_answers * _mean(self.generated_tokens, self.finished_requests)
        return min(likely, self.waiting_answer_tokens)


def figures_of(reading: WorkerReading) -> WorkerFigures:
    """A worker's memory and backlog, when nothing is known yet of what arrives."""
    return WorkerFigures(
        worker=reading.worker,
        memory_bytes=reading.memory_bytes,
        total_blocks=reading.total_blocks,
        live_blocks=reading.live_blocks,
        cached_blocks=reading.cached_blocks,
        pending_prefill_tokens=reading.pending_prefill_tokens,
        pending_decode_tokens=reading.pending_decode_tokens,
    )


def figures_between(before: WorkerReading, after: WorkerReading) -> WorkerFigures:
    """A worker's figures over the time between two of its readings.

    Raises:
        ValueError: they are of two workers, or of two lives of one, or the second one is not the later.
    """
    life, same = (before.worker, before.epoch), (after.worker, after.epoch)
    if life != same or not after.taken_s > before.taken_s:
        raise ValueError(
            f"readings of {life} at {before.taken_s} and of {same} at {after.taken_s} were given; give two of one "
            "worker and epoch, the earlier one first"
        )
    period_s = after.taken_s - before.taken_s
    prefill_tokens = after.prefill_tokens - before.prefill_tokens
    decode_steps = after.decode_steps - before.decode_steps
    state = figures_of(after)
    return WorkerFigures(
        worker=after.worker,
        memory_bytes=state.memory_bytes,
        total_blocks=state.total_blocks,
        live_blocks=state.live_blocks,
        cached_blocks=state.cached_blocks,
        prefill_tokens_per_s=offered_per_s(
            prefill_tokens, before.pending_prefill_tokens, after.pending_prefill_tokens, period_s
        ),
        prefilled_tokens_per_s=prefill_tokens / period_s,
        decode_tokens_per_s=offered_per_s(
            after.decode_rows - before.decode_rows, before.pending_decode_tokens, after.pending_decode_tokens, period_s
        ),
        pending_prefill_tokens=state.pending_prefill_tokens,
        pending_decode_tokens=state.pending_decode_tokens,
        running=_mean(after.decoding_requests - before.decoding_requests, decode_steps),
        prefill_step_tokens=_mean(prefill_tokens, after.prefill_steps - before.prefill_steps),
    )


def _mean(total: float, count: float) -> float:
    return total / count if count else 0.0
