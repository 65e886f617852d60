"""schemathesis over all of openapi.json against the running app: no 5xx, and no answer that is not described there.

The model is tiny and answers are kept short, so that what is generated reaches the engine without taking long.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from transformers import AutoTokenizer

from actors.random_model import parse_random_name, write_random_model
from app.ingress import http
from tests.app_insides import wait_free
from tests.running_app import Deploy, RunningApp, small_roles

pytestmark = pytest.mark.cluster

MODEL = "described"
MAX_TOKENS, MAX_CHOICES = 3, 2
VOCABULARY = 260
CHAT_TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]


@pytest.fixture(scope="module")
def app(deploy: Deploy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    folder: Path = tmp_path_factory.mktemp("model")
    model = parse_random_name("random/llama-2x2")
    assert model is not None
    write_random_model(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    app = deploy(
        {
            "model": str(folder),
            "served_model_name": MODEL,
            "engine": {"dtype": "float32", "block_tokens": 16, "kv_cache_blocks": 64, "max_batch_tokens": 256},
            **small_roles(),
        }
    )
    yield app
    wait_free(app)


def shorten(body: dict[str, Any]) -> None:
    """For the model that there is, and with little to do."""
    if isinstance(body.get("model"), str):
        body["model"] = MODEL
    for name, most in (("max_tokens", MAX_TOKENS), ("max_completion_tokens", MAX_TOKENS), ("n", MAX_CHOICES)):
        if isinstance(body.get(name), int) and body[name] > most:
            body[name] = most


def make_fit(body: dict[str, Any]) -> None:
    """What no schema says: which fields must fit each other, and how large a token id may be. Else nearly all that is
    generated would be refused for these."""
    has = {name for name, value in body.items() if value is not None}
    if "max_tokens" in has:
        body["max_tokens"] = MAX_TOKENS  # not 0, which needs echo
    if "max_completion_tokens" in has:
        body["max_tokens"] = body["max_completion_tokens"] = MAX_TOKENS
    if "min_tokens" in has:
        body["min_tokens"] = 1 if has.isdisjoint({"response_format", "structured_outputs"}) else None
    if {"response_format", "structured_outputs"} <= has:
        body["response_format"] = None
    if "best_of" in has:
        body["best_of"] = body.get("n") or 1
    if "stream_options" in has:
        body["stream"] = True
    if "top_logprobs" in has:
        body["logprobs"] = True
    if "continue_final_message" in has:
        body["continue_final_message"] = False
    if "priority" in has:
        body["priority"] = abs(body["priority"])  # less than 0 takes a key that says so
    if "stop_token_ids" in has:
        body["stop_token_ids"] = [token_id % VOCABULARY for token_id in body["stop_token_ids"]]
    if "logit_bias" in has:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in enumerate(body["logit_bias"].values())}
    for name in ("prompt", "tokens"):
        if name in has:
            body[name] = _in_vocabulary(body[name])


def _in_vocabulary(value: Any) -> Any:
    if isinstance(value, list):
        return [_in_vocabulary(item) for item in value]
    return value % VOCABULARY if isinstance(value, int) else value


api = schemathesis.openapi.from_dict(http.openapi())


def test_the_document_is_served(app: RunningApp) -> None:
    assert app.get("/openapi.json") == (200, http.openapi())


@api.parametrize()
@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_described_and_none_is_a_failure(app: RunningApp, case: schemathesis.Case) -> None:
    if isinstance(case.body, dict):
        shorten(case.body)
        if case.meta is not None and case.meta.generation.mode.is_positive:
            make_fit(case.body)
    case.call_and_validate(base_url=app.base_url, checks=CHECKS, timeout=60.0)
