from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from load_tests.page_cache import PagesKeptError, cached_share, drop_pages


def test_files_leave_memory_again_and_again_until_it_is_ended(
    tmp_path: Path, until: Callable[[Callable[[], bool]], None]
) -> None:
    deep = tmp_path / "folder" / "deep"
    first, other = deep / "a.kv", deep / "a.txt"
    probe = tmp_path / "probe"
    probe.write_bytes(os.urandom(1 << 16))
    try:
        drop_pages([probe])
    except PagesKeptError:
        pytest.skip("the temporary folder lies in memory")
    command = [sys.executable, "-m", "load_tests.keep_cold", str(tmp_path / "folder"), "--every-s", "0.01"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            deep.mkdir(parents=True)  # the folder may come later
            for path in (other, first):
                path.write_bytes(os.urandom(1 << 16))
            until(lambda: cached_share(first) == 0)
            assert len(first.read_bytes()) == 1 << 16
            until(lambda: cached_share(first) == 0)
            assert cached_share(other) == 1
        finally:
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "times a file was dropped" in err
