"""An app behind HAProxy in place of Serve's own proxy. Not collected with the other tests, since a cluster has one of
the two: `test_behind_haproxy.py` runs it by itself, in a process of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from app.builder import build
from tests.app_insides import reported
from tests.asked import Asked, ask
from tests.engine_driver import make_prompt
from tests.running_app import APP_NAME, START_LIMIT_S, RunningApp, free_port, wait_until
from tests.serve.own_cluster import ONE_PAIR

ANSWER_TOKENS = 20
AT_ONCE = 8


@pytest.fixture(scope="module")
def app() -> Iterator[RunningApp]:
    # HAProxy's own ports are the machine's, and another cluster may have the usual ones.
    os.environ |= {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
    }
    node = {"num_cpus": 2, "object_store_memory": 120 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    ray.init(address=cluster.address, namespace="equipoise-tests", logging_level=logging.ERROR)
    try:
        port = free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        serve.run(build(ONE_PAIR), name=APP_NAME, route_prefix="/")
        running = RunningApp(f"http://127.0.0.1:{port}")
        wait_until(lambda: is_reached(running), START_LIMIT_S, "HAProxy did not pass requests on")
        yield running
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def is_reached(app: RunningApp) -> bool:
    try:
        return app.get("/health")[0] == 200
    except (OSError, ValueError):  # before HAProxy knows of a replica, it answers with words of its own
        return False


def test_streams_at_once_are_those_of_one_by_one(app: RunningApp) -> None:
    prompts = [make_prompt(40, seed, vocab=250) for seed in range(AT_ONCE)]
    alone = [ask(app.base_url, prompt, ANSWER_TOKENS).tokens for prompt in prompts]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        together = list(pool.map(lambda prompt: ask(app.base_url, prompt, ANSWER_TOKENS).tokens, prompts))
    assert together == alone
    assert {len(tokens) for tokens in alone} == {ANSWER_TOKENS}


def test_a_token_comes_before_the_answer_ends(app: RunningApp) -> None:
    """HAProxy passes events on as they come. The answer is too long to have ended when its third event is read."""
    asked = Asked(app.base_url, make_prompt(40, 99, vocab=250), 400)
    assert len(list(islice(asked.events(), 3))) == 3
    assert reported(app, "decode", "live_blocks") > 0
    asked.leave()


def test_a_client_that_leaves_frees_its_request(app: RunningApp) -> None:
    asked = Asked(app.base_url, make_prompt(40, 98, vocab=250), 400)
    asked.wait_tokens(1)
    asked.leave()
    wait_until(lambda: reported(app, "decode", "live_blocks") == 0, START_LIMIT_S, "a request outlived its client")


def test_refusals_are_ours(app: RunningApp) -> None:
    answer = ask(app.base_url, make_prompt(40, 1, vocab=250), ANSWER_TOKENS, stream=False, temperature=-1)
    assert answer.status == 400
    assert answer.error is not None
    assert answer.error["type"] == "invalid_request_error"
    assert app.get("/v1/nothing")[0] == 404
