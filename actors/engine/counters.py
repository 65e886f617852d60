"""What an engine counts: totals since its start. Ratios are for whoever reads them (a ratio of nothing is NaN)."""

from __future__ import annotations

from dataclasses import dataclass

from actors.engine.step_plan import Chunk, StepPlan


@dataclass(slots=True)
class EngineCounters:
    """In tokens unless the name says otherwise."""

    prompt_tokens: int = 0
    """Prompt tokens of requests that began here; a hand-over or a resumed request is not counted again."""
    cached_prompt_tokens: int = 0
    """Of these, tokens whose KV was found, here or in the global store."""
    device_hit_tokens: int = 0
    """Of these, tokens whose KV was found here."""
    computed_prompt_tokens: int = 0
    """Prompt tokens run through the model for the first time."""
    recomputed_tokens: int = 0
    """Tokens run again because of a preemption."""
    fetched_tokens: int = 0
    """Tokens whose KV was brought in from outside."""
    early_starts: int = 0
    """Requests that could be computed while their KV still arrived."""
    generated_tokens: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0
    failed_requests: int = 0
    steps: int = 0
    lost_steps: int = 0
    """Steps that another worker has not run its part of."""
    busy_s: float = 0.0
    """Wall time in steps, waiting for KV left out."""
    waited_s: float = 0.0
    """Wall time in steps spent waiting for KV that came layer by layer."""

    awaited_s: float = 0.0
    """Wall time in which other workers had all steps in flight and there was nothing else to do."""
    hosted_stages: int = 0
    """Stages of other instances' steps that were run here, and the wall time of these."""
    hosted_s: float = 0.0
    recent_step_s: float = 0.0
    """What a step takes at present: a mean in which one counts a tenth when it has ended, and less from then on."""

    prefill_steps: int = 0
    """Steps with prompt chunks, and the tokens of these."""
    prefill_step_tokens: int = 0
    decode_steps: int = 0
    """Steps with decodes, and these."""
    decode_step_rows: int = 0
    decoding_requests: int = 0
    """The same with the requests that wait for their turn in another step in flight."""

    @property
    def mean_step_s(self) -> float:
        """Wall time of a step; 0 before the first."""
        return self.busy_s / self.steps if self.steps else 0.0

    def count_step(self, plan: StepPlan, duration_s: float, waited_s: float, *, turns: int, num_running: int) -> None:
        """A step that has ended well, one of `turns` in which `num_running` requests take turns."""
        self.recent_step_s += (duration_s - self.recent_step_s) * (0.1 if self.steps else 1.0)
        self.steps += 1
        self.busy_s += duration_s
        self.waited_s += waited_s
        if plan.prefills:
            self.prefill_steps += 1
            self.prefill_step_tokens += sum(chunk.num_tokens for chunk in plan.prefills)
        if plan.decodes:
            rows = len(plan.decodes)
            self.decode_steps += 1
            self.decode_step_rows += rows
            self.decoding_requests += min(turns * rows, max(rows, num_running))

    def count_hosted(self, stage_s: float) -> None:
        """A stage of another instance's step."""
        self.hosted_stages += 1
        self.hosted_s += stage_s

    def count_chunk(self, chunk: Chunk) -> None:
        """To be called before the chunk's tokens count as computed."""
        sequence = chunk.sequence
        if not sequence.was_counted:
            sequence.was_counted = True
            if not sequence.request.output_token_ids:
                self.prompt_tokens += sequence.num_prompt_tokens
                cached = sequence.num_cached_tokens or 0
                self.cached_prompt_tokens += cached
                self.device_hit_tokens += max(0, cached - sequence.num_fetched_tokens)
            sequence.num_ever_computed = sequence.num_computed
        start, stop = sequence.num_computed, sequence.num_computed + chunk.num_tokens
        known = sequence.num_ever_computed
        self.recomputed_tokens += max(0, min(stop, known) - start)
        self.computed_prompt_tokens += max(0, min(stop, sequence.num_prompt_tokens) - max(start, known))
        sequence.num_ever_computed = max(known, stop)
