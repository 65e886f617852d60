"""The app on a Ray cluster of two nodes. Not collected with the other tests, since it needs a cluster of its own:
`test_two_nodes.py` runs it by itself, in a process of its own."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from actors.addresses import address_of
from actors.model_source import resolve_model
from app.builder import build
from kv.keys import block_keys
from kv.wire import pack_keys
from migrate.moves import LayerMove
from tests.app_insides import directory, store_stats
from tests.asked import SERVED, Asked
from tests.engine_driver import greedy, make_prompt
from tests.flow_client import FlowAnswer, FlowClient
from tests.judge import Judge
from tests.ordered_moves import order, state_of
from tests.reference import assert_greedy, load_reference
from tests.running_app import APP_NAME, RunningApp, small_roles, wait_until

MODEL = "random/llama-8x8"
BLOCK = 16
MIB = 1 << 20
OBJECT_STORE_BYTES = 80 * MIB
LIMIT_S = 120.0
NODE = {"num_cpus": 2, "object_store_memory": OBJECT_STORE_BYTES}
ARGS: dict[str, Any] = {
    "mode": "balanced",
    "moves": {"automatic": False},
    "model": MODEL,
    "served_model_name": SERVED,
    "engine": {
        "dtype": "float32",
        "block_tokens": BLOCK,
        "kv_cache_blocks": 256,
        "max_batch_tokens": 256,
        "max_context_tokens": 2048,
    },
    "store": {"dram_gib": 1.0},
    **small_roles(),
    # Two of them do not fit on one node.
    "prefill": {"replicas": 2, "num_cpus": 1.2},
}


@dataclass(frozen=True)
class TwoNodes:
    cluster: Cluster
    spilled: Path
    """Where the first node's Ray writes what does not fit into its object store."""
    second: Any
    """The node that does not run the control deployment."""
    app: RunningApp
    reference: Any

    def ask(self, node: int, prompt: Sequence[int]) -> FlowAnswer:
        """Prefilled on the first or the second node, checked against transformers."""
        (prefill,) = [m for m in self.app.members("prefill") if (m.node_id == self.head_id) == (node == 1)]
        client = FlowClient((prefill, *self.app.members("decode")), "static", directory())
        (answer,) = client.run([prompt], greedy(6), together=True)
        assert_greedy(self.reference, [prompt], [answer.tokens])
        return answer

    @property
    def head_id(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def stored_blocks(self, prompt: Sequence[int]) -> int:
        fingerprint = address_of(self.app.members()[0]).facts.fingerprint
        keys = block_keys(prompt, BLOCK, fingerprint, b"")
        num_blocks: int = ray.get(directory().match_blocks.remote(pack_keys(keys)), timeout=30)
        return num_blocks


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    spilled = tmp_path_factory.mktemp("spilled")
    head = {**NODE, "include_dashboard": False, "object_spilling_directory": str(spilled)}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, namespace="equipoise-tests", logging_level=logging.ERROR)
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(serve.run, build(ARGS), name=APP_NAME, route_prefix="/")
            # All that fits is on the first node before there is another one.
            wait_until(is_all_but_one_there, LIMIT_S, "the app did not start")
            second = cluster.add_node(**NODE)
            running.result()
        app = RunningApp(f"http://127.0.0.1:{port}")
        app.wait_healthy()
        yield TwoNodes(cluster, spilled, second, app, load_reference(resolve_model(MODEL).path))
    finally:
        ray.shutdown()
        cluster.shutdown()


def is_all_but_one_there() -> bool:
    if APP_NAME not in serve.status().applications:
        return False
    deployments = serve.status().applications[APP_NAME].deployments
    counts = {name: deployment.replica_states.get("RUNNING", 0) for name, deployment in deployments.items()}
    one_each = ("Ingress", "ControlServer", "ControllerServer", "PrefillServer", "DecodeServer")
    return counts == dict.fromkeys(one_each, 1)


def prompt(blocks: int, seed: int) -> tuple[int, ...]:
    return make_prompt(blocks * BLOCK + 3, seed, vocab=250)


