"""What requests offer the fleet: tokens per second, and the batch in which decodes can be run."""

from __future__ import annotations

from migrate.fleet import Fleet
from migrate.move_settings import MoveSettings


def offered(fleet: Fleet, instance: str, horizon_s: float) -> tuple[float, float]:
    """Prompt tokens and tokens to generate of `instance`, each per second (ours).

    The backlog is spread over `horizon_s`: after a burst nothing arrives, and yet the worker is busy as long as there
    is a backlog. What waits for its prompt will want tokens when that is computed, wherever these are generated: as
    many for each prompt token as now. So a worker that lives on what another one lets through is not taken to be idle
    once the other is helped. It gets no more than all workers together could let through.
    """
    figures = fleet.figures[instance]
    prefill = figures.prefill_tokens_per_s + figures.pending_prefill_tokens / horizon_s
    decode = figures.decode_tokens_per_s + figures.pending_decode_tokens / horizon_s
    done = sum(item.prefilled_tokens_per_s for item in fleet.figures.values())
    wanted = sum(item.prefill_tokens_per_s + item.pending_prefill_tokens / horizon_s for item in fleet.figures.values())
    following = min(max(1.0, wanted / done), len(fleet.figures)) if done > 0 else 1.0
    return prefill, decode * following


def reached_rows(fleet: Fleet, instance: str, settings: MoveSettings) -> float:
    """Rows of a decode step that the instance's tokens could share (ours): at the rate at which they are wanted, and
    `max_itl_ratio` times as far apart as with a worker to themselves, which is as slow as a move may make them.

    A decode loop with one request is always busy and yet has room, but not for as much as if it ran a full batch: its
    requests would have to wait for others first. Nothing is believed of steps that were never seen: no more rows than
    so many times those that there were, so that whatever a step costs by itself, and whatever for each row, the load
    is known within `max_itl_ratio`.
    """
    times = fleet.model.times
    layers = fleet.model.sizes.num_layers
    _, tokens_per_s = offered(fleet, instance, settings.horizon_s)
    step_s = layers * times.step_s + times.head_step_s
    rows_s = tokens_per_s * (layers * times.row_s + times.head_row_s)
    # Tokens wait for a step: rows = tokens_per_s * (step_s + row_s * rows).
    alone = max(1.0, tokens_per_s * step_s / (1 - rows_s)) if rows_s < 1 else float(times.full_batch)
    if times.known_rows > 0:
        alone = min(alone, max(1.0, times.known_rows))
    return min(float(times.full_batch), settings.max_itl_ratio * alone)
