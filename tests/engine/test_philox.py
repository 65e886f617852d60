from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.philox import philox4x32, uniforms

MASK = 0xFFFFFFFF

# Random123's tests/kat_vectors, lines "philox4x32 10": counter, key, expected.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def philox_in_python_ints(counter: list[int], key: list[int]) -> list[int]:
    """The paper's definition, word by word, for one block."""
    left, right = (counter[1], counter[3]), (counter[0], counter[2])
    for round_index in range(10):
        k0 = (key[0] + round_index * 0x9E3779B9) & MASK
        k1 = (key[1] + round_index * 0xBB67AE85) & MASK
        high_0, low_0 = divmod(right[0] * 0xD2511F53, 1 << 32)
        high_1, low_1 = divmod(right[1] * 0xCD9E8D57, 1 << 32)
        right, left = (high_1 ^ left[0] ^ k0, high_0 ^ left[1] ^ k1), (low_1, low_0)
    return [right[0], left[0], right[1], left[1]]


def uniform_in_python_ints(seed: int, choice_index: int, position: int) -> float:
    seed %= 1 << 64
    block = philox_in_python_ints(
        [position & MASK, position >> 32, choice_index & MASK, choice_index >> 32], [seed & MASK, seed >> 32]
    )
    return ((block[1] * (1 << 32) + block[0]) >> 11) / (1 << 53)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_published_vectors(counter: str, key: str, expected: str) -> None:
    block = philox4x32(np.array([words(counter)], dtype=np.uint32), np.array([words(key)], dtype=np.uint32))
    assert block.tolist() == [words(expected)]
    assert philox_in_python_ints(words(counter), words(key)) == words(expected)


def test_published_vectors_in_one_batch() -> None:
    counters = np.array([words(counter) for counter, _, _ in KNOWN_ANSWERS], dtype=np.uint32)
    keys = np.array([words(key) for _, key, _ in KNOWN_ANSWERS], dtype=np.uint32)
    block = philox4x32(counters, keys)
    assert block.dtype == np.uint32
    assert block.tolist() == [words(expected) for _, _, expected in KNOWN_ANSWERS]


rows_of_keys = st.lists(
    st.tuples(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**40), st.integers(0, 2**40)), min_size=1, max_size=20
)


@given(rows_of_keys)
def test_any_batch_equals_single_rows_in_python_ints(rows: list[tuple[int, int, int]]) -> None:
    numbers = uniforms(*zip(*rows, strict=True))
    assert numbers.dtype == np.float64
    assert numbers.tolist() == [uniform_in_python_ints(*row) for row in rows]


@given(rows_of_keys, st.data())
def test_a_row_does_not_see_its_neighbours(rows: list[tuple[int, int, int]], data: st.DataObject) -> None:
    alone = {row: uniforms([row[0]], [row[1]], [row[2]])[0] for row in rows}
    shuffled = data.draw(st.permutations(rows))
    assert uniforms(*zip(*shuffled, strict=True)).tolist() == [alone[row] for row in shuffled]


def test_seed_choice_and_position_each_matter() -> None:
    numbers = uniforms([1, 2, 1, 1, 1 + 2**32, 1, 1], [0, 0, 1, 0, 0, 2**32, 0], [0, 0, 0, 1, 0, 0, 2**32])
    assert len(set(numbers.tolist())) == 7


def test_seeds_are_64_bit() -> None:
    same = uniforms([-1, 2**64 - 1, 3, 3 + 2**64], [0] * 4, [0] * 4)
    assert same[0] == same[1]
    assert same[2] == same[3]
    assert same[0] != same[2]


@pytest.mark.parametrize("varied", ["seed", "choice_index", "position"])
def test_uniformity(varied: str) -> None:
    """Chi-square over 100 bins of 200,000 numbers along each axis; 99 degrees of freedom, 0.1 % point 148.2."""
    count, bins = 200_000, 100
    fixed, steps = [12345] * count, list(range(count))
    axes = {"seed": fixed, "choice_index": fixed, "position": fixed} | {varied: steps}
    numbers = uniforms(axes["seed"], axes["choice_index"], axes["position"])
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    observed = np.histogram(numbers, bins=bins, range=(0.0, 1.0))[0]
    expected = count / bins
    assert float(((observed - expected) ** 2 / expected).sum()) < 148.2
    # Neighbours on the axis are uncorrelated: the estimate's deviation is 1 / sqrt(count) = 0.0022.
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.008


def test_all_53_bits_are_used() -> None:
    numbers = uniforms(list(range(500)), [0] * 500, [0] * 500)
    scaled = numbers * 2.0**53
    assert np.array_equal(scaled, np.floor(scaled))
    as_ints = scaled.astype(np.int64)
    assert int(np.bitwise_or.reduce(as_ints)) == 2**53 - 1
    assert int(np.bitwise_and.reduce(as_ints)) == 0


def test_no_rows() -> None:
    assert uniforms([], [], []).shape == (0,)


@pytest.mark.parametrize("rows", [([1], [0], []), ([1], [-1], [0]), ([1], [0], [-1])])
def test_bad_rows_are_refused(rows: tuple[list[int], list[int], list[int]]) -> None:
    with pytest.raises(ValueError, match="got"):
        uniforms(*rows)
