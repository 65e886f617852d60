"""After requests that are known, what Ray's endpoint shows of them adds up exactly, over HTTP and gRPC."""

from __future__ import annotations

import contextlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from app.grpc_api.inference_pb2 import GenerateRequest
from kv.metrics import table
from kv.metrics.histogram import exported_as
from kv.metrics.table import METRICS, Metric, Series
from tests.app_insides import wait_free
from tests.asked import Asked, ask
from tests.engine_driver import make_prompt
from tests.exported_metrics import all_samples, samples
from tests.grpc_app import LIMIT_S, grpc_client
from tests.monitoring_files import dashboard_queries, rule_queries
from tests.openai_app import send
from tests.running_app import Deploy, RunningApp, small_roles
from tests.store_cell import eventually

pytestmark = pytest.mark.cluster

MODEL = "metered"
"""No other app's, so that what they counted is not counted here."""
NUM_BLOCKS = 60
HISTOGRAMS = {
    "ttft": table.TTFT,
    "itl": table.ITL,
    "e2e": table.E2E,
    "queue": table.QUEUE_TIME,
    "prefill": table.PREFILL_TIME,
    "transfer": table.TRANSFER_TIME,
    "decode": table.DECODE_TIME,
}


@pytest.fixture(scope="module")
def app(deploy: Deploy, tmp_path_factory: pytest.TempPathFactory) -> RunningApp:
    engine = {"dtype": "float32", "block_tokens": 32, "kv_cache_blocks": NUM_BLOCKS, "max_batch_tokens": 256}
    disk = {"folder": str(tmp_path_factory.mktemp("kv")), "limit_gib": 0.1}
    return deploy(
        {
            "model": "random/llama-8x8",
            "served_model_name": MODEL,
            "default_sampling": {"temperature": 0},
            "engine": engine,
            "store": {"dram_gib": 0.1, "disk": disk},
            **small_roles(),
        }
    )


class Sent:
    """Requests of known lengths, and what their answers said of themselves: token counts of each choice."""

    def __init__(self, app: RunningApp, stub: Any) -> None:
        self._app = app
        self._stub = stub
        self._seeds = iter(range(100))
        self.prompt_tokens = 0
        self.endings: dict[str, int] = defaultdict(int)
        self.generated: list[int] = []

    def prompt(self, length: int) -> tuple[int, ...]:
        self.prompt_tokens += length
        return make_prompt(length, next(self._seeds), vocab=250)

    def over_http(self, length: int, max_tokens: int, *, stream: bool) -> None:
        answer = ask(self._app.base_url, self.prompt(length), max_tokens, stream=stream, model=MODEL)
        assert (answer.usage["prompt_tokens"], answer.usage["completion_tokens"]) == (length, max_tokens)
        self._ended(answer.finish_reason, max_tokens)

    def several_over_http(self, lengths: list[int], choices: int, max_tokens: int) -> None:
        prompts = [self.prompt(length) for length in lengths]
        body = {"model": MODEL, "prompt": prompts, "n": choices, "max_tokens": max_tokens, "ignore_eos": True}
        answer = send(self._app.base_url, "POST", "/v1/completions", json.dumps(body).encode())
        usage = answer.json["usage"]
        assert usage["prompt_tokens"] == sum(lengths)
        assert usage["completion_tokens"] == len(lengths) * choices * max_tokens
        for _ in range(len(lengths) * choices):
            self._ended("length", max_tokens)

    def over_grpc(self, prompt: Sequence[int], max_tokens: int, **options: Any) -> list[int]:
        answer = self._stub.Generate(_grpc_request(prompt, max_tokens, **options), timeout=LIMIT_S)
        for choice in answer.choices:
            self._ended(choice.finish_reason, len(choice.token_ids))
        assert answer.usage.completion_tokens == sum(len(choice.token_ids) for choice in answer.choices)
        return list(answer.choices[0].token_ids)

    def streamed_over_grpc(self, length: int, max_tokens: int) -> None:
        request = _grpc_request(self.prompt(length), max_tokens, ignore_eos=True)
        chunks = list(self._stub.GenerateStream(request, timeout=LIMIT_S))
        assert chunks[-1].usage.completion_tokens == max_tokens
        self._ended("length", max_tokens)

    def expected(self) -> dict[str, float]:
        choices = len(self.generated)
        return {
            **self.endings,
            "prompt": self.prompt_tokens,
            "generated": sum(self.generated),
            "itl": sum(self.generated) - choices,
            "transfer": sum(tokens > 1 for tokens in self.generated),
            **dict.fromkeys(("ttft", "e2e", "queue", "prefill", "decode"), choices),
        }

    def _ended(self, reason: str | None, tokens: int) -> None:
        self.endings[reason or ""] += 1
        self.generated.append(tokens)


def _grpc_request(prompt: Sequence[int], max_tokens: int, **options: Any) -> GenerateRequest:
    return GenerateRequest(model=MODEL, prompt_token_ids=prompt, max_tokens=max_tokens, **options)


