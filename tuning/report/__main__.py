"""A tuning job's page again, from what it saved: `python -m tuning.report SUMMARY.json --out report.html`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kv.exit_status import status_of
from tuning.report.page import html_page
from tuning.report.summary_file import SummaryError, read_summary
from tuning.trace.errors import TraceFileError, TraceUsageError
from tuning.trace.writing import replacing


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 when the summary is refused; 2 for what was asked for."""
    options = _parser().parse_args(argv)
    try:
        page = html_page(read_summary(options.summary))
        with replacing(options.out, options.overwrite) as part:
            part.write_text(page, encoding="utf-8", errors="replace")  # names of files may have bytes that are no text
    except SummaryError as error:
        print(error, file=sys.stderr)
        return 1
    except OverflowError:
        print(f"{options.summary}: a number is too large to be drawn: give a summary that a job wrote", file=sys.stderr)
        return 1
    except (TraceFileError, TraceUsageError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tuning.report",
        description="Make the page of a tuning job from the summary that it saved.",
        epilog="example: python -m tuning.report summary.json --out report.html",
    )
    parser.add_argument("summary", metavar="SUMMARY", type=Path, help="JSON that the job wrote")
    parser.add_argument("--out", metavar="PAGE", type=Path, required=True, help="the HTML file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace --out if it is there")
    return parser


if __name__ == "__main__":
    sys.exit(status_of(main))
