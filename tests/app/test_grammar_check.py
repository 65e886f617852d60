"""Clients' grammars that end, stall or fill a process: the one that checks them, and nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from actors.random_model import byte_tokenizer
from app.chat_protocol import ChatCompletionRequest
from app.grammar_check import GrammarCheck
from app.grammar_child import why_unusable
from app.openai_errors import ApiError
from app.request_parsing import validate_request
from app.structured_output import JSON_STYLE

TOKENIZER = byte_tokenizer()
VOCAB = 320
"""More than the tokenizer has, as models have."""
DEEP = 5000
LIMIT_S = 0.5

FINE = LLMatcher.grammar_from_regex("[a-c]{3}")
SLOW = LLMatcher.grammar_from_lark("start: A\nA: " + " & ".join(f"/(.|\\n)*x{{{n}}}(.|\\n)*/" for n in range(1, 60)))
"""A product of 59 automata."""


def grammar_of(rule: dict[str, Any]) -> str:
    """Of a request with these `structured_outputs`."""
    messages = [{"role": "user", "content": "x"}]
    document = {"model": "m", "messages": messages, "structured_outputs": rule}
    grammar = validate_request(document, ChatCompletionRequest).grammar
    assert grammar is not None
    return grammar


def chained(step: Callable[[dict[str, str]], dict[str, Any]], length: int = DEEP) -> dict[str, Any]:
    """A schema whose first definition refers to the second one, and so on."""
    definitions = {f"d{n}": step({"$ref": f"#/$defs/d{n + 1}"}) for n in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "string"}}}


def rules(name: str) -> str:
    steps = "\n".join(f"{name}{n}: {name}{n + 1}" for n in range(DEEP))
    return f'start: {name}0\n{steps}\n{name}{DEEP}: "a"'


DEADLY: dict[str, dict[str, Any]] = {
    "references": {"json": chained(lambda reference: reference)},
    "arrays": {"json": chained(lambda reference: {"type": "array", "items": reference, "minItems": 1}, 2000)},
    "rules": {"grammar": rules("r")},
    "terminals": {"grammar": rules("R")},
    "in a tool": {"grammar": 'start: "x" body\nbody: %json ' + json.dumps(chained(lambda reference: reference))},
}
HOPELESS: dict[str, dict[str, Any]] = {
    "itself": {"json": {"$ref": "#"}},
    "all of itself": {"json": {"allOf": [{"$ref": "#"}]}},
    "any of itself": {"json": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}},
    "in a circle": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
    "itself in itself": {"json": {"type": "object", "properties": {"p": {"$ref": "#"}}, "required": ["p"]}},
    "no character": {"regex": r"[^\s\S]"},
    "no such token": {"grammar": "start: <[99999]>"},
    "too many items": {"grammar": 'start: "x " "a"{1000000000}'},
    "too many expressions": {"regex": "((a{1000}){1000}){1000}"},
    "unknown rule": {"grammar": "start: nothing"},
    "unknown type": {"json": {"type": "unknown"}},
}


def checking(body: Callable[[GrammarCheck], Awaitable[None]], *, limit_s: float = LIMIT_S) -> None:
    async def with_check() -> None:
        check = GrammarCheck(TOKENIZER, limit_s)
        try:
            await body(check)
        finally:
            await check.stop()
        assert processes() == []

    asyncio.run(with_check())


async def reason_of(check: GrammarCheck, grammar: str) -> str | None:
    """Why it is refused."""
    try:
        await check.check(grammar, "field", vocab_size=VOCAB, end_token_ids=[TOKENIZER.eos_token_id])
    except ApiError as error:
        refusal = error
    else:
        return None
    assert (refusal.status, refusal.param, refusal.code) == (400, "field", "invalid_grammar")
    return refusal.message


def processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("rule", DEADLY.values(), ids=DEADLY.keys())
def test_what_kills_a_process_is_refused_and_the_next_one_is_served(rule: dict[str, Any]) -> None:
    async def body(check: GrammarCheck) -> None:
        reason = await reason_of(check, grammar_of(rule))
        assert reason is not None
        assert "refers to itself too deeply" in reason
        assert await reason_of(check, FINE) is None

    checking(body, limit_s=10.0)


def test_what_takes_too_long_is_refused_and_once_only() -> None:
    async def body(check: GrammarCheck) -> None:
        reason = await reason_of(check, SLOW)
        assert reason is not None
        assert "more than 0.3 s of CPU time" in reason
        assert processes() == []
        assert await reason_of(check, SLOW) == reason
        assert processes() == []  # it was not asked again

    checking(body, limit_s=0.3)


def test_what_no_answer_keeps_to_is_refused_without_its_text() -> None:
    async def body(check: GrammarCheck) -> None:
        for name, rule in HOPELESS.items():
            reason = await reason_of(check, grammar_of(rule))
            assert reason is not None, name
            assert len(reason) < 200
            assert "\n" not in reason
            assert "start:" not in reason

    checking(body)


def test_a_wrong_regular_expression_is_told_from_others() -> None:
    async def body(check: GrammarCheck) -> None:
        assert "unclosed character class" in (await reason_of(check, grammar_of({"regex": "(["})) or "")
        assert "look-around" in (await reason_of(check, grammar_of({"json": {"pattern": "(?=a)"}})) or "")

    checking(body)


def test_a_grammar_whose_steps_would_hold_others_is_refused() -> None:
    tokenizer = from_tokenizer(TOKENIZER, VOCAB)
    assert why_unusable(tokenizer, FINE) is None
    assert "0 s of CPU time for one token" in (why_unusable(tokenizer, FINE, max_step_s=0.0) or "")


def test_one_process_checks_all_until_it_is_gone() -> None:
    async def body(check: GrammarCheck) -> None:
        assert processes() == []  # most servers never need it
        assert await reason_of(check, FINE) is None
        (process,) = processes()
        for schema in ({}, {"type": "object"}, {"enum": ["a", "b"]}, {"type": "array", "items": {"$ref": "#"}}):
            assert await reason_of(check, LLMatcher.grammar_from_json_schema(schema, overrides=JSON_STYLE)) is None
        assert processes() == [process]
        process.kill()
        psutil.wait_procs([process])
        assert await reason_of(check, LLMatcher.grammar_from_regex("x")) is None
        assert len(processes()) == 1

    checking(body)


def test_a_client_that_leaves_takes_nobody_with_it() -> None:
    async def body(check: GrammarCheck) -> None:
        leaving, staying = (asyncio.create_task(reason_of(check, SLOW)) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        other = asyncio.create_task(reason_of(check, FINE))
        assert "CPU time" in (await staying or "")
        assert await other is None
        assert leaving.cancelled()

    checking(body, limit_s=0.3)


def test_what_could_not_be_found_out_is_asked_again() -> None:
    async def body(check: GrammarCheck) -> None:
        asking = asyncio.create_task(check.check(SLOW, "field", vocab_size=VOCAB, end_token_ids=[0]))
        while not processes():
            await asyncio.sleep(0.001)
        processes()[0].kill()
        with pytest.raises((ApiError, ChildProcessError)) as caught:  # the latter when it had not even begun
            await asking
        assert getattr(caught.value, "status", 503) == 503
        assert "CPU time" in (await reason_of(check, SLOW) or "")

    checking(body, limit_s=0.3)
