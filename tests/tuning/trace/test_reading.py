from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.tuning.trace.random_traces import blocks_of, equal
from tuning.trace.errors import TraceError, TraceFileError, TraceUsageError
from tuning.trace.reading import TraceRefused, read_trace

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "traces"
MOONCAKE = FIXTURES / "mooncake_conversation_head.jsonl"
AZURE = FIXTURES / "azure_llm_2023_conv_head.csv"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def mooncake_row(**changed: Any) -> str:
    row = {"timestamp": 0, "input_length": 1000, "output_length": 7, "hash_ids": [0, 1]} | changed
    return json.dumps({key: value for key, value in row.items() if value is not ...})


def bailian_row(chat_id: int, parent: int, **changed: Any) -> str:
    row = {"chat_id": chat_id, "parent_chat_id": parent, "timestamp": 0.5, "input_length": 20, "output_length": 7}
    return json.dumps(row | {"type": "text", "turn": 1, "hash_ids": [chat_id, chat_id]} | changed)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_mooncake(file: Path) -> None:
    trace, report = read_trace(MOONCAKE)
    rows = [json.loads(line) for line in MOONCAKE.read_text().splitlines()]
    assert (report.format, report.rows_read, report.rows_kept, report.num_problems) == ("mooncake", 200, 200, 0)
    assert report.warnings == []
    assert trace.block_tokens == 512
    assert trace.arrival_s.tolist() == [row["timestamp"] / 1000 for row in rows]
    assert trace.input_tokens.tolist() == [row["input_length"] for row in rows]
    assert trace.output_tokens.tolist() == [row["output_length"] for row in rows]
    # This file numbers its prefixes by first appearance itself.
    assert trace.block_ids.tolist() == [entry for row in rows for entry in row["hash_ids"]]
    assert trace.parent_request.tolist() == [-1] * 200


def test_azure() -> None:
    trace, report = read_trace(AZURE)
    assert (report.format, report.rows_read, report.rows_kept) == ("azure", 200, 200)
    assert not trace.has_reuse
    # From 18:15:46.6805900 to 18:15:50.9951690: the seventh digit counts.
    assert trace.arrival_s[1] == 4.314579
    assert trace.input_tokens[:2].tolist() == [374, 396]
    assert trace.output_tokens[:2].tolist() == [44, 109]


def test_azure_with_a_time_zone(file: Path) -> None:
    times = ("2024-05-10 23:59:59+00:00", "2024-05-11 00:00:00.25+00:00", "2024-05-11T02:00:01.000009930+02:00")
    file.write_text("\n".join([HEADER, *(f"{time},5,0" for time in times)]))
    assert read_trace(file)[0].arrival_s.tolist() == [0.0, 1.25, 2.0000099]


def test_real_rows_of_bailian(file: Path) -> None:
    # Row 0 of qwen_thinking, and the example of the repository's README, of whose ids it shows the first and the last.
    thinking = {"chat_id": 0, "parent_chat_id": -1, "timestamp": 0.0, "input_length": 502, "output_length": 1494}
    thinking |= {"type": "thinking", "turn": 1, "hash_ids": list(range(32))}
    example = {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521, "output_length": 132}
    example |= {"type": "text", "turn": 2, "hash_ids": [1089, 1090, 1091, 6326, *range(13120, 13148), 13148]}
    file.write_text(f"{json.dumps(thinking)}\n{json.dumps(example)}\n")
    trace, report = read_trace(file)
    assert report.format == "bailian"
    assert trace.block_tokens == 16
    assert trace.arrival_s.tolist() == [0.0, 61.114]
    assert trace.input_tokens.tolist() == [502, 521]
    assert trace.output_tokens.tolist() == [1494, 132]
    assert trace.turn.tolist() == [1, 2]
    assert trace.kind == ("thinking", "text")
    assert [len(blocks_of(trace, row)) for row in (0, 1)] == [32, 33]
    assert trace.parent_request.tolist() == [-1, -1]
    assert report.warnings == [
        "1 request said to follow one that does not come before in the file: sessions begin there"
    ]


def test_half_of_a_surrogate_pair_is_refused_by_line(file: Path) -> None:
    file.write_text(f"{bailian_row(0, -1)}\n{bailian_row(1, -1, type=chr(0xD800))}\n")
    with pytest.raises(TraceRefused, match=r'line 2: type is "\\ud800": allowed is a string of whole characters'):
        read_trace(file)


