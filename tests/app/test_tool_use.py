"""What an answer with tools is held to, token by token, under templates of either form; and what templates get."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from tokenizers import AddedToken

from actors.random_model import byte_tokenizer
from app.chat_protocol import ChatCompletionRequest
from app.chat_template import render_chat
from app.openai_errors import ApiError
from app.request_parsing import validate_request
from app.tool_formats import HERMES, LLAMA_3
from app.tool_use import ToolUse, tool_use

TURNS = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments | tojson }})"
    "{% endfor %}{% endfor %}"
)
LISTED = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
PLAIN = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
HERMES_TEMPLATE = (
    LISTED
    + '{{ "Answer <tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <object>}\\n</tool_call>" }}'
    + TURNS
)
LLAMA_TEMPLATE = LISTED + """{{ '{"name": function name, "parameters": dictionary of them}' }}""" + TURNS
OTHER_TEMPLATE = LISTED + "Answer <tool_call>{function-name}<arg_key>{name}</arg_key></tool_call>" + TURNS

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]
STOP = {"type": "function", "function": {"name": "stop"}}


def tokenizer_with(template: str | None, *added: AddedToken) -> Any:
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.add_tokens(list(added))
    tokenizer.chat_template = template
    return tokenizer


def chat(**changes: Any) -> ChatCompletionRequest:
    document = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **changes}
    return validate_request(document, ChatCompletionRequest)


def used(template: str, **changes: Any) -> ToolUse:
    use = tool_use(tokenizer_with(template), chat(**changes))
    assert use is not None
    return use


def accepts(use: ToolUse, text: str, tokenizer: Any = None) -> bool:
    """Whether a whole answer keeps to it."""
    assert use.grammar is not None
    tokenizer = tokenizer or byte_tokenizer()
    matcher = LLMatcher(from_tokenizer(tokenizer), use.grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return all(matcher.consume_token(token) for token in tokens) and matcher.is_accepting()


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


@pytest.mark.parametrize(
    ("template", "write", "form"),
    [(HERMES_TEMPLATE, hermes, HERMES), (LLAMA_TEMPLATE, llama, LLAMA_3), (PLAIN, hermes, HERMES)],
)
def test_a_call_that_is_asked_for(template: str, write: Any, form: Any) -> None:
    required = used(template, tool_choice="required")
    assert (required.form, required.names) == (form, {"add", "stop"})
    for text in (write("add", '{"a": 5}'), write("add", '{"a": -1, "b": "y"}'), write("stop", "{}")):
        assert accepts(required, text)
    wrong = [write("add", "{}"), write("add", '{"a": "5"}'), write("stop", '{"a": 1}'), write("mul", "{}")]
    for text in ("", "Well", "I add. " + write("stop", "{}"), write("stop", "{}") + "!", *wrong):
        assert not accepts(required, text)
    named = used(template, tool_choice=STOP)
    assert named.names == {"stop"}
    assert accepts(named, write("stop", "{}"))
    assert not accepts(named, write("add", '{"a": 5}'))


def test_several_calls_or_one() -> None:
    two = hermes("stop", "{}") + "\n" + hermes("add", '{"a": 1}')
    for choice in ("required", "auto"):
        assert accepts(used(HERMES_TEMPLATE, tool_choice=choice), two)
        one = used(HERMES_TEMPLATE, tool_choice=choice, parallel_tool_calls=False)
        assert not accepts(one, two)
        assert accepts(one, hermes("stop", "{}"))
    assert not accepts(used(HERMES_TEMPLATE, tool_choice=STOP), hermes("stop", "{}") + "\n" + hermes("stop", "{}"))
    # Llama's own template refuses a conversation with several.
    assert not accepts(used(LLAMA_TEMPLATE, tool_choice="required"), llama("stop", "{}") + "; " + llama("stop", "{}"))


def after(use: ToolUse, text: str) -> set[int]:
    """The tokens that may follow `text` in an answer."""
    assert use.grammar is not None
    tokenizer = byte_tokenizer()
    matcher = LLMatcher(from_tokenizer(tokenizer), use.grammar, log_level=0)
    assert matcher.consume_tokens(tokenizer.encode(text, add_special_tokens=False))
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


@pytest.mark.parametrize(("template", "write"), [(HERMES_TEMPLATE, hermes), (LLAMA_TEMPLATE, llama), (PLAIN, hermes)])
def test_an_answer_of_one_call_can_only_end_after_it(template: str, write: Any) -> None:
    end = byte_tokenizer().eos_token_id
    one = used(template, tool_choice="required", parallel_tool_calls=False)
    assert after(one, write("stop", "{}")) == {end}
    assert end not in after(one, write("stop", "{}")[:-1])
    if template == PLAIN:
        several = used(template, tool_choice="required")
        assert after(several, write("stop", "{}")) > {end}


def test_a_call_that_is_left_to_the_model() -> None:
    auto = used(HERMES_TEMPLATE)
    texts = ["", "Hello.\n\nWorld", "a < b", "<tool_", '{"name": "mul"}', hermes("stop", "{}")]
    texts += ["I add.\n" + hermes("add", '{"a": 1}'), hermes("stop", "{}") + "\nSo " + hermes("stop", "{}") + " ok"]
    for text in texts:
        assert accepts(auto, text)
    for text in (hermes("mul", "{}"), "x " + hermes("add", "{}"), "<tool_call>", hermes("add", '{"a": 1}')[:-3]):
        assert not accepts(auto, text)
    assert used(LLAMA_TEMPLATE).grammar is None


@pytest.mark.parametrize("special", [False, True])
def test_markers_that_are_tokens(special: bool) -> None:
    names = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    tokenizer = tokenizer_with(
        HERMES_TEMPLATE, *(AddedToken(name, special=special, normalized=False) for name in names)
    )
    begin, end = tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
    for choice in ("auto", "required"):
        use = tool_use(tokenizer, chat(tool_choice=choice))
        assert use is not None
        assert use.marker_ids == {begin, end}
        call = hermes("add", '{"a": 1}')
        assert tokenizer.encode(call, add_special_tokens=False)[0] == begin
        assert accepts(use, call, tokenizer)
        assert not accepts(use, hermes("add", "{}"), tokenizer)
        thought = "<think>I might <b>add</b>.</think>\n"
        assert accepts(use, thought + call, tokenizer) == (choice == "auto")
        assert accepts(use, thought + "No.", tokenizer) == (choice == "auto")


def test_no_tools_no_rule() -> None:
    for changes in ({"tools": []}, {"tool_choice": "none"}):
        assert tool_use(tokenizer_with(HERMES_TEMPLATE), chat(**changes)) is None


@pytest.mark.parametrize(
    ("template", "said"),
    [(PLAIN, "says nothing of tools"), (OTHER_TEMPLATE, "in a form that this server does not read")],
)
def test_a_model_that_cannot_be_left_to_call(template: str, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        tool_use(tokenizer_with(template), chat())
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "tools", "unsupported_parameter")
    assert said in caught.value.message
    assert "Set 'tool_choice'" in caught.value.message
    assert "'parallel_tool_calls' to false" in caught.value.message


def test_schemas_that_are_too_long() -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"const": "x" * 300_000}}}
    with pytest.raises(ApiError) as caught:
        tool_use(tokenizer_with(HERMES_TEMPLATE), chat(tools=[bad]))
    assert (caught.value.param, caught.value.code) == ("tools", "invalid_grammar")


def rendered(template: str, **changes: Any) -> str:
    tokenizer = tokenizer_with(template)
    return str(tokenizer.decode(render_chat(tokenizer, chat(add_generation_prompt=False, **changes))))


def test_templates_get_tools_that_may_be_called() -> None:
    assert rendered(LISTED + PLAIN) == "add stop [user]hi"
    assert rendered(LISTED + PLAIN, tool_choice=STOP) == "stop [user]hi"
    assert rendered(LISTED + PLAIN, tool_choice="none") == "[user]hi"
    assert rendered(PLAIN, tool_choice="required") == "[user]hi"


def test_templates_get_earlier_calls_and_their_results() -> None:
    function = {"name": "add", "arguments": json.dumps({"a": 1})}
    messages = [
        {
            "role": "assistant",
            "content": "I add.",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c"},
    ]
    assert rendered(TURNS, messages=messages) == '[assistant]I add.(add {"a": 1})[tool]2'
    assert rendered(PLAIN, messages=messages) == f"[assistant]I add.\n{hermes('add', json.dumps({'a': 1}))}[tool]2"
