"""What transformers says of a running app's answers."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from actors.model_source import resolve_model
from app.token_bytes import TokenBytes
from app.tokenizer import load_tokenizer
from tests.asked import Answered
from tests.reference import assert_greedy, load_reference


class Judge:
    """Of one model with a byte tokenizer."""

    def __init__(self, model: str) -> None:
        tokenizer = load_tokenizer(model).tokenizer
        table = TokenBytes(tokenizer)
        self._ids = {table.text(token): token for token in range(len(tokenizer))}
        self._model: PreTrainedModel = load_reference(resolve_model(model).path)

    def check(self, prompts: Sequence[Sequence[int]], answers: Sequence[Answered], max_tokens: int) -> None:
        """Each is whole, and greedy token by token."""
        for answered in answers:
            assert (answered.status, answered.error) == (200, None)
            assert (len(answered.tokens), answered.finish_reason) == (max_tokens, "length")
        outputs = [[self._ids[token] for token in answered.tokens] for answered in answers]
        assert_greedy(self._model, prompts, outputs)
