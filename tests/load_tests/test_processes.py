from __future__ import annotations

import os
import subprocess
import sys

import pytest

from load_tests.processes import (
    ProcessRow,
    ServerProcesses,
    process_label,
    read_process_table,
    select,
    server_rows,
    this_process_and_ancestors,
)


@pytest.mark.parametrize(
    ("command", "label"),
    [
        (["ray::ServeReplica:default:Ingress.handle_request", "", ""], "ray::ServeReplica:default:Ingress"),
        (["ray::ServeReplica:my-app:Decode"], "ray::ServeReplica:my-app:Decode"),
        (["ray::Worker.step"], "ray::Worker"),
        (["ray::IDLE"], "ray::IDLE"),
        (["/opt/x/raylet/raylet", "--raylet_socket_name=/tmp/x"], "raylet"),
        (["/usr/bin/python3.11", "-u", "/srv/app/agent.py", "--port=1"], "python agent.py"),
        (["python", "-m", "uvicorn", "main:app"], "python -m uvicorn"),
        (["python", "-X", "dev", "-c", "print(1)"], "python -c"),
        (["python3", "-c", "import time"], "python -c"),
        (["python"], "python"),
        (["nginx: worker process"], "nginx:"),
        ([], "unnamed"),
        ([""], "unnamed"),
    ],
)
def test_labels(command: list[str], label: str) -> None:
    assert process_label(command) == label


#   1 init
#   +- 10 shell "load_tests.run --cpu-of ray::"
#   |  +- 11 the load generator itself (same words)
#   +- 20 raylet
#   |  +- 21 ray::A
#   |  |  +- 23 helper
#   |  +- 22 ray::B
#   +- 30 other
ROWS = [
    ProcessRow(1, 0.0, 0, ("init",)),
    ProcessRow(10, 1.0, 1, ("sh", "-c", "python -m load_tests.run --cpu-of ray::")),
    ProcessRow(11, 1.0, 10, ("python", "-m", "load_tests.run", "--cpu-of", "ray::")),
    ProcessRow(20, 2.0, 1, ("raylet",)),
    ProcessRow(21, 2.0, 20, ("ray::A",)),
    ProcessRow(22, 2.0, 20, ("ray::B",)),
    ProcessRow(23, 2.0, 21, ("helper",)),
    ProcessRow(30, 2.0, 1, ("other",)),
]


@pytest.mark.parametrize(
    ("wanted", "without", "pids"),
    [
        (ServerProcesses(root_pids=(20,)), (), {20, 21, 22, 23}),
        (ServerProcesses(patterns=("ray::",)), (1, 10, 11), {21, 22, 23}),
        (ServerProcesses(patterns=("ray::",)), (), {10, 11, 21, 22, 23}),
        (ServerProcesses(patterns=("^ray::B$", "other")), (), {22, 30}),
        (ServerProcesses(root_pids=(1,)), (11,), {1, 10, 20, 21, 22, 23, 30}),
        (ServerProcesses(root_pids=(99,)), (), set()),
        (ServerProcesses(), (), set()),
    ],
)
def test_selection(wanted: ServerProcesses, without: tuple[int, ...], pids: set[int]) -> None:
    assert {row.pid for row in select(ROWS, wanted, without)} == pids


def test_a_circle_of_parents_ends() -> None:
    rows = [ProcessRow(1, 0.0, 2, ("a",)), ProcessRow(2, 0.0, 1, ("b",))]
    assert {row.pid for row in select(rows, ServerProcesses(root_pids=(1,)))} == {1, 2}


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="no regular expression"):
        ServerProcesses(patterns=("ray::(",))


def test_the_real_process_table() -> None:
    mark = f"mark-{os.getpid()}"
    child = subprocess.Popen([sys.executable, "-c", "input()", mark], stdin=subprocess.PIPE)
    try:
        table = {row.pid: row for row in read_process_table()}
        assert table[child.pid].parent_pid == os.getpid()
        assert mark in table[child.pid].command
        assert [row.pid for row in server_rows(ServerProcesses(patterns=(mark,)))] == [child.pid]
        assert {os.getpid(), os.getppid()} <= this_process_and_ancestors()
        assert server_rows(ServerProcesses()) == []
    finally:
        child.communicate()
