"""The store of an app on several nodes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

TESTS = Path(__file__).parent / "app_on_two_nodes.py"
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 400.0


@pytest.mark.cluster
def test_two_nodes_in_a_cluster_of_their_own() -> None:
    """A process has one Ray cluster, and that of the other tests is of one node."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # Paths of sockets must be short. And nobody else is to take this cluster for the machine's own.
    with tempfile.TemporaryDirectory(prefix="eq", dir="/tmp") as folder:
        environment |= {
            "RAY_TMPDIR": folder,
            "RAY_AUTH_MODE": "disabled",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")]),
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "--show-capture=no",
            str(TESTS),
        ]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "3 passed" in done.stdout
