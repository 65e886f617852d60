from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers.utils.chat_template_utils import render_jinja_template

from app.chat_protocol import ChatCompletionRequest
from app.chat_template import render_chat
from app.openai_errors import ApiError

PLAIN = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def with_template(tokenizer: Any, template: Any) -> Any:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def chat(*turns: tuple[str, str], **changes: Any) -> ChatCompletionRequest:
    messages = [{"role": role, "content": content} for role, content in turns] or [{"role": "user", "content": "hi"}]
    return ChatCompletionRequest.model_validate({"model": "tiny", "messages": messages, **changes})


def refused(tokenizer: Any, request: ChatCompletionRequest) -> dict[str, Any]:
    with pytest.raises(ApiError) as caught:
        render_chat(tokenizer, request)
    assert caught.value.status == 400
    error: dict[str, Any] = caught.value.body()["error"]
    assert error["type"] == "invalid_request_error"
    return error


def test_a_chat_becomes_the_tokens_of_its_text_with_one_bos(byte_level_tokenizer: Any) -> None:
    tokenizer = with_template(byte_level_tokenizer, PLAIN)
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", bos)]
    )
    assert tokenizer.encode("a")[0] == bos
    got = render_chat(tokenizer, chat(("system", "Be kind."), ("user", "你好 😀")))
    text = "[system]Be kind.\n[user]你好 😀\n[assistant]"
    assert got == (bos, *tokenizer.encode(text, add_special_tokens=False))


def test_the_answer_is_not_opened_when_the_request_says_so(byte_level_tokenizer: Any) -> None:
    tokenizer = with_template(byte_level_tokenizer, PLAIN)
    got = render_chat(tokenizer, chat(("user", "hi"), add_generation_prompt=False))
    assert tokenizer.decode(got) == "<|bos|>[user]hi\n"


def test_going_on_with_the_last_message(byte_level_tokenizer: Any) -> None:
    tokenizer = with_template(byte_level_tokenizer, PLAIN)
    got = render_chat(tokenizer, chat(("user", "hi"), ("assistant", "Well, I"), continue_final_message=True))
    assert tokenizer.decode(got) == "<|bos|>[user]hi\n[assistant]Well, I"


def test_a_last_message_that_the_template_drops(byte_level_tokenizer: Any) -> None:
    tokenizer = with_template(byte_level_tokenizer, "{{ messages[0]['content'] }}")
    error = refused(tokenizer, chat(("user", "hi"), ("assistant", "Well, I"), continue_final_message=True))
    assert error["code"] == "chat_template_error"


def test_variables_of_the_template(byte_level_tokenizer: Any) -> None:
    tokenizer = with_template(byte_level_tokenizer, PLAIN + "{% if thinking %}<think>{% endif %}")
    assert not tokenizer.decode(render_chat(tokenizer, chat())).endswith("<think>")
    got = render_chat(tokenizer, chat(chat_template_kwargs={"thinking": True}))
    assert tokenizer.decode(got).endswith("<think>")


@pytest.mark.parametrize(
    "name",
    [
        "messages",
        "chat_template",
        "tokenize",
        "tools",
        "documents",
        "truncation",
        "max_length",
        "return_dict",
        "return_tensors",
        "tokenizer_kwargs",
        "conversations",
        "return_assistant_tokens_mask",
        "add_generation_prompt",
        "continue_final_message",
        "bos_token",
        "eos_token",
    ],
)
def test_arguments_and_special_tokens_are_not_the_requests_to_set(byte_level_tokenizer: Any, name: str) -> None:
    error = refused(with_template(byte_level_tokenizer, PLAIN), chat(chat_template_kwargs={name: "x"}))
    assert error["param"] == "chat_template_kwargs"
    assert f"must not set '{name}'" in error["message"]


def test_no_argument_of_transformers_can_be_set(byte_level_tokenizer: Any) -> None:
    tokenizer = with_template(byte_level_tokenizer, PLAIN)
    functions = tokenizer.apply_chat_template, render_jinja_template
    for name in ("self", *(name for function in functions for name in inspect.signature(function).parameters)):
        assert refused(tokenizer, chat(chat_template_kwargs={name: 1}))["param"] == "chat_template_kwargs"


