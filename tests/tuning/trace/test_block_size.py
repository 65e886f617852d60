from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.trace.block_size import fits, infer
from tuning.trace.errors import TraceError


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.lists(st.integers(1, 2000), min_size=1, max_size=30))
def test_finds_the_size_that_fits_all_rows_or_says_which_do(size: int, lengths: list[int]) -> None:
    tokens = np.array(lengths)
    counts = np.array([-(-length // size) for length in lengths])
    possible = [candidate for candidate in range(1, 2001) if fits(candidate, tokens, counts).all()]
    assert size in possible
    powers = [candidate for candidate in possible if candidate & (candidate - 1) == 0]
    if 512 in possible:
        assert infer(tokens, counts, usual=512)[0] == 512
    elif len(possible) == 1 or len(powers) == 1:
        assert infer(tokens, counts, usual=512)[0] == (possible if len(possible) == 1 else powers)[0]
    else:
        with pytest.raises(TraceError, match=f"any from {possible[0]} to "):
            infer(tokens, counts, usual=512)


def test_a_single_bad_row_does_not_change_the_size() -> None:
    tokens = np.array([40, 100, 33, 50])
    counts = np.array([3, 7, 3, 99])
    size, source = infer(tokens, counts, usual=512)
    assert size == 16
    assert source == "the one that most rows fit"


def test_rows_that_contradict_each_other_are_refused() -> None:
    tokens, counts = np.array([40, 1000, 33, 50]), np.array([3, 1, 30, 40])
    with pytest.raises(TraceError, match="no block size fits more than half of the rows"):
        infer(tokens, counts, usual=512)
