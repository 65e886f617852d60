"""What makes a trace a poor ground for a bill: requests that nothing could serve, or too few of them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from tuning.job.job_error import JobError
from tuning.model_shape import ModelShape
from tuning.simulator.prompts import BLOCK_TOKENS_UNKNOWN
from tuning.timing import Timing
from tuning.trace.trace import Trace

ENOUGH_REQUESTS: Final = 100
"""With fewer, a 99th percentile is the slowest of all."""


def trace_doubts(path: Path, trace: Trace, timing: Timing) -> list[str]:
    """Warnings, by what they are about: the model's context, a device's memory, the number of requests.

    Raises:
        JobError: more than half of the requests could not be served.
    """
    doubts = [_too_long(trace, timing.model), _too_large(trace, timing), _too_few(trace)]
    return [f"{path}: {doubt}" for doubt in doubts if doubt]


def _too_long(trace: Trace, model: ModelShape) -> str:
    """A deployment refuses what is longer than the context, and the simulator does not."""
    lengths = trace.input_tokens + trace.output_tokens
    num_longer = int((lengths > model.max_context_tokens).sum())
    message = (
        f"{num_longer:,} of {len(trace):,} requests are longer, prompt and answer together, than the context of "
        f"{model.name}, {model.max_context_tokens:,} tokens; the longest has {int(lengths.max()):,}"
    )
    _refuse_most(num_longer, trace, message, "give a trace of shorter requests, or a model of longer context")
    doubt = f"{message}. A deployment refuses them; here they are simulated like the others, and all figures count them"
    if 100 * num_longer > len(trace):
        doubt += (
            ". They are more than one in a hundred, so that 99th percentiles may be theirs alone: leave them out of "
            "the trace to see those of what is served"
        )
    return doubt if num_longer else ""


def _too_large(trace: Trace, timing: Timing) -> str:
    """Who leaves large requests out serves the others all the faster, so the figures are too good."""
    block_tokens = trace.block_tokens or BLOCK_TOKENS_UNKNOWN
    pool_blocks = max(1, timing.kv_pool_tokens() // block_tokens)
    # As `Prompts.lifetime_blocks`: the KV of an answer's last token is never computed.
    lifetime_tokens = trace.input_tokens + np.maximum(trace.output_tokens, 1) - 1
    num_larger = int((-(-lifetime_tokens // block_tokens) > pool_blocks).sum())
    message = (
        f"{num_larger:,} of {len(trace):,} requests need more KV than {timing.hardware.name} has room for beside the "
        f"weights of {timing.model.name}, {pool_blocks * block_tokens:,} tokens; the largest needs "
        f"{int(lifetime_tokens.max()):,}"
    )
    _refuse_most(num_larger, trace, message, "give a trace of shorter requests, or a larger device")
    doubt = f"{message}. They are refused, and no figure counts them: the others are served all the faster"
    return doubt if num_larger else ""


def _too_few(trace: Trace) -> str:
    if len(trace) >= ENOUGH_REQUESTS:
        return ""
    return (
        f"{len(trace)} requests say little of what other traffic would make of a configuration, and their 99th "
        f"percentile is the slowest: take {ENOUGH_REQUESTS} or more, better an hour of traffic"
    )


def _refuse_most(num_refused: int, trace: Trace, message: str, advice: str) -> None:
    if 2 * num_refused > len(trace):
        raise JobError(f"{message}. At most half may be: {advice}")
