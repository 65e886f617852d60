"""Keys that change while the server runs."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from pathlib import Path

import pytest

from app.api_keys import ApiKeysError, new_key
from app.key_file import KeyFile

ALICE, ALICES_LINE = new_key("alice")
BOB, BOBS_LINE = new_key("bob")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(ALICES_LINE + "\n")
    return path


async def asked(file: KeyFile, key: str) -> str | None:
    principal = (await file.current()).authenticate(f"Bearer {key}")
    return None if principal is None else principal.name


def who(file: KeyFile, *keys: str) -> list[str | None]:
    """Whose keys these are, asked one after the other."""

    async def ask() -> list[str | None]:
        return [await asked(file, key) for key in keys]

    return asyncio.run(ask())


def test_keys_come_and_go_with_their_lines(path: Path) -> None:
    file = KeyFile(path, check_period_s=0)
    assert who(file, ALICE, BOB) == ["alice", None]
    path.write_text(f"{ALICES_LINE}\n{BOBS_LINE}\n")
    assert who(file, ALICE, BOB) == ["alice", "bob"]
    # As editors and `mv` do it: another file in its place.
    (path.parent / "new").write_text(BOBS_LINE + "\n")
    (path.parent / "new").replace(path)
    assert who(file, ALICE, BOB) == [None, "bob"]


@pytest.mark.parametrize("content", ["", "no line of a key file", "# all are gone\n"])
def test_a_file_that_is_wrong_locks_nobody_out(path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    file = KeyFile(path, check_period_s=0)
    with caplog.at_level(logging.ERROR, "ray.serve"):
        path.write_text(content)
        assert who(file, ALICE) == ["alice"]
    assert ["the API keys stay as they were" in record.getMessage() for record in caplog.records] == [True]
    path.write_text(BOBS_LINE + "\n")
    assert who(file, ALICE, BOB) == [None, "bob"]


def test_a_file_that_is_gone_locks_nobody_out(path: Path) -> None:
    file = KeyFile(path, check_period_s=0)
    path.unlink()
    assert who(file, ALICE) == ["alice"]


def test_a_file_that_could_not_be_opened_is_tried_again(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = KeyFile(path, check_period_s=0)
    (path.parent / "new").write_text(BOBS_LINE + "\n")
    (path.parent / "new").replace(path)

    async def ask_without_files() -> list[str | None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))  # as in a server that has too many connections
        try:
            return [await asked(file, ALICE) for _ in range(3)]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    with caplog.at_level(logging.ERROR, "ray.serve"):
        assert asyncio.run(ask_without_files()) == ["alice"] * 3
    assert ["Too many open files" in record.getMessage() for record in caplog.records] == [True]
    assert who(file, ALICE, BOB) == [None, "bob"]


def test_a_file_with_its_old_time_and_size_is_read(path: Path) -> None:
    file = KeyFile(path, check_period_s=0)
    before = path.stat()
    path.write_text(ALICES_LINE.replace("alice", "alicf") + "\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns, after.st_size) == (before.st_ino, before.st_mtime_ns, before.st_size)
    assert who(file, ALICE) == ["alicf"]


def test_a_pipe_in_its_place_holds_nobody_up(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = KeyFile(path, check_period_s=0)
    path.unlink()
    os.mkfifo(path)
    with caplog.at_level(logging.ERROR, "ray.serve"):
        assert who(file, ALICE) == ["alice"]
    assert ["is no regular file" in record.getMessage() for record in caplog.records] == [True]


def test_a_file_is_read_beside_the_event_loop(path: Path) -> None:
    file = KeyFile(path, check_period_s=0)
    path.write_text(BOBS_LINE + "\n")

    async def ask() -> tuple[str | None, str | None]:
        waiting = asyncio.create_task(asked(file, BOB))
        await asyncio.sleep(0)  # the task is at the file
        assert not waiting.done()
        return await waiting, await asked(file, ALICE)

    assert asyncio.run(ask()) == ("bob", None)


def test_between_two_looks_nothing_is_read(path: Path) -> None:
    file = KeyFile(path, check_period_s=3600)
    path.write_text(BOBS_LINE + "\n")
    assert who(file, ALICE, BOB) == ["alice", None]


def test_at_the_start_a_wrong_file_is_an_error(path: Path) -> None:
    path.write_text("nothing")
    with pytest.raises(ApiKeysError):
        KeyFile(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        KeyFile(path)