def test_content_hashes_become_prefixes(file: Path) -> None:
    rows = [[7, 9], [8, 9], [7, 9]]
    file.write_text("\n".join(bailian_row(i, -1, hash_ids=ids) for i, ids in enumerate(rows)))
    trace, report = read_trace(file)
    assert trace.block_ids.tolist() == [0, 1, 2, 3, 0, 1]
    assert report.warnings == []
    file.write_text("\n".join(mooncake_row(hash_ids=ids) for ids in rows))
    trace, report = read_trace(file)
    assert trace.block_ids.tolist() == [0, 1, 2, 3, 0, 1]
    assert "hashes come after different predecessors (there are 1 more prefixes than hashes)" in report.warnings[0]


def test_sessions_survive_sorting_and_other_names(file: Path) -> None:
    file.write_text(
        "\n".join(
            [
                bailian_row(900, 70, timestamp=9, turn=3),
                bailian_row(70, 5, timestamp=4, turn=2),
                bailian_row(5, -1, timestamp=4, turn=1),
                bailian_row(6, -1, timestamp=1, turn=1),
                bailian_row(7, 6, timestamp=2, turn=4),
            ]
        )
    )
    trace, report = read_trace(file)
    # 6, 7, 70, 5, 900: the parent of 70 comes at the same time, but later in the file.
    assert trace.arrival_s.tolist() == [0, 1, 3, 3, 8]
    assert trace.parent_request.tolist() == [-1, 0, -1, -1, 2]
    assert "not in the order of their times (see line 2)" in report.warnings[0]
    assert report.warnings[1].startswith("1 request said to follow one that does not come before")
    assert report.warnings[2].startswith("1 request with a turn that is not one more")


def test_equal_times_keep_their_order(file: Path) -> None:
    file.write_text("\n".join(mooncake_row(timestamp=t, output_length=n) for n, t in enumerate((5, 3, 5, 3, 5, 3))))
    trace, _ = read_trace(file)
    assert trace.output_tokens.tolist() == [1, 3, 5, 0, 2, 4]
    assert trace.arrival_s.tolist() == [0, 0, 0, 0.002, 0.002, 0.002]


def test_how_text_is_written_does_not_matter(tmp_path: Path) -> None:
    plain = MOONCAKE.read_bytes()
    trace, _ = read_trace(MOONCAKE)
    for name, content in {
        "windows.jsonl": b"\xef\xbb\xbf" + plain.replace(b"\n", b"\r\n") + b"\r\n\r\n",
        "blank.jsonl": b"\n  \n" + plain.replace(b"\n", b"\n\n"),
        "no_last_newline.jsonl": plain.rstrip(),
        "packed.jsonl.gz": gzip.compress(plain),
        "packed_under_another_name": gzip.compress(plain[:9000]) + gzip.compress(plain[9000:]),
        "floats.jsonl": plain.replace(b'length": 6758,', b'length": 6758.0,').replace(b"p: 0,", b"p: 0.0,"),
    }.items():
        (tmp_path / name).write_bytes(content)
        other, report = read_trace(tmp_path / name)
        assert equal(trace, other), name
        assert report.rows_read == 200


def test_clock_that_counts_from_an_epoch_begins_at_0(file: Path) -> None:
    file.write_text("\n".join(mooncake_row(timestamp=1_700_000_000_000 + time) for time in (0, 1500)))
    trace, report = read_trace(file)
    assert trace.arrival_s.tolist() == [0.0, 1.5]
    assert report.shift_s == 1.7e9
    assert "counted from some epoch: shifted to 0" in report.warnings[0]


@pytest.mark.parametrize(("step", "plausible"), [(0.3, False), (300, True), (300_000, False)])
def test_unbelievable_rates_are_warned_of(file: Path, step: float, plausible: bool) -> None:
    file.write_text("\n".join(mooncake_row(timestamp=step * row) for row in range(200)))
    _, report = read_trace(file)
    assert [("hard to believe" in warning) for warning in report.warnings] == ([] if plausible else [True])