def test_two_nodes_share_one_store(nodes: TwoNodes) -> None:
    assert {m.node_id == nodes.head_id for m in nodes.app.members("prefill")} == {True, False}
    first = prompt(20, 1)
    assert nodes.ask(1, first).cached_tokens == 0
    assert nodes.ask(2, first).cached_tokens == 20 * BLOCK

    # Workers of the first node learn of the second one's store a little later.
    count = 0

    def is_shared() -> bool:
        nonlocal count
        count += 1
        asked = prompt(10, 100 + count)
        assert nodes.ask(2, asked).cached_tokens == 0
        return nodes.ask(1, asked).cached_tokens == 10 * BLOCK

    wait_until(is_shared, LIMIT_S, "what is stored on the second node is no hit on the first")
    stats = store_stats()
    assert stats["stores"].keys() == stats["directory"]["bytes_by_store"].keys()
    assert len(stats["stores"]) == 2
    assert all(store.used_bytes for store in stats["stores"].values())


def test_kv_that_ray_has_spilled_is_read_right(nodes: TwoNodes) -> None:
    """The limit of the DRAM tier is far above the object store, and something else fills that too."""
    prompts = [prompt(120, 200 + number) for number in range(4)]
    for each in prompts:
        assert nodes.ask(1, each).cached_tokens == 0
    (head_store,) = [store for name, store in store_stats()["stores"].items() if name == nodes.head_id]
    # Newer than all KV, so that this is what has to go.
    hog = ray.put(np.ones(OBJECT_STORE_BYTES - head_store.used_bytes // 2, np.uint8))
    spilled_bytes = sum(path.stat().st_size for path in nodes.spilled.rglob("*") if path.is_file())
    assert spilled_bytes >= head_store.used_bytes // 2
    for each in prompts:
        assert nodes.ask(2, each).cached_tokens == 120 * BLOCK
    assert ray.get(hog, timeout=30).all()


def test_a_lost_node_takes_only_its_blocks(nodes: TwoNodes) -> None:
    """And layers that it hosts come home: requests under way are answered all the same."""
    (decode,) = (member.worker_id for member in nodes.app.members("decode"))
    (host,) = (m.worker_id for m in nodes.app.members("prefill") if m.node_id != nodes.head_id)
    order(LayerMove(decode, 4, 4, decode, host))
    assert state_of(decode).placement.layers_on(host) == (4, 5, 6, 7)
    here, there = prompt(20, 300), prompt(20, 301)
    nodes.ask(1, here)
    nodes.ask(2, there)
    assert [nodes.stored_blocks(each) for each in (here, there)] == [20, 20]
    under_way = [make_prompt(400 + number, 310 + number, vocab=250) for number in range(6)]
    streams = [Asked(nodes.app.base_url, each, 200) for each in under_way]
    for stream in streams[:3]:
        stream.wait_tokens(1)
    lost_before = store_stats()["directory"]["lost"]["dram"]
    nodes.cluster.remove_node(nodes.second, allow_graceful=False)
    with ThreadPoolExecutor(len(streams)) as pool:
        rest = list(pool.map(Asked.answer, streams))
    assert [(answer.status, answer.error, answer.finish_reason) for answer in rest] == [(200, None, "length")] * 6
    assert (state_of(decode).placement.is_home, state_of(decode).repairs) == (True, 1)

    wait_until(lambda: len(nodes.app.members("prefill")) == 1, LIMIT_S, "the lost worker is still listed")
    wait_until(lambda: nodes.stored_blocks(there) == 0, LIMIT_S, "the lost node's blocks are still listed")
    stats = store_stats()
    assert stats["directory"]["lost"]["dram"] > lost_before
    assert set(stats["directory"]["bytes_by_store"]) == {nodes.head_id}
    assert nodes.stored_blocks(here) == 20
    # What was lost is computed and stored again.
    assert nodes.ask(1, there).cached_tokens == 0
    assert nodes.stored_blocks(there) == 20
    Judge(MODEL).check([here], [Asked(nodes.app.base_url, here, 6).answer()], 6)
