from __future__ import annotations

import os
import signal
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from load_tests.server_process import ServerFailedError, ServerProcess, ServerSpec, serve_config, server_command


@pytest.fixture
def spec(server_script: Path, unused_port: int) -> Callable[..., ServerSpec]:
    def make(*options: str) -> ServerSpec:
        command = (sys.executable, str(server_script), "--port", str(unused_port), *options)
        return ServerSpec("tiny", command, f"http://127.0.0.1:{unused_port}")

    return make


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_server_is_healthy_inside_and_gone_afterwards(spec: Callable[..., ServerSpec]) -> None:
    made = spec()
    with ServerProcess(made) as server:
        with urllib.request.urlopen(f"{made.base_url}/v1/models", timeout=30) as response:
            assert response.status == 200
        assert os.getpgid(server.pid) == server.pid
        pid = server.pid
    assert is_gone(pid)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{made.base_url}/health", timeout=30)


def test_it_is_gone_too_when_the_measurement_fails(spec: Callable[..., ServerSpec]) -> None:
    pids = []

    def measure_until_interrupted() -> None:
        with ServerProcess(spec()) as server:
            pids.append(server.pid)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_until_interrupted()
    assert is_gone(pids[0])


def test_strays_in_other_sessions_without_their_parent_are_ended_too(
    spec: Callable[..., ServerSpec], tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    with ServerProcess(spec("--stray", str(pid_file)), stop_limit_s=2.0):
        stray = int(pid_file.read_text())
        assert os.getsid(stray) == stray
        assert not is_gone(stray)
    assert is_gone(stray)


def test_a_server_that_ignores_sigterm_is_killed(spec: Callable[..., ServerSpec]) -> None:
    with ServerProcess(spec("--stubborn"), stop_limit_s=0.5) as server:
        pid = server.pid
    assert is_gone(pid)


def test_a_server_that_never_gets_healthy(spec: Callable[..., ServerSpec], tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with (
        pytest.raises(ServerFailedError, match="did not answer 200 within 3 s"),
        ServerProcess(spec("--unhealthy", "--stray", str(pid_file)), start_limit_s=3.0, stop_limit_s=2.0),
    ):
        pass
    assert is_gone(int(pid_file.read_text()))


def test_a_server_that_ends_by_itself_says_why(spec: Callable[..., ServerSpec]) -> None:
    with (
        pytest.raises(ServerFailedError, match=r"(?s)ended with 2 before it was healthy.*unrecognized arguments"),
        ServerProcess(spec("--no-such-option")),
    ):
        pass


def test_a_program_that_is_not_there() -> None:
    made = server_command("ghost", "/no/such/program --x", "http://127.0.0.1:9")
    with pytest.raises(ServerFailedError, match="cannot be started"), ServerProcess(made):
        pass


def test_another_server_at_the_address_is_not_measured_by_mistake(start_server: Callable[..., Any]) -> None:
    other = start_server()
    made = server_command("late", f"{sys.executable} -c pass", other.url)
    with pytest.raises(ServerFailedError, match="already answers"), ServerProcess(made):
        pass
    assert other.get("/v1/models")["data"]


def test_an_interrupted_stop_leaves_nothing(spec: Callable[..., ServerSpec], until: Callable[..., None]) -> None:
    """A signal that arrives while the server is being stopped must not leave it running."""
    server = ServerProcess(spec("--stubborn"), stop_limit_s=60.0)
    server.__enter__()

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(KeyboardInterrupt):
            server.__exit__(None, None, None)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    until(lambda: is_gone(server.pid))


def test_the_two_kinds_of_server(tmp_path: Path) -> None:
    config = tmp_path / "local.yaml"
    config.write_text("applications: []\n")
    served = serve_config("mine", str(config), "http://127.0.0.1:8000")
    assert served.command[1:] == ("-m", "ray.serve.scripts", "run", "--address", "local", str(config))
    assert served.own_ray_session
    with pytest.raises(FileNotFoundError, match="there is no Serve config"):
        serve_config("mine", str(tmp_path / "other.yaml"), "http://127.0.0.1:8000")
    assert server_command("vllm", "python -m 'a b'", "http://x").command == ("python", "-m", "a b")
    with pytest.raises(ValueError, match="empty"):
        server_command("vllm", " ", "http://x")


def test_a_served_config_gets_a_ray_session_of_its_own(
    monkeypatch: pytest.MonkeyPatch, server_script: Path, unused_port: int
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.1.2.3:6379")
    command = (sys.executable, str(server_script), "--port", str(unused_port))
    made = ServerSpec("tiny", command, f"http://127.0.0.1:{unused_port}", own_ray_session=True)
    with ServerProcess(made) as server:
        environment = psutil.Process(server.pid).environ()
    assert "RAY_ADDRESS" not in environment
    # Ray's sockets lie some 60 bytes below it, and may have 107.
    assert len(environment["RAY_TMPDIR"]) < 40
    assert not Path(environment["RAY_TMPDIR"]).exists()


def test_an_overlay_is_named_in_the_servers_environment_alone(
    server_script: Path, unused_port: int, tmp_path: Path
) -> None:
    config, overlay = tmp_path / "config.yaml", tmp_path / "overlay.yaml"
    config.touch()
    with pytest.raises(FileNotFoundError, match="no overlay"):
        serve_config("tiny", str(config), "http://x", str(overlay))
    overlay.touch()
    made = serve_config("tiny", str(config), f"http://127.0.0.1:{unused_port}", str(overlay))
    command = (sys.executable, str(server_script), "--port", str(unused_port))
    with ServerProcess(replace(made, command=command)) as server:
        assert psutil.Process(server.pid).environ()["EQUIPOISE_OVERLAY"] == str(overlay)
    assert "EQUIPOISE_OVERLAY" not in os.environ


def test_the_ray_session_is_the_one_that_the_servers_own_processes_name(server_script: Path, unused_port: int) -> None:
    server_command_line = f"{sys.executable} {server_script} --port {unused_port}"
    with_raylet = f"{sys.executable} -c 'import time; time.sleep(600)' --gcs-address=127.0.0.1:4321 & exec "
    for beside, address in ((with_raylet, "127.0.0.1:4321"), ("exec ", None)):
        made = ServerSpec("tiny", ("sh", "-c", beside + server_command_line), f"http://127.0.0.1:{unused_port}")
        with ServerProcess(made, stop_limit_s=2.0) as server:
            assert server.ray_address() == address
