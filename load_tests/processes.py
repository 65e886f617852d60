"""Which processes belong to the server under test, and what to call them.

A process belongs to it when it or one of its ancestors is a given root, or has a command line that matches a given
pattern. Ray sets the titles of its workers (`ray::ServeReplica:app:Ingress`), so patterns find them in a cluster that
somebody else started.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import psutil  # type: ignore[import-untyped]

_RAY_TITLE = re.compile(r"ray::[\w:\-]+")
_PYTHON = re.compile(r"python[\d.]*$")


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One line of the process table. `(pid, started_s)` names a process for good; a pid alone is used again."""

    pid: int
    started_s: float
    """Seconds since the epoch."""
    parent_pid: int
    command: tuple[str, ...]

    @property
    def key(self) -> tuple[int, float]:
        return self.pid, self.started_s


@dataclass(frozen=True, slots=True)
class ServerProcesses:
    """How to find the server's processes. With neither roots nor patterns there are none."""

    root_pids: tuple[int, ...] = ()
    patterns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from error


def process_label(command: Sequence[str]) -> str:
    """A short name that is the same for all processes that do the same, without any folder.

    A Ray title without the method that runs at the moment; `python -m module`; `python script.py`; else the program.
    """
    if not command or not command[0]:
        return "unnamed"
    title = _RAY_TITLE.match(command[0])
    if title:
        return title.group()
    program = PurePath(command[0].split()[0]).name
    if not _PYTHON.match(program):
        return program
    arguments = iter(command[1:])
    for argument in arguments:
        if argument in ("-X", "-W"):
            next(arguments, None)
        elif argument == "-c":
            return "python -c"
        elif argument == "-m":
            return f"python -m {next(arguments, '')}".rstrip()
        elif argument and not argument.startswith("-"):
            return f"python {PurePath(argument).name}"
    return "python"


def select(rows: Iterable[ProcessRow], wanted: ServerProcesses, without: Collection[int] = ()) -> list[ProcessRow]:
    """The rows that belong to the server: matches and their descendants, except for the pids in `without`.

    Pure. A pid in `without` is no match, and its children are not taken for its sake.
    """
    table = {row.pid: row for row in rows if row.pid not in without}
    patterns = [re.compile(pattern) for pattern in wanted.patterns]
    roots = [
        row.pid
        for row in table.values()
        if row.pid in wanted.root_pids or any(pattern.search(" ".join(row.command)) for pattern in patterns)
    ]
    children: dict[int, list[int]] = {}
    for row in table.values():
        children.setdefault(row.parent_pid, []).append(row.pid)
    selected: dict[int, ProcessRow] = {}
    while roots:
        pid = roots.pop()
        if pid not in selected:
            selected[pid] = table[pid]
            roots.extend(children.get(pid, ()))
    return list(selected.values())


def read_process_table() -> list[ProcessRow]:
    """All processes that can be seen now."""
    rows = []
    for process in psutil.process_iter():
        try:
            with process.oneshot():
                rows.append(ProcessRow(process.pid, process.create_time(), process.ppid(), tuple(process.cmdline())))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return rows


def this_process_and_ancestors() -> set[int]:
    """Pids that a pattern must not match: the command lines of the load generator and of the shell that started it
    hold the pattern."""
    me = psutil.Process()
    return {me.pid, *(parent.pid for parent in me.parents())}


def server_rows(wanted: ServerProcesses) -> list[ProcessRow]:
    """The server's processes as they are now. Skips the process table when nothing is wanted."""
    if not wanted.root_pids and not wanted.patterns:
        return []
    return select(read_process_table(), wanted, without=this_process_and_ancestors())
