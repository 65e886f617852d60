"""gRPC over the running app: the same tokens, errors and freeing as HTTP, from the same code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
import ray
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from app.grpc_api.inference_pb2 import (
    ChatMessage,
    GenerateRequest,
    ListModelsRequest,
    TokenizeRequest,
    TokenLogprobs,
    Tool,
    ToolChoice,
)
from tests.app_insides import wait_free
from tests.grpc_app import LIMIT_S, grpc_client, refusal
from tests.openai_app import CONTEXT_TOKENS, OpenAIApp, fresh_salt
from tests.reference_text import ReferenceText
from tests.running_app import APP_NAME, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.model]

QUESTION = "What is the capital of France?"
CHAT = [ChatMessage(role="user", content=QUESTION)]


@dataclass(frozen=True)
class GrpcApp:
    http: OpenAIApp
    stub: Any

    def request(self, **fields: Any) -> GenerateRequest:
        """Greedy unless it says otherwise."""
        return GenerateRequest(model=self.http.model, **{"temperature": 0.0, **fields})

    def generate(self, **fields: Any) -> Any:
        return self.stub.Generate(self.request(**fields), timeout=LIMIT_S)

    def stream(self, **fields: Any) -> Any:
        return self.stub.GenerateStream(self.request(**fields), timeout=LIMIT_S)


@pytest.fixture(scope="module")
def app(openai_app: OpenAIApp) -> Iterator[GrpcApp]:
    with grpc_client(openai_app.app.grpc_target) as stub:
        yield GrpcApp(openai_app, stub)


def test_a_chat_says_what_it_says_over_http(app: GrpcApp) -> None:
    over_http = app.http.chat(QUESTION, max_tokens=24)
    answer = app.generate(messages=CHAT, max_tokens=24)
    (choice,) = answer.choices
    assert choice.text == over_http.choices[0].message.content
    assert choice.finish_reason == over_http.choices[0].finish_reason
    assert answer.usage.prompt_tokens == over_http.usage.prompt_tokens
    assert answer.usage.completion_tokens == over_http.usage.completion_tokens == len(choice.token_ids)
    assert (answer.model, answer.id[:9]) == (app.http.model, "chatcmpl-")


def test_a_seed_gives_the_same_tokens_over_both(app: GrpcApp) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": -3, "n": 3, "max_tokens": 12}
    prompt = "Once upon a time"
    over_http = app.http.complete(prompt, **sampling, logprobs=2)
    answer = app.generate(prompt=prompt, **sampling, logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == [choice.text for choice in over_http.choices]
    assert len({choice.text for choice in answer.choices}) > 1
    for choice, http_choice in zip(answer.choices, over_http.choices, strict=True):
        assert [position.chosen.token_id for position in choice.logprobs] == list(choice.token_ids)
        # The last digits are the batch's: the choices begin one after the other.
        logprobs = [position.chosen.logprob for position in choice.logprobs]
        assert logprobs == pytest.approx(http_choice.logprobs.token_logprobs, abs=1e-4)
        assert all(len(position.top) == 2 and is_sorted(position) for position in choice.logprobs)


def is_sorted(position: TokenLogprobs) -> bool:
    values = [entry.logprob for entry in position.top]
    return values == sorted(values, reverse=True)


def test_a_stream_adds_up_to_the_whole_answer(app: GrpcApp) -> None:
    fields: dict[str, Any] = {"messages": CHAT, "max_tokens": 20, "n": 2, "temperature": 0.8, "seed": 5, "logprobs": 0}
    whole = app.generate(**fields)
    *pieces, last = app.stream(**fields)
    for choice in whole.choices:
        own = [piece.choice for piece in pieces if piece.choice.index == choice.index]
        assert "".join(piece.text for piece in own) == choice.text
        assert [token for piece in own for token in piece.token_ids] == list(choice.token_ids)
        assert sum(len(piece.logprobs) for piece in own) == len(choice.token_ids)
        assert [piece.finish_reason for piece in own] == [""] * (len(own) - 1) + [choice.finish_reason]
    assert not last.HasField("choice")
    assert not any(piece.HasField("usage") for piece in pieces)
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert {piece.id for piece in (*pieces, last)} == {last.id}


def test_token_ids_stops_and_cached_prefixes(app: GrpcApp) -> None:
    token_ids = list(app.stub.Tokenize(TokenizeRequest(model=app.http.model, prompt=QUESTION * 6)).token_ids)
    salt = fresh_salt()
    first, second = (
        app.generate(prompt_token_ids=token_ids, max_tokens=8, cache_salt=salt, ignore_eos=True) for _ in range(2)
    )
    assert first.choices == second.choices
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens == (len(token_ids) - 1) // 16 * 16
    stop = first.choices[0].text[2:4]
    stopped = app.generate(prompt_token_ids=token_ids, max_tokens=8, stop=[stop], ignore_eos=True).choices[0]
    assert (stopped.text, stopped.finish_reason) == (first.choices[0].text.split(stop)[0], "stop")


def test_what_is_not_said_is_as_over_http(app: GrpcApp) -> None:
    message = GenerateRequest(model=app.http.model, prompt="The", seed=7)
    answer = app.stub.Generate(message, timeout=LIMIT_S)
    over_http = app.http.client.completions.create(model=app.http.model, prompt="The", seed=7)
    assert answer.choices[0].text == over_http.choices[0].text
    assert answer.usage.completion_tokens == over_http.usage.completion_tokens


def test_tokenize_and_models(app: GrpcApp, reference: ReferenceText) -> None:
    tokenizer = reference.tokenizer
    plain = app.stub.Tokenize(TokenizeRequest(model=app.http.model, prompt="Zwölf Boxkämpfer"))
    assert list(plain.token_ids) == tokenizer("Zwölf Boxkämpfer")["input_ids"]
    chat = app.stub.Tokenize(TokenizeRequest(model=app.http.model, messages=CHAT))
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
    )
    assert list(chat.token_ids) == rendered
    (model,) = app.stub.ListModels(ListModelsRequest()).models
    assert (model.id, model.context_tokens, chat.context_tokens) == (app.http.model, CONTEXT_TOKENS, CONTEXT_TOKENS)


def test_tokenize_and_detokenize_over_http(app: GrpcApp, reference: ReferenceText) -> None:
    text = "Zwölf Boxkämpfer\n"
    tokenized = app.http.post("/tokenize", {"prompt": text}).json
    ids = reference.tokenizer(text)["input_ids"]
    assert tokenized == {"tokens": ids, "count": len(ids), "max_model_len": CONTEXT_TOKENS}
    assert app.http.post("/detokenize", {"tokens": ids}).json == {"prompt": text}
    chat = app.http.post("/tokenize", {"messages": [{"role": "user", "content": QUESTION}]}).json
    assert chat["tokens"] == list(app.stub.Tokenize(TokenizeRequest(model=app.http.model, messages=CHAT)).token_ids)
    assert app.http.post("/detokenize", {"tokens": [10**6]}).error(400, "invalid_value")["param"] == "tokens"
    assert app.http.post("/detokenize", {"tokens": []}).json == {"prompt": ""}
    assert app.http.post("/tokenize", {}).error(400)["param"] == "prompt"


TEXT = {"type": "string", "maxLength": 12}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "get_weather": {"type": "object", "properties": {"city": TEXT, "unit": {"enum": ["celsius", "kelvin"]}},
                    "required": ["city", "unit"], "additionalProperties": False},
    "add": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}},
            "required": ["a"], "additionalProperties": False},
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}  # fmt: skip
TOOLS = [Tool(name=name, description=f"Does {name}.", parameters=json.dumps(s)) for name, s in FUNCTIONS.items()]
HTTP_TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": schema}}
    for name, schema in FUNCTIONS.items()
]


@pytest.mark.parametrize(
    ("choice", "http_choice", "n"),
    [
        *((ToolChoice(function=name), {"type": "function", "function": {"name": name}}, 1) for name in FUNCTIONS),
        (ToolChoice(mode="required"), "required", 3),
    ],
)
def test_a_seed_gives_the_same_calls_over_both(app: GrpcApp, choice: ToolChoice, http_choice: Any, n: int) -> None:
    options: dict[str, Any] = {"temperature": 1.2, "seed": 11, "max_tokens": 120, "n": n, "parallel_tool_calls": False}
    over_http = app.http.chat(QUESTION, tools=HTTP_TOOLS, tool_choice=http_choice, **options)
    fields: dict[str, Any] = {"messages": CHAT, "tools": TOOLS, "tool_choice": choice, **options}
    whole = app.generate(**fields)
    *pieces, last = app.stream(**fields)
    assert whole.usage.completion_tokens == last.usage.completion_tokens == over_http.usage.completion_tokens
    for got, wanted in zip(whole.choices, over_http.choices, strict=True):
        (call,), (http_call,) = got.tool_calls, wanted.message.tool_calls
        assert (call.name, call.arguments) == (http_call.function.name, http_call.function.arguments)
        jsonschema.validate(json.loads(call.arguments), FUNCTIONS[call.name])
        assert (got.finish_reason, got.text) == (wanted.finish_reason, "") == ("tool_calls", "")
        own = [piece.choice for piece in pieces if piece.choice.index == got.index]
        first, *more = (part for piece in own for part in piece.tool_calls)
        assert (first.name, first.index) == (call.name, 0)
        assert first.id.startswith("call_")
        assert all((part.id, part.name, part.index) == ("", "", 0) for part in more)
        assert "".join(part.arguments for part in (first, *more)) == call.arguments
        assert [piece.finish_reason for piece in own] == [""] * (len(own) - 1) + ["tool_calls"]
        assert [token for piece in own for token in piece.token_ids] == list(got.token_ids)


def test_a_call_and_its_result_are_gone_on_with(app: GrpcApp) -> None:
    asked = app.generate(messages=CHAT, tools=TOOLS, tool_choice=ToolChoice(function="get_weather"), max_tokens=60)
    (choice,) = asked.choices
    answered = ChatMessage(role="assistant", tool_calls=choice.tool_calls)
    result = ChatMessage(role="tool", content="It is sunny.", tool_call_id=choice.tool_calls[0].id)
    (call,) = choice.tool_calls
    over_http = app.http.chat(
        [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}]},
            {"role": "tool", "tool_call_id": call.id, "content": "It is sunny."},
        ],
        tools=HTTP_TOOLS, tool_choice="none", max_tokens=8,
    )  # fmt: skip
    answer = app.generate(
        messages=[*CHAT, answered, result], tools=TOOLS, tool_choice=ToolChoice(mode="none"), max_tokens=8
    )
    assert answer.choices[0].text == over_http.choices[0].message.content
    assert answer.usage.prompt_tokens == over_http.usage.prompt_tokens
    assert not answer.choices[0].tool_calls


INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ({"prompt": "x", "temperature": 3.0}, INVALID, "Invalid value for 'temperature': 3.0. It must be a number"),
        ({"prompt": "x", "temperature": float("nan")}, INVALID, "'temperature'"),
        ({"prompt": "x", "n": 65}, INVALID, "Invalid value for 'n': 65"),
        ({"prompt": "x", "top_k": -2}, INVALID, "'top_k'"),
        ({"prompt": "x", "logit_bias": {3: 101.0}}, INVALID, "'logit_bias'"),
        ({"prompt": "x", "max_tokens": 10**6}, INVALID, "maximum context length is 4096 tokens"),
        ({"prompt_token_ids": [10**6]}, INVALID, "token id 1000000"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, INVALID, "'messages[0].role'"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, INVALID, "prompt and messages"),
        ({}, INVALID, "Set exactly one of them"),
        ({"prompt": ""}, INVALID, "'prompt'"),
        ({"prompt": "x", "model": "another"}, NOT_FOUND, "'another' does not exist here"),
        ({"prompt": "x", "stop": ["s"] * 17}, INVALID, "at most 16 strings"),
        ({"messages": CHAT, "tools": TOOLS}, INVALID, "chat template says nothing of tools"),
        ({"messages": CHAT, "tools": [Tool(name="a", parameters="{")]}, INVALID, "not valid JSON"),
        ({"prompt": "x", "priority": -1}, INVALID, "must be 0 or more"),
        ({"prompt": "x", "seed": 1, "min_tokens": 9, "max_tokens": 3}, INVALID, "'min_tokens' is 9"),
    ],
)
def test_what_is_wrong_is_said_by_both_kinds_of_call(
    app: GrpcApp, fields: dict[str, Any], code: grpc.StatusCode, said: str
) -> None:
    message = GenerateRequest(**{"model": app.http.model, **fields})
    for method in (app.stub.Generate, app.stub.GenerateStream):
        given_code, given_message = refusal(lambda method=method: method(message, timeout=LIMIT_S))
        assert given_code is code
        assert said in given_message


def test_a_refused_call_is_a_line_of_the_log(app: GrpcApp) -> None:
    session = ray.get_runtime_context().get_session_name()
    files = [
        (path, path.stat().st_size)
        for kind in ("proxy_*.log", f"replica_{APP_NAME}_Ingress_*.log")
        for path in (Path("/tmp/ray") / session / "logs" / "serve").glob(kind)
    ]

    def lines() -> list[str]:
        return [line for path, size in files for line in path.read_bytes()[size:].decode().splitlines()]

    wrong = app.request(prompt="x", temperature=3.0)
    calls = (
        lambda: app.stub.Generate(wrong, timeout=LIMIT_S),
        lambda: app.stub.GenerateStream(wrong, timeout=LIMIT_S),
        lambda: app.stub.Tokenize(TokenizeRequest(model="another", prompt="x"), timeout=LIMIT_S),
    )
    for call in calls:
        refusal(call)
    # One of the proxy and one of the replica for each, which end with how long it took.
    wait_until(lambda: sum(line.endswith("ms") for line in lines()) >= 2 * len(calls), LIMIT_S, "no line of a call")
    assert [line for line in lines() if not line.startswith("INFO ")] == []


def test_a_refused_stream_has_no_message(app: GrpcApp) -> None:
    """Serve sends a status along with a message, which is kept from the client."""
    stream = app.stub.GenerateStream(app.request(prompt="x", temperature=3.0), timeout=LIMIT_S)
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    assert caught.value.code() is INVALID


def test_a_field_of_a_later_version_is_refused(app: GrpcApp) -> None:
    later = app.request(prompt="x")
    later.MergeFromString(b"\xf8\x3e\x01")  # field 1007, a varint
    code, said = refusal(lambda: app.stub.Generate(later, timeout=LIMIT_S))
    assert code is INVALID
    assert "field number 1007" in said


@pytest.mark.parametrize("tokens_before", [0, 1, 5])
def test_a_cancelled_stream_frees_its_blocks(app: GrpcApp, tokens_before: int) -> None:
    wait_free(app.http.app)
    call = app.stream(prompt="count: " * 40, max_tokens=2000, ignore_eos=True, cache_salt=fresh_salt())
    for _ in range(tokens_before):
        next(call)
    call.cancel()
    wait_free(app.http.app)
    assert app.generate(prompt="and", max_tokens=2, ignore_eos=True).usage.completion_tokens == 2


@pytest.mark.parametrize("streams", [False, True])
def test_a_deadline_frees_the_blocks(app: GrpcApp, streams: bool) -> None:
    wait_free(app.http.app)
    message = app.request(prompt="count: " * 40, max_tokens=3000, ignore_eos=True, cache_salt=fresh_salt())
    method = app.stub.GenerateStream if streams else app.stub.Generate
    code, _ = refusal(lambda: method(message, timeout=1.0))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_free(app.http.app)


def test_reflection_describes_the_service(app: GrpcApp) -> None:
    with grpc.insecure_channel(app.http.app.grpc_target) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "equipoise.v1.Inference" in database.get_services()
        service = DescriptorPool(database).FindServiceByName("equipoise.v1.Inference")
        assert [method.name for method in service.methods] == ["Generate", "GenerateStream", "Tokenize", "ListModels"]
