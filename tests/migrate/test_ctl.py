"""The command line, over HTTP, against the application's own routes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from migrate.controller_settings import ControllerSettings
from migrate.ctl.__main__ import main
from migrate.ctl.names import numbers, shown, worker_called
from migrate.move_settings import MoveSettings
from tests.actors.moves.simulated_cell import SimulatedCell
from tests.migrate.fleets import model, worker
from tests.migrate.simulated_fleet import SimulatedFleet
from tests.simulated_moves_app import MovesApp, moves_app

PLANNER = MoveSettings(period_s=1, window_s=1, busy_from=0, cool_down_s=4, compute_weight=1, memory_weight=0)
BY_HAND = ControllerSettings(PLANNER, automatic=False)


def cell(**tokens_per_s: float) -> SimulatedCell:
    workers = {name: worker(name, prefill_tokens_per_s=rate) for name, rate in tokens_per_s.items()}
    return SimulatedCell(SimulatedFleet(model(switch_s=0.5), lambda _: workers))


@pytest.fixture
def app() -> Iterator[MovesApp]:
    with moves_app(cell(prefill1=200, decode1=0, decode2=0), BY_HAND) as app:
        yield app


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EQUIPOISE_URL", "EQUIPOISE_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def run(app: MovesApp, *arguments: str) -> int:
    return main([*arguments, "--url", app.url], sleep=lambda _: None)


def run_json(app: MovesApp, capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run(app, *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


MOVE = ("move", "--instance", "prefill1", "--layers", "2-3", "--to", "decode1")


def test_a_move_by_hand_and_everything_home(app: MovesApp, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, *MOVE) == 0
    said = capsys.readouterr().out
    assert "#1 done 0 s ago, by hand: layers 2 to 3 of 'prefill1' from 'prefill1' to 'decode1'" in said
    assert "expected 0 bytes in 0.00 s; took 0 bytes in 0.50 s, held 100 ms" in said
    assert app.cell.fleet.placements["prefill1"].layers_on("decode1") == (2, 3)

    assert run(app, "status") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["worker", "U", "compute", "memory", "busy", "with"]
    assert ["prefill1", "0.400", "0.400", "0.000"] in [line.split() for line in lines]
    assert "prefill1  1        layers 2-3  decode1" in lines
    assert "nothing moves by itself: automatic is off" in lines

    assert run(app, "home") == 0
    assert app.cell.fleet.placements["prefill1"].is_home
    assert "sent home" not in capsys.readouterr().out


def test_a_move_from_where_it_is_to_a_third_worker_by_short_names(app: MovesApp) -> None:
    assert run(app, *MOVE) == 0
    assert run(app, "move", "--instance", "pre", "--layers", "2,3", "--from", "decode1", "--to", "decode2") == 0
    assert app.cell.fleet.placements["prefill1"].layers_on("decode2") == (2, 3)


@pytest.mark.parametrize("words", [("--json", "status"), ("status", "--json")])
def test_options_stand_before_the_command_or_after(
    app: MovesApp, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert main(["--url", app.url, *words]) == 0
    assert json.loads(capsys.readouterr().out)["automatic"] is False
    # The last one holds.
    assert main(["--url", "http://127.0.0.1:9", *words, "--url", app.url]) == 0


def test_home_is_not_done_when_the_controller_has_forgotten_it(
    app: MovesApp, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, *MOVE) == 0
    app.cell.fleet.fate = lambda _: "hangs"

    def replaced(_: float) -> None:
        """A new controller, which has run for no time yet."""
        app.loop.controller.is_bringing_home = False
        app.loop._begun_s = app.cell.now_s

    assert main(["home", "--url", app.url], sleep=replaced) == 3
    assert "the controller was replaced before everything was home" in capsys.readouterr().err


def test_a_plan_is_a_dry_run(app: MovesApp, capsys: pytest.CaptureFixture[str]) -> None:
    run(app, "status")
    run(app, "status")
    capsys.readouterr()
    assert run(app, "plan") == 0
    said = capsys.readouterr().out
    assert said.index("accepted: layers") < said.index("not the best: layer")
    assert "U prefill1 0.800 -> 0.400, decode1 0.000 -> 0.400; 0 bytes in 0.00 s" in said
    assert "the peak falls from 0.800 to 0.400" in said
    plan = run_json(app, capsys, "plan")
    assert [move["layers"] for move in plan["moves"]] == [[2, 3]]
    assert run_json(app, capsys, "status")["history"] == []


def test_what_is_refused_says_why(app: MovesApp, capsys: pytest.CaptureFixture[str]) -> None:
    run(app, *MOVE)
    assert run(app, *MOVE) == 1
    assert "is refused, invalid: layers [2, 3] of 'prefill1' are not on 'prefill1'" in capsys.readouterr().err
    assert run(app, "move", "--instance", "decode2", "--layers", "0-3", "--to", "decode1") == 1
    assert "leave it one at least" in capsys.readouterr().err


def test_a_move_that_fails_is_an_error(app: MovesApp, capsys: pytest.CaptureFixture[str]) -> None:
    app.cell.fleet.fate = lambda _: "fails"
    assert run(app, *MOVE) == 1
    assert "the link died" in capsys.readouterr().out
    app.cell.fleet.fate = lambda _: "hangs"
    assert run(app, *MOVE, "--wait-s", "0") == 0
    assert "#2 under way 0 s ago" in capsys.readouterr().out
    assert run_json(app, capsys, "status")["under_way"][0]["move"]["layers"] == [2, 3]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("move", "--instance", "decode", "--layers", "2", "--to", "prefill1"), "decode1, decode2 begin so"),
        (("move", "--instance", "x", "--layers", "2", "--to", "prefill1"), "there are decode1, decode2, prefill1"),
        (("move", "--instance", "prefill1", "--layers", "1,3", "--to", "decode1"), "This is no move: layers [1, 3]"),
        (("move", "--instance", "prefill1", "--layers", "1", "--to", "prefill1"), "they must be two workers"),
    ],
)
def test_what_makes_no_sense_is_told(
    app: MovesApp, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], complaint: str
) -> None:
    run(app, "status")
    assert run(app, *arguments) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "required: COMMAND"),
        (("move", "--layers", "1"), "required: --instance, --to"),
        (("move", "--instance", "a", "--to", "b", "--layers", "3-1"), "write numbers such as 5, 4-6 or 4,5,6"),
        (("home", "--wait-s", "-1"), "write a number of seconds, 0 or more"),
        (("status", "--timeout-s", "0"), "write a number of seconds above 0"),
        (("status", "--url", "ftp://x"), "give one such as http://127.0.0.1:8000"),
    ],
)
def test_wrong_use_is_told(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], complaint: str) -> None:
    try:
        status = main(list(arguments))
    except SystemExit as left:
        status = int(left.code or 0)
    assert status == 2
    assert complaint in capsys.readouterr().err


def test_before_anything_was_measured_there_is_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    with moves_app(cell(a=0, b=0), BY_HAND) as app:
        assert run(app, "plan") == 3
    assert "nothing is known yet of 1 s of traffic of a, b" in capsys.readouterr().err


def test_where_nothing_moves_is_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with moves_app(cell(a=0), BY_HAND, mode="static") as app:
        assert run(app, "status") == 3
    assert "answers 404: Nothing moves in mode 'static'" in capsys.readouterr().err


def test_no_application_is_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert main(["status", "--url", f"http://127.0.0.1:{taken.getsockname()[1]}"]) == 3
    assert "does not answer as it should" in capsys.readouterr().err


def test_the_key_comes_from_the_environment(app: MovesApp, monkeypatch: pytest.MonkeyPatch) -> None:
    app.keys = {"Bearer eq-secret"}
    assert run(app, "status") == 3
    monkeypatch.setenv("EQUIPOISE_API_KEY", "eq-secret")
    monkeypatch.setenv("EQUIPOISE_URL", app.url + "/")
    assert main(["status"]) == 0


def test_it_is_a_program_with_help() -> None:
    helped = subprocess.run(
        [sys.executable, "-m", "migrate.ctl", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    for word in ("status", "plan", "move", "home", "exit status:", "EQUIPOISE_API_KEY"):
        assert word in helped.stdout


@pytest.mark.parametrize(("text", "values"), [("5", [5]), ("4-6", [4, 5, 6]), ("0,2-3, 9", [0, 2, 3, 9])])
def test_numbers_are_read_as_they_are_shown(text: str, values: list[int]) -> None:
    assert numbers(text) == values
    assert numbers(shown(values)) == values


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-2", "1,,2", "99999"])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write numbers such as"):
        numbers(text)


def test_a_worker_that_is_called_wholly_is_meant_though_another_begins_so() -> None:
    assert worker_called("d", ["d", "d1"]) == "d"
    assert worker_called("d1", ["d", "d1"]) == "d1"
