"""API keys of the running app: who comes in, and whose cache is whose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import openai
import pytest
from starlette.routing import Route

from app.api_keys import new_key
from app.grpc_api import inference_pb2
from app.grpc_api.inference_pb2 import GenerateRequest
from app.ingress import http
from tests.grpc_app import LIMIT_S, grpc_client, refusal
from tests.openai_app import OpenAIApp, RawAnswer, cached_tokens, send
from tests.running_app import Deploy, RunningApp, small_roles, wait_until

pytestmark = pytest.mark.cluster

BLOCK_TOKENS = 16
PROMPT = "a prompt of more than three blocks, byte by byte, and so on"


@dataclass(frozen=True)
class KeyedApp:
    app: RunningApp
    alice: OpenAIApp
    bob: OpenAIApp
    alices_key: str
    bobs_key: str
    carols_key: str
    erins_key: str
    daves_key: str

    def send(self, method: str, path: str, authorization: str | None = None) -> RawAnswer:
        headers = {} if authorization is None else {"Authorization": authorization}
        return send(self.app.base_url, method, path, b"{}" if method != "GET" else b"", headers)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """(key file, alice's key, bob's key, that of carol, who may have one request at a time, those of erin, who goes
    before others, and of dave, who goes after them)"""
    file = tmp_path_factory.mktemp("keys") / "keys.txt"
    names = ("alice", "bob", "carol", "erin", "dave")
    keys, lines = zip(*(new_key(name) for name in names), strict=True)
    limits = ("", "", " max_inflight=1", " priority=-5", " priority=5")
    text = "\n".join(line + limit for line, limit in zip(lines, limits, strict=True))
    file.write_text(f"# who may come in\n{text}\n", encoding="utf-8")
    return str(file), *keys


@pytest.fixture(scope="module")
def keyed(deploy: Deploy, keys: tuple[str, ...]) -> Iterator[KeyedApp]:
    """Two requests run at a time."""
    file, alice, bob, *others = keys
    roles = small_roles()
    app = deploy(
        {
            "model": "random/llama-2x4",
            "engine": {"block_tokens": BLOCK_TOKENS},
            **roles,
            "ingress": {**roles["ingress"], "api_keys_file": file, "max_inflight_requests": 2},
        }
    )
    keyed = KeyedApp(app, OpenAIApp.of(app, alice), OpenAIApp.of(app, bob), alice, bob, *others)
    with keyed.alice.client, keyed.bob.client:
        yield keyed


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
    keyed: KeyedApp, method: str, path: str, authorization: str | None
) -> None:
    if authorization is not None:
        authorization = authorization.replace("KEY", keyed.alices_key)
    answer = keyed.send(method, path, authorization)
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
    keyed: KeyedApp, name: str, kind: type[Any], authorization: str | None
) -> None:
    metadata = [] if authorization is None else [("authorization", authorization.replace("KEY", keyed.alices_key))]
    with grpc_client(keyed.app.grpc_target) as stub:
        code, said = refusal(lambda: getattr(stub, name)(kind(), metadata=metadata, timeout=LIMIT_S))
    assert (code, said[:29]) == (grpc.StatusCode.UNAUTHENTICATED, "No valid API key was given. S")
    assert "eq-wrong" not in said


def test_grpc_knows_the_keys_and_their_caches(keyed: KeyedApp) -> None:
    request = GenerateRequest(model=keyed.alice.model, prompt=PROMPT.upper(), max_tokens=2, temperature=0.0)
    warm = (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    with grpc_client(keyed.app.grpc_target) as stub:

        def cached(key: str) -> int:
            answer = stub.Generate(request, metadata=[("authorization", f"Bearer {key}")], timeout=LIMIT_S)
            return int(answer.usage.cached_tokens)

        assert [cached(keyed.alices_key), cached(keyed.alices_key), cached(keyed.bobs_key)] == [0, warm, 0]
    assert cached_tokens(keyed.alice.complete(PROMPT.upper(), max_tokens=2)) == warm


def test_a_key_with_one_request_at_a_time(keyed: KeyedApp) -> None:
    """A stream holds it until it is over, or left."""
    carol = OpenAIApp.of(keyed.app, keyed.carols_key)
    request = GenerateRequest(model=carol.model, prompt="hi", max_tokens=2)
    with carol.client, grpc_client(keyed.app.grpc_target) as stub:
        metadata = [("authorization", f"Bearer {keyed.carols_key}")]
        stream = carol.complete("go on", max_tokens=2000, ignore_eos=True, stream=True)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as caught:
            carol.complete("hi", max_tokens=2)
        assert (caught.value.code, caught.value.response.headers["retry-after"]) == ("rate_limit_exceeded", "1")
        code, said = refusal(lambda: stub.Generate(request, metadata=metadata, timeout=LIMIT_S))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "1 requests at a time" in said
        assert keyed.alice.complete("hi", max_tokens=2, ignore_eos=True).usage.completion_tokens == 2
        stream.close()
        wait_until(lambda: not is_refused(carol), LIMIT_S, "the stream that was left still counts")


def test_keys_have_priorities_and_nobody_gets_ahead_by_asking(keyed: KeyedApp) -> None:
    asked = {keyed.alices_key: (-1, 0), keyed.erins_key: (-6, -5), keyed.daves_key: (4, 5)}
    with grpc_client(keyed.app.grpc_target) as stub:
        for key, (too_small, smallest) in asked.items():
            metadata = [("authorization", f"Bearer {key}")]
            request = GenerateRequest(model=keyed.alice.model, prompt="hi", max_tokens=2, ignore_eos=True)
            request.priority = too_small
            code, said = refusal(lambda: stub.Generate(request, metadata=metadata, timeout=LIMIT_S))  # noqa: B023
            assert (code, f"must be {smallest} or more" in said) == (grpc.StatusCode.INVALID_ARGUMENT, True)
            request.priority = smallest
            assert stub.Generate(request, metadata=metadata, timeout=LIMIT_S).usage.completion_tokens == 2
            app = OpenAIApp.of(keyed.app, key)
            with app.client:
                with pytest.raises(openai.BadRequestError) as caught:
                    app.complete("hi", priority=too_small)
                assert caught.value.param == "priority"
                assert app.complete("hi", max_tokens=2, priority=smallest).usage.completion_tokens


def test_those_that_wait_go_by_priority_and_then_as_they_came(keyed: KeyedApp) -> None:
    """One place is taken all the time, and one becomes free when all wait."""

    def waiting() -> int:
        answer = keyed.send("GET", "/debug/blocks", f"Bearer {keyed.alices_key}")
        return int(answer.json["queued_requests"])

    ended: list[str] = []

    def run(name: str, key: str, options: dict[str, Any]) -> None:
        app = OpenAIApp.of(keyed.app, key)
        with app.client:
            app.complete("hi", max_tokens=2, **options)
        ended.append(name)

    comers = [
        ("dave", keyed.daves_key, {}),
        ("alice", keyed.alices_key, {}),
        ("alice, later", keyed.alices_key, {"priority": 100}),
        ("bob", keyed.bobs_key, {}),
        ("erin, as others", keyed.erins_key, {"priority": 0}),
        ("erin", keyed.erins_key, {}),
    ]  # fmt: skip
    stays, leaves_soon = (
        keyed.alice.complete("go on", max_tokens=2000, ignore_eos=True, stream=True) for _ in range(2)
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


def test_with_a_right_key_everything_answers(keyed: KeyedApp) -> None:
    for method, path in ROUTES:
        assert keyed.send(method, path, f"Bearer {keyed.alices_key}").status not in (401, 403)
    for client in (keyed.alice, keyed.bob):
        assert client.complete("hi", max_tokens=2, ignore_eos=True).usage.completion_tokens == 2


def test_the_official_client_is_told(keyed: KeyedApp) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        OpenAIApp.of(keyed.app, "eq-wrong")
    assert caught.value.code == "invalid_api_key"
    assert "eq-wrong" not in str(caught.value)


def test_two_keys_share_no_cached_prefix(keyed: KeyedApp) -> None:
    warm = (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert warm > 0
    got = [
        cached_tokens(client.complete(PROMPT, max_tokens=2))
        for client in (keyed.alice, keyed.alice, keyed.bob, keyed.bob, keyed.alice)
    ]
    assert got == [0, warm, 0, warm, warm]


def test_a_salt_of_the_clients_own_parts_its_cache_further(keyed: KeyedApp) -> None:
    prompt = PROMPT[::-1]
    warm = (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    def cached(client: OpenAIApp, salt: str | None) -> int:
        return cached_tokens(client.complete(prompt, max_tokens=2, **({"cache_salt": salt} if salt else {})))

    assert [cached(keyed.alice, None), cached(keyed.alice, None)] == [0, warm]
    assert [cached(keyed.alice, "tenant 1"), cached(keyed.alice, "tenant 1")] == [0, warm]
    assert [cached(keyed.alice, "tenant 2"), cached(keyed.alice, None)] == [0, warm]
    # Nobody reaches into another key's cache by its salt.
    assert [cached(keyed.bob, "tenant 1"), cached(keyed.bob, "tenant 1")] == [0, warm]
