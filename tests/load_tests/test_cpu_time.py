from __future__ import annotations

import subprocess
import sys
from itertools import count

import pytest

from load_tests.cpu_time import LOAD_GENERATOR, CpuLedger, CpuMeter, CpuSample, CpuUsage, MachineCpu, parse_machine_cpu
from load_tests.processes import ServerProcesses

START_S = 1000.0


def sample(
    pid: int, own_s: float, reaped_s: float = 0.0, *, parent: int = 1, label: str = "", born_s: float = 10.0
) -> CpuSample:
    return CpuSample((pid, born_s), parent, label or f"p{pid}", own_s, reaped_s)


def test_a_process_counts_from_the_start_of_the_run() -> None:
    ledger = CpuLedger(START_S, [sample(5, own_s=100.0, reaped_s=7.0)])
    ledger.observe([sample(5, own_s=101.5, reaped_s=7.0)])
    assert ledger.seconds_by_label() == {"p5": 1.5}


def test_a_process_that_starts_during_the_run_counts_whole_and_an_older_one_from_when_it_is_seen() -> None:
    ledger = CpuLedger(START_S, [])
    ledger.observe([sample(5, own_s=2.0, born_s=1001.0), sample(6, own_s=50.0, born_s=900.0)])
    ledger.observe([sample(5, own_s=3.0, born_s=1001.0), sample(6, own_s=51.0, born_s=900.0)])
    assert ledger.seconds_by_label() == {"p5": 3.0, "p6": 1.0}


def test_labels_are_summed_and_the_last_one_counts() -> None:
    ledger = CpuLedger(START_S, [sample(5, 1.0, label="ray::IDLE"), sample(6, 1.0, label="ray::Worker")])
    ledger.observe([sample(5, 2.0, label="ray::Worker"), sample(6, 4.0, label="ray::Worker")])
    assert ledger.seconds_by_label() == {"ray::Worker": 4.0}


def test_what_a_child_used_after_it_was_last_seen_comes_in_through_its_parent() -> None:
    # The child had used 10 s before the run and was last seen at 12 s; in all it used 12.5 s.
    ledger = CpuLedger(START_S, [sample(5, 1.0), sample(6, 10.0, parent=5, label="child")])
    ledger.observe([sample(5, 1.0), sample(6, 12.0, parent=5, label="child")])
    ledger.observe([sample(5, 1.25, reaped_s=12.5)])
    assert ledger.seconds_by_label() == {"child": 2.0, "p5": 0.25 + 0.5}


def test_a_child_that_was_never_seen_counts_for_its_parent() -> None:
    ledger = CpuLedger(START_S, [sample(5, 1.0, reaped_s=3.0)])
    ledger.observe([sample(5, 1.0, reaped_s=4.0)])
    assert ledger.seconds_by_label() == {"p5": 1.0}


def test_grandchildren_are_not_counted_twice() -> None:
    # 7 is a child of 6, which is a child of 5. 7 ends and is reaped by 6; then 6 ends and is reaped by 5.
    ledger = CpuLedger(START_S, [sample(5, 0.0), sample(6, 0.0, parent=5), sample(7, 0.0, parent=6)])
    ledger.observe([sample(5, 0.0), sample(6, 1.0, parent=5), sample(7, 4.0, parent=6)])
    ledger.observe([sample(5, 0.0, reaped_s=5.0)])
    assert ledger.seconds_by_label() == {"p5": 0.0, "p6": 1.0, "p7": 4.0}


def test_a_parent_that_does_not_wait_for_its_children_is_charged_nothing() -> None:
    ledger = CpuLedger(START_S, [sample(5, 0.0), sample(6, 0.0, parent=5)])
    ledger.observe([sample(5, 0.0), sample(6, 4.0, parent=5)])
    ledger.observe([sample(5, 0.5)])
    assert ledger.seconds_by_label() == {"p5": 0.5, "p6": 4.0}


