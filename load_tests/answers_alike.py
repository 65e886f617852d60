"""Whether answers given while layers and heads moved are those that are given when nothing moves.

Greedy answers in float32 must have the same tokens, but for close calls (`greedy_rule`): where two answers to one
prompt part, the model's own logits say whether the one with moves is still what a greedy choice may give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from load_tests.greedy_rule import TOKENS_PER_CLOSE_CALL, GreedyMismatchError, close_calls


@dataclass(frozen=True, slots=True)
class Likeness:
    """Of all answers together."""

    answers: int
    tokens: int
    parted: int
    """Answers that are not the same token by token."""
    close_calls: int
    """Tokens in these that are not the reference's first choice, and as good."""
    wrong: tuple[str, ...]
    """What is wrong, in words; empty when all is as it should be."""


class Judge:
    """The model as transformers runs it, loaded when it is first asked.

    Args:
        model: what the application's `model` says.
    """

    def __init__(self, model: str) -> None:
        self._name = model

    def likeness(
        self,
        prompts: Sequence[Sequence[int]],
        moved: Sequence[Sequence[str]],
        unmoved: Sequence[Sequence[str]],
        wanted: Sequence[int],
    ) -> Likeness:
        """Compares answers to the same prompts, by the names of their tokens. `wanted`: how many each was to have, so
        that none is lost or repeated."""
        wrong: list[str] = []
        parted = close = 0
        for number, (one, other, count) in enumerate(zip(moved, unmoved, wanted, strict=True)):
            if len(one) != count or len(other) != count:
                wrong.append(
                    f"answer {number} has {len(one)} tokens, and {len(other)} without moves; {count} were wanted"
                )
            elif list(one) != list(other):
                parted += 1
                try:
                    close += close_calls(self._model, prompts[number], [self._ids[name] for name in one])
                except GreedyMismatchError as error:
                    wrong.append(f"answer {number}: {error}")
        tokens = sum(map(len, moved))
        if close > 1 + tokens // TOKENS_PER_CLOSE_CALL:
            wrong.append(f"{close} of {tokens} tokens are close calls")
        return Likeness(len(moved), tokens, parted, close, tuple(wrong))

    # Imported where they are used: most runs need neither.

    @cached_property
    def _model(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        from actors.model_source import resolve_model

        return AutoModelForCausalLM.from_pretrained(resolve_model(self._name).path, dtype=torch.float32).eval()

    @cached_property
    def _ids(self) -> dict[str, int]:
        from app.token_bytes import TokenBytes
        from app.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(self._name).tokenizer
        table = TokenBytes(tokenizer)
        return {table.text(token): token for token in range(len(tokenizer))}