@pytest.mark.parametrize("hash_ids", [..., []])
def test_rows_without_hashes_are_a_trace_without_reuse_information(file: Path, hash_ids: Any) -> None:
    file.write_text("\n".join(mooncake_row(timestamp=1000 * row, hash_ids=hash_ids) for row in range(3)))
    trace, report = read_trace(file)
    assert (trace.has_reuse, len(trace), trace.num_ids, report.warnings) == (False, 3, 0, [])
    with pytest.raises(TraceUsageError, match="no block hashes, so no block size can be given"):
        read_trace(file, block_tokens=512)
    rows = [json.loads(bailian_row(0, -1)), json.loads(bailian_row(1, 0, turn=2))]
    for row in rows:
        row.pop("hash_ids")
    file.write_text("\n".join(map(json.dumps, rows)))
    trace, _ = read_trace(file)
    assert (trace.has_reuse, trace.parent_request.tolist()) == (False, [-1, 0])


def test_where_most_rows_have_no_hashes_the_others_say_the_block_size(file: Path) -> None:
    file.write_text("\n".join([mooncake_row(hash_ids=...), mooncake_row(), mooncake_row(hash_ids=...)]))
    with pytest.raises(TraceRefused) as refused:
        read_trace(file)
    assert [line.split(": ")[1] for line in str(refused.value).splitlines()] == ["line 1", "line 3"]
    trace, report = read_trace(file, strict=False)
    assert (len(trace), trace.block_tokens, report.reasons) == (1, 512, {"no hash_ids": 2})


@pytest.mark.parametrize("key", ["hash_ids", "timestamp", "note"])
def test_a_key_that_is_given_twice_is_refused_by_line(file: Path, key: str) -> None:
    twice = mooncake_row()[:-1] + f', "note": 1, "{key}": [0, 7]}}'
    inside = mooncake_row()[:-1] + f', "note": {{"{key}": 1, "{key}": 2}}}}'
    for row in (twice, inside):
        file.write_text("\n".join([mooncake_row(), row]))
        with pytest.raises(TraceRefused, match=f'line 2: "{key}" is given twice: keep one of them'):
            read_trace(file)
        assert len(read_trace(file, strict=False)[0]) == 1


def test_seconds_that_are_read_as_milliseconds_are_warned_of_where_the_rows_show_it(file: Path) -> None:
    rows = [bailian_row(row, -1, timestamp=row, input_length=20) for row in range(3)]
    file.write_text("\n".join(rows))
    _, report = read_trace(file, format="mooncake")
    assert "the first row has a chat_id, as those of the format bailian, whose times are seconds" in report.warnings[0]
    assert read_trace(file)[1].warnings == []
    # Without a session's fields a fraction still gives it away.
    file.write_text("\n".join(mooncake_row(timestamp=time) for time in (0, 1.5, 2)))
    _, report = read_trace(file)
    assert report.warnings[0].startswith("there are times with fractions, where mooncake has whole milliseconds")


