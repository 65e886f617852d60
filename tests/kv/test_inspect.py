from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kv.disk.tier import DiskTier
from kv.inspect import main
from tests.kv.disk.extents_to_write import Extent, chain_keys, make_extent

IDS = [f"{number:032x}" for number in (0xA << 124, 0xB << 124, 0xC << 124)]
EXTENTS = [
    make_extent(2, fingerprint=b"\1" * 32),
    make_extent(3, first_block=2, layer_groups=2, fingerprint=b"\1" * 32),
    make_extent(4, fingerprint=b"\2" * 32),
]


def size_of(extent: Extent) -> int:
    return DiskTier.size_on_disk(extent.sizes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tier = DiskTier.open(tmp_path, 10**6, remove_leftovers=True)
    for age_s, (extent_id, extent) in enumerate(zip(IDS, EXTENTS, strict=True)):
        assert tier.reserve(size_of(extent))
        tier.write(extent_id, extent.parent, extent.buffers)
        last_use_s = time.time() - 3600 * (3 - age_s)
        os.utime(path_of(tmp_path, extent_id), (last_use_s, last_use_s))
    tier.close()
    return tmp_path


def path_of(folder: Path, extent_id: str) -> Path:
    return folder / extent_id[:2] / f"{extent_id}.kv"


def damage(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    output = capsys.readouterr()
    return status, output.out, output.err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    status, output, _ = inspected(capsys, *arguments, "--json")
    return status, json.loads(output)


def test_what_was_used_in_the_future_has_no_age(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The clock was set back since."""
    os.utime(path_of(folder, IDS[0]), (time.time() + 3600, time.time() + 3600))
    _, found = as_json(capsys, folder)
    assert {row["extent"]: row["age_s"] for row in found["extents"]}[IDS[0]] == 0


def test_extents_and_totals_are_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = as_json(capsys, folder)
    assert status == 0
    for row, age_s in zip(found["extents"], (3 * 3600, 2 * 3600, 3600), strict=True):
        assert age_s <= row.pop("age_s") < age_s + 600
    keys = [key.hex() for key in chain_keys(5)]
    columns = ("extent", "model", "parent", "last_key", "first_block", "blocks", "parts", "bytes")
    sizes = [size_of(extent) for extent in EXTENTS]
    assert found["extents"] == [
        dict(zip(columns, values, strict=True))
        for values in (
            (IDS[0], "01" * 32, "root", keys[1], 0, 2, 1, sizes[0]),
            (IDS[1], "01" * 32, keys[1], keys[4], 2, 3, 2, sizes[1]),
            (IDS[2], "02" * 32, "root", keys[3], 0, 4, 1, sizes[2]),
        )
    ]
    assert found["models"] == [
        {"model": "01" * 32, "extents": 2, "blocks": 5, "bytes": sizes[0] + sizes[1]},
        {"model": "02" * 32, "extents": 1, "blocks": 4, "bytes": sizes[2]},
    ]
    assert (found["problems"], found["is_broken"]) == ([], False)


def test_tables_have_the_columns_of_the_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path_of(folder, IDS[2]).write_bytes(b"")
    _, found = as_json(capsys, folder)
    status, text, _ = inspected(capsys, folder)
    assert status == 0
    extents, models, rest = (block.splitlines() for block in text.split("\n\n")[:3])
    for lines, rows in ((extents, found["extents"]), (models, found["models"]), (rest, found["problems"])):
        assert lines[0].split() == list(rows[0])
        assert len(lines) == 1 + len(rows)
    ages = {row.pop("age_s") for row in found["extents"]}
    assert len(ages) == 2
    for line, row in zip(extents[1:], found["extents"], strict=True):
        shown = [str(row[name])[:12] if name in ("model", "parent", "last_key") else str(row[name]) for name in row]
        assert line.split()[:-1] == shown
    assert "2 extents" in text.splitlines()[-1]


def test_a_running_store_is_not_disturbed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tier = DiskTier.open(folder, 10**6, remove_leftovers=True)
    before = {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}
    assert inspected(capsys, folder, "--verify")[0] == 0
    assert {path: path.lstat().st_mtime_ns for path in folder.rglob("*")} == before
    assert tier.num_extents == 3
    tier.close()


def test_verifying_finds_what_the_list_does_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = path_of(folder, IDS[1])
    damage(path, path.stat().st_size - 100)
    status, found = as_json(capsys, folder)
    assert (status, len(found["extents"]), found["is_broken"]) == (0, 3, False)
    status, found = as_json(capsys, folder, "--verify")
    assert (status, found["is_broken"]) == (1, True)
    assert [row["extent"] for row in found["extents"]] == [IDS[0], IDS[2]]
    assert [row["extents"] for row in found["models"]] == [1, 1]
    (problem,) = found["problems"]
    assert problem["path"] == f"b0/{IDS[1]}.kv"
    assert problem["reason"] == "checksum"
    assert problem["bytes"] == size_of(EXTENTS[1])
    assert "checksum" in inspected(capsys, folder, "--verify")[1]


def test_broken_and_left_over_files_are_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(path_of(folder, IDS[0]), 0)
    (folder / "a0" / f".{IDS[0]}.tmp").write_bytes(b"unfinished")
    (folder / "a0" / "evil\x1b[2J\n\udcff.kv").write_bytes(b"")
    status, found = as_json(capsys, folder)
    assert status == 0
    assert found["is_broken"]
    reasons = {problem["path"]: (problem["reason"], problem["bytes"]) for problem in found["problems"]}
    assert reasons == {
        f"a0/{IDS[0]}.kv": ("magic", size_of(EXTENTS[0])),
        f"a0/.{IDS[0]}.tmp": ("temporary", 4096),
        "a0/evil\x1b[2J\n\udcff.kv": ("foreign", 0),
    }
    assert "\x1b" not in inspected(capsys, folder)[1]


def test_left_over_files_alone_are_not_broken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a0" / f".{IDS[0]}.tmp").write_bytes(b"unfinished")
    assert inspected(capsys, folder, "--verify")[0] == 0


def test_an_empty_tier_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DiskTier.open(tmp_path, 0, remove_leftovers=True).close()
    status, text, _ = inspected(capsys, tmp_path, "--verify")
    assert (status, text.count("\n")) == (0, 1)
    assert text.startswith("0 extents")


@pytest.mark.parametrize("name", ["missing", "file", "folder"])
def test_what_is_no_tier_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    status, text, message = inspected(capsys, tmp_path / name)
    assert (status, text) == (2, "")
    assert str(tmp_path / name) in message
    assert "disk tier" in message


def test_it_is_a_command(folder: Path) -> None:
    command = [sys.executable, "-m", "kv.inspect"]
    listed = subprocess.run([*command, str(folder), "--verify"], capture_output=True, text=True, check=True)
    assert listed.stderr == ""
    assert IDS[0] in listed.stdout
    text = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
    assert "python -m kv.inspect ~/" in text
