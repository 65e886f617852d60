"""A trace into a file of any of the formats."""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from tuning.trace import formats, own_parquet
from tuning.trace.errors import TraceFileError, TraceUsageError
from tuning.trace.formats import PARQUET, TEXT_FORMATS
from tuning.trace.trace import Trace


def format_for(path: Path, asked: str | None) -> str:
    """The format to write a file in: the one asked for, else the one that its name ends like.

    Raises:
        TraceUsageError: the name leaves it open, or it is not a format.
    """
    if asked is not None:
        if asked not in formats.NAMES:
            raise TraceUsageError(f"format {asked!r} is not allowed: give one of {', '.join(formats.NAMES)}")
        return asked
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix == ".parquet":
        return PARQUET
    if suffix == ".csv":
        return "azure"
    raise TraceUsageError(f"{path}: the name does not say which format to write: say it (--to)")


def losses(trace: Trace, format: str) -> list[str]:
    """What of a trace has no place in a format, in words."""
    if format == PARQUET:
        return []
    text_format = TEXT_FORMATS[format]
    lost = []
    if trace.has_reuse and text_format.usual_block_tokens is None:
        lost.append("block hashes: what is shared")
    elif trace.block_tokens != text_format.usual_block_tokens:
        lost.append(f"that blocks are of {trace.block_tokens} tokens")
    if not text_format.sessions:
        if (trace.parent_request >= 0).any() or (trace.turn > 1).any():
            lost.append("sessions: who follows whom")
        if trace.kind:
            lost.append("kinds")
    return lost


def write_trace(trace: Trace, path: Path, format: str, overwrite: bool = False) -> None:
    """Write a file, packed where its name ends in .gz. It appears whole or not at all.

    Raises:
        TraceUsageError: the format needs block hashes that the trace has not; or Parquet is to be packed again; or as
            `replacing`.
        TraceFileError: it cannot be written.
    """
    if format != PARQUET and TEXT_FORMATS[format].usual_block_tokens is not None and not trace.has_reuse:
        raise TraceUsageError(f"{trace.name} has no block hashes, which {format} must have: write azure or parquet")
    if format == PARQUET and path.suffix == ".gz":
        raise TraceUsageError(f"{path}: Parquet is packed already: give it a name without .gz")
    with replacing(path, overwrite) as part:
        if format == PARQUET:
            own_parquet.write(trace, part)
        else:
            with part.open("wb") as file, _packed(file, path) as stream:
                text = io.TextIOWrapper(stream, encoding="utf-8", newline="\n")
                TEXT_FORMATS[format].write(trace, text)
                text.flush()
                text.detach()


@contextmanager
def replacing(path: Path, overwrite: bool) -> Iterator[Path]:
    """A name beside `path` to write to; what is there takes the place of `path` at the end of the block.

    With an exception nothing remains of it.

    Raises:
        TraceUsageError: `path` is there and `overwrite` is not given, or it is no plain file.
        TraceFileError: the system refuses something, in the block too.
    """
    if path.exists() and not path.is_file():
        raise TraceUsageError(f"{path}: is there, and no plain file: give another name")
    if path.exists() and not overwrite:
        raise TraceUsageError(f"{path}: is there already: give another name, or say to overwrite it (--overwrite)")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    except OSError as error:
        raise TraceFileError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _packed(file: BinaryIO, path: Path) -> Iterator[BinaryIO]:
    if path.suffix != ".gz":
        yield file
        return
    # Neither name nor time inside, so that equal traces make equal files.
    with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
        yield cast(BinaryIO, packed)