def test_of_few_requests_in_whole_numbers_nobody_can_tell_the_unit(file: Path) -> None:
    # The same rows are a minute of traffic in seconds, and a burst in milliseconds: both happen.
    file.write_text("\n".join(mooncake_row(timestamp=time) for time in range(60)))
    trace, report = read_trace(file)
    assert (trace.arrival_s[-1], report.warnings) == (0.059, [])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"timestamp": ...}, "timestamp is missing"),
        ({"timestamp": "12"}, 'timestamp is "12": allowed is a number of milliseconds'),
        ({"timestamp": True}, "timestamp is true"),
        ({"timestamp": -1}, "timestamp is -1"),
        ({"timestamp": 1e15}, "timestamp is 1000000000000000.0"),
        ({"timestamp": float("nan")}, "NaN is no number of JSON"),
        ({"timestamp": float("inf")}, "Infinity is no number of JSON"),
        ({"input_length": 0}, "input_length is 0: allowed is a whole number from 1"),
        ({"input_length": -5}, "input_length is -5"),
        ({"input_length": 10.5}, "input_length is 10.5"),
        ({"input_length": None}, "input_length is null"),
        ({"input_length": 10**30}, "input_length is 1000000000000000000000000000000: allowed is"),
        ({"input_length": 10**60}, "input_length is a number of about 60 digits"),
        ({"output_length": -1}, "output_length is -1"),
        ({"output_length": ...}, "output_length is missing"),
        ({"hash_ids": ...}, "no hash_ids for input_length 1000: blocks of 512 tokens make it 2. Give all rows theirs"),
        ({"hash_ids": 3}, "hash_ids is 3: allowed is a list"),
        ({"hash_ids": [0, "x"]}, 'an entry of hash_ids is "x"'),
        ({"hash_ids": [0, 1.5]}, "an entry of hash_ids is 1.5"),
        ({"hash_ids": [0, True]}, "an entry of hash_ids is true"),
        ({"hash_ids": [0, None]}, "an entry of hash_ids is null"),
        ({"hash_ids": [0, [1]]}, "an entry of hash_ids is a list"),
        ({"hash_ids": [0, -1]}, "an entry of hash_ids is -1"),
        ({"hash_ids": [0, 2**64]}, "an entry of hash_ids is 18446744073709551616"),
        ({"hash_ids": [0]}, "1 hash_ids for input_length 1000: blocks of 512 tokens make it 2"),
        ({"hash_ids": []}, "no hash_ids for input_length 1000"),
    ],
)
def test_bad_values_are_refused_or_left_out_by_line(file: Path, changed: dict[str, Any], message: str) -> None:
    file.write_text("\n".join([mooncake_row(), "", mooncake_row(**changed), mooncake_row(), mooncake_row()]))
    with pytest.raises(TraceRefused) as refused:
        read_trace(file)
    assert f"{file}: line 3: " in str(refused.value)
    assert message in str(refused.value)
    trace, report = read_trace(file, strict=False)
    assert len(trace) == 3
    assert (report.rows_read, report.rows_kept, report.rows_dropped, report.num_problems) == (4, 3, 1, 1)
    assert message in report.problems[0].message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[1, 2]", "found a list: each line must be one JSON object"),
        (b'"row"', 'found "row"'),
        (b'{"timestamp": 0, "input', "not JSON that can be read"),
        (b'{"timestamp": ' + b"1" * 5000 + b"}", "not JSON that can be read"),
        (b'{"timestamp": ' + b"[" * 100_000, "not JSON that can be read"),
        (b'{"a": "\xff"}', "byte 8 of the line is not UTF-8"),
        (b"\x00\x00", "not JSON that can be read"),
    ],
)
def test_lines_that_are_no_rows(file: Path, line: bytes, message: str) -> None:
    file.write_bytes(mooncake_row().encode() + b"\n" + line + b"\n" + mooncake_row().encode())
    with pytest.raises(TraceRefused, match="line 2: ") as refused:
        read_trace(file)
    assert message in str(refused.value)
    assert len(read_trace(file, strict=False)[0]) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2023-11-16 18:15:46.6805900,374", "found 2 columns"),
        ("16/11/2023 18:15,374,44", "TIMESTAMP is '16/11/2023 18:15'"),
        ("2023-13-16 18:15:46.6805900,374,44", "month must be in 1..12"),
        ("2023-11-16 18:15:46.6805900,-374,44", "ContextTokens is -374"),
        ("2023-11-16 18:15:46.6805900,374,nan", 'GeneratedTokens is "nan"'),
        ("2023-11-16 18:15:46.6805900,,44", 'ContextTokens is ""'),
        ("2023-11-16 18:15:46.6805900,99999999999999999999999,44", "ContextTokens is"),
    ],
)
def test_bad_rows_of_azure(file: Path, row: str, message: str) -> None:
    file.write_text(f"{HEADER}\n2023-11-16 18:15:46.6805900,374,44\n{row}\n")
    with pytest.raises(TraceRefused, match="line 3: ") as refused:
        read_trace(file)
    assert message in str(refused.value)


def test_a_name_that_is_given_twice(file: Path) -> None:
    file.write_text("\n".join([bailian_row(4, -1), bailian_row(5, 4, turn=2), bailian_row(4, -1)]))
    with pytest.raises(TraceRefused, match="line 3: chat_id 4 is that of line 1"):
        read_trace(file)
    trace, _ = read_trace(file, strict=False)
    assert trace.parent_request.tolist() == [-1, 0]


def test_many_problems_are_counted_and_a_few_shown(file: Path) -> None:
    rows = [mooncake_row(), mooncake_row(), *(mooncake_row(output_length=-row) for row in range(1, 101)), "{}"]
    file.write_text("\n".join(rows))
    with pytest.raises(TraceRefused) as refused:
        read_trace(file)
    lines = str(refused.value).splitlines()
    assert "line 12: output_length is -10" in lines[9]
    assert "and 91 more problems" in lines[10]
    assert [line.split(":   ")[1] for line in lines[11:]] == [
        "100 x output_length is not allowed",
        "1 x timestamp is missing",
    ]


