"""`python -m app.cluster_check` on a Ray cluster of two nodes. Not collected with the other tests, since it needs a
cluster of its own: `test_two_nodes.py` runs it by itself, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.cluster_utils import Cluster

MIB = 1 << 20
OBJECT_STORE_BYTES = 80 * MIB
NODE = {"num_cpus": 2, "object_store_memory": OBJECT_STORE_BYTES}
FITS_GIB = 0.05


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        cluster.add_node(**NODE)
        yield cluster.address
    finally:
        cluster.shutdown()


def config(path: Path, folder: str, **store: Any) -> Path:
    args = {
        "model": "random/llama-2x2",
        "engine": {"dtype": "float32", "block_tokens": 16, "kv_cache_blocks": 64},
        "prefill": {"num_cpus": 0.5},
        "decode": {"num_cpus": 0.5},
        "store": {"disk": {"folder": folder, "limit_gib": 0.001}, "dram_gib": FITS_GIB, **store},
    }
    app = {"name": "equipoise", "import_path": "app.builder:build", "route_prefix": "/", "args": args}
    path.write_text(yaml.safe_dump({"applications": [app]}))
    return path


def check(file: Path, address: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "app.cluster_check", str(file), "--address", address, "--disk-mib", "1", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def test_a_cluster_that_fits_is_ready(address: str, tmp_path: Path) -> None:
    done = check(config(tmp_path / "fits.yaml", str(tmp_path / "kv")), address, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["ready"]
    by_check: dict[str, list[dict[str, Any]]] = {}
    for finding in answer["findings"]:
        by_check.setdefault(finding["check"], []).append(finding)
    assert {check: len(found) for check, found in by_check.items()} == {
        "object store": 2, "disk": 2, "CPUs": 1, "versions": 1, "network": 2,
    }  # fmt: skip
    assert len({finding["node"] for finding in by_check["disk"]}) == 2
    assert [(network["verdict"], network["detail"]) for network in by_check["network"]] == [
        ("ok", "2 nodes reach each other over gloo"),
        ("skipped", "NCCL was not tried: the configuration asks for no GPU"),
    ]
    assert list((tmp_path / "kv").iterdir()) == []


def test_what_does_not_fit_is_told_for_each_node(address: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = check(config(tmp_path / "large.yaml", str(tmp_path / "file"), dram_gib=1.0), address)
    assert done.returncode == 1, done.stdout + done.stderr
    problems = [line for line in done.stdout.splitlines() if line.startswith("problem")]
    assert sum("--object-store-memory" in line for line in problems) == 2
    assert sum("File exists" in line for line in problems) == 2


def test_what_cannot_be_checked_is_another_status(address: str, tmp_path: Path) -> None:
    fits = config(tmp_path / "fits.yaml", str(tmp_path / "kv"))
    nowhere = check(fits, "127.0.0.1:1")
    assert (nowhere.returncode, nowhere.stdout) == (2, "")
    assert "no Ray cluster at '127.0.0.1:1'" in nowhere.stderr
    wrong = check(config(tmp_path / "wrong.yaml", "kv", dram_gib=-1), address)
    assert wrong.returncode == 2
    assert "dram_gib" in wrong.stderr
