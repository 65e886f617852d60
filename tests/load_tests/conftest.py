"""Starts the small OpenAI-like server as a process of its own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SERVER = Path(__file__).parent / "openai_like_server.py"


@dataclass(frozen=True)
class RunningServer:
    url: str
    pid: int

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return json.load(response)

    def seen(self) -> Any:
        return self.get("/debug/seen")


@pytest.fixture
def server_script() -> Path:
    return SERVER


@pytest.fixture
def start_server() -> Iterator[Callable[..., RunningServer]]:
    """Call it with the server's options; every server is ended after the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(*options: str) -> RunningServer:
        process = subprocess.Popen([sys.executable, str(SERVER), *options], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        return RunningServer(f"http://127.0.0.1:{int(process.stdout.readline())}", process.pid)

    yield start
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    """Waits until a condition holds; fails when it never does."""

    def wait(condition: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + 60.0
        while not condition():
            assert time.monotonic() < give_up_s, "the condition never held"
            time.sleep(0.01)

    return wait


@pytest.fixture
def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