def test_the_block_size_follows_from_the_rows(file: Path) -> None:
    file.write_text("\n".join(mooncake_row(input_length=n, hash_ids=list(range(-(-n // 24)))) for n in (24, 25, 600)))
    with pytest.raises(TraceRefused, match="line 2: 2 hash_ids for input_length 25: blocks of 25 tokens make it 1"):
        read_trace(file, block_tokens=25)
    trace, report = read_trace(file)
    assert trace.block_tokens == 24
    assert report.block_tokens_from == "the only one, or the only power of two, that fits all rows"
    file.write_text(bailian_row(1, -1, input_length=200, hash_ids=[3, 4, 5]))
    assert read_trace(file, block_tokens=99)[0].block_tokens == 99
    file.write_text(bailian_row(1, -1, input_length=1000, hash_ids=[3, 4]))
    assert read_trace(file)[0].block_tokens == 512
    file.write_text(bailian_row(1, -1, input_length=40, hash_ids=[3]))
    with pytest.raises(TraceError, match="all rows fit any from 40 on: say which"):
        read_trace(file)


def test_wrong_arguments() -> None:
    with pytest.raises(TraceUsageError, match="block size 0 is not allowed: give a whole number from 1 to 2147483647"):
        read_trace(MOONCAKE, block_tokens=0)
    with pytest.raises(TraceUsageError, match="give auto or one of mooncake, bailian, azure, parquet"):
        read_trace(MOONCAKE, format="burstgpt")
    with pytest.raises(TraceUsageError, match="no block hashes"):
        read_trace(AZURE, block_tokens=16)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="nothing_here: cannot be opened: No such file"):
        read_trace(tmp_path / "nothing_here")
    with pytest.raises(TraceFileError, match="cannot be opened: Is a directory"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"\n \r\n", "the file is empty"),
        (gzip.compress(b"", mtime=0), "the file is empty"),
        (HEADER.encode(), "there is no request in it"),
        (b"Timestamp,Model,Request tokens\n5,x,1", "line 1 is 'Timestamp,Model,Request tokens': none of the formats"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:07cedc9e\n", "a pointer of Git LFS"),
        (b"\xff\xfe{\x00", "none of the formats begins so"),
        (b"PAR1 and no more", "is broken, or no Parquet at all"),
    ],
)
def test_files_without_a_trace(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    for strict in (True, False):
        with pytest.raises(TraceError, match=message) as refused:
            read_trace(file, strict=strict)
        assert str(refused.value).startswith(str(file))


def test_wrong_columns(file: Path) -> None:
    file.write_text("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.6805900,374\n")
    with pytest.raises(TraceError, match="line 1 is 'TIMESTAMP,ContextTokens': the columns must be TIMESTAMP,Context"):
        read_trace(file, format="azure")


def test_a_packed_file_that_is_cut_short(file: Path) -> None:
    packed = gzip.compress(MOONCAKE.read_bytes())
    file.write_bytes(packed[: len(packed) * 3 // 4])
    with pytest.raises(TraceRefused) as refused:
        read_trace(file)
    trace, report = read_trace(file, strict=False)
    # The first line that could not be had.
    assert f"line {len(trace) + 1}: the gzip data ends before this line does" in str(refused.value)
    whole, _ = read_trace(MOONCAKE)
    assert report.reasons["cut short"] == 1
    assert 100 < len(trace) < 200
    assert equal(trace, whole.head(len(trace)))


@pytest.mark.parametrize(("broken", "line"), [("content", 1), ("checksum", 201)])
def test_a_packed_file_that_is_broken(file: Path, broken: str, line: int) -> None:
    packed = bytearray(gzip.compress(MOONCAKE.read_bytes()))
    if broken == "content":
        packed[10:] = b"\xff" * 50
    else:
        packed[-8] ^= 1
    file.write_bytes(packed)
    with pytest.raises(TraceRefused, match=rf"line {line}: the gzip data is broken before this line ends"):
        read_trace(file)


def test_a_line_that_does_not_end(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuning.trace.lines.MAX_LINE_BYTES", 500)
    file.write_text(mooncake_row() + "\n" + "x" * 500)
    with pytest.raises(TraceError, match="line 2 is longer than 500 bytes"):
        read_trace(file)
