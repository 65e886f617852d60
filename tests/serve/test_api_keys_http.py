"""API keys of the running app: who comes in, and whose cache is whose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import openai
import pytest
from starlette.routing import Route

from app.grpc_api import inference_pb2
from app.grpc_api.inference_pb2 import GenerateRequest
from app.ingress import http
from tests.grpc_app import LIMIT_S, grpc_client, refusal
from tests.keyed_app import BLOCK_TOKENS, KeyedApp
from tests.openai_app import OpenAIApp, cached_tokens
from tests.running_app import wait_until

pytestmark = pytest.mark.cluster

PROMPT = "a prompt of more than three blocks, byte by byte, and so on"


def leaves(routes: Iterable[Any]) -> Iterator[Route]:
    """Routes, those of included routers too."""
    for route in routes:
        if isinstance(route, Route):
            yield route
        else:
            yield from leaves(route.original_router.routes)


ROUTES = sorted(
    (method, route.path.replace("{model:path}", "some/model"))
    for route in leaves(http.routes)
    for method in route.methods or ()
)
"""Every route of the app, those of the framework included."""


def test_the_app_has_the_routes_that_are_walked() -> None:
    assert {"/health", "/v1/models", "/v1/chat/completions", "/v1/completions", "/debug/blocks", "/openapi.json"} <= {
        path for _, path in ROUTES
    }
    assert all("{" not in path for _, path in ROUTES)


@pytest.mark.parametrize(("method", "path"), [*ROUTES, ("GET", "/nowhere"), ("POST", "/health"), ("GET", "/health/")])
@pytest.mark.parametrize("authorization", [None, "Bearer eq-wrong", "Bearer", "Basic KEY", "KEY"])
def test_without_a_right_key_only_liveness_answers(
    keyed_app: KeyedApp, method: str, path: str, authorization: str | None
) -> None:
    if authorization is not None:
        authorization = authorization.replace("KEY", keyed_app.keys.alice)
    answer = keyed_app.send(method, path, authorization)
    if path == "/health":
        assert answer.status == (200 if method in ("GET", "HEAD") else 405)
        return
    if method == "HEAD":
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        return
    assert answer.error(401, "invalid_api_key")["type"] == "authentication_error"
    assert answer.headers["www-authenticate"] == "Bearer"


GRPC_CALLS = sorted(
    (method.name, getattr(inference_pb2, method.input_type.name))
    for method in inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods
)


@pytest.mark.parametrize(("name", "kind"), GRPC_CALLS)
@pytest.mark.parametrize("authorization", [None, "Bearer eq-wrong", "Bearer", "Basic KEY", "KEY"])
def test_no_grpc_method_answers_without_a_right_key(
    keyed_app: KeyedApp, name: str, kind: type[Any], authorization: str | None
) -> None:
    metadata = [] if authorization is None else [("authorization", authorization.replace("KEY", keyed_app.keys.alice))]
    with grpc_client(keyed_app.app.grpc_target) as stub:
        code, said = refusal(lambda: getattr(stub, name)(kind(), metadata=metadata, timeout=LIMIT_S))
    assert (code, said[:29]) == (grpc.StatusCode.UNAUTHENTICATED, "No valid API key was given. S")
    assert "eq-wrong" not in said


def test_grpc_knows_the_keys_and_their_caches(keyed_app: KeyedApp) -> None:
    request = GenerateRequest(model=keyed_app.alice.model, prompt=PROMPT.upper(), max_tokens=2, temperature=0.0)
    warm = (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    with grpc_client(keyed_app.app.grpc_target) as stub:

        def cached(key: str) -> int:
            answer = stub.Generate(request, metadata=[("authorization", f"Bearer {key}")], timeout=LIMIT_S)
            return int(answer.usage.cached_tokens)

        assert [cached(keyed_app.keys.alice), cached(keyed_app.keys.alice), cached(keyed_app.keys.bob)] == [0, warm, 0]
    assert cached_tokens(keyed_app.alice.complete(PROMPT.upper(), max_tokens=2)) == warm


def test_a_key_with_one_request_at_a_time(keyed_app: KeyedApp) -> None:
    """A stream holds it until it is over, or left."""
    carol = OpenAIApp.of(keyed_app.app, keyed_app.keys.carol)
    request = GenerateRequest(model=carol.model, prompt="hi", max_tokens=2)
    with carol.client, grpc_client(keyed_app.app.grpc_target) as stub:
        metadata = [("authorization", f"Bearer {keyed_app.keys.carol}")]
        stream = carol.complete("go on", max_tokens=2000, ignore_eos=True, stream=True)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as caught:
            carol.complete("hi", max_tokens=2)
        assert (caught.value.code, caught.value.response.headers["retry-after"]) == ("rate_limit_exceeded", "1")
        code, said = refusal(lambda: stub.Generate(request, metadata=metadata, timeout=LIMIT_S))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "1 requests at a time" in said
        assert keyed_app.alice.complete("hi", max_tokens=2, ignore_eos=True).usage.completion_tokens == 2
        stream.close()
        wait_until(lambda: not is_refused(carol), LIMIT_S, "the stream that was left still counts")


def test_keys_have_priorities_and_nobody_gets_ahead_by_asking(keyed_app: KeyedApp) -> None:
    asked = {keyed_app.keys.alice: (-1, 0), keyed_app.keys.erin: (-6, -5), keyed_app.keys.dave: (4, 5)}
    with grpc_client(keyed_app.app.grpc_target) as stub:
        for key, (too_small, smallest) in asked.items():
            metadata = [("authorization", f"Bearer {key}")]
            request = GenerateRequest(model=keyed_app.alice.model, prompt="hi", max_tokens=2, ignore_eos=True)
            request.priority = too_small
            code, said = refusal(lambda: stub.Generate(request, metadata=metadata, timeout=LIMIT_S))  # noqa: B023
            assert (code, f"must be {smallest} or more" in said) == (grpc.StatusCode.INVALID_ARGUMENT, True)
            request.priority = smallest
            assert stub.Generate(request, metadata=metadata, timeout=LIMIT_S).usage.completion_tokens == 2
            app = OpenAIApp.of(keyed_app.app, key)
            with app.client:
                with pytest.raises(openai.BadRequestError) as caught:
                    app.complete("hi", priority=too_small)
                assert caught.value.param == "priority"
                assert app.complete("hi", max_tokens=2, priority=smallest).usage.completion_tokens


def test_those_that_wait_go_by_priority_and_then_as_they_came(keyed_app: KeyedApp) -> None:
    """One place is taken all the time, and one becomes free when all wait."""

    def waiting() -> int:
        answer = keyed_app.send("GET", "/debug/blocks", f"Bearer {keyed_app.keys.alice}")
        return int(answer.json["queued_requests"])

    ended: list[str] = []

    def run(name: str, key: str, options: dict[str, Any]) -> None:
        app = OpenAIApp.of(keyed_app.app, key)
        with app.client:
            app.complete("hi", max_tokens=2, **options)
        ended.append(name)

    comers = [
        ("dave", keyed_app.keys.dave, {}),
        ("alice", keyed_app.keys.alice, {}),
        ("alice, later", keyed_app.keys.alice, {"priority": 100}),
        ("bob", keyed_app.keys.bob, {}),
        ("erin, as others", keyed_app.keys.erin, {"priority": 0}),
        ("erin", keyed_app.keys.erin, {}),
    ]  # fmt: skip
    stays, leaves_soon = (
        keyed_app.alice.complete("go on", max_tokens=2000, ignore_eos=True, stream=True) for _ in range(2)
    )
    next(iter(stays))
    next(iter(leaves_soon))
    with ThreadPoolExecutor(len(comers)) as pool:
        for number, comer in enumerate(comers, start=1):
            pool.submit(run, *comer)
            wait_until(lambda: waiting() == number, LIMIT_S, "it does not wait")  # noqa: B023
        leaves_soon.close()
    stays.close()
    assert ended == ["erin", "alice", "bob", "erin, as others", "dave", "alice, later"]


def is_refused(app: OpenAIApp) -> bool:
    try:
        app.complete("hi", max_tokens=2)
    except openai.RateLimitError:
        return True
    return False


def test_with_a_right_key_everything_answers(keyed_app: KeyedApp) -> None:
    for method, path in ROUTES:
        assert keyed_app.send(method, path, f"Bearer {keyed_app.keys.alice}").status not in (401, 403)
    for client in (keyed_app.alice, keyed_app.bob):
        assert client.complete("hi", max_tokens=2, ignore_eos=True).usage.completion_tokens == 2


def test_the_official_client_is_told(keyed_app: KeyedApp) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        OpenAIApp.of(keyed_app.app, "eq-wrong")
    assert caught.value.code == "invalid_api_key"
    assert "eq-wrong" not in str(caught.value)


def test_two_keys_share_no_cached_prefix(keyed_app: KeyedApp) -> None:
    warm = (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert warm > 0
    got = [
        cached_tokens(client.complete(PROMPT, max_tokens=2))
        for client in (keyed_app.alice, keyed_app.alice, keyed_app.bob, keyed_app.bob, keyed_app.alice)
    ]
    assert got == [0, warm, 0, warm, warm]


def test_a_salt_of_the_clients_own_parts_its_cache_further(keyed_app: KeyedApp) -> None:
    prompt = PROMPT[::-1]
    warm = (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    def cached(client: OpenAIApp, salt: str | None) -> int:
        return cached_tokens(client.complete(prompt, max_tokens=2, **({"cache_salt": salt} if salt else {})))

    assert [cached(keyed_app.alice, None), cached(keyed_app.alice, None)] == [0, warm]
    assert [cached(keyed_app.alice, "tenant 1"), cached(keyed_app.alice, "tenant 1")] == [0, warm]
    assert [cached(keyed_app.alice, "tenant 2"), cached(keyed_app.alice, None)] == [0, warm]
    # Nobody reaches into another key's cache by its salt.
    assert [cached(keyed_app.bob, "tenant 1"), cached(keyed_app.bob, "tenant 1")] == [0, warm]
