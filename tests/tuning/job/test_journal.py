"""A journal that was cut off goes on as if the last line had never been begun."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from tests.tuning.job.job_runs import arguments, found_by, make_files, run
from tuning.job.job import CHOSEN, UNUSABLE, main
from tuning.job.job_error import JobError
from tuning.job.journal import open_journal


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Of a study with two trials."""
    path = tmp_path / "study.journal"
    study = optuna.create_study(storage=JournalStorage(JournalFileBackend(str(path))), study_name="s")
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    return path


def test_wherever_it_was_cut_it_can_be_read_and_written_again(journal: Path) -> None:
    content = journal.read_bytes()
    for length in range(len(content)):
        journal.write_bytes(content[:length])
        storage = open_journal(journal)
        assert journal.read_bytes() == content[: content.rfind(b"\n", 0, length) + 1]
        if length % 150 == 0:  # each write waits for the disk
            optuna.create_study(storage=storage, study_name="after")
            again = JournalStorage(JournalFileBackend(str(journal)))
            assert "after" in optuna.get_all_study_names(again)
    journal.write_bytes(content)
    open_journal(journal)
    assert journal.read_bytes() == content


@pytest.mark.parametrize("line", [b"", b"{", b"\0\0\0", b"\xff", b"5", b"{}", b'{"op_code":99}', b'{"op_code":4}'])
def test_other_damage_is_said_with_its_line_and_nothing_is_written(journal: Path, line: bytes) -> None:
    lines = journal.read_bytes().split(b"\n")
    for damaged in ([*lines[:2], line, *lines[3:-1], b'{"cut'], [*lines[:-1], line, b""]):
        journal.write_bytes(b"\n".join(damaged))
        number = damaged.index(line) + 1
        with pytest.raises(JobError, match=rf"study\.journal, line {number}: damaged"):
            open_journal(journal)
        assert journal.read_bytes() == b"\n".join(damaged)


def test_the_lock_of_a_job_that_was_killed_while_it_wrote_is_removed(journal: Path) -> None:
    JournalFileSymlinkLock(str(journal)).acquire()  # and never released
    lock = journal.with_name("study.journal.lock")
    assert lock.is_symlink()
    storage = open_journal(journal)
    assert not lock.is_symlink()
    optuna.create_study(storage=storage, study_name="after")
    assert not lock.is_symlink()
    again = JournalStorage(JournalFileBackend(str(journal)))
    assert set(optuna.get_all_study_names(again)) == {"s", "after"}


def test_a_job_goes_on_from_a_journal_that_was_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_files(tmp_path)
    more = ("--evaluations", "4")
    status, unbroken = run(tmp_path, *more)
    assert status == CHOSEN
    journal = tmp_path / "out" / "study.journal"
    content = journal.read_bytes()
    journal.write_bytes(content[: len(content) - 7])
    status, resumed = run(tmp_path, *more)
    assert status == CHOSEN
    assert found_by(resumed) == found_by(unbroken)

    lines = journal.read_bytes().split(b"\n")
    lines[4] = lines[4][:-3]
    journal.write_bytes(b"\n".join(lines))
    capsys.readouterr()
    assert main(arguments(tmp_path, *more)) == UNUSABLE
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"tuning.job: {journal}, line 5: damaged")
    assert journal.read_bytes() == b"\n".join(lines)
