"""Our own Parquet: what the others hold, typed and small, and what a live server can record of its traffic.

Lengths, times and block hashes; never text or tokens. A hash names a whole prefix, and has the same number of bytes all
over a file: eight here, 32 where it is a block's key in the live store (`kv.keys`), which has none for a partial last
block. Such a block then counts as one that nobody else has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tuning.trace.errors import TraceError, TraceFileError
from tuning.trace.raw_rows import Blocks, RawRows, Sessions
from tuning.trace.report import ReadReport
from tuning.trace.row_values import MAX_CLOCK_S, MAX_TOKENS
from tuning.trace.trace import Trace

VERSION: Final = 1
VERSION_KEY: Final = b"equipoise.trace.version"
BLOCK_TOKENS_KEY: Final = b"equipoise.trace.block_tokens"
PARTIAL_KEY: Final = b"equipoise.trace.partial_last_block"
"""Says "hashed" or "left out"."""
MAGIC: Final = b"PAR1"

_PARTIAL: Final = {True: b"hashed", False: b"left out"}
_ROW_GROUP: Final = 10_000
_MAX_NAMES: Final = 300
_REQUIRED: Final[dict[str, tuple[pa.DataType, str]]] = {
    "arrival_s": (pa.float64(), "seconds, from any origin"),
    "input_tokens": (pa.int64(), "length of the prompt in tokens, at least 1"),
    "output_tokens": (pa.int64(), "tokens generated, at least 0"),
}
_OPTIONAL: Final[dict[str, tuple[pa.DataType, str]]] = {
    "parent_request": (
        pa.int64(),
        "row (from 0) of the session's previous turn; -1 where there is none or it is unknown",
    ),
    "turn": (pa.int32(), "number of the turn in its session, from 1"),
    "kind": (pa.string(), "what sort of request"),
}
_HASHES_DOC: Final = (
    "one hash for each block of the prompt, which stands for the whole prefix up to and with that block; "
    "the metadata say how many tokens a block has, and whether a partial last block has a hash"
)


def schema(
    block_tokens: int | None, hash_bytes: int = 8, partial_is_hashed: bool = True, with_kind: bool = True
) -> pa.Schema:
    """Columns with their descriptions, and the metadata of the file.

    Args:
        block_tokens: tokens a block; None for a file without block hashes.
        hash_bytes: size of a hash.
        partial_is_hashed: whether a partial last block has a hash.
        with_kind: whether requests have a kind.
    """
    columns = dict(_REQUIRED)
    if block_tokens is not None:
        columns["block_hashes"] = (pa.list_(pa.field("element", pa.binary(hash_bytes), nullable=False)), _HASHES_DOC)
    columns.update(_OPTIONAL)
    if not with_kind:
        del columns["kind"]
    metadata = {VERSION_KEY: str(VERSION).encode()}
    if block_tokens is not None:
        metadata[BLOCK_TOKENS_KEY] = str(block_tokens).encode()
        metadata[PARTIAL_KEY] = _PARTIAL[partial_is_hashed]
    fields = [
        pa.field(name, dtype, nullable=False, metadata={"description": description})
        for name, (dtype, description) in columns.items()
    ]
    return pa.schema(fields, metadata=metadata)


def write(trace: Trace, path: Path) -> None:
    """Write a whole trace. Its ids serve as hashes, eight bytes each, the highest first."""
    form = schema(trace.block_tokens, with_kind=bool(trace.kind))
    # Of a name pyarrow makes an address, in which not all characters may be, so it gets the open file.
    with path.open("wb") as file, pq.ParquetWriter(file, form, compression="zstd") as writer:
        for start in range(0, len(trace), _ROW_GROUP):
            rows = slice(start, start + _ROW_GROUP)
            columns: dict[str, Any] = {
                "arrival_s": trace.arrival_s[rows],
                "input_tokens": trace.input_tokens[rows],
                "output_tokens": trace.output_tokens[rows],
                "parent_request": trace.parent_request[rows],
                "turn": trace.turn[rows],
            }
            if trace.kind:
                columns["kind"] = trace.kind[rows]
            if trace.has_reuse:
                offsets = trace.block_offsets[start : start + _ROW_GROUP + 1]
                columns["block_hashes"] = _lists(trace, offsets, form.field("block_hashes").type)
            writer.write_table(pa.Table.from_pydict(columns, schema=form))


def _lists(trace: Trace, offsets: NDArray[np.int64], dtype: pa.DataType) -> pa.Array:
    ids = trace.block_ids[offsets[0] : offsets[-1]]
    packed = pa.py_buffer(ids.astype(">i8").tobytes())
    hashes = pa.FixedSizeBinaryArray.from_buffers(dtype.value_type, len(ids), [None, packed])
    return pa.ListArray.from_arrays(pa.array(offsets - offsets[0], pa.int32()), hashes, type=dtype)


def read(path: Path, report: ReadReport) -> RawRows:
    """The rows of a file. Rows that are not allowed are problems in `report`.

    Raises:
        TraceFileError: it cannot be opened.
        TraceError: it is not Parquet, or not ours, or of another version.
    """
    try:
        with path.open("rb") as file:
            table = pq.ParquetFile(file).read()
    except OSError as error:
        # Arrow raises OSError without a number for data that it cannot make sense of.
        if error.errno is None:
            raise TraceError(f"is broken, or no Parquet at all ({error})") from error
        raise TraceFileError(f"{path}: cannot be opened: {error.strerror}") from error
    except pa.ArrowException as error:
        raise TraceError(f"is broken, or no Parquet at all ({error})") from error
    _check_schema(table.schema)
    return _checked_rows(table, report)


def _check_schema(found: pa.Schema) -> None:
    version = (found.metadata or {}).get(VERSION_KEY)
    if version is None:
        raise TraceError(
            f"this Parquet file is no trace: its metadata has no {VERSION_KEY.decode()}. {_columns(found)}. `convert` "
            "makes one of the other formats; `schema()` of tuning/trace/own_parquet.py is for tables of one's own"
        )
    if version != str(VERSION).encode():
        raise TraceError(f"is of version {version!r}; version {VERSION} can be read")
    for name, (dtype, _) in (_REQUIRED | _OPTIONAL).items():
        index = found.get_field_index(name)
        if index == -1 and name in _OPTIONAL:
            continue
        if index == -1 or found.field(index).type != dtype:
            what = "is missing (or there twice)" if index == -1 else f"is of type {found.field(index).type}"
            raise TraceError(f"column {name} {what}: it must be one column of type {dtype}. {_columns(found)}")
    index = found.get_field_index("block_hashes")
    block_tokens = found.metadata.get(BLOCK_TOKENS_KEY)
    if (index == -1) != (block_tokens is None):
        raise TraceError(f"a column block_hashes and {BLOCK_TOKENS_KEY.decode()} must be there both or neither")
    if block_tokens is not None:
        if not block_tokens.isdigit() or not 1 <= int(block_tokens) <= MAX_TOKENS:
            raise TraceError(f"{BLOCK_TOKENS_KEY.decode()} is {block_tokens!r}: it must be a number from 1")
        if (partial := found.metadata.get(PARTIAL_KEY)) not in _PARTIAL.values():
            raise TraceError(f"{PARTIAL_KEY.decode()} is {partial!r}: it must be hashed or left out")
        dtype = found.field(index).type
        if not pa.types.is_list(dtype) or not pa.types.is_fixed_size_binary(dtype.value_type):
            raise TraceError(f"column block_hashes is of type {dtype}: it must hold lists of fixed_size_binary")


def _columns(found: pa.Schema) -> str:
    """What is there and what must be."""
    there = ", ".join(found.names)
    needed = ", ".join(f"{name} ({dtype})" for name, (dtype, _) in _REQUIRED.items())
    there = there if len(there) <= _MAX_NAMES else f"{there[: _MAX_NAMES - 3]}..."
    return f"Its columns are {there or 'none'}; needed are {needed}, and block_hashes for what is shared"


def _checked_rows(table: pa.Table, report: ReadReport) -> RawRows:
    count = table.num_rows
    report.rows_read = count
    good = np.ones(count, dtype=np.bool_)

    def check(name: str, allowed: NDArray[np.bool_], what: str) -> None:
        for row in np.flatnonzero(~allowed).tolist():
            if good[row]:
                value = table.column(name)[row]
                report.add(row + 1, f"{name} is not allowed", f"{name} is {value}: allowed is {what}")
        good[~allowed] = False

    for name in table.column_names:
        check(name, ~_numpy(table.column(name).is_null()), "anything but null")
    numbers = {name: _filled(table, name) for name in ("arrival_s", "input_tokens", "output_tokens")}
    clock = numbers["arrival_s"]
    check("arrival_s", (clock >= 0) & (clock <= MAX_CLOCK_S), f"a number from 0 to {MAX_CLOCK_S}")
    for name, least in (("input_tokens", 1), ("output_tokens", 0)):
        check(name, (numbers[name] >= least) & (numbers[name] <= MAX_TOKENS), f"a number from {least} to {MAX_TOKENS}")
    sessions = None
    if "parent_request" in table.column_names and "turn" in table.column_names:
        parent, turn = _filled(table, "parent_request"), _filled(table, "turn")
        check("parent_request", (parent >= -1) & (parent < count), f"a row from 0 to {count - 1}, or -1")
        check("turn", turn >= 1, "a number from 1")
        sessions = Sessions(np.arange(count), parent, turn)
    raw = RawRows(
        line=np.arange(1, count + 1),
        clock=clock,
        input_tokens=numbers["input_tokens"],
        output_tokens=numbers["output_tokens"],
        blocks=_blocks(table, numbers["input_tokens"]) if "block_hashes" in table.column_names else None,
        sessions=sessions,
        kind=["" if kind is None else kind for kind in table.column("kind").to_pylist()]
        if "kind" in table.column_names
        else [],
    )
    return raw if good.all() else raw.select(np.flatnonzero(good))


def _blocks(table: pa.Table, input_tokens: NDArray[np.int64]) -> Blocks:
    lists = table.column("block_hashes")
    counts = _numpy(pc.list_value_length(lists).fill_null(0)).astype(np.int64)
    hashes = pa.chunked_array([chunk.flatten() for chunk in lists.chunks], lists.type.value_type).combine_chunks()
    if hashes.null_count:
        raise TraceError(f"{hashes.null_count} of the hashes in column block_hashes are null: give each block one")
    # Numbers in the place of bytes: only which are equal counts.
    codes = _numpy(hashes.dictionary_encode().indices).astype(np.int64)
    block_tokens = int(table.schema.metadata[BLOCK_TOKENS_KEY])
    if table.schema.metadata[PARTIAL_KEY] == _PARTIAL[False]:
        partial = input_tokens % block_tokens != 0
        codes = np.insert(codes, np.cumsum(counts)[partial], len(codes) + np.arange(np.count_nonzero(partial)))
        counts += partial
    return Blocks(counts, codes, block_tokens)


def _filled(table: pa.Table, name: str) -> NDArray[Any]:
    """A column of numbers; 0 for null."""
    return _numpy(table.column(name).fill_null(0))


def _numpy(values: Any) -> NDArray[Any]:
    array: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return array