@pytest.mark.parametrize("name", ["generation_indices", "raise_exception", "namespace", "range", "a b", "_x"])
def test_odd_variables_are_harmless(byte_level_tokenizer: Any, name: str) -> None:
    tokenizer = with_template(byte_level_tokenizer, PLAIN)
    assert render_chat(tokenizer, chat(chat_template_kwargs={name: 1})) == render_chat(tokenizer, chat())


@pytest.mark.parametrize("name", ["conversations", "self"])
def test_variables_that_clash_inside_transformers(byte_level_tokenizer: Any, name: str) -> None:
    refused(with_template(byte_level_tokenizer, PLAIN), chat(chat_template_kwargs={name: 1}))


REFUSES_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + PLAIN
)


def test_a_role_that_the_template_refuses(byte_level_tokenizer: Any) -> None:
    tokenizer = with_template(byte_level_tokenizer, REFUSES_SYSTEM)
    error = refused(tokenizer, chat(("system", "Be kind."), ("user", "hi")))
    assert error["message"] == "The model's chat template refuses these messages: System role not supported"
    assert (error["param"], error["code"]) == ("messages", "chat_template_error")
    assert render_chat(tokenizer, chat(("user", "hi")))


@pytest.mark.parametrize(
    "template",
    [
        "{% for message in messages %}",  # does not parse
        "{{ messages[0].content.nothing.at_all }}",
        "{{ messages[0]['content'] + 5 }}",
        "{{ 1 // 0 }}",
        "{{ '{}'.format() }}",  # IndexError
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",  # the sandbox
        "{{ messages.append(1) }}",
        "{{ raise_exception('x' * 10000) }}",
    ],
)
def test_templates_that_fail(byte_level_tokenizer: Any, template: str) -> None:
    error = refused(with_template(byte_level_tokenizer, template), chat())
    assert error["code"] == "chat_template_error"
    assert len(error["message"]) < 400


def test_a_template_that_gives_nothing(byte_level_tokenizer: Any) -> None:
    error = refused(with_template(byte_level_tokenizer, "{% if false %}x{% endif %}"), chat())
    assert "no tokens at all" in error["message"]


def test_a_tokenizer_without_a_template(byte_level_tokenizer: Any) -> None:
    assert byte_level_tokenizer.chat_template is None
    error = refused(byte_level_tokenizer, chat())
    assert error["code"] == "no_chat_template"
    assert "/v1/completions" in error["message"]


def test_several_templates(byte_level_tokenizer: Any) -> None:
    tokenizer = with_template(byte_level_tokenizer, {"default": PLAIN, "tool_use": "tools"})
    assert tokenizer.decode(render_chat(tokenizer, chat(("user", "hi")))) == "<|bos|>[user]hi\n[assistant]"
    assert refused(with_template(byte_level_tokenizer, {"rag": PLAIN}), chat())["code"] == "chat_template_error"


def test_developer_is_system_unless_the_template_knows_it(byte_level_tokenizer: Any) -> None:
    tokenizer = with_template(byte_level_tokenizer, PLAIN)
    got = tokenizer.decode(render_chat(tokenizer, chat(("developer", "Be kind."), ("user", "hi"))))
    assert got == "<|bos|>[system]Be kind.\n[user]hi\n[assistant]"
    knows = with_template(byte_level_tokenizer, PLAIN + "{# 'developer' is a role #}")
    assert "[developer]Be kind." in knows.decode(render_chat(knows, chat(("developer", "Be kind."))))


@pytest.mark.model
def test_the_default_model(default_tokenizer: Any) -> None:
    got = render_chat(
        default_tokenizer, chat(("system", "Be kind."), ("user", "hi"), ("assistant", "yo"), ("user", "?"))
    )
    text = (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nyo<|im_end|>\n<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert default_tokenizer.decode(got) == text
    assert got == tuple(default_tokenizer.encode(text, add_special_tokens=False))
