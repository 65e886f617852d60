from __future__ import annotations

import pytest

from tuning.job.axes import MAX_GIB, choice_axis, numeric_axis, ttl_axis
from tuning.pareto.space import CategoricalAxis, NumericAxis


def test_one_value_is_fixed_and_a_range_is_searched() -> None:
    assert numeric_axis("dram_gib", "512", MAX_GIB) == 512
    assert numeric_axis("dram_gib", "0:2048:512/16", MAX_GIB) == NumericAxis("dram_gib", (0, 512, 1024, 1536, 2048), 16)
    assert numeric_axis("instances", "1:4:1", 4) == NumericAxis("instances", (1, 2, 3, 4), 1)
    assert ttl_axis("ttl_s", "none") is None
    assert ttl_axis("ttl_s", "60:120:60/30") == NumericAxis("ttl_s", (60, 120), 30)
    assert choice_axis("eviction", "lru", ("lru", "lfu")) == "lru"
    assert choice_axis("eviction", "lfu,lru", ("lru", "lfu")) == CategoricalAxis("eviction", ("lfu", "lru"))


@pytest.mark.parametrize("text", ["", "-1", "1.5", "0:10", "10:0:5", "0:10:3", "0:10:5/2", "0:10:0", "0:10:5/0", "a"])
def test_what_is_no_axis_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not allowed"):
        numeric_axis("dram_gib", text, MAX_GIB)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5", "numbers go up to 4"),
        ("1:5:1", "numbers go up to 4"),
        ("1:3:2/5", "numbers go up to 4"),
        ("9" * 20, "numbers go up to 4"),
        ("9" * 5000, r"instances: '9{57}\.\.\.' is not allowed: numbers go up to 4"),
    ],
)
def test_numbers_above_the_largest_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        numeric_axis("instances", text, 4)


def test_a_range_has_64_coarse_values_at_most() -> None:
    axis = numeric_axis("dram_gib", "0:63:1", MAX_GIB)
    assert isinstance(axis, NumericAxis)
    assert len(axis.coarse) == 64
    # A million of millions would fill the memory before anybody could say so.
    for text in ("0:64:1", "0:1000000000:1/1"):
        with pytest.raises(ValueError, match="64 are the most; give a larger COARSE"):
            numeric_axis("dram_gib", text, MAX_GIB)
    assert isinstance(numeric_axis("dram_gib", "0:1000000000:100000000/1", MAX_GIB), NumericAxis)


@pytest.mark.parametrize("text", ["", "mru", "lru,", "lru,lru"])
def test_unknown_and_repeated_choices_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="eviction"):
        choice_axis("eviction", text, ("lru", "lfu"))
