"""Command line: `python -m tuning.trace stats|validate|convert|generate`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Final

from kv.exit_status import status_of
from tuning.trace import formats
from tuning.trace.errors import TraceError, TraceFileError, TraceUsageError
from tuning.trace.generator import SyntheticTraffic, generate
from tuning.trace.plots import html_page
from tuning.trace.reading import TraceRefused, read_trace
from tuning.trace.report import ReadReport, counted
from tuning.trace.statistics import describe, text_lines
from tuning.trace.trace import Trace
from tuning.trace.writing import format_for, losses, replacing, write_trace

FINE: Final = 0
PROBLEMS: Final = 1
USAGE: Final = 2

_EXAMPLES: Final = """examples:
  python -m tuning.trace stats conversation_trace.jsonl --html conversation.html
  python -m tuning.trace validate qwen_traceA_blksz_16.jsonl.gz
  python -m tuning.trace convert --lenient conversation_trace.jsonl conversation.parquet
  python -m tuning.trace generate synthetic.jsonl --requests 20000 --seed 1

exit status: 0 all is well; 1 there are problems in the file; 2 the command or a file name is wrong"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; `arguments` are those of the process when left out. Returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except TraceRefused as error:
        _say(str(error))
        _say(_summary(error.report))
        return PROBLEMS
    except (TraceFileError, TraceUsageError) as error:
        _say(str(error))
        return USAGE
    except TraceError as error:
        _say(str(error))
        return PROBLEMS
    except MemoryError:
        _say("this takes more memory than there is")
        return PROBLEMS
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tuning.trace",
        description="Traces of traffic: describe, check, convert, make up.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    stats = _command(commands, "stats", "figures of a trace, and plots of them", "stats trace.jsonl --json")
    _add_reading(stats)
    stats.add_argument("--json", action="store_true", help="print JSON, with the courses over time")
    stats.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")
    stats.add_argument("--overwrite", action="store_true", help="replace FILE if it is there")
    stats.set_defaults(run=_stats)

    validate = _command(commands, "validate", "say what is wrong with a file, by line", "validate trace.jsonl.gz")
    _add_reading(validate, with_strictness=False)
    validate.set_defaults(run=_validate)

    convert = _command(commands, "convert", "write a trace in another format", "convert trace.jsonl trace.parquet")
    _add_reading(convert)
    _add_writing(convert)
    convert.set_defaults(run=_convert)

    make = _command(commands, "generate", "make a synthetic trace", "generate synthetic.jsonl --seed 1 --turns 3")
    _add_writing(make)
    for figure in fields(SyntheticTraffic):
        make.add_argument(
            "--" + figure.name.replace("_", "-"),
            type=int if isinstance(figure.default, int) else float,
            default=figure.default,
            metavar="N",
            help=f"{figure.metadata['help']} ({figure.default:,})",
        )
    make.set_defaults(run=_generate)
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, help: str, example: str
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog=f"example: python -m tuning.trace {example}",
        allow_abbrev=False,
    )


def _add_reading(parser: argparse.ArgumentParser, with_strictness: bool = True) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="the file, packed with gzip or not")
    parser.add_argument("--format", choices=("auto", *formats.NAMES), default="auto", help="of TRACE (auto)")
    parser.add_argument("--block-size", type=int, metavar="TOKENS", help="tokens a block, if the file leaves it open")
    if with_strictness:
        strictness = parser.add_mutually_exclusive_group()
        strictness.add_argument(
            "--strict", action="store_true", default=True, help="refuse a file with problems (default)"
        )
        strictness.add_argument("--lenient", dest="strict", action="store_false", help="leave out rows with problems")


def _add_writing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT", help="file to write, packed if its name ends in .gz")
    parser.add_argument("--to", choices=formats.NAMES, help="format of OUT, if its name does not say")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")


def _stats(options: argparse.Namespace) -> int:
    trace = _read_wanted(options)
    statistics = describe(trace)
    if options.html is not None:
        with replacing(options.html, options.overwrite) as part:
            part.write_text(html_page(trace, statistics), encoding="utf-8")
    if options.json:
        print(json.dumps(statistics.as_json(), allow_nan=False), flush=True)
    else:
        print("\n".join(text_lines(statistics)), flush=True)
    return FINE


def _validate(options: argparse.Namespace) -> int:
    _, report = _read(options, strict=False)
    print(_summary(report), flush=True)
    return PROBLEMS if report.num_problems else FINE


def _convert(options: argparse.Namespace) -> int:
    format = format_for(options.out, options.to)
    trace = _read_wanted(options)
    _write(trace, options, format)
    return FINE


def _generate(options: argparse.Namespace) -> int:
    # Somebody may find the file without knowing where it is from, and its rows cannot say.
    if "synthetic" not in options.out.name:
        raise TraceUsageError(f"{options.out}: give a name with the word synthetic in it: nobody may take it for real")
    if options.to is None and options.out.name.removesuffix(".gz").endswith(".jsonl"):
        options.to = "bailian"
    format = format_for(options.out, options.to)
    figures = {figure.name: getattr(options, figure.name) for figure in fields(SyntheticTraffic)}
    try:
        traffic = SyntheticTraffic(**figures)
    except ValueError as error:
        raise TraceUsageError(str(error)) from error
    _write(generate(traffic), options, format)
    return FINE


def _read(options: argparse.Namespace, strict: bool) -> tuple[Trace, ReadReport]:
    trace, report = read_trace(options.trace, options.format, strict, options.block_size)
    for line in report.problem_lines():
        _say(line)
    for warning in report.warnings:
        _say(f"{report.path}: warning: {warning}")
    return trace, report


def _read_wanted(options: argparse.Namespace) -> Trace:
    trace, report = _read(options, options.strict)
    if report.num_problems:
        _say(_summary(report))
    return trace


def _write(trace: Trace, options: argparse.Namespace, format: str) -> None:
    for lost in losses(trace, format):
        _say(f"{options.out}: warning: {format} has no place for {lost}")
    write_trace(trace, options.out, format, options.overwrite)
    print(f"{options.out}: {counted(len(trace), 'request')} in the format {format}", flush=True)


def _summary(report: ReadReport) -> str:
    as_what = f"read as {report.format}" if report.format else "not read"
    rows, problems = counted(report.rows_read, "row"), counted(report.num_problems, "problem")
    parts = [as_what, rows, f"{report.rows_kept:,} kept", problems]
    if report.block_tokens is not None:
        parts.append(f"blocks of {counted(report.block_tokens, 'token')} ({report.block_tokens_from})")
    elif report.rows_kept:
        parts.append("no reuse information")
    return f"{report.path}: {', '.join(parts)}"


def _say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(status_of(main))
