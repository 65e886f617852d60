from __future__ import annotations

import itertools
import json
import random
from collections import OrderedDict
from pathlib import Path

import pytest

from load_tests import shard_eviction
from load_tests.shard_eviction import WORKLOADS, simulate


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_whole_directory_finds_what_lru_written_out_finds(workload: str) -> None:
    """Block by block, all of a chain used last block first; the same but for extents, which go whole."""
    requests = list(itertools.islice(WORKLOADS[workload](random.Random(f"{workload}/1")), 600))
    room = int(0.3 * len({key for keys in requests for key in keys}))
    cache: OrderedDict[bytes, None] = OrderedDict()
    found = asked = 0
    for number, keys in enumerate(requests):
        hits = len(list(itertools.takewhile(cache.__contains__, keys)))
        for key in reversed(keys):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > room:
            cache.popitem(last=False)
        if number >= 300:
            found += hits
            asked += len(keys)
    outcome = simulate(workload, 600, 0.3, "whole", 1, seed=1)
    assert outcome.hit_share == pytest.approx(found / asked, abs=0.01)


def test_the_oldest_first_is_as_good_as_a_whole_one() -> None:
    whole = simulate("hot root", 1000, 0.1, "whole", 1, seed=2).hit_share
    assert simulate("hot root", 1000, 0.1, "oldest", 4, seed=2).hit_share == pytest.approx(whole, abs=0.002)


def test_a_run_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--requests", "60", "--shards", "2", "--save", "s", "--save-in", str(tmp_path)]
    assert shard_eviction.main(options) == 0
    outcomes = json.loads(capsys.readouterr().out.splitlines()[-1])["outcomes"]
    assert len(outcomes) == 3 * 2 * 3
    assert all(0 <= outcome["hit_share"] <= 1 for outcome in outcomes)
    (markdown,) = tmp_path.glob("*-s.md")
    assert "| hot root | 10% |" in markdown.read_text()


def test_one_shard_is_nothing_to_compare(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        shard_eviction.main(["--shards", "1"])
    assert "must be at least 2" in capsys.readouterr().err
