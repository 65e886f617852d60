"""Calls in an answer's text: hand-written cases of each form, cut at every place."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.spoken_answer import gathered
from app.tool_call_parser import ToolCallDelta, ToolCallParser
from app.tool_formats import HERMES, LLAMA_3, ToolFormat

NAMES = frozenset({"get_weather", "add"})

Outcome = tuple[str, list[tuple[str, str]]]
"""What was said, and the calls with their arguments as the client gets them."""


def outcome(form: ToolFormat, pieces: Iterable[str]) -> Outcome:
    parser = ToolCallParser(form, NAMES)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    calls = gathered(part for part in parts if isinstance(part, ToolCallDelta))
    assert parser.num_calls == len(calls)
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    said = "".join(part for part in parts if isinstance(part, str))
    return said, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
CALLED = ("get_weather", '{"city": "Paris"}')

HERMES_CASES: dict[str, tuple[str, Outcome]] = {
    "text alone": ("Hello, world.", ("Hello, world.", [])),
    "nothing": ("", ("", [])),
    "blanks are text": (" \n", (" \n", [])),
    "a call": (f"<tool_call>\n{PARIS}\n</tool_call>", ("", [CALLED])),
    "a call on one line": (f"<tool_call>{PARIS}</tool_call>", ("", [CALLED])),
    "text before": (f"Let me look.\n\n<tool_call>\n{PARIS}\n</tool_call>", ("Let me look.", [CALLED])),
    "text after": (f"<tool_call>\n{PARIS}\n</tool_call>\nDone. ", ("Done. ", [CALLED])),
    "two calls": (
        f"<tool_call>\n{PARIS}\n</tool_call>\n<tool_call>\n"
        '{"name": "add", "arguments": {"a": [1, 2]}}\n</tool_call>',
        ("", [CALLED, ("add", '{"a": [1, 2]}')]),
    ),
    "text between": (
        f"A <tool_call>{PARIS}</tool_call> B <tool_call>{PARIS}</tool_call>",
        ("AB", [CALLED, CALLED]),
    ),
    "braces and quotes in a string": (
        '<tool_call>\n{"name": "add", "arguments": {"a": "}\\"</tool_call>{", "b": {"c": "\\\\"}}}\n</tool_call>x',
        ("x", [("add", '{"a": "}\\"</tool_call>{", "b": {"c": "\\\\"}}')]),
    ),
    "no blanks": (
        '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>',
        ("", [("add", '{"a":1}')]),
    ),
    "an escaped name": (
        '<tool_call>{"name": "\\u0061dd", "arguments": {}}</tool_call>',
        ("", [("add", "{}")]),
    ),
    "arguments first": (
        '<tool_call>\n{"arguments": {"a":  1}, "name": "add"}\n</tool_call>',
        ("", [("add", '{"a": 1}')]),
    ),
    "more keys": (
        '<tool_call>{"name": "add", "arguments": {"a": 1}, "id": {"x": "}"}}</tool_call>!',
        ("!", [("add", '{"a": 1}')]),
    ),
    "no end marker": (f"<tool_call>\n{PARIS}", ("", [CALLED])),
    "a cut end marker": (f"<tool_call>\n{PARIS}\n</tool_", ("", [CALLED])),
    "cut arguments": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
        ("", [("get_weather", '{"city": "Par')]),
    ),
    "a cut opening is text": ('Hm <tool_call>\n{"name": "get_wea', ('Hm <tool_call>\n{"name": "get_wea', [])),
    "a cut marker is text": ("Hm <tool_ca", ("Hm <tool_ca", [])),
    "almost a marker": ("a <tool_box> and <b", ("a <tool_box> and <b", [])),
    "a marker within a beginning of one": (f"<tool_<tool_call>{PARIS}</tool_call>", ("<tool_", [CALLED])),
    "an unknown function is text": (
        'x <tool_call>{"name": "rm", "arguments": {"a": 1}}</tool_call>',
        ('x <tool_call>{"name": "rm", "arguments": {"a": 1}}</tool_call>', []),
    ),
    "no object is text": ("<tool_call>\nget_weather\n</tool_call>", ("<tool_call>\nget_weather\n</tool_call>", [])),
    "no arguments are text": (
        '<tool_call>{"name": "add"}</tool_call>',
        ('<tool_call>{"name": "add"}</tool_call>', []),
    ),
    "arguments that are no object are text": (
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', []),
    ),
    "a call after what was none": (
        f"<tool_call>oh <tool_call>{PARIS}</tool_call>",
        ("<tool_call>oh", [CALLED]),
    ),
    "a missing brace": (
        '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call> so',
        ("so", [("add", '{"a": 1}')]),
    ),
    "bare JSON is text": (PARIS, (PARIS, [])),
    "other scripts": (
        '<tool_call>{"name": "add", "arguments": {"a": "東京 😀"}}</tool_call>',
        ("", [("add", '{"a": "東京 😀"}')]),
    ),
}

BARE = '{"name": "get_weather", "parameters": {"city": "Paris"}}'

LLAMA_CASES: dict[str, tuple[str, Outcome]] = {
    "text alone": ("The sum is {3}.", ("The sum is {3}.", [])),
    "blanks are text": (" \n", (" \n", [])),
    "a call": (BARE, ("", [CALLED])),
    "a call after blanks": (f"\n {BARE}", ("", [CALLED])),
    "after the tag": (f"<|python_tag|>{BARE}", ("", [CALLED])),
    "text before the tag": (f"Look: <|python_tag|>{BARE}", ("Look:", [CALLED])),
    "arguments by that name": (PARIS, ("", [CALLED])),
    "with a type": (
        '{"type": "function", "name": "add", "parameters": {"a": 1}}',
        ("", [("add", '{"a": 1}')]),
    ),
    "two calls": (f"{BARE}; {BARE}", ("", [CALLED, CALLED])),
    "two calls on lines": (f"{BARE}\n{BARE}\n", ("", [CALLED, CALLED])),
    "text after": (f"{BARE} I think", ("I think", [CALLED])),
    "JSON that is no call": ('{"a": {"name": "add"}}', ('{"a": {"name": "add"}}', [])),
    "another function": ('{"name": "rm", "parameters": {}} x', ('{"name": "rm", "parameters": {}} x', [])),
    "a call that comes later is text": (f"So: {BARE}", (f"So: {BARE}", [])),
    "a call after what was none is text": (f"{{}} {BARE}", (f"{{}} {BARE}", [])),
    "cut arguments": ('{"name": "add", "parameters": {"a": ', ("", [("add", '{"a": ')])),
    "a cut opening is text": (' {"name": "add", "para', (' {"name": "add", "para', [])),
    "python code after the tag is text": ("<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
}

CASES = [(HERMES, *case) for case in HERMES_CASES.values()] + [(LLAMA_3, *case) for case in LLAMA_CASES.values()]
IDS = [f"hermes: {name}" for name in HERMES_CASES] + [f"llama: {name}" for name in LLAMA_CASES]


@pytest.mark.parametrize(("form", "text", "expected"), CASES, ids=IDS)
def test_cases_cut_at_every_place(form: ToolFormat, text: str, expected: Outcome) -> None:
    assert outcome(form, [text]) == expected
    assert outcome(form, text) == expected  # character by character
    for cut in range(len(text)):
        assert outcome(form, [text[:cut], text[cut:]]) == expected


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool_", "<|python_tag|>", "\n", " ", "{", "}", '"name": ', '"add"', ", ", ": ",
    '"arguments": {', '"parameters": {', '"\\', "; ", "x", PARIS, BARE,
]  # fmt: skip


@given(st.sampled_from([HERMES, LLAMA_3]), st.lists(st.sampled_from(FRAGMENTS), max_size=12), st.data())
def test_the_outcome_does_not_depend_on_the_cuts(form: ToolFormat, fragments: list[str], data: st.DataObject) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert outcome(form, pieces) == outcome(form, [text])


@given(st.text(alphabet='ab<>{}" \n:,', max_size=40))
def test_text_without_a_call_is_left_as_it_is(text: str) -> None:
    assert outcome(HERMES, text) == (text, [])


def test_text_and_arguments_are_given_on_as_early_as_they_can_be() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.push("I look. ") == ["I look."]
    assert parser.push('<tool_call>\n{"name": "add", "arguments": ') == []
    first, second = parser.push('{"a": 1')
    assert isinstance(first, ToolCallDelta)
    assert (first.index, first.name, first.arguments) == (0, "add", "")
    assert second == ToolCallDelta(0, '{"a": 1')
    assert parser.push("2}}\n</tool_call>") == [ToolCallDelta(0, "2}")]
    assert parser.finish() == []


@pytest.mark.parametrize("form", [HERMES, LLAMA_3])
def test_what_is_written_for_a_template_is_read_back(form: ToolFormat) -> None:
    calls = [
        {"function": {"name": "add", "arguments": {"a": "ü}\n", "b": [1, None]}}},
        {"function": {"name": "get_weather", "arguments": {}}},
    ]
    said, read = outcome(form, form.written(calls))
    assert said == ""
    assert [(name, json.loads(arguments)) for name, arguments in read] == [
        (call["function"]["name"], call["function"]["arguments"]) for call in calls
    ]
