from __future__ import annotations

import dataclasses
import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tuning.trace.random_traces import equal, traces
from tuning.trace.bailian import UNKNOWN_KIND
from tuning.trace.errors import TraceFileError, TraceUsageError
from tuning.trace.reading import read_trace
from tuning.trace.trace import Trace
from tuning.trace.writing import format_for, losses, write_trace

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "traces"


def what_remains(trace: Trace, format: str) -> Trace:
    """What a format can hold of a trace."""
    count = len(trace)
    if format == "bailian":
        return dataclasses.replace(trace, kind=trace.kind or (UNKNOWN_KIND,) * count)
    bare = dataclasses.replace(trace, kind=(), parent_request=np.full(count, -1), turn=np.ones(count, dtype=np.int32))
    if format == "mooncake":
        return bare
    nothing = np.zeros(0, dtype=np.int64)
    return dataclasses.replace(bare, block_tokens=None, block_offsets=np.zeros(count + 1, np.int64), block_ids=nothing)


@settings(deadline=None)
@given(trace=traces(), format=st.sampled_from(("mooncake", "bailian", "azure")))
def test_what_is_written_can_be_read(trace: Trace, format: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("written") / "trace"
    write_trace(trace, path, format)
    back, report = read_trace(path, format, block_tokens=None if format == "azure" else trace.block_tokens)
    assert equal(back, what_remains(trace, format))
    assert report.num_problems == 0


@pytest.mark.parametrize(
    ("name", "format"), [("mooncake_conversation_head.jsonl", "mooncake"), ("azure_llm_2023_conv_head.csv", "azure")]
)
def test_by_way_of_parquet_a_file_remains_the_same(name: str, format: str, tmp_path: Path) -> None:
    write_trace(read_trace(FIXTURES / name)[0], tmp_path / "trace.parquet", "parquet")
    write_trace(read_trace(tmp_path / "trace.parquet")[0], tmp_path / name, format)
    if format == "mooncake":
        assert (tmp_path / name).read_text() == (FIXTURES / name).read_text()
    else:
        assert equal(read_trace(tmp_path / name)[0], read_trace(FIXTURES / name)[0])


def test_packed_files_are_the_same_every_time(tmp_path: Path) -> None:
    trace, _ = read_trace(FIXTURES / "mooncake_conversation_head.jsonl")
    for name in ("one.jsonl.gz", "two.jsonl.gz"):
        write_trace(trace, tmp_path / name, "mooncake")
    one, two = ((tmp_path / name).read_bytes() for name in ("one.jsonl.gz", "two.jsonl.gz"))
    assert one == two
    assert gzip.decompress(one) == (FIXTURES / "mooncake_conversation_head.jsonl").read_bytes()


def test_says_what_is_lost(tmp_path: Path) -> None:
    trace, _ = read_trace(FIXTURES / "mooncake_conversation_head.jsonl")
    assert losses(trace, "parquet") == []
    assert losses(trace, "mooncake") == []
    assert losses(trace, "bailian") == ["that blocks are of 512 tokens"]
    assert losses(trace, "azure") == ["block hashes: what is shared"]
    parents = np.full(200, -1)
    parents[1] = 0
    sessions = dataclasses.replace(trace, parent_request=parents, kind=("text",) * 200)
    assert losses(sessions, "mooncake") == ["sessions: who follows whom", "kinds"]


def test_the_name_says_the_format() -> None:
    assert format_for(Path("a.parquet"), None) == "parquet"
    assert format_for(Path("a.csv.gz"), None) == "azure"
    assert format_for(Path("a.parquet"), "mooncake") == "mooncake"
    with pytest.raises(TraceUsageError, match="the name does not say which format"):
        format_for(Path("a.jsonl"), None)
    with pytest.raises(TraceUsageError, match="format 'csv' is not allowed"):
        format_for(Path("a.csv"), "csv")


def test_nothing_is_replaced_or_left_behind_by_mistake(tmp_path: Path) -> None:
    trace, _ = read_trace(FIXTURES / "mooncake_conversation_head.jsonl")
    out = tmp_path / "out.csv"
    out.write_text("precious")
    with pytest.raises(TraceUsageError, match="is there already"):
        write_trace(trace, out, "azure")
    assert out.read_text() == "precious"
    write_trace(trace, out, "azure", overwrite=True)
    assert out.read_text().startswith("TIMESTAMP")
    with pytest.raises(TraceUsageError, match="no plain file"):
        write_trace(trace, tmp_path, "azure", overwrite=True)
    with pytest.raises(TraceFileError, match="cannot be written: No such file"):
        write_trace(trace, tmp_path / "nowhere" / "out.csv", "azure")
    with pytest.raises(TraceUsageError, match="packed already"):
        write_trace(trace, tmp_path / "out.parquet.gz", "parquet")
    bare, _ = read_trace(FIXTURES / "azure_llm_2023_conv_head.csv")
    with pytest.raises(TraceUsageError, match="has no block hashes, which mooncake must have"):
        write_trace(bare, tmp_path / "out.jsonl", "mooncake")
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]
