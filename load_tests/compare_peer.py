"""Our application beside another OpenAI server, on the four loads at 16 in flight and with one request at a time.

The other server is given by a command. It and each of ours are started one at a time and in turns, each round with
prompts that are new and the same for all; runs during which other processes used the machine are repeated, and thrown
away if that does not help. Every figure is then judged by what we want to reach beside the other server
(load_tests/peer_aims.py). Give both the same weights, dtype and cores, and read docs/metrics-of-load-tests.md first.

Progress goes to stderr; stdout gets Markdown tables and, as its last line, one JSON object. The exit code is 1 when a
server failed or a request failed, whatever the verdicts are.

    python -m load_tests.compare_peer --peer 'vllm=python -m vllm.entrypoints.openai.api_server --model m --port 8100
        --dtype bfloat16' --ours two-monolithic static --rounds 6 --save peer
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from kv.exit_status import status_of
from load_tests.command_line import FOUR_LOADS
from load_tests.comparison_program import add_comparison_options, name_and_value, run_comparison
from load_tests.peer_aims import verdicts
from load_tests.server_process import ServerSpec, serve_config, server_command
from load_tests.workloads import ONE_AT_A_TIME

_MODULE = "load_tests.compare_peer"
_BFLOAT16 = "serve_configs/overlays/bfloat16.yaml"
OURS = {
    "static": ("serve_configs/local.yaml", _BFLOAT16),
    "two-monolithic": ("serve_configs/local-monolithic.yaml", _BFLOAT16),
    "monolithic": ("serve_configs/local-monolithic.yaml", "load_tests/overlays/one-monolithic.yaml"),
    "alone": ("serve_configs/local-monolithic.yaml", "load_tests/overlays/one-alone.yaml"),
}
"""Ways to use two cores, each as a configuration and an overlay: a prefill and a decode worker; two workers that do
both; one such worker with two threads; the same without the store."""
_HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}


def main(argv: Sequence[str] | None = None) -> int:
    arguments_given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog=f"python -m {_MODULE}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    servers = parser.add_argument_group("servers")
    servers.add_argument(
        "--peer", required=True, metavar="NAME=COMMAND", type=name_and_value, help="the server to compare with"
    )
    servers.add_argument("--peer-url", default="http://127.0.0.1:8100", help="where it answers (default %(default)s)")
    servers.add_argument(
        "--ours",
        nargs="+",
        default=["two-monolithic"],
        choices=OURS,
        metavar="NAME",
        help=f"how we use two cores, each a mode of its own: {', '.join(OURS)} (default two-monolithic)",
    )
    servers.add_argument(
        "--haproxy", action="store_true", help="put HAProxy before ours in place of Serve's own proxy, in all modes"
    )
    servers.add_argument("--url", default="http://127.0.0.1:8000", help="where ours answers (default %(default)s)")
    add_comparison_options(parser)
    parser.set_defaults(workloads=[*FOUR_LOADS, ONE_AT_A_TIME])
    return run_comparison(_MODULE, parser, arguments_given, _specs, verdicts)


def _specs(arguments: argparse.Namespace) -> list[ServerSpec]:
    name, command = arguments.peer
    ours = list(dict.fromkeys(arguments.ours))
    if name in ours:
        raise ValueError(f"--peer is named {name!r} as one of ours is; give it another name")
    specs = [serve_config(mode, OURS[mode][0], arguments.url, OURS[mode][1]) for mode in ours]
    if arguments.haproxy:
        specs = [replace(spec, environment={**spec.environment, **_HAPROXY}) for spec in specs]
    return [server_command(name, command, arguments.peer_url), *specs]


if __name__ == "__main__":
    sys.exit(status_of(main))
