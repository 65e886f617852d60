"""Tokens are held to a grammar: against a finite language, token by token, and in whole answers of an engine."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from transformers import AutoTokenizer

from actors.engine.config import EngineConfig
from actors.engine.engine import Engine
from actors.engine.grammar import GrammarError, Grammars, GrammarState, mask_by_grammars
from actors.engine.loading import load_model
from actors.engine.request import EngineRequest, SamplingParams
from actors.model_source import resolve_model
from tests.engine_driver import make_prompt

MODEL = resolve_model("random/llama-2x4").path
TOKENIZER = AutoTokenizer.from_pretrained(MODEL)
END = TOKENIZER.eos_token_id
VOCAB = 320
"""More than the tokenizer has, as models have."""
GRAMMARS = Grammars(MODEL, VOCAB, [END])
BYTES = {token: TOKENIZER.decode([token]) for token in range(len(TOKENIZER)) if token not in TOKENIZER.all_special_ids}


def choice_of(texts: Sequence[str]) -> str:
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, texts)))


def allowed_tokens(state: GrammarState) -> set[int]:
    logits = torch.zeros(3, VOCAB)
    assert mask_by_grammars(logits, {1: state}) == {}
    assert (logits[[0, 2]] == 0).all()
    assert set(logits[1].tolist()) <= {0.0, -torch.inf}
    return set((logits[1] == 0).nonzero().flatten().tolist())


@settings(max_examples=50, deadline=None)
@given(texts=st.lists(st.text("ab{", min_size=1, max_size=5), min_size=1, max_size=5), data=st.data())
def test_what_may_come_next_is_what_leads_to_a_member(texts: list[str], data: st.DataObject) -> None:
    state, answer, tokens = GRAMMARS.state(choice_of(texts)), "", list[int]()
    while True:
        wanted = {token for token, text in BYTES.items() if any(member.startswith(answer + text) for member in texts)}
        wanted |= {END} if answer in texts else set()
        assert allowed_tokens(state) == wanted
        token = data.draw(st.sampled_from(sorted(wanted)))
        tokens.append(token)
        state.follow(tokens)
        if token == END:
            return
        answer += BYTES[token]


def test_a_state_is_made_anew_from_the_tokens_so_far() -> None:
    grammar = choice_of(["abc", "abd"])
    tokens = TOKENIZER.encode("ab", add_special_tokens=False)
    first, second = GRAMMARS.state(grammar), GRAMMARS.state(grammar)
    for count in range(len(tokens) + 1):
        first.follow(tokens[:count])
    second.follow(tokens)
    assert allowed_tokens(first) == allowed_tokens(second) == {token for token, text in BYTES.items() if text in "cd"}


def test_what_may_not_stand_there_is_an_error() -> None:
    state = GRAMMARS.state(choice_of(["abc"]))
    with pytest.raises(GrammarError, match="does not keep to its grammar at token 1"):
        state.follow(TOKENIZER.encode("ax", add_special_tokens=False))


def test_what_is_no_grammar_is_an_error() -> None:
    with pytest.raises(GrammarError, match="unknown name"):
        GRAMMARS.state(LLMatcher.grammar_from_lark("start: nothing"))


def test_errors_have_neither_the_grammar_nor_the_answer_in_them() -> None:
    lark = LLMatcher.grammar_from_lark
    with pytest.raises(GrammarError, match="unknown name") as caught:
        GRAMMARS.state(lark('start: "SECRET" nothing'))
    assert "SECRET" not in str(caught.value)
    state = GRAMMARS.state(lark('start: "SECRET" "a"{1000000000}'))
    tokens = TOKENIZER.encode("SECRETaaa", add_special_tokens=False)

    def answer() -> None:
        for count in range(len(tokens)):
            state.write_mask(torch.zeros(VOCAB // 32, dtype=torch.int32))
            state.follow(tokens[: count + 1])

    with pytest.raises(GrammarError, match="Too many items") as caught:
        answer()
    assert "SECRET" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert state.has_failed


@pytest.fixture(scope="module")
def engine() -> Engine:
    config = EngineConfig(dtype="float32", block_tokens=16, kv_cache_blocks=64)
    return Engine(load_model(MODEL, config), config)


def run(engine: Engine, sampling: Sequence[SamplingParams], so_far: Sequence[Sequence[int]] = ()) -> list[str | None]:
    """Answers as text, beside a free one; None where a request failed."""
    grammars = Grammars(MODEL, engine.loaded.spec.vocab_size, [END])
    tokens: dict[str, list[int]] = {}
    failed = set()
    for number, each in enumerate([*sampling, SamplingParams(40, temperature=0.0, ignore_eos=True)]):
        state = None if each.grammar is None else grammars.state(each.grammar)
        before = tuple(so_far[number]) if number < len(so_far) else ()
        request = EngineRequest(str(number), make_prompt(9, number, 200), each, before, eos_token_ids=(END,))
        tokens[str(number)] = list(before)
        if engine.add(request, state) is not None:
            failed.add(str(number))
    while engine.has_work:
        for event in engine.step().events:
            if event.token_id is not None:
                tokens[event.request_id].append(event.token_id)
            assert event.error is None
    engine.check_idle()
    assert len(tokens.popitem()[1]) == 40
    return [None if name in failed else TOKENIZER.decode(ids, skip_special_tokens=True) for name, ids in tokens.items()]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_answers_of_a_model_that_knows_nothing_are_members(engine: Engine, temperature: float) -> None:
    member = '{"a": [true, null], "b": "x"}'
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": {"enum": [True, None]}, "minItems": 1, "maxItems": 3},
            "b": {"type": "string", "maxLength": 3},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    by_schema = LLMatcher.grammar_from_json_schema(
        schema, overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    )
    sampling = [
        SamplingParams(200, temperature=temperature, seed=seed, grammar=grammar)
        for seed in range(4)
        for grammar in (by_schema, LLMatcher.grammar_from_regex("(ab|cd){3}"), choice_of([member]))
    ]
    answers = run(engine, sampling)
    for index in range(0, len(answers), 3):
        value = json.loads(answers[index] or "")
        assert value.keys() == {"a", "b"}
        assert 1 <= len(value["a"]) <= 3
        assert all(item is True or item is None for item in value["a"])
        assert len(value["b"]) <= 3
        assert len(answers[index + 1] or "") == 6
        assert {(answers[index + 1] or "")[at : at + 2] for at in (0, 2, 4)} <= {"ab", "cd"}
        assert answers[index + 2] == member


def test_an_answer_goes_on_elsewhere_from_its_tokens(engine: Engine) -> None:
    sampling = [SamplingParams(40, temperature=1.0, seed=3, grammar=LLMatcher.grammar_from_regex("[a-c]{20}"))]
    (whole,) = run(engine, sampling)
    assert whole is not None
    begun = TOKENIZER.encode(whole[:7], add_special_tokens=False)
    assert run(engine, sampling, [begun]) == [whole]


def test_a_request_and_its_state_belong_together(engine: Engine) -> None:
    sampling = SamplingParams(8, grammar=choice_of(["a"]))
    event = engine.add(EngineRequest("alone", (5, 6), sampling))
    assert event is not None
    assert "needs its state" in (event.error or "")
    assert run(engine, [sampling], [TOKENIZER.encode("b", add_special_tokens=False)]) == [None]


def test_a_model_without_an_end_has_no_grammars() -> None:
    with pytest.raises(GrammarError, match="no end-of-sequence token"):
        Grammars(MODEL, VOCAB, []).state(choice_of(["a"]))


def test_an_answer_ends_with_its_grammar_and_not_at_the_limit(engine: Engine) -> None:
    sampling = SamplingParams(30, temperature=0.0, ignore_eos=True, grammar=choice_of(["abc"]))
    engine.add(
        EngineRequest("r", (5, 6, 7), sampling, eos_token_ids=(END,)),
        Grammars(MODEL, engine.loaded.spec.vocab_size, [END]).state(choice_of(["abc"])),
    )
    events = []
    while engine.has_work:
        events += engine.step().events
    assert not any(event.blames_grammar for event in events)
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert events[-1].token_id == END
    assert TOKENIZER.decode([event.token_id for event in events[:-1]]) == "abc"


@pytest.mark.parametrize(
    "grammar", [LLMatcher.grammar_from_regex(r"[^\s\S]"), LLMatcher.grammar_from_lark('start: "a"{1000000000}')]
)
def test_a_grammar_that_fails_in_an_answer_is_blamed_for_it(engine: Engine, grammar: str) -> None:
    state = Grammars(MODEL, engine.loaded.spec.vocab_size, [END]).state(grammar)
    assert not state.has_failed
    sampling = SamplingParams(30, temperature=0.0, grammar=grammar)
    engine.add(EngineRequest("r", (5, 6, 7), sampling, eos_token_ids=(END,)), state)
    events = []
    while engine.has_work:
        events += engine.step().events
    assert (events[-1].finish_reason, events[-1].blames_grammar) == ("error", True)
    engine.check_idle()
