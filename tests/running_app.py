"""The whole app under test, as tests see it: over HTTP, and through its workers' own handles."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray import serve

from actors.addresses import RosterView, address_of
from migrate.roster import Member

APP_NAME = "equipoise"
START_LIMIT_S = 180.0

Deploy = Callable[[Mapping[str, Any]], "RunningApp"]


class RunningApp:
    """The app under test: its addresses, and a look at its workers beside HTTP."""

    def __init__(self, base_url: str, grpc_target: str = "") -> None:
        self.base_url = base_url
        self.grpc_target = grpc_target

    def get(self, path: str) -> tuple[int, Any]:
        """(status, parsed body)"""
        try:
            with urllib.request.urlopen(self.base_url + path, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    @property
    def model(self) -> str:
        """The served model's name."""
        return str(self.get("/v1/models")[1]["data"][0]["id"])

    def members(self, role: str | None = None) -> list[Member]:
        """Workers in the roster now."""
        control = serve.get_deployment_handle("ControlServer", APP_NAME)
        view: RosterView = control.watch.remote(-1, 0.0).result(timeout_s=30)
        return [member for member in view.members if role is None or member.role == role]

    def actors(self, role: str | None = None) -> list[Any]:
        """Handles of the Worker actors."""
        return [address_of(member).actor for member in self.members(role)]

    def stats(self, role: str | None = None) -> list[dict[str, Any]]:
        """Each worker's own counters."""
        answers: list[dict[str, Any]] = ray.get([actor.stats.remote() for actor in self.actors(role)], timeout=30)
        return answers

    def total(self, name: str, role: str | None = None) -> int:
        """One counter over the workers of a role."""
        return sum(int(stats[name]) for stats in self.stats(role))

    def wait_healthy(self, limit_s: float = START_LIMIT_S) -> None:
        """Until /health says 200."""
        wait_until(lambda: self.get("/health")[0] == 200, limit_s, "the app did not become healthy")


def wait_until(condition: Callable[[], bool], limit_s: float, complaint: str) -> float:
    """Polls `condition` until it holds and returns how long that took; fails the test after `limit_s`."""
    started_s = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - started_s
        assert waited_s < limit_s, f"{complaint} within {limit_s:g} s"
        # What takes long is mostly processes that start, and they need the cores that each look at the app takes.
        time.sleep(min(max(0.02, waited_s / 10), 0.1))
    return time.monotonic() - started_s


def small_roles(prefill: int = 1, decode: int = 1) -> dict[str, Any]:
    """Shares of a CPU small enough for two cores."""
    return {
        "prefill": {"replicas": prefill, "num_cpus": 0.1},
        "decode": {"replicas": decode, "num_cpus": 0.1},
        "monolithic": {"num_cpus": 0.1},
        "ingress": {"num_cpus": 0.1},
    }


def free_port() -> int:
    """One of this machine that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
