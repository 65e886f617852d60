from __future__ import annotations

import subprocess
import sys

from load_tests.memory_samples import MemoryMeter, MemorySample, growth, read_memory
from load_tests.processes import ServerProcesses

MIB = 2**20
HOLD = """
import sys
held = []
for line in sys.stdin:
    held.append(b"x" * (int(line) * 2**20))
    print("held", flush=True)
"""


def test_memory_that_a_real_process_takes_is_seen() -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None

    def hold(mib: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{mib}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "held\n"

    wanted = ServerProcesses(root_pids=(process.pid,))
    try:
        hold(1)
        before = read_memory(wanted)["python -c"]
        with MemoryMeter(wanted, interval_s=3600.0) as meter:
            hold(64)
        first, last = meter.samples["python -c"]
    finally:
        process.communicate()
    assert before.uss_bytes is not None
    assert last.uss_bytes is not None
    assert 60 * MIB <= last.rss_bytes - before.rss_bytes <= 80 * MIB
    assert 60 * MIB <= last.uss_bytes - before.uss_bytes <= 80 * MIB
    assert last.uss_bytes <= last.rss_bytes
    assert first.time_s < last.time_s
    assert read_memory(wanted) == {}


def test_growth_is_that_of_the_second_half() -> None:
    # Up by 100 a second for 10 s (warm-up), then by 2 a second.
    rss = [100 * s if s < 10 else 1000 + 2 * (s - 10) for s in range(21)]
    found = growth([MemorySample(float(s), value, None) for s, value in enumerate(rss)])
    assert found.rss is not None
    assert found.rss.slope_per_s == 2.0
    assert found.rss.grows
    assert found.uss is None
    assert (found.first.rss_bytes, found.last.rss_bytes) == (0, 1020)