def shown() -> dict[Series, float]:
    """What Ray shows of this app's ingress."""
    found: dict[Series, float] = defaultdict(float)
    for metric, sample in samples():
        if sample.labels.get("model") == MODEL:
            found[metric, tuple(sample.labels[tag] for tag in metric.tags)] += sample.value
    return found


def counted() -> dict[str, float]:
    """The same by the names of `Sent.expected`."""
    found, counts = shown(), {}
    for (metric, tags), value in found.items():
        if metric is table.REQUESTS:
            counts[tags[-1]] = value
    counts["prompt"] = found[table.PROMPT_TOKENS, (MODEL,)]
    counts["generated"] = found[table.GENERATION_TOKENS, (MODEL,)]
    return counts | {name: _of_all(found, exported_as(metric)[2]) for name, metric in HISTOGRAMS.items()}


def assert_counted(expected: Mapping[str, float]) -> None:
    with contextlib.suppress(AssertionError):
        eventually(lambda: counted() == expected, 0.5)
    assert counted() == expected


def sum_of(found: Mapping[Series, float], metric: Metric) -> float:
    return _of_all(found, exported_as(metric)[1])


def _of_all(found: Mapping[Series, float], metric: Metric) -> float:
    """Whatever the priority, where that is a tag too."""
    return sum(value for (shown, _), value in found.items() if shown == metric)


def test_what_is_shown_adds_up(app: RunningApp) -> None:
    with grpc_client(app.grpc_target) as stub:
        sent = Sent(app, stub)
        sent.over_http(40, 5, stream=False)
        sent.over_http(70, 9, stream=True)
        sent.over_http(33, 1, stream=True)  # nothing is handed over
        sent.several_over_http([20, 50], 3, 4)
        sent.streamed_over_grpc(33, 6)
        prompt = sent.prompt(45)
        token_ids = sent.over_grpc(prompt, 8, ignore_eos=True)
        sent.prompt_tokens += len(prompt)
        sent.over_grpc(prompt, 8, stop_token_ids=token_ids[-1:])
        assert sent.endings.keys() == {"length", "stop"}

        wrong = send(app.base_url, "POST", "/v1/completions", b'{"model": "metered", "max_tokens": -1, "prompt": "a"}')
        assert wrong.status == 400
        assert_counted(sent.expected())

        found = shown()
        stages = (table.QUEUE_TIME, table.PREFILL_TIME, table.TRANSFER_TIME, table.DECODE_TIME)
        assert 0 < sum(sum_of(found, stage) for stage in stages) <= sum_of(found, table.E2E)
        assert 0 < sum_of(found, table.ITL) <= sum_of(found, table.E2E)

        leaving = Asked(app.base_url, sent.prompt(60), 1500, model=MODEL)
        leaving.wait_tokens(2)
        leaving.leave()
        wait_free(app)
        expected = sent.expected() | {"abort": 1, "ttft": len(sent.generated) + 1}
        for name in ("generated", "itl"):  # nobody knows how many tokens had come
            del expected[name]

        def is_shown() -> bool:
            now = counted()
            return {name: now.get(name, 0) for name in expected} == expected

        eventually(is_shown, 0.5)
        now = counted()
        assert now["generated"] - now["itl"] == now["ttft"]


def test_workers_show_their_blocks(app: RunningApp) -> None:
    wait_free(app)
    expected = {
        (metric, (member.role, member.worker_id)): value
        for member in app.members()
        for metric, value in (
            (table.KV_BLOCKS, NUM_BLOCKS),
            (table.KV_USED, 0),
            (table.RUNNING, 0),
            (table.WAITING, 0),
        )
    }

    def found() -> dict[Series, float]:
        by_series = {
            (metric, tuple(sample.labels.get(tag, "") for tag in metric.tags)): sample.value
            for metric, sample in samples()
        }
        return {series: by_series.get(series, -1) for series in expected}

    with contextlib.suppress(AssertionError):
        eventually(lambda: found() == expected, 0.5)
    assert found() == expected


OF_MOVES = (
    table.MOVES,
    table.MOVE_BYTES,
    table.MOVE_HELD,
    table.MODULES_AWAY,
    table.WORKER_LOADS,
    table.HOSTED_S,
    table.AWAITED_S,
    table.REPAIRS,
)


def test_what_dashboard_and_rules_ask_for_is_shown(app: RunningApp) -> None:
    """But for counters of what has not happened, and what is told in mode balanced alone."""
    ask(app.base_url, make_prompt(70, 99, vocab=250), 3, model=MODEL)
    asked = set().union(*(query.names() for query in (*dashboard_queries(), *rule_queries())))
    asked = {name for name in asked if not name.startswith("equipoise:")}
    asked -= {f"ray_{metric.name}" for metric in OF_MOVES}
    events = {f"ray_{metric.name}" for metric in METRICS if metric.kind == "counter"}

    def missing() -> set[str]:
        return asked - {sample.name for sample in all_samples()}

    with contextlib.suppress(AssertionError):
        eventually(lambda: missing() <= events, 0.5)
    assert missing() <= events
    # Among what has not happened is not what every request makes happen.
    assert missing() <= {
        name for name in events if re.search("preempt|misses|broken|evict|refus|declined|expired", name)
    }
