from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.trace.prefix_ids import by_first_appearance, prefix_ids

# Few small numbers, so that prefixes are shared, and some that need all 64 bits.
CONTENTS = st.lists(st.lists(st.sampled_from((0, 1, 2, -1, 2**31 - 1, 2**63 - 1, -(2**63))), max_size=6), max_size=10)


@settings(deadline=None)
@given(CONTENTS)
def test_ids_stand_for_prefixes(requests: list[list[int]]) -> None:
    known: dict[tuple[int, ...], int] = {}
    expected = [
        known.setdefault(tuple(request[: end + 1]), len(known)) for request in requests for end in range(len(request))
    ]
    offsets = np.concatenate(([0], np.cumsum([len(request) for request in requests], dtype=np.int64)))
    hashes = np.array([block for request in requests for block in request], dtype=np.int64)
    assert prefix_ids(offsets, hashes).tolist() == expected


def test_equal_content_after_different_blocks_is_not_the_same() -> None:
    offsets = np.array([0, 2, 4, 6])
    assert prefix_ids(offsets, np.array([7, 9, 8, 9, 7, 9])).tolist() == [0, 1, 2, 3, 0, 1]


@settings(deadline=None)
@given(st.lists(st.integers(0, 20)))
def test_numbers_follow_first_appearance(ids: list[int]) -> None:
    known: dict[int, int] = {}
    expected = [known.setdefault(entry, len(known)) for entry in ids]
    assert by_first_appearance(np.array(ids, dtype=np.int64)).tolist() == expected
