"""The controller of the running app, from its workers' counters to the command line. Only the moves themselves are
pretended: the control deployment of this test says that they were made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import ray
from ray import serve

from actors.addresses import address_of
from actors.control import ControlServer
from app import builder
from load_tests import cycle_soak
from migrate.ctl.__main__ import main
from migrate.move_history import Happened
from migrate.moves import Move
from migrate.placement import Placement
from tests.app_insides import replica
from tests.openai_app import OpenAIApp
from tests.running_app import APP_NAME, Deploy, RunningApp, small_roles, wait_until

pytestmark = pytest.mark.cluster

LAYERS = 4


@dataclass(frozen=True)
class State:
    placement: Placement
    under_way: str | None = None


class PretendingControl(ControlServer.func_or_class):  # type: ignore[name-defined,misc]
    """Knows where things lie, as real workers would."""

    async def placements(self) -> dict[str, State]:
        here = self.__dict__.setdefault("here", {})
        for member in self._roster.members():
            layout = address_of(member).facts.layout
            home = Placement.at_home(member.worker_id, layout.num_layers, layout.num_kv_heads)
            here.setdefault(member.worker_id, home)
        return {name: State(placement) for name, placement in here.items() if self._roster.get(name) is not None}

    async def order_move(self, move: Move, home: str) -> Happened:
        if move.layers[0] == 0:
            raise RuntimeError("a layer 0 is not moved in this test")
        here = self.__dict__["here"]
        here[home] = move.after(here[home])
        return Happened(weight_bytes=1000, kv_bytes=0, duration_s=0.5, held_s=0.1)


@pytest.fixture(scope="module")
def app(deploy: Deploy) -> Iterator[RunningApp]:
    pretending = serve.deployment(PretendingControl).options(name="ControlServer", graceful_shutdown_wait_loop_s=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "ControlServer", pretending)
        yield deploy(
            {
                "mode": "balanced",
                "model": f"random/llama-{LAYERS}x4",
                "engine": {"block_tokens": 16, "dtype": "float32"},
                "moves": {"automatic": False, "period_s": 0.5, "window_s": 0.5},
                **small_roles(),
            }
        )


def ctl(app: RunningApp, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    """(exit status, what is printed)"""
    status = main([*arguments, "--url", app.base_url, "--json"])
    printed = capsys.readouterr().out
    return status, json.loads(printed) if printed else None


def wait_seen(app: RunningApp, workers: int = 2) -> Any:
    """The status, once so many workers are in it."""
    wait_until(
        lambda: len(app.get("/debug/moves")[1].get("workers", {})) == workers, 60.0, "the controller sees too few"
    )
    return app.get("/debug/moves")[1]


def test_workers_are_measured_moved_and_brought_home(app: RunningApp, capsys: pytest.CaptureFixture[str]) -> None:
    wait_seen(app)
    with OpenAIApp.of(app).client as client:
        for number in range(3):
            client.completions.create(model=app.model, prompt=f"{number} {'word ' * 40}", max_tokens=40, temperature=0)

    plans: list[Any] = []

    def is_planned() -> bool:
        """Not before steps are measured, nor in a period in which a worker is slow to tell what it did."""
        status, plan = ctl(app, capsys, "plan")
        plans.append(plan)
        return status == 0

    wait_until(is_planned, 30.0, "steps are not measured")
    plan = plans[-1]
    assert {name.split("-")[0] for name in plan["utilisation"]} == {"prefill", "decode"}
    status, order = ctl(app, capsys, "move", "--instance", "prefill", "--layers", "2-3", "--to", "decode")
    assert (status, order["outcome"], order["happened"]["held_s"]) == (0, "done", 0.1)
    assert order["predicted"]["weight_bytes"] == 0  # all workers of one model have all weights before the first move
    placements = {p["instance"].split("-")[0]: p["layers"] for p in ctl(app, capsys, "status")[1]["placements"]}
    assert sorted(placements["prefill"].values()) == [[0, 1], [2, 3]]
    assert list(placements["decode"].values()) == [[0, 1, 2, 3]]
    status, order = ctl(app, capsys, "move", "--instance", "decode", "--layers", "0", "--to", "prefill")
    assert (status, order["problem"]) == (1, "a layer 0 is not moved in this test")

    # A controller that is killed is replaced by one that knows where things lie, and no history.
    old = replica("ControllerServer")
    ray.kill(old)
    wait_until(lambda: app.get("/debug/moves")[1].get("history") == [], 60.0, "there is no new controller")
    seen = wait_seen(app)
    assert seen["modules_away"] == {"layers": 2, "heads": 0}
    status, home = ctl(app, capsys, "home")
    assert (status, home["modules_away"]) == (0, {"layers": 0, "heads": 0})


def test_settings_change_without_a_new_replica(app: RunningApp) -> None:
    wait_seen(app)
    handle = serve.get_deployment_handle("ControllerServer", APP_NAME)
    handle.reconfigure.remote({"rho": 9}).result(timeout_s=30)
    assert app.get("/debug/moves")[1]["settings"]["rho"] == 9


def test_programs_that_order_moves_want_nobody_else_to(app: RunningApp, capsys: pytest.CaptureFixture[str]) -> None:
    wait_seen(app)
    handle = serve.get_deployment_handle("ControllerServer", APP_NAME)
    handle.reconfigure.remote({"automatic": True}).result(timeout_s=30)
    assert cycle_soak.main([app.base_url]) == 1
    assert "set moves.automatic: false" in capsys.readouterr().err


def test_bad_orders_are_answered(app: RunningApp, capsys: pytest.CaptureFixture[str]) -> None:
    name = next(iter(wait_seen(app)["workers"]))
    openai_app = OpenAIApp.of(app)
    with openai_app.client:
        good = {"instance": name, "layers": [1], "source": name, "destination": "nobody"}
        answer = openai_app.post("/debug/moves", json.dumps(good).encode())
        assert "'nobody' is not a worker that is alive" in answer.error(409, "move_refused")["message"]
        answer = openai_app.post("/debug/moves", json.dumps({**good, "layers": "1"}).encode())
        assert answer.error(400)["param"] == "layers"
        assert openai_app.post("/debug/moves", b"{").error(400, "invalid_json")
