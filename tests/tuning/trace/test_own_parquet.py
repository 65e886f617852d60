from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv.keys import block_keys
from tests.tuning.trace.random_traces import equal, traces
from tuning.trace import own_parquet
from tuning.trace.errors import TraceError
from tuning.trace.reading import TraceRefused, read_trace
from tuning.trace.writing import write_trace


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.parquet"


@settings(deadline=None)
@given(trace=traces())
def test_comes_back_as_it_was(trace: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("own") / "trace.parquet"
    write_trace(trace, path, "parquet")
    back, report = read_trace(path)
    assert equal(back, trace)
    assert report.num_problems == 0


def test_row_groups_join_seamlessly(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, _ = read_trace(Path(__file__).resolve().parents[2] / "fixtures/traces/mooncake_conversation_head.jsonl")
    monkeypatch.setattr(own_parquet, "_ROW_GROUP", 7)
    write_trace(trace, file, "parquet")
    assert pq.ParquetFile(file).num_row_groups == 29
    assert equal(read_trace(file)[0], trace)


def test_columns_say_what_they_are(file: Path) -> None:
    for field in own_parquet.schema(16):
        assert field.metadata[b"description"]
    assert own_parquet.schema(None).names == [
        *("arrival_s", "input_tokens", "output_tokens", "parent_request", "turn", "kind")
    ]


def recorded(prompts: list[list[int]], block_tokens: int) -> pa.Table:
    """What a live server would record: keys of full blocks, 32 bytes each."""
    count = len(prompts)
    columns = {
        "arrival_s": [1.7e9 + row for row in range(count)],
        "input_tokens": [len(prompt) for prompt in prompts],
        "output_tokens": [1] * count,
        "block_hashes": [block_keys(prompt, block_tokens, b"model", b"") for prompt in prompts],
        "parent_request": [-1] * count,
        "turn": [1] * count,
    }
    form = own_parquet.schema(block_tokens, hash_bytes=32, partial_is_hashed=False, with_kind=False)
    return pa.Table.from_pydict(columns, schema=form)


@settings(deadline=None)
@given(prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=8))
def test_keys_of_the_live_store(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("own") / "recorded.parquet"
    pq.write_table(recorded(prompts, 2), path)
    trace, _ = read_trace(path)
    known: dict[object, int] = {}
    expected = []
    for row, prompt in enumerate(prompts):
        for end in range(2, len(prompt) + 1, 2):
            expected.append(known.setdefault(tuple(prompt[:end]), len(known)))
        if len(prompt) % 2:  # a partial block is nobody else's
            expected.append(known.setdefault(row, len(known)))
    assert trace.block_ids.tolist() == expected


def changed(name: str, values: list[Any], dtype: pa.DataType | None = None) -> pa.Table:
    table = recorded([[1, 2, 3, 4], [1, 2], [3, 4]], 2)
    field = pa.field(name, dtype or table.schema.field(name).type)
    return table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("arrival_s", [0.0, float("nan"), 1.0], "line 2: arrival_s is nan"),
        ("arrival_s", [0.0, None, 1.0], "line 2: arrival_s is None: allowed is anything but null"),
        ("arrival_s", [0.0, -1.0, 1.0], "line 2: arrival_s is -1"),
        ("arrival_s", [0.0, float("inf"), 1.0], "line 2: arrival_s is inf"),
        ("input_tokens", [4, 0, 2], "line 2: input_tokens is 0"),
        ("input_tokens", [4, 4, 2], "line 2: 1 hash_ids for input_length 4: blocks of 2 tokens make it 2"),
        ("input_tokens", [4, 2**40, 2], "line 2: input_tokens is 1099511627776"),
        ("output_tokens", [1, -1, 1], "line 2: output_tokens is -1"),
        ("turn", [1, 0, 1], "line 2: turn is 0"),
        ("parent_request", [-1, 3, -1], "line 2: parent_request is 3: allowed is a row from 0 to 2, or -1"),
        ("block_hashes", [[b"a" * 32] * 2, None, [b"b" * 32]], "line 2: block_hashes is None"),
    ],
)
def test_bad_values(file: Path, name: str, values: list[Any], message: str) -> None:
    pq.write_table(changed(name, values), file)
    with pytest.raises(TraceRefused) as refused:
        read_trace(file)
    assert message in str(refused.value)
    trace, report = read_trace(file, strict=False)
    assert (len(trace), report.rows_dropped) == (2, 1)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"a": [1]}), "is no trace: its metadata has no equipoise.trace.version"),
        (
            pa.table({"timestamp": [1], "prompt": [2]}),
            r"columns are timestamp, prompt; needed are arrival_s \(double\), input_tokens \(int64\), output_tokens",
        ),
        (
            recorded([[1]], 2).drop_columns(["arrival_s"]),
            "column arrival_s is missing .* Its columns are input_tokens, output_tokens, .*; needed are arrival_s",
        ),
        (pa.table({f"column_{number}": [1] for number in range(100)}), r"column_1, .*\.\.\.; needed are"),
        (recorded([[1]], 2).drop_columns(["block_hashes"]), "must be there both or neither"),
        (changed("input_tokens", ["4", "2", "2"], pa.string()), "column input_tokens is of type string: it must be"),
        (changed("block_hashes", [[1, 2], [1], [3]], pa.list_(pa.int64())), "column block_hashes is of type list<"),
        (changed("block_hashes", [[b"a", None], [b"a"], [b"b"]], pa.list_(pa.binary(1))), "1 of the hashes in column"),
        (recorded([], 2), "there is no request in it"),
    ],
)
def test_tables_that_are_not_ours(file: Path, table: pa.Table, message: str) -> None:
    pq.write_table(table, file)
    with pytest.raises(TraceError, match=message):
        read_trace(file)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (own_parquet.VERSION_KEY, b"2", "is of version b'2'; version 1 can be read"),
        (own_parquet.BLOCK_TOKENS_KEY, b"0", "must be a number from 1"),
        (own_parquet.BLOCK_TOKENS_KEY, b"-16", "must be a number from 1"),
        (own_parquet.PARTIAL_KEY, b"maybe", "must be hashed or left out"),
    ],
)
def test_metadata_that_is_not_understood(file: Path, key: bytes, value: bytes, message: str) -> None:
    table = recorded([[1, 2]], 2)
    pq.write_table(table.replace_schema_metadata(table.schema.metadata | {key: value}), file)
    with pytest.raises(TraceError, match=message):
        read_trace(file)


def test_a_file_that_is_cut_short(file: Path) -> None:
    pq.write_table(recorded([[1, 2]], 2), file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(TraceError, match="is broken, or no Parquet at all"):
        read_trace(file)


def test_the_file_knows_its_block_size(file: Path) -> None:
    pq.write_table(recorded([[1, 2]], 2), file)
    with pytest.raises(TraceError, match="the file says that its blocks are of 2 tokens, not of 4"):
        read_trace(file, block_tokens=4)
