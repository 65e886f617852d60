"""Runs test files that need a Ray cluster of their own, since a process has one, and that of the other tests is of one
node and without a dashboard."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.asked import SERVED
from tests.running_app import small_roles

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 400.0
ONE_PAIR = {
    "model": "random/llama-8x8",
    "served_model_name": SERVED,
    "engine": {"dtype": "float32", "block_tokens": 16, "kv_cache_blocks": 256, "max_batch_tokens": 256},
    "store": {"dram_gib": 0.01},
    **small_roles(),
}
"""Settings of an app with a prefill and a decode worker, for such a file."""


def run_tests(file: Path, expected: str) -> None:
    """Runs a file that is not collected with the others, in a process of its own; `expected` must be in its summary."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # Paths of sockets must be short. And nobody else is to take this cluster for the machine's own.
    with tempfile.TemporaryDirectory(prefix="eq", dir="/tmp") as folder:
        environment |= {
            "RAY_TMPDIR": folder,
            "RAY_AUTH_MODE": "disabled",
            "RAY_worker_niceness": "0",
            "RAY_health_check_period_ms": "500",  # a node is lost after five of them
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")]),
        }
        options = ["-q", "-x", "-p", "no:cacheprovider", "--show-capture=no"]
        command = [sys.executable, "-m", "pytest", *options, str(file)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert expected in done.stdout
