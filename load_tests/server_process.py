"""Runs one server at a time for a measurement, and leaves none of its processes behind.

A server is a Serve config, started by `serve run` in a Ray session of its own (never one that is already running on
the machine), or any other command. It is asked to stop with SIGTERM to its own pid, which ends Serve and Ray in good
order. What then still lives of the processes it was seen to start is ended one by one.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import psutil  # type: ignore[import-untyped]

from app.overlay import OVERLAY_VARIABLE
from load_tests.processes import ServerProcesses, read_process_table, select, this_process_and_ancestors

_ASK_EVERY_S = 0.25
_LOOK_EVERY_S = 2.0
"""Costs a look at every process of the machine, on the cores that are being measured."""
_END_LIMIT_S = 5.0
_LOG_TAIL_BYTES = 4000
RAY_ENVIRONMENT = {"RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5", "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "2000"}
"""What users are given for Ray's processes by the Makefile and in deploy/, and nothing else."""
_MARK = "EQUIPOISE_LOAD_TEST_SERVER"
"""In the environment of every process of a server; its value is the run's own temporary folder."""


class ServerFailedError(Exception):
    """The server did not come up, or its port is taken; the message holds the end of its output."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """What to start and where it will answer."""

    name: str
    command: tuple[str, ...]
    base_url: str
    own_ray_session: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    """Over this process's own."""


def serve_config(name: str, config: str, base_url: str, overlay: str | None = None) -> ServerSpec:
    """A Serve config file, run by the `serve` of this Python's environment, with an overlay merged over its `args` if
    one is given. Raises FileNotFoundError."""
    if not Path(config).is_file():
        raise FileNotFoundError(f"mode {name!r}: there is no Serve config {config!r}; give a path to a YAML file")
    if overlay is not None and not Path(overlay).is_file():
        raise FileNotFoundError(f"mode {name!r}: there is no overlay {overlay!r}; give a path to a YAML file")
    environment = dict(RAY_ENVIRONMENT)
    if overlay is not None:
        environment[OVERLAY_VARIABLE] = str(Path(overlay).resolve())
    # `--address local` starts a session even where Ray would find a running cluster by itself.
    command = (sys.executable, "-m", "ray.serve.scripts", "run", "--address", "local", config)
    return ServerSpec(name, command, base_url, own_ray_session=True, environment=environment)


def server_command(name: str, command_line: str, base_url: str) -> ServerSpec:
    """Any other server, given as a command line in shell quoting (it is not run by a shell)."""
    command = tuple(shlex.split(command_line))
    if not command:
        raise ValueError(f"mode {name!r}: the command line is empty")
    return ServerSpec(name, command, base_url)


class ServerProcess:
    """One run of a server, as a context manager: entering starts it and waits until `GET /health` answers 200, leaving
    stops it.

    `pid` is the root of its processes. Entering raises ServerFailedError when something else answers at its address,
    when it ends by itself, or when it is not healthy after `start_limit_s`; nothing is left running then.
    """

    def __init__(self, spec: ServerSpec, *, start_limit_s: float = 300.0, stop_limit_s: float = 60.0) -> None:
        self._spec = spec
        self._start_limit_s = start_limit_s
        self._stop_limit_s = stop_limit_s
        self._seen: set[tuple[int, float]] = set()
        self._stop_looking = threading.Event()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ray_address(self) -> str | None:
        """Of the server's own Ray session, as its processes were told it; None when it has none."""
        for row in select(read_process_table(), ServerProcesses(root_pids=(self.pid,))):
            for argument in row.command:
                option, _, address = argument.partition("=")
                if option == "--gcs-address" and address:
                    return address
        return None

    def __enter__(self) -> ServerProcess:
        if _answers(self._spec.base_url):
            raise ServerFailedError(
                f"mode {self._spec.name!r}: a server already answers at {self._spec.base_url}; stop it first"
            )
        # Short, because Ray makes socket files below it and their paths may have 107 bytes.
        self._folder = tempfile.mkdtemp(prefix="eqp-", dir="/tmp")
        environment = {**os.environ, **self._spec.environment, _MARK: self._folder}
        if self._spec.own_ray_session:
            environment.pop("RAY_ADDRESS", None)
            environment["RAY_TMPDIR"] = self._folder
        self._log = Path(self._folder) / "server.log"
        with self._log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    self._spec.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                shutil.rmtree(self._folder, ignore_errors=True)
                raise ServerFailedError(f"mode {self._spec.name!r}: cannot be started: {error}") from error
        self._looker = threading.Thread(target=self._keep_looking, name="server-processes", daemon=True)
        self._looker.start()
        try:
            self._wait_until_healthy()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def log_tail(self) -> str:
        """The last lines that the server wrote."""
        return self._log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")

    def _wait_until_healthy(self) -> None:
        deadline_s = time.monotonic() + self._start_limit_s
        while not _is_healthy(self._spec.base_url):
            if self._process.poll() is not None:
                raise ServerFailedError(
                    f"mode {self._spec.name!r}: the server ended with {self._process.returncode} before it was "
                    f"healthy; it wrote:\n{self.log_tail()}"
                )
            if time.monotonic() > deadline_s:
                raise ServerFailedError(
                    f"mode {self._spec.name!r}: {self._spec.base_url}/health did not answer 200 within "
                    f"{self._start_limit_s:g} s; the server wrote:\n{self.log_tail()}"
                )
            time.sleep(_ASK_EVERY_S)

    def _stop(self) -> None:
        try:
            self._look()
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(self._stop_limit_s)
        except subprocess.TimeoutExpired:
            pass  # Ended below.
        finally:
            # Also when the wait was interrupted: nothing may be left.
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            self._stop_looking.set()
            self._looker.join()
            for number in (signal.SIGTERM, signal.SIGKILL):
                left = self._look()
                for process in left:
                    _signal(process, number)
                psutil.wait_procs(left, timeout=min(_END_LIMIT_S, self._stop_limit_s))
            shutil.rmtree(self._folder, ignore_errors=True)

    def _keep_looking(self) -> None:
        while not self._stop_looking.wait(_LOOK_EVERY_S):
            self._look()

    def _look(self) -> list[psutil.Process]:
        """The server's processes other than the root that live now: by descent, by session, and by the mark in the
        environment they were started with. Remembers them, because a process can lose all three: its parent dies, it
        starts a session, it writes its title over its environment (as Ray's workers do)."""
        rows = read_process_table()
        roots = [
            row.pid
            for row in rows
            if row.key in self._seen or _session_of(row.pid) == self._process.pid or _mark_of(row.pid) == self._folder
        ]
        if self._process.returncode is None:
            roots.append(self._process.pid)
        own = select(rows, ServerProcesses(root_pids=tuple(roots)), without=this_process_and_ancestors())
        alive = []
        for row in own:
            if row.pid == self._process.pid:
                continue
            self._seen.add(row.key)
            try:
                alive.append(psutil.Process(row.pid))
            except psutil.NoSuchProcess:
                continue
        return alive


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _mark_of(pid: int) -> str | None:
    try:
        mark: str | None = psutil.Process(pid).environ().get(_MARK)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    return mark


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        # psutil refuses to signal a pid that has come to name another process.
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def _answers(base_url: str) -> bool:
    """Whether anything speaks HTTP there."""
    return _health_status(base_url) is not None


def _is_healthy(base_url: str) -> bool:
    return _health_status(base_url) == 200


def _health_status(base_url: str) -> int | None:
    try:
        with urllib.request.urlopen(base_url.rstrip("/") + "/health", timeout=5.0) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except (OSError, ValueError):
        return None
