"""Keeps the files of a folder out of the operating system's memory until it is told to stop (SIGINT, SIGTERM).

For measurements of a disk tier that would fit into the page cache many times over. Pages that a process has mapped at
the moment stay until a later round.

    python -m load_tests.keep_cold ~/.cache/equipoise/working-set & ...; kill $!
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kv.exit_status import status_of
from load_tests.page_cache import PagesKeptError, drop_pages
from tuning.option_types import above_0


def drop_once(folder: Path, pattern: str) -> int:
    """Drops the pages of all files below `folder` that match and can be opened; returns how many files that were. A
    folder that is not there yet has none."""
    count = 0
    for path in folder.rglob(pattern):
        try:
            drop_pages([path])
        except PagesKeptError:
            pass  # somebody reads it now
        except FileNotFoundError:
            continue  # evicted meanwhile
        count += 1
    return count


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m load_tests.keep_cold", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="looked through with all that is below it")
    parser.add_argument("--pattern", default="*.kv", help="of the files' names (default %(default)s)")
    parser.add_argument(
        "--every-s", type=above_0, default=0.5, help="from the end of a round to the next (default 0.5)"
    )
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rounds = files = 0
    try:
        while True:
            files += drop_once(arguments.folder.expanduser(), arguments.pattern)
            rounds += 1
            time.sleep(arguments.every_s)
    except KeyboardInterrupt:
        print(f"{rounds} rounds, {files} times a file was dropped", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(status_of(main))
