"""The disk under DRAM: tiny traces, worked out by hand (`tiny` has the figures)."""

from __future__ import annotations

from typing import Any

from kv.policy.admission import DiskAdmission
from tests.tuning.simulator.tiny import BLOCK_BYTES, is_at, names, run

DISK = {"dram_bytes": 0, "disk_bytes": 100 * BLOCK_BYTES, "disk_read_bytes_per_s": 0.5e6}


def behind(queue_tokens: int) -> list[Any]:
    """A prompt whose first half only the disk has, behind another one. To read it takes 100 ms, to compute it 50 ms."""
    first = [(0.0, 100, 1, names("a", 10))]
    queue = [(1.0, queue_tokens, 1, names("q", queue_tokens // 10))] if queue_tokens else []
    return [*first, *queue, (1.0, 100, 1, [*names("a", 5), *names("b", 5)])]


def test_the_disk_pays_when_the_queue_is_longer_than_the_fetch() -> None:
    result = run(behind(200), **DISK)
    assert is_at(result.first_token_s[2:], 1.200 + 0.050)
    assert result.hit_tokens_disk[2] == 50
    assert (result.moved.disk_prefetched, result.moved.disk_fetched) == (50_000, 0)


def test_the_disk_does_not_pay_without_a_queue() -> None:
    result = run(behind(0), **DISK)
    assert is_at(result.first_token_s[1:], 1.100)
    assert result.hit_tokens_disk[1] == 0


def test_the_rest_of_a_fetch_is_hidden_while_layers_are_computed() -> None:
    """After 80 ms in the queue, 20 ms of the fetch are left: f = 5 ms, c = 12.5 ms."""
    result = run(behind(80), **DISK)
    assert is_at(result.first_token_s[2:], 1.080 + 0.005 + 4 * 0.0125)
    shorter = run(behind(40), **DISK)  # 60 ms left, for what 50 ms compute
    assert is_at(shorter.first_token_s[2:], 1.040 + 0.100)


def test_without_prefetch_the_fetch_begins_with_the_service() -> None:
    result = run(behind(200), **DISK, prefetch=False)
    assert is_at(result.first_token_s[2:], 1.200 + 0.100)
    assert (result.hit_tokens_disk[2], result.dram.read_bytes) == (0, result.moved.dram_to_disk)
    quick = run(behind(200), **DISK | {"disk_read_bytes_per_s": 2e6}, prefetch=False)  # 25 ms
    assert is_at(quick.first_token_s[2:], 1.200 + 0.00625 + 4 * 0.0125)
    assert quick.moved.disk_fetched == 50_000


def test_iops_limit_a_disk() -> None:
    """50,000 bytes are 13 operations of 4,000 bytes."""
    disk = DISK | {"disk_read_bytes_per_s": 1e9, "disk_operation_bytes": 4000}
    result = run(behind(0), **disk, disk_iops=13 / 0.025)
    assert is_at(result.first_token_s[1:], 1.0 + 0.00625 + 4 * 0.0125)


def test_what_leaves_dram_is_found_on_disk_and_brought_back() -> None:
    rows = [
        (0.0, 20, 1, names("a", 2)),
        (1.0, 20, 1, names("b", 2)),
        (2.0, 20, 1, names("a", 2)),
        (3.0, 20, 1, names("a", 2)),
        (4.0, 20, 1, names("b", 2)),
    ]
    result = run(rows, dram_bytes=2 * BLOCK_BYTES, disk_bytes=4 * BLOCK_BYTES)
    assert result.hit_tokens_disk.tolist() == [0, 0, 19, 0, 19]
    assert result.hit_tokens_dram.tolist() == [0, 0, 0, 19, 0]
    assert result.moved.dram_promoted == 4 * BLOCK_BYTES
    assert (result.dram.evicted_blocks, result.disk.evicted_blocks) == (6, 0)
    gone = run(rows, dram_bytes=2 * BLOCK_BYTES, disk_bytes=2 * BLOCK_BYTES)
    assert gone.hit_tokens_disk.tolist() == [0, 0, 0, 0, 0]


def test_what_is_being_written_can_not_be_read_yet() -> None:
    """Two blocks take 2 s to write; DRAM has lost them by then."""
    rows = [(0.0, 20, 1, names("a", 2)), (0.5, 20, 1, names("b", 2))]
    tiers = {"dram_bytes": 2 * BLOCK_BYTES, "disk_bytes": 10 * BLOCK_BYTES, "disk_write_bytes_per_s": 1e4}
    assert run([*rows, (2.019, 20, 1, names("a", 2))], **tiers).hit_tokens_disk[2] == 0
    assert run([*rows, (2.021, 20, 1, names("a", 2))], **tiers).hit_tokens_disk[2] == 19


def test_a_full_write_queue_takes_nothing_more() -> None:
    rows = [(0.0, 20, 1, names("a", 2)), (0.5, 20, 1, names("b", 2))]
    tiers = {"disk_bytes": 10 * BLOCK_BYTES, "disk_write_bytes_per_s": 1e4}
    result = run(rows, **tiers, disk_write_queue_bytes=3 * BLOCK_BYTES)
    assert (result.disk_refused_blocks, result.disk.inserted_blocks) == (2, 2)


def test_only_what_is_used_again_is_written_where_admission_says_so() -> None:
    rows = [(0.0, 20, 1, names("a", 2)), (1.0, 20, 1, names("b", 2)), (2.0, 20, 1, names("a", 2))]
    result = run(rows, disk_bytes=10 * BLOCK_BYTES, disk_admission=DiskAdmission.ON_REUSE)
    assert result.disk.inserted_blocks == 2
    assert result.moved.dram_to_disk == 2 * BLOCK_BYTES
