"""The rule of greedy equality, over a model whose logits are written down."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from load_tests.greedy_rule import CLOSE_CALL, GreedyMismatchError, check_greedy, close_calls

PROMPT = (5, 6)


class Written(torch.nn.Module):
    """Gives the same logits whatever the tokens are: row i chooses output token i of a prompt of two."""

    def __init__(self, *rows: list[float]) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(torch.tensor([[0.0] * len(rows[0]), *rows, [0.0] * len(rows[0])]))

    def forward(self, tokens: torch.Tensor) -> SimpleNamespace:
        assert tokens.shape == (1, len(self.rows))
        return SimpleNamespace(logits=self.rows[None])


def test_argmax_is_equal_and_a_near_tie_is_counted() -> None:
    model = Written([0.0, 1.0, 0.5], [2.0, 2.0 + CLOSE_CALL / 2, 0.0])
    assert close_calls(model, PROMPT, [1, 1]) == 0
    assert close_calls(model, PROMPT, [1, 0]) == 1
    assert check_greedy(model, [PROMPT], [[1, 0]]) == 1
    assert close_calls(model, PROMPT, []) == 0


def test_token_that_is_not_near_the_best_is_refused() -> None:
    model = Written([0.0, 1.0, 0.5], [2.0, 2.001, 0.0])
    with pytest.raises(GreedyMismatchError, match=r"output token 1 is 0, the reference has 1, 1\.0\de-03 above it"):
        close_calls(model, PROMPT, [1, 0])


def test_nan_is_never_equal() -> None:
    with pytest.raises(GreedyMismatchError):
        close_calls(Written([0.0, float("nan"), 0.5]), PROMPT, [0])


def test_close_calls_are_few() -> None:
    model = Written([1.0, 1.0 + CLOSE_CALL / 2])
    assert check_greedy(model, [PROMPT], [[0]]) == 1
    with pytest.raises(GreedyMismatchError, match="2 of 2 tokens differ"):
        check_greedy(model, [PROMPT] * 2, [[0], [0]])
    with pytest.raises(ValueError, match="shorter"):
        check_greedy(model, [PROMPT] * 2, [[0]])
