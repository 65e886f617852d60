"""Compares configurations of the server, or servers, by interleaved runs on the same machine.

The modes are started one at a time and in turns (A B A B ...), each round with prompts that are new and the same for
every mode. A run during which other processes used more of the machine than --foreign-limit is repeated with another
seed, up to --attempts times, and thrown away if that does not help. The first mode is the baseline: the others'
results are the median of the rounds' ratios to it, with an interval (docs/metrics-of-load-tests.md).

Progress goes to stderr; stdout gets Markdown tables and, as its last line, one JSON object. The exit code is 1 when a
server failed or a request failed.

    python -m load_tests.compare_modes --serve monolithic=serve_configs/local-monolithic.yaml \\
        --serve static=serve_configs/local.yaml -w decode-heavy shared-prefix --rounds 10 --save modes

A configuration with an overlay: --serve mine=serve_configs/local.yaml --overlay-of mine=overlay.yaml. A server of
another kind is given as a command: --command 'vllm=python -m vllm.entrypoints.openai.api_server --model m
--port 8100' --url-of vllm=http://127.0.0.1:8100
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kv.exit_status import status_of
from load_tests.comparison_program import add_comparison_options, name_and_value, run_comparison
from load_tests.server_process import ServerSpec, serve_config, server_command

_MODULE = "load_tests.compare_modes"


def main(argv: Sequence[str] | None = None) -> int:
    arguments_given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog=f"python -m {_MODULE}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    modes = parser.add_argument_group("modes (at least two, the first is the baseline)")
    modes.add_argument("--serve", dest="modes", action="append", metavar="NAME=CONFIG", type=_serve_mode, default=[])
    modes.add_argument("--command", dest="modes", action="append", metavar="NAME=COMMAND", type=_command_mode)
    modes.add_argument("--url", default="http://127.0.0.1:8000", help="where the servers answer (default %(default)s)")
    modes.add_argument(
        "--url-of", action="append", default=[], metavar="NAME=URL", type=name_and_value, help="where one answers"
    )
    modes.add_argument(
        "--overlay-of",
        action="append",
        default=[],
        metavar="NAME=FILE",
        type=name_and_value,
        help="an overlay over one mode's config",
    )
    add_comparison_options(parser)
    return run_comparison(_MODULE, parser, arguments_given, _specs)


def _serve_mode(text: str) -> tuple[str, str, str]:
    return "serve", *name_and_value(text)


def _command_mode(text: str) -> tuple[str, str, str]:
    return "command", *name_and_value(text)


def _specs(arguments: argparse.Namespace) -> list[ServerSpec]:
    urls, overlays = dict(arguments.url_of), dict(arguments.overlay_of)
    specs: list[ServerSpec] = []
    for kind, name, value in arguments.modes:
        url = urls.pop(name, arguments.url)
        if kind == "serve":
            specs.append(serve_config(name, value, url, overlays.pop(name, None)))
        else:
            specs.append(server_command(name, value, url))
    names = [spec.name for spec in specs]
    if len(names) < 2 or len(set(names)) < len(names):
        raise ValueError(f"the modes are {names}; give at least two, each with its own name")
    if urls:
        raise ValueError(f"--url-of names {', '.join(urls)}, which is none of the modes {', '.join(names)}")
    if overlays:
        raise ValueError(f"--overlay-of names {', '.join(overlays)}, which is none of the modes of --serve")
    return specs


if __name__ == "__main__":
    sys.exit(status_of(main))
