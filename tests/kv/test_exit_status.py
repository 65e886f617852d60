from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

LITTLE, MUCH = "print('x')", "print('x' * 10**6); print('y' * 10**6)"
HELP = "argparse.ArgumentParser().parse_args(['--help'])"
RUN = """
import argparse, sys
from kv.exit_status import status_of
def main():
    {body}
    return 1
sys.exit(status_of(main))
"""


@pytest.fixture
def closed_pipe() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def ended(body: str, stdout: int) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(body=body)], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("body", [LITTLE, MUCH])
def test_a_reader_that_has_gone_ends_a_program_quietly(body: str, closed_pipe: int) -> None:
    assert ended(body, closed_pipe) == (141, "")


@pytest.mark.parametrize("body", [LITTLE, MUCH, HELP])
def test_a_full_disk_is_one_line_and_2(body: str) -> None:
    with open("/dev/full", "wb") as full:
        assert ended(body, full.fileno()) == (2, "the output cannot be written: No space left on device\n")


def test_else_the_status_is_the_programs_own() -> None:
    assert ended(LITTLE, subprocess.DEVNULL) == (1, "")
    assert ended(HELP, subprocess.DEVNULL) == (0, "")
    status, said = ended("open('/no/such/file')", subprocess.DEVNULL)
    assert status == 1
    assert said.endswith("FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file'\n")
