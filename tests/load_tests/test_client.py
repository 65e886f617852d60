from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from load_tests.client import AbortPoint, Api, CompletionClient, first_model
from load_tests.driver import clock_s
from load_tests.request_record import RequestRecord
from load_tests.workloads import PlannedRequest

REQUEST = PlannedRequest(prompt=(5, 6, 7), prompt_tokens=3, output_tokens=4)
CHAT_REQUEST = PlannedRequest(prompt="rain field", prompt_tokens=2, output_tokens=4)


def send(url: str, request: PlannedRequest = REQUEST, abort: AbortPoint | None = None, **options: Any) -> RequestRecord:
    async def run() -> RequestRecord:
        async with CompletionClient(url, "tiny", **options) as client:
            return await client.send(
                client.encode(request), wanted_output_tokens=request.output_tokens, scheduled_s=clock_s(), abort=abort
            )

    return asyncio.run(run())


@pytest.mark.parametrize(("api", "request_"), [("completions", REQUEST), ("chat", CHAT_REQUEST)])
def test_a_request_that_succeeds(start_server: Callable[..., Any], api: Api, request_: PlannedRequest) -> None:
    server = start_server("--first-token-s", "0.02", "--token-s", "0.005")
    record = send(server.url, request_, api=api)
    assert record.error is None
    assert record.succeeded
    # The role of a chat answer, its empty end and the usage event are no output.
    assert len(record.chunk_s) == 4
    assert (record.prompt_tokens, record.output_tokens, record.cached_prompt_tokens) == (request_.prompt_tokens, 4, 0)
    assert record.finish_reason == "length"
    times = [record.scheduled_s, record.sent_s, *record.chunk_s, record.ended_s]
    assert times == sorted(times)
    # The server sleeps so long before each of these; a client cannot see them earlier.
    assert record.chunk_s[0] - record.sent_s >= 0.019
    assert record.chunk_s[3] - record.chunk_s[0] >= 0.005


def test_what_is_sent(start_server: Callable[..., Any]) -> None:
    server = start_server()
    send(server.url, api_key="sesame", extra={"ignore_eos": False, "user": "u"})
    (body,) = server.seen()["bodies"]
    assert body == {
        "model": "tiny",
        "prompt": [5, 6, 7],
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": False,
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": "u",
        "authorization": "Bearer sesame",
    }


def test_several_tokens_in_a_chunk_are_one_chunk(start_server: Callable[..., Any]) -> None:
    record = send(start_server("--tokens-per-chunk", "3").url)
    assert len(record.chunk_s) == 2
    assert record.output_tokens == 4


def test_a_server_without_usage_leaves_the_counts_open(start_server: Callable[..., Any]) -> None:
    record = send(start_server("--no-usage").url)
    assert record.succeeded
    assert (record.prompt_tokens, record.output_tokens) == (None, None)


@pytest.mark.parametrize(
    ("fault", "chunks", "message"),
    [
        ("http_500", 0, "HTTP 500.*out of order"),
        ("error_event", 1, "error event.*lost a worker"),
        ("named_error", 1, "error event.*lost a worker"),
        ("cut", 1, "Error"),
        ("not_json", 0, "JSONDecodeError"),
        ("odd", 0, "no completion chunk"),
    ],
)
def test_a_fault_is_the_requests_outcome(
    start_server: Callable[..., Any], fault: str, chunks: int, message: str
) -> None:
    record = send(start_server().url, extra={"fault": fault})
    assert record.error is not None
    with pytest.raises(RuntimeError, match=message):
        raise RuntimeError(record.error)
    assert len(record.chunk_s) == chunks
    assert not record.succeeded
    assert record.ended_s >= record.sent_s


def test_no_connection_is_a_failed_request(unused_port: int) -> None:
    record = send(f"http://127.0.0.1:{unused_port}")
    assert record.error is not None
    assert "onnect" in record.error


def test_a_hanging_server_runs_into_the_timeout(start_server: Callable[..., Any]) -> None:
    record = send(start_server().url, extra={"fault": "hang"}, timeout_s=0.2)
    assert record.error == "timed out after 0.2 s"
    assert not record.aborted


def test_a_short_answer_is_no_failure(start_server: Callable[..., Any]) -> None:
    record = send(start_server().url, extra={"fault": "short"})
    assert record.succeeded
    assert record.output_tokens == 3
    assert record.wanted_output_tokens == 4


@pytest.mark.parametrize(
    ("abort", "fault", "chunks"),
    [(AbortPoint(after_chunks=2), None, 2), (AbortPoint(after_s=0.05), "hang", 0)],
)
def test_an_aborted_request_is_closed_at_the_server(
    start_server: Callable[..., Any],
    until: Callable[[Callable[[], bool]], None],
    abort: AbortPoint,
    fault: str | None,
    chunks: int,
) -> None:
    server = start_server("--token-s", "0.001")
    record = send(server.url, PlannedRequest((1,), 1, 5000), abort=abort, extra={"fault": fault})
    assert record.aborted
    assert record.error is None
    assert not record.succeeded
    assert chunks <= len(record.chunk_s) < 5000
    until(lambda: server.seen()["disconnects"] == 1)
    assert server.get("/debug/blocks")["workers"][0]["live_blocks"] == 0


def test_an_abort_after_the_end_changes_nothing(start_server: Callable[..., Any]) -> None:
    record = send(start_server().url, abort=AbortPoint(after_s=300.0, after_chunks=100))
    assert record.succeeded


def test_the_first_model_is_asked_for(start_server: Callable[..., Any], unused_port: int) -> None:
    assert asyncio.run(first_model(start_server().url)) == "tiny"
    with pytest.raises(ConnectionError, match="start the server first or name the model"):
        asyncio.run(first_model(f"http://127.0.0.1:{unused_port}"))


def test_chat_refuses_token_ids() -> None:
    with pytest.raises(ValueError, match="--prompt text"):
        CompletionClient("http://127.0.0.1:1", "tiny", api="chat").encode(REQUEST)
