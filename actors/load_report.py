"""From an engine's state to what a worker reports of its load."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from actors.engine.engine import Engine
from migrate.load import Role, WorkerLoad


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """Taken in the engine's thread between two steps; counts in requests, tokens and blocks."""

    total_blocks: int = 0
    live_blocks: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    steps: int = 0
    pending_tokens: Counter[str] = field(default_factory=Counter)
    """By owner: prompt tokens to compute before a first token."""
    pending_requests: Counter[str] = field(default_factory=Counter)
    """By owner: requests without a first token from here."""

    def report(self, worker_id: str, epoch: int, role: Role, prefill_tokens_per_s: float, owner: str) -> WorkerLoad:
        """The report addressed to `owner`."""
        return WorkerLoad(
            worker_id=worker_id,
            epoch=epoch,
            role=role,
            total_blocks=self.total_blocks,
            live_blocks=self.live_blocks,
            running_requests=self.running_requests,
            waiting_requests=self.waiting_requests,
            pending_prefill_tokens=self.pending_tokens.total(),
            prefill_tokens_per_s=prefill_tokens_per_s,
            steps=self.steps,
            from_this_ingress_prefill_tokens=self.pending_tokens[owner],
            from_this_ingress_requests=self.pending_requests[owner],
        )


def take_snapshot(engine: Engine) -> LoadSnapshot:
    """Reads an engine between two steps."""
    scheduler = engine.scheduler
    tokens: Counter[str] = Counter()
    requests: Counter[str] = Counter()
    for sequence in scheduler.sequences():
        if sequence.num_output_tokens == len(sequence.request.output_token_ids):
            owner = sequence.request.owner
            requests[owner] += 1
            # What is still to be fetched is not to be computed.
            tokens[owner] += sequence.num_tokens - max(sequence.num_computed, sequence.external_tokens)
    return LoadSnapshot(
        total_blocks=engine.blocks.num_blocks,
        live_blocks=engine.blocks.num_live - scheduler.exports.num_reclaimable,
        running_requests=len(scheduler.running),
        waiting_requests=len(scheduler.waiting) + len(scheduler.fetching),
        steps=engine.counters.steps,
        pending_tokens=tokens,
        pending_requests=requests,
    )
