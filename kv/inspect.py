"""Lists a disk tier, and verifies it: `python -m kv.inspect ~/.cache/equipoise/kv`. Changes nothing, takes no lock."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path

from kv.disk.extent_file import read_index, verify_file
from kv.disk.folder import MARKER, extent_path, list_folder
from kv.errors import PartError
from kv.exit_status import status_of

_SHORT_HEX = 12


@dataclass(frozen=True, slots=True)
class ExtentRow:
    """One extent. Hexadecimal values are whole here; the table shortens them."""

    extent: str
    model: str
    """Fingerprint."""
    parent: str
    """Key of the block before the first one, or "root" where a chain begins."""
    last_key: str
    """Key of the last block: the parent of what follows."""
    first_block: int
    blocks: int
    parts: int
    bytes: int
    """On disk."""
    age_s: int
    """Since the last use, as the tier noted it."""


@dataclass(frozen=True, slots=True)
class ModelRow:
    """All extents of one model."""

    model: str
    extents: int
    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ProblemRow:
    """A file that is no usable extent."""

    path: str
    """Within the folder."""
    reason: str
    bytes: int
    age_s: int
    detail: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is in a folder. `is_broken` when an extent's file is damaged; left-overs and foreign files are not."""

    extents: list[ExtentRow]
    models: list[ModelRow]
    problems: list[ProblemRow]
    is_broken: bool


def inspect_folder(
    folder: Path, *, verify: bool, now_s: float, progress: Callable[[int, int], None] | None = None
) -> Inspection:
    """Look at every file. What a store writes or removes meanwhile may or may not be in the result.

    Args:
        verify: read the files whole and check every checksum, instead of headers only.
        now_s: seconds since 1970; ages count from it.
        progress: called with the number of files done and of all.

    Raises:
        OSError: the folder cannot be listed.
    """
    listing = list_folder(folder)
    read = verify_file if verify else read_index

    def age_s(last_use_s: float) -> int:
        return max(0, round(now_s - last_use_s))

    problems = [
        ProblemRow(str(other.path.relative_to(folder)), other.reason, other.disk_bytes, age_s(other.last_use_s), "")
        for other in listing.others
    ]
    extents: list[ExtentRow] = []
    is_broken = False
    for done, listed in enumerate(sorted(listing.extents, key=lambda listed: listed.last_use_s)):
        if progress is not None:
            progress(done, len(listing.extents))
        path = extent_path(folder, listed.extent_id)
        try:
            index = read(path)
        except PartError as error:
            if error.reason != "gone":  # else a running store removed it
                is_broken = True
                problems.append(
                    ProblemRow(
                        str(path.relative_to(folder)),
                        error.reason,
                        listed.disk_bytes,
                        age_s(listed.last_use_s),
                        error.detail,
                    )
                )
            continue
        extents.append(
            ExtentRow(
                extent=listed.extent_id,
                model=index.fingerprint.hex(),
                parent="root" if index.parent is None else index.parent.hex(),
                last_key=index.keys[-1].hex(),
                first_block=index.first_block,
                blocks=len(index.keys),
                parts=len(index.ranges),
                bytes=listed.disk_bytes,
                age_s=age_s(listed.last_use_s),
            )
        )
    return Inspection(extents, _by_model(extents), problems, is_broken)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 when `--verify` finds a broken file; 2 when the folder is no disk tier."""
    parser = argparse.ArgumentParser(
        prog="python -m kv.inspect",
        description="List the extents of a disk tier, the longest unused first, and what else lies in its folder. "
        "A store may be using it meanwhile; nothing is changed.",
        epilog="example: python -m kv.inspect ~/.cache/equipoise/kv --verify",
    )
    parser.add_argument(
        "folder", metavar="DIR", type=Path, help="what store.disk.folder of a configuration names, on its node"
    )
    parser.add_argument("--verify", action="store_true", help="check every checksum; exit status 1 if a file is broken")
    parser.add_argument("--json", action="store_true", help="one JSON object, with whole keys, instead of tables")
    options = parser.parse_args(argv)
    folder: Path = options.folder
    try:
        if not folder.is_dir():
            raise _NoTierError(f"{folder} is no folder: give the folder of a disk tier")
        if not (folder / MARKER).exists():
            raise _NoTierError(f"{folder} is no disk tier (there is no {MARKER} in it): give the folder of one")
        progress = _show_progress if options.verify and sys.stderr.isatty() else None
        found = inspect_folder(folder, verify=options.verify, now_s=time.time(), progress=progress)
    except (_NoTierError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(asdict(found)) if options.json else "\n".join(_report(found, verified=options.verify)))
    return 1 if options.verify and found.is_broken else 0


class _NoTierError(Exception):
    pass


def _by_model(extents: Sequence[ExtentRow]) -> list[ModelRow]:
    groups: dict[str, list[ExtentRow]] = {}
    for row in extents:
        groups.setdefault(row.model, []).append(row)
    return [
        ModelRow(model, len(rows), sum(row.blocks for row in rows), sum(row.bytes for row in rows))
        for model, rows in sorted(groups.items())
    ]


def _report(found: Inspection, *, verified: bool) -> Iterator[str]:
    if found.extents:
        yield from _table(found.extents)
        yield ""
        yield from _table(found.models)
    if found.extents and found.problems:
        yield ""
    if found.problems:
        yield from _table(found.problems)
    if found.extents or found.problems:
        yield ""
    checked = "all checksums verified" if verified else "payloads not verified"
    yield f"{len(found.extents)} extents in order ({checked}), {len(found.problems)} other files"


def _table(rows: Sequence[ExtentRow] | Sequence[ModelRow] | Sequence[ProblemRow]) -> Iterator[str]:
    names = [column.name for column in fields(rows[0])]
    cells = [[_cell(name, value) for name, value in zip(names, astuple(row), strict=True)] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    for line in [names, *cells]:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _cell(name: str, value: object) -> str:
    text = str(value)
    if name in ("model", "parent", "last_key"):
        return text[:_SHORT_HEX]
    return text if text.isprintable() else ascii(text)  # names of foreign files may be anything


def _show_progress(done: int, total: int) -> None:
    print(f"\r{done} of {total} files", end="" if done + 1 < total else "\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(status_of(main))
