"""Shows where layers and heads lie, what would move, and moves them by hand: a client of the running application."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from kv.exit_status import status_of
from migrate.ctl.client import BadRequestError, Client, RefusedError, UnreachableError
from migrate.ctl.names import numbers, worker_called
from migrate.ctl.text import entry_text, plan_text, status_text

DONE: Final = 0
NOT_DONE: Final = 1
WRONG_USE: Final = 2
UNREACHABLE: Final = 3

_EPILOG = """exit status:
  0  done
  1  the move was refused or came to nothing, or was not over within --wait-s
  2  the command, or what it names, is wrong
  3  no answer: no application there, a wrong key, nothing that moves in its mode, or nothing measured yet; or another
     controller since, which knows nothing of the order: see `status`

environment:
  EQUIPOISE_URL      instead of --url
  EQUIPOISE_API_KEY  a key of the application, where it asks for one

examples:
  python -m migrate.ctl status
  python -m migrate.ctl plan --json
  python -m migrate.ctl move --instance prefill-ab12 --layers 20-29 --to decode
  python -m migrate.ctl home"""

_POLL_S = 0.5

Json = dict[str, Any]


def main(argv: Sequence[str] | None = None, sleep: Callable[[float], None] = time.sleep) -> int:
    """Returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        client = Client(options.url, os.environ.get("EQUIPOISE_API_KEY"), options.timeout_s)
        status: int = options.run(client, options, sleep)
        return status
    except (BadRequestError, ValueError) as error:
        return _complain(error, WRONG_USE)
    except RefusedError as error:
        return _complain(error, NOT_DONE)
    except UnreachableError as error:
        return _complain(error, UNREACHABLE)


def _status(client: Client, options: argparse.Namespace, _: Any) -> int:
    status = client.get("/debug/moves")
    _print(status, options, lambda status: status_text(status, options.history))
    return DONE


def _plan(client: Client, options: argparse.Namespace, _: Any) -> int:
    _print(client.get("/debug/moves/plan"), options, plan_text)
    return DONE


def _move(client: Client, options: argparse.Namespace, sleep: Callable[[float], None]) -> int:
    workers = client.get("/debug/moves")["workers"]
    instance = worker_called(options.instance, workers)
    order = {
        "instance": instance,
        "layers": options.layers,
        "heads": options.heads,
        "source": instance if options.source is None else worker_called(options.source, workers),
        "destination": worker_called(options.to, workers),
    }
    entry = client.post("/debug/moves", order)["order"]
    until_s = time.monotonic() + options.wait_s
    while entry["outcome"] == "under way" and time.monotonic() < until_s:
        sleep(_POLL_S)
        status = client.get("/debug/moves")
        known = {each["order_id"]: each for each in status["under_way"] + status["history"]}
        if entry["order_id"] not in known:
            raise UnreachableError("the controller was replaced and does not know the order; see where things lie")
        entry = known[entry["order_id"]]
    _print(entry, options, entry_text)
    return DONE if entry["outcome"] == "done" or not options.wait_s else NOT_DONE


def _home(client: Client, options: argparse.Namespace, sleep: Callable[[float], None]) -> int:
    client.post("/debug/moves/home", {})
    until_s = time.monotonic() + options.wait_s
    status = client.get("/debug/moves")
    while status["bringing_home"] and time.monotonic() < until_s:
        sleep(_POLL_S)
        before, status = status, client.get("/debug/moves")
        if status["running_s"] < before["running_s"]:
            raise UnreachableError(
                "the controller was replaced before everything was home, and has forgotten it: ask anew"
            )
    _print(status, options, lambda status: status_text(status, 0))
    return DONE if not status["bringing_home"] or not options.wait_s else NOT_DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m migrate.ctl",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_common(parser)
    # After the command's name as well; what is not given there leaves alone what was given before it.
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    _add_common(common)
    url = os.environ.get("EQUIPOISE_URL", "http://127.0.0.1:8000")
    parser.set_defaults(url=url, timeout_s=30.0, json=False)
    waits = argparse.ArgumentParser(add_help=False)
    waits.add_argument(
        "--wait-s", type=_seconds, default=120.0, help="how long to wait for the end; 0: not at all (default: 120)"
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    status = commands.add_parser("status", parents=[common], help="who has which layers, how loaded, what has moved")
    status.add_argument("--history", type=int, default=10, help="so many ended moves (default: %(default)s)")
    status.set_defaults(run=_status)
    plan = commands.add_parser("plan", parents=[common], help="what would move now, and why nothing else: a dry run")
    plan.set_defaults(run=_plan)
    move = commands.add_parser("move", parents=[common, waits], help="move layers, or heads of them, by hand")
    move.add_argument(
        "--instance", required=True, help="worker that is the instance's home: its id, or how that begins"
    )
    move.add_argument("--layers", required=True, type=_numbers, help="such as 4-6")
    move.add_argument("--heads", type=_numbers, help="KV heads of these layers, such as 0-1 (default: whole layers)")
    move.add_argument("--from", dest="source", help="worker that has them (default: the instance's home)")
    move.add_argument("--to", required=True, help="worker that is to have them")
    move.set_defaults(run=_move)
    home = commands.add_parser("home", parents=[common, waits], help="send everything home")
    home.set_defaults(run=_home)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="where the application is (default: http://127.0.0.1:8000)")
    parser.add_argument("--timeout-s", type=_some_seconds, help="for each answer, above 0 (default: 30)")
    parser.add_argument("--json", action="store_true", help="the application's answer as it is")


def _numbers(text: str) -> list[int]:
    try:
        return numbers(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is given; write a number of seconds, 0 or more")
    return seconds


def _some_seconds(text: str) -> float:
    seconds = _seconds(text)
    if not seconds:
        raise argparse.ArgumentTypeError(f"{text!r} is given; write a number of seconds above 0")
    return seconds


def _print(answer: Json, options: argparse.Namespace, text: Callable[[Json], str]) -> None:
    print(json.dumps(answer, indent=2) if options.json else text(answer))


def _complain(error: Exception, status: int) -> int:
    print(f"python -m migrate.ctl: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(status_of(main))