def test_a_pid_that_is_used_again_is_another_process() -> None:
    ledger = CpuLedger(START_S, [sample(5, 9.0, parent=5)])
    ledger.observe([sample(5, 10.0, parent=5)])
    ledger.observe([sample(5, 0.5, parent=5, born_s=1002.0)])
    assert ledger.seconds_by_label() == {"p5": 1.5}


def test_the_machine_counters() -> None:
    stat = "cpu  100 20 30 1000 50 4 6 40 7 0\ncpu0 1 2 3\n"
    assert parse_machine_cpu(stat, ticks_per_s=100) == MachineCpu(busy_s=2.0, total_s=12.5)
    with pytest.raises(ValueError, match="/proc/stat begins with"):
        parse_machine_cpu("intr 1 2\n", 100)


def test_the_foreign_share_is_what_nobody_named_used() -> None:
    usage = CpuUsage({"a": 3.0, LOAD_GENERATOR: 1.0}, MachineCpu(busy_s=5.0, total_s=20.0), server_known=True)
    assert usage.foreign_share == 0.05
    # Counters are read one after the other: less than nothing is nothing.
    assert CpuUsage({"a": 6.0}, MachineCpu(5.0, 20.0), server_known=True).foreign_share == 0.0
    assert CpuUsage({"a": 3.0}, MachineCpu(5.0, 20.0), server_known=False).foreign_share is None


BURN = """
import subprocess, sys, time
def burn(cpu_s):
    while time.process_time() < cpu_s: sum(range(1000))
if sys.argv[1] == "parent":
    sys.stdin.readline()
    burn(0.3)
    subprocess.run([sys.executable, "-c", sys.argv[2], "child", sys.argv[2]], check=True)
    print("done", flush=True)
    sys.stdin.readline()
else:
    burn(0.4)
"""


def test_a_real_process_and_its_child_that_ended() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BURN, "parent", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with CpuMeter(ServerProcesses(root_pids=(process.pid,)), interval_s=0.1) as meter:
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"
    finally:
        process.communicate("\n")
    by_label = meter.usage.by_label_s
    assert by_label.keys() == {"python -c", LOAD_GENERATOR}
    # 0.3 s of its own, of which starting Python had used a part before the run, and at least 0.4 s of the child.
    assert 0.4 + 0.3 - 0.2 <= by_label["python -c"] <= 0.4 + 0.3 + 0.3
    assert meter.usage.server_known
    foreign = meter.usage.foreign_share
    assert foreign is not None
    assert 0.0 <= foreign <= 1.0


def test_without_processes_nothing_foreign_is_claimed() -> None:
    with CpuMeter(ServerProcesses()) as meter:
        pass
    assert meter.usage.by_label_s.keys() == {LOAD_GENERATOR}
    assert meter.usage.foreign_share is None
    with pytest.raises(RuntimeError, match="still runs, or never ran"):
        _ = CpuMeter(ServerProcesses()).usage


def test_sums_agree_with_the_truth_however_samples_fall() -> None:
    """A tree of processes with known CPU times, looked at at every possible subset of moments."""
    # Moments 0..4. 5 lives throughout; 6 (its child) lives over moments 0-2; 7 (child of 6) over moments 1-1.
    truth = {
        0: [sample(5, 1.0), sample(6, 2.0, parent=5)],
        1: [sample(5, 1.5), sample(6, 2.5, parent=5), sample(7, 0.5, parent=6, born_s=1001.0)],
        2: [sample(5, 2.0), sample(6, 3.0, 0.75, parent=5)],
        3: [sample(5, 2.5, reaped_s=3.25 + 0.75)],
        4: [sample(5, 3.0, reaped_s=3.25 + 0.75)],
    }
    used_s = (3.0 - 1.0) + (3.25 - 2.0) + 0.75
    for number in count():
        looked_at = [moment for moment in (1, 2, 3) if number >> (moment - 1) & 1]
        ledger = CpuLedger(START_S, truth[0])
        for moment in [*looked_at, 4]:
            ledger.observe(truth[moment])
        assert sum(ledger.seconds_by_label().values()) == pytest.approx(used_s)
        if len(looked_at) == 3:
            break
