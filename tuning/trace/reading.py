"""A trace from a file: rows checked, put in order, and their blocks made prefixes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tuning.trace import block_size, formats, own_parquet
from tuning.trace.errors import RowError, TraceError, TraceFileError, TraceUsageError
from tuning.trace.formats import PARQUET, TEXT_FORMATS, TextFormat
from tuning.trace.lines import numbered_lines, open_unpacked
from tuning.trace.prefix_ids import prefix_ids
from tuning.trace.raw_rows import RawRows, RowBuilder, Sessions
from tuning.trace.report import ReadReport, counted
from tuning.trace.row_values import MAX_TOKENS
from tuning.trace.trace import Trace

EPOCH_SCALE_S: Final = 1e8
"""A clock beyond this (three years) counts from some epoch, not from the beginning of the trace."""
PLAUSIBLE_RATE: Final = (1 / 60, 1000.0)
"""Requests a second. Traces that were published have 2 to 25; seconds read as milliseconds make it thousands."""

_ENOUGH_FOR_A_RATE: Final = 100


class TraceRefused(TraceError):
    """Problems were found, and reading was strict.

    Args:
        report: all that was found.
    """

    def __init__(self, report: ReadReport) -> None:
        super().__init__("\n".join(report.problem_lines()))
        self.report = report


def read_trace(
    path: str | Path, format: str = "auto", strict: bool = True, block_tokens: int | None = None
) -> tuple[Trace, ReadReport]:
    """Read a file, plain or packed with gzip.

    Args:
        path: the file.
        format: one of `formats.NAMES`; "auto" recognises it by how the file begins.
        strict: refuse a file with problems. Otherwise the rows with problems are left out.
        block_tokens: tokens a block, where the file does not say and the rows leave it open.

    Returns:
        The trace, and what became of the rows. The caller owns both.

    Raises:
        TraceUsageError: an argument is not allowed, or contradicts the file.
        TraceFileError: the file cannot be opened.
        TraceRefused: `strict`, and there are problems.
        TraceError: there is no row that can be used; or the file as a whole is in none of the formats.
    """
    path = Path(path)
    if format not in ("auto", *formats.NAMES):
        raise TraceUsageError(f"format={format!r} is not allowed: give auto or one of {', '.join(formats.NAMES)}")
    if block_tokens is not None and not 1 <= block_tokens <= MAX_TOKENS:
        raise TraceUsageError(f"block size {block_tokens} is not allowed: give a whole number from 1 to {MAX_TOKENS}")
    report = ReadReport(str(path))
    try:
        raw, ticks_per_s = _read_rows(path, format, report)
        if not len(raw):
            raise TraceRefused(report) if report.num_problems else TraceError("there is no request in it")
        raw = _consistent(raw, block_tokens, report)
        if report.num_problems and (strict or not len(raw)):
            raise TraceRefused(report)
        return _assemble(path, raw, ticks_per_s, report), report
    except (TraceFileError, TraceRefused):
        raise
    except TraceError as error:
        raise type(error)(f"{path}: {error}") from error
    except OSError as error:
        raise TraceFileError(f"{path}: cannot be read: {error.strerror}") from error


def _read_rows(path: Path, format: str, report: ReadReport) -> tuple[RawRows, int]:
    """All rows that are valid in themselves, and the ticks a second of their clock."""
    with open_unpacked(path) as stream:
        lines = numbered_lines(stream, report)
        first = next(lines, None)
        if first is None:
            raise TraceRefused(report) if report.num_problems else TraceError("the file is empty")
        if format == PARQUET or (format == "auto" and first[1].startswith(own_parquet.MAGIC)):
            report.format = PARQUET
            return own_parquet.read(path, report), 1
        report.format = formats.recognise(first[1]) if format == "auto" else format
        if format == "mooncake" and formats.looks_like_bailian(first[1]):
            report.warnings.append(
                "the first row has a chat_id, as those of the format bailian, whose times are seconds; read as "
                "mooncake they are milliseconds. Leave --format out to have it recognised"
            )
        text_format = TEXT_FORMATS[report.format]
        if text_format.header is not None:
            if first[1] != text_format.header.encode():
                found = ascii(first[1][:80].decode(errors="replace"))
                raise TraceError(f"line {first[0]} is {found}: the columns must be {text_format.header}")
            return _parse_lines(lines, text_format, report), text_format.ticks_per_s
        return _parse_lines(chain((first,), lines), text_format, report), text_format.ticks_per_s


def _parse_lines(lines: Iterable[tuple[int, bytes]], text_format: TextFormat, report: ReadReport) -> RawRows:
    rows = RowBuilder(text_format.clock_type)
    parse = text_format.parse
    for number, line in lines:
        report.rows_read += 1
        try:
            parse(number, line.decode(), rows)
        except RowError as error:
            report.add(number, error.reason, str(error))
        except UnicodeDecodeError as error:
            report.add(number, "not UTF-8", f"byte {error.start + 1} of the line is not UTF-8: {error.reason}")
    return rows.rows()


def _consistent(raw: RawRows, block_tokens: int | None, report: ReadReport) -> RawRows:
    """The rows that agree with the others; the rest become problems."""
    keep = np.ones(len(raw), dtype=np.bool_)
    if raw.blocks is None:
        if block_tokens is not None:
            raise TraceUsageError("has no block hashes, so no block size can be given")
    else:
        text_format = TEXT_FORMATS.get(report.format)
        usual = text_format.usual_block_tokens if text_format else raw.blocks.block_tokens
        keep &= block_size.settle(raw, raw.blocks, usual or 1, block_tokens, report)
    if raw.sessions is not None:
        _, first, occurrence = np.unique(raw.sessions.chat_id, return_index=True, return_inverse=True)
        for row in np.flatnonzero(first[occurrence] != np.arange(len(raw))).tolist():
            earlier = int(raw.line[first[occurrence[row]]])
            keep[row] = False
            message = f"chat_id {raw.sessions.chat_id[row]} is that of line {earlier}: each request has its own"
            report.add(int(raw.line[row]), "chat_id is given twice", message)
    return raw if keep.all() else raw.select(np.flatnonzero(keep))


def _assemble(path: Path, raw: RawRows, ticks_per_s: int, report: ReadReport) -> Trace:
    report.rows_kept = len(raw)
    backwards = np.flatnonzero(np.diff(raw.clock) < 0)
    if len(backwards):
        report.warnings.append(
            f"rows are not in the order of their times (see line {raw.line[backwards[0] + 1]}): they were sorted, "
            "those of equal times as they stand in the file"
        )
        raw = raw.select(np.argsort(raw.clock, kind="stable"))
    arrival_s = (raw.clock - raw.clock[0]) / ticks_per_s
    report.shift_s = float(raw.clock[0]) / ticks_per_s
    _judge_clock(raw.clock, arrival_s, report)

    count = len(raw)
    offsets, ids = np.zeros(count + 1, dtype=np.int64), np.empty(0, dtype=np.int64)
    if raw.blocks is not None:
        offsets = raw.blocks.offsets
        ids = prefix_ids(offsets, raw.blocks.hashes)
        text_format = TEXT_FORMATS.get(report.format)
        if text_format is None or text_format.prefix_hashes:
            several = int(ids.max()) - np.count_nonzero(np.diff(np.sort(raw.blocks.hashes)))
            if several:
                report.warnings.append(
                    f"hashes come after different predecessors (there are {several:,} more prefixes than hashes), so "
                    "they are of content, not of prefixes as this format has them: prefixes were made of them"
                )
    parent, turn = np.full(count, -1, dtype=np.int64), np.ones(count, dtype=np.int32)
    if raw.sessions is not None:
        parent, turn = _parents(raw.sessions, report), raw.sessions.turn
    return Trace(
        name=path.name.removesuffix(".gz").rpartition(".")[0] or path.name,
        arrival_s=arrival_s,
        input_tokens=raw.input_tokens,
        output_tokens=raw.output_tokens,
        block_tokens=report.block_tokens,
        block_offsets=offsets,
        block_ids=ids,
        parent_request=parent,
        turn=turn,
        kind=tuple(raw.kind),
    )


def _judge_clock(clock: NDArray[Any], arrival_s: NDArray[np.float64], report: ReadReport) -> None:
    """Warns of an odd clock. Few requests say nothing by their rate: any number may come in one burst."""
    if report.shift_s > EPOCH_SCALE_S and report.format != "azure":
        report.warnings.append(f"the clock begins at {report.shift_s:,.3f} s, counted from some epoch: shifted to 0")
    span_s = float(arrival_s[-1])
    least, most = PLAUSIBLE_RATE
    doubts = []
    if len(arrival_s) >= _ENOUGH_FOR_A_RATE and not least * span_s <= len(arrival_s) <= most * span_s:
        doubts.append(f"{len(arrival_s):,} requests within {span_s:,.3f} s is hard to believe")
    if report.format == "mooncake" and (clock % 1).any():
        doubts.append("there are times with fractions, where mooncake has whole milliseconds")
    if doubts:
        report.warnings.append(
            f"{', and '.join(doubts)}: is the clock in the unit that the format {report.format} has (mooncake: "
            "milliseconds; bailian and parquet: seconds)?"
        )


def _parents(sessions: Sessions, report: ReadReport) -> NDArray[np.int64]:
    """[N] Row of the previous turn; -1 where there is none, or none before it in the file."""
    count = len(sessions.chat_id)
    order = np.argsort(sessions.chat_id)
    at = np.minimum(np.searchsorted(sessions.chat_id, sessions.parent_chat_id, sorter=order), count - 1)
    parent = order[at]
    named = sessions.parent_chat_id != -1
    found = named & (sessions.chat_id[parent] == sessions.parent_chat_id) & (parent < np.arange(count))
    if missing := int((named & ~found).sum()):
        report.warnings.append(
            f"{counted(missing, 'request')} said to follow one that does not come before in the file: sessions "
            "begin there"
        )
    parent = np.where(found, parent, -1)
    if odd := int((found & (sessions.turn != sessions.turn[parent] + 1)).sum()):
        report.warnings.append(
            f"{counted(odd, 'request')} with a turn that is not one more than that of the request before"
        )
    return parent
