"""The default model in transformers, from text to text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from transformers import AutoTokenizer

from actors.model_source import ensure_default_model
from tests.reference import load_reference

EditLogits = Callable[[torch.Tensor, list[int]], torch.Tensor]
"""(logits [vocab], the answer so far) -> the logits to choose from"""


class ReferenceText:
    """Model and tokenizer, float32 on one thread."""

    def __init__(self) -> None:
        folder = ensure_default_model()
        torch.set_num_threads(1)
        self.model = load_reference(folder)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.eos: int = self.model.generation_config.eos_token_id
        self._greedy = lru_cache(maxsize=None)(self._generate)

    def chat_prompt(self, messages: str | Sequence[dict[str, Any]], **options: Any) -> list[int]:
        """The token ids of a chat; a string is one user message."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        options = {"add_generation_prompt": True, **options}
        return list(self.tokenizer.apply_chat_template(list(messages), return_dict=False, **options))

    def greedy(self, prompt: Sequence[int], num_tokens: int, **options: Any) -> list[int]:
        """What `generate` gives, with the token that ends the answer; `options` are generate's."""
        return list(self._greedy(tuple(prompt), num_tokens, tuple(sorted(options.items()))))

    def _generate(self, prompt: tuple[int, ...], num_tokens: int, options: tuple[tuple[str, Any], ...]) -> list[int]:
        output = self.model.generate(
            torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, **dict(options)
        )
        return output[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def greedy_with(self, prompt: Sequence[int], num_tokens: int, edit: EditLogits) -> list[int]:
        """Greedy over logits that `edit` changes, a whole forward pass a token. For rules that transformers lacks."""
        answer: list[int] = []
        while len(answer) < num_tokens and self.eos not in answer:
            logits = self.model(torch.tensor([[*prompt, *answer]])).logits[0, -1].float()
            answer.append(int(edit(logits, answer).argmax()))
        return answer

    @torch.inference_mode()
    def logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """[len(answer), vocab], natural logarithm: of each token of the answer, given all before it."""
        logits = self.model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        return logits.float().log_softmax(-1)

    def text(self, token_ids: Sequence[int]) -> str:
        """Without special tokens, and without a character that is not complete."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True)).rstrip("\ufffd")
