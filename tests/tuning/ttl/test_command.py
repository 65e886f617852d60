from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kv.policy.policy_file import load
from tests.tuning.ttl.path_traces import path_trace
from tuning.simulator.group_roots import root_key
from tuning.trace.own_parquet import schema, write
from tuning.trace.reading import read_trace
from tuning.ttl.__main__ import main
from tuning.ttl.live_keys import live_keys

PREFIX_EVERY = 10


def mooncake_rows() -> list[dict[str, object]]:
    """Two prompts of three blocks come back, the others do not."""
    rows = []
    for number in range(100):
        prefix = {0: [1, 2, 3], 5: [4, 5, 6]}.get(number % PREFIX_EVERY, [])
        hashes = prefix or [100 + 3 * number, 101 + 3 * number, 102 + 3 * number]
        rows.append({"timestamp": 1000 * number, "input_length": 1536, "output_length": 5, "hash_ids": hashes})
    return rows


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "made-up.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in mooncake_rows()))
    return path


def test_a_policy_for_the_simulator(mooncake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "policy.json"
    arguments = ["--trace", str(mooncake), "--capacity-blocks", "7", "--out", str(out), "--eviction", "lfu", "--json"]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["budget_block_s"] == 7 * 99
    assert [group["name"] for group in report["groups"]] == ["rest", "group-1", "group-2"]
    assert [group["root_block"] for group in report["groups"]] == [None, 0, 15]
    assert [group["blocks"] for group in report["groups"]] == [240, 3, 3]
    assert [group["ttl_s"] for group in report["groups"]] == [0, 10, 10]
    assert [group["hits"] for group in report["groups"]] == [0, 27, 27]
    # Three blocks each: 9 times from one use to the next, and once after the last.
    assert [group["block_s"] for group in report["groups"]] == [0, 300, 300]
    assert report["hits"] == report["bound_hits"] == 54
    assert report["same_trace"]["group_ttl"] == 54 / 300
    spec = load(out.read_text())
    assert spec.eviction == "lfu"
    assert spec.default_ttl_s == 1e-6
    assert [(group.root, group.ttl_s) for group in spec.groups] == [(root_key(0), 10), (root_key(15), 10)]


def test_a_policy_that_a_live_store_would_misread_is_told(
    mooncake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "policy.json"
    arguments = ["--trace", str(mooncake), "--capacity-blocks", "7"]
    assert main(arguments) == 0
    assert capsys.readouterr().err == ""  # nothing is written that could be misread
    assert main([*arguments, "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert f"{out} is for the simulator only" in said
    assert "time-to-live of the rest, 0.000 s" in said
    assert "--max-groups 0" in said
    assert main(["--trace", str(mooncake), "--capacity-blocks", "70", "--max-groups", "0", "--out", str(out)]) == 2
    capsys.readouterr()
    more = ["--trace", str(mooncake), "--capacity-blocks", "70", "--max-groups", "0", "--out", str(out), "--overwrite"]
    assert main(more) == 0
    assert capsys.readouterr().err == ""
    assert not load(out.read_text()).groups


@pytest.mark.parametrize("comes_back", [True, False])
def test_groups_and_ttls_that_do_not_pay_are_told_with_what_to_do(
    comes_back: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five blocks come every ten seconds, five others never again. Six blocks of LRU never hit; groups keep the five,
    which does not help when the second half has others."""
    rows = []
    for number in range(200):
        again = number % 10 if comes_back or number < 100 else 100 + number % 10
        block = again if number % 2 == 0 else 1000 + number
        rows.append({"timestamp": 1000 * number, "input_length": 512, "output_length": 5, "hash_ids": [block]})
    path = tmp_path / "made-up.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--trace", str(path), "--capacity-blocks", "6"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert ("these groups are hindsight. One TTL for all is had with --max-groups 0" in said) != comes_back
    assert ("LRU alone does as well on the second half" in said) != comes_back
    assert main([*arguments[:-1], "20", "--max-groups", "0"]) == 0
    assert "hindsight" not in capsys.readouterr().out


def test_the_same_for_people(mooncake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", str(mooncake), "--budget-block-s", "693"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "made-up: 100 requests, 300 block uses in 99.0 s"
    assert lines[1] == "budget: 693 block-seconds, 7.0 blocks on average; taken: 600 block-seconds"
    assert lines[2].startswith("hits by group: 54 of at most 54 within the budget")
    assert any(line.split() == ["group-2", "15", "3", "27", "27", "10.000", "s", "300"] for line in lines)
    assert any(line.startswith("same trace") for line in lines)
    assert any(line.startswith("second half by first") for line in lines)


@pytest.mark.parametrize("option", ["--capacity-blocks", "--budget-block-s"])
@pytest.mark.parametrize("given", ["0", "-1", "nan", "many"])
def test_a_budget_of_nothing_is_refused(
    mooncake: Path, capsys: pytest.CaptureFixture[str], option: str, given: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--trace", str(mooncake), option, given])
    assert ended.value.code == 2
    assert f"'{given}' is not allowed: give a number above 0, or inf for no limit" in capsys.readouterr().err


def test_a_budget_that_keeps_no_block_until_its_next_use_is_refused_with_the_least_that_does(
    mooncake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Three blocks for ten seconds, ten times: 300 block-seconds in 99 s.
    out = tmp_path / "policy.json"
    command = ["--trace", str(mooncake), "--out", str(out), "--budget-block-s"]
    assert main([*command, "299"]) == 2
    assert (
        "give --budget-block-s 300 or more, or --capacity-blocks 3.031 or more for as many" in capsys.readouterr().err
    )
    assert not out.exists()
    assert main([*command, "300"]) == 0
    assert [group.ttl_s for group in load(out.read_text()).groups].count(10) == 1


def test_a_trace_that_uses_nothing_again_has_no_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "made-up.jsonl"
    rows = [{"timestamp": 1000 * n, "input_length": 512, "output_length": 5, "hash_ids": [n]} for n in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["--trace", str(path), "--capacity-blocks", "2"]) == 2
    assert "no block of the trace is used again later" in capsys.readouterr().err


def test_without_limit(mooncake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "policy.json"
    assert main(["--trace", str(mooncake), "--budget-block-s", "inf", "--out", str(out)]) == 0
    assert "budget: no limit" in capsys.readouterr().out
    assert main(["--trace", str(mooncake), "--capacity-blocks", "inf", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["budget_block_s"] is None
    assert load(out.read_text()).ttls_s == (None, None, None)


def test_keys_of_the_live_store(mooncake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file with 32-byte keys, its rows not in the order of time."""
    rows = mooncake_rows()[::-1]
    keys = [[hashlib.sha256(str(block).encode()).digest() for block in row["hash_ids"]] for row in rows]  # type: ignore[attr-defined]
    form = schema(512, hash_bytes=32, with_kind=False)
    columns = {
        "arrival_s": [row["timestamp"] / 1000 for row in rows],  # type: ignore[operator]
        "input_tokens": [1536] * len(rows),
        "output_tokens": [5] * len(rows),
        "block_hashes": keys,
        "parent_request": [-1] * len(rows),
        "turn": [1] * len(rows),
    }
    path, out = tmp_path / "served.parquet", tmp_path / "policy.json"
    pq.write_table(pa.Table.from_pydict(columns, schema=form), path)
    assert main(["--trace", str(path), "--capacity-blocks", "7", "--out", str(out)]) == 0
    assert "sorted" in capsys.readouterr().err
    roots = [group.root for group in load(out.read_text()).groups]
    assert roots == [hashlib.sha256(b"1").digest(), hashlib.sha256(b"4").digest()]


def test_a_converted_trace_has_no_keys(tmp_path: Path) -> None:
    path = tmp_path / "converted.parquet"
    trace = path_trace((0, "ab"), (1, "ab"))
    write(trace, path)
    assert live_keys(path, read_trace(path)[0], [0]) is None
    with pytest.raises(ValueError, match="has 2 rows, the trace 1 requests"):
        live_keys(path, trace.head(1), [0])


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        ("", 1, "empty"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n", 2, "no block hashes"),
        ('{"timestamp": 0, "input_length": 0}\n', 1, "line 1"),
    ],
)
def test_traces_that_say_nothing_are_refused(
    content: str, status: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    assert main(["--trace", str(path), "--capacity-blocks", "7"]) == status
    assert message in capsys.readouterr().err


def test_a_policy_that_is_there_is_kept(mooncake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "policy.json"
    out.write_text("mine")
    arguments = ["--trace", str(mooncake), "--capacity-blocks", "7", "--out", str(out)]
    assert main(arguments) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert main([*arguments, "--overwrite"]) == 0
    assert load(out.read_text()).groups


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        ["--capacity-blocks", "7", "--budget-block-s", "7"],
        ["--capacity-blocks", "-1"],
        ["--capacity-blocks", "nan"],
        ["--capacity-blocks", "many"],
        ["--capacity-blocks", "7", "--coverage", "0"],
        ["--capacity-blocks", "7", "--coverage", "1.01"],
        ["--capacity-blocks", "7", "--max-groups", "-1"],
        ["--capacity-blocks", "7", "--max-groups", "1.5"],
        ["--capacity-blocks", "7", "--block-size", "0"],
    ],
)
def test_options_without_sense_are_refused(
    wrong: list[str], mooncake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--trace", str(mooncake), *wrong])
    assert left.value.code == 2
    assert "error:" in capsys.readouterr().err
