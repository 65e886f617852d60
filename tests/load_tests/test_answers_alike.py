from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.token_bytes import TokenBytes
from app.tokenizer import load_tokenizer
from load_tests.answers_alike import Judge
from tests.engine_driver import make_prompt
from tests.reference import load_reference

MODEL = "random/llama-4x8x2"
PROMPT = make_prompt(12, 1, vocab=250)
COUNT = 6


@pytest.fixture(scope="module")
def greedy_ids() -> list[int]:
    from actors.model_source import resolve_model

    torch.set_num_threads(1)
    reference = load_reference(Path(resolve_model(MODEL).path))
    ids = list(PROMPT)
    for _ in range(COUNT):
        with torch.inference_mode():
            ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


@pytest.fixture(scope="module")
def names() -> list[str]:
    tokenizer = load_tokenizer(MODEL).tokenizer
    table = TokenBytes(tokenizer)
    return [table.text(token) for token in range(len(tokenizer))]


def test_the_same_answers_are_right_and_nobody_is_asked() -> None:
    likeness = Judge("no/such-model").likeness([PROMPT] * 2, [["a", "b"]] * 2, [["a", "b"]] * 2, [2, 2])
    assert (likeness.answers, likeness.tokens, likeness.parted, likeness.wrong) == (2, 4, 0, ())


def test_an_answer_that_parts_is_right_only_if_it_is_greedy(greedy_ids: list[int], names: list[str]) -> None:
    greedy = [names[token] for token in greedy_ids]
    other = [*greedy[:3], names[(greedy_ids[3] + 1) % 250], *greedy[4:]]
    judge = Judge(MODEL)
    good = judge.likeness([PROMPT], [greedy], [other], [COUNT])
    assert (good.parted, good.close_calls, good.wrong) == (1, 0, ())
    bad = judge.likeness([PROMPT], [other], [greedy], [COUNT])
    assert bad.parted == 1
    assert bad.wrong[0].startswith("answer 0: output token 3 is")


def test_a_token_lost_or_repeated_is_wrong() -> None:
    judge = Judge("no/such-model")
    for moved, unmoved in ((["a", "b"], ["a"]), (["a"], ["a", "b"]), (["a", "a", "b"], ["a", "b"])):
        (wrong,) = judge.likeness([PROMPT], [moved], [unmoved], [2]).wrong
        assert wrong == f"answer 0 has {len(moved)} tokens, and {len(unmoved)} without moves; 2 were wanted"
