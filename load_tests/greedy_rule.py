"""When greedy output counts as that of the reference: one rule for tests and for checks on a GPU.

Batching changes float32 sums by about 1e-4, so a token may differ from the reference's argmax only where the
reference's two best logits lie within 2e-4, and such places are counted: at most one in 5,000 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

CLOSE_CALL = 2e-4
TOKENS_PER_CLOSE_CALL = 5000


class GreedyMismatchError(AssertionError):
    """An output that the reference would not have given."""


@torch.inference_mode()
def logits_of(model: Any, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """float32 [len(output), vocab]: the logits from which a transformers model chooses each token of `output`, given
    all tokens before it."""
    device = next(model.parameters()).device
    logits: torch.Tensor = model(torch.tensor([[*prompt, *output]], device=device)).logits
    return logits[0, len(prompt) - 1 : -1].float()


def close_calls(reference: Any, prompt: Sequence[int], output: Sequence[int]) -> int:
    """How many tokens of `output` are not the reference's argmax, but within the tolerance of it.

    Where all tokens are the argmax, the output is what `generate` gives, by induction. Raises GreedyMismatchError: a
    token lies farther off.
    """
    if not output:
        return 0
    logits = logits_of(reference, prompt, output)
    chosen = logits.gather(1, torch.tensor(output, device=logits.device)[:, None])[:, 0]
    best, best_ids = logits.max(1)
    gaps = (best - chosen).tolist()
    differ = [position for position, best_id in enumerate(best_ids.tolist()) if best_id != output[position]]
    for position in differ:
        # Written so that a NaN fails.
        if not gaps[position] <= CLOSE_CALL:
            raise GreedyMismatchError(
                f"output token {position} is {output[position]}, the reference has {int(best_ids[position])}, "
                f"{gaps[position]:.2e} above it"
            )
    return len(differ)


def check_greedy(reference: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> int:
    """`close_calls` over many. Raises GreedyMismatchError: a token is wrong, or too many are close calls."""
    close = sum(close_calls(reference, prompt, output) for prompt, output in zip(prompts, outputs, strict=True))
    tokens = sum(map(len, outputs))
    if close > 1 + tokens // TOKENS_PER_CLOSE_CALL:
        raise GreedyMismatchError(
            f"{close} of {tokens} tokens differ from the reference, all by less than {CLOSE_CALL}"
        )
    return close
