from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv.keys import block_keys, extend_block_keys

ROOT = Path(__file__).resolve().parents[2]

# Bytes that look like the encoding's own fields, so that a border that moves would show.
adversarial = st.one_of(
    st.binary(max_size=12),
    st.sampled_from([b"", b"\0", b"\0" * 8, b"\1" + b"\0" * 7, b"equipoise/kv-block/1", b"a", b"ab", b"a\0b"]),
)
token_lists = st.lists(st.integers(0, 3) | st.integers(0, 2**32 - 1), min_size=2, max_size=8)


def test_golden_value() -> None:
    # Written out by hand from the format: five fields, each after its length as 64 bits little endian.
    first = (
        bytes.fromhex("1400000000000000")
        + b"equipoise/kv-block/1"
        + bytes.fromhex("0000000000000000")
        + bytes.fromhex("0800000000000000 01000000 02010000")
        + bytes.fromhex("0300000000000000")
        + b"fpr"
        + bytes.fromhex("0200000000000000")
        + b"sa"
    )
    first_key = hashlib.sha256(first).digest()
    second = (
        bytes.fromhex("1400000000000000")
        + b"equipoise/kv-block/1"
        + bytes.fromhex("2000000000000000")
        + first_key
        + bytes.fromhex("0800000000000000 ffffffff 00000000")
        + bytes.fromhex("0300000000000000")
        + b"fpr"
        + bytes.fromhex("0200000000000000")
        + b"sa"
    )
    assert block_keys([1, 258, 2**32 - 1, 0, 7], 2, b"fpr", b"sa") == [first_key, hashlib.sha256(second).digest()]
    # The digest itself, so that a change of the format cannot pass unseen.
    assert first_key.hex() == "3e68f33a419e741d5e64965637f24d278e2db776eda5bfa17c42a7fc6a292462"


def test_equal_in_fresh_processes_with_different_hash_seeds() -> None:
    code = "from kv.keys import block_keys; print([k.hex() for k in block_keys(range(64), 16, b'f', b's')])"
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "4711")
    ]
    here = str([key.hex() for key in block_keys(range(64), 16, b"f", b"s")])
    assert outputs == [here, here]


@given(
    token_lists, adversarial, adversarial, token_lists, adversarial, adversarial, st.integers(1, 2), st.integers(1, 2)
)
def test_different_inputs_never_share_a_key(
    tokens_a: list[int],
    print_a: bytes,
    salt_a: bytes,
    tokens_b: list[int],
    print_b: bytes,
    salt_b: bytes,
    block_a: int,
    block_b: int,
) -> None:
    keys_a = block_keys(tokens_a, block_a, print_a, salt_a)
    keys_b = block_keys(tokens_b, block_b, print_b, salt_b)
    same_space = (block_a, print_a, salt_a) == (block_b, print_b, salt_b)
    for i, key_a in enumerate(keys_a):
        for j, key_b in enumerate(keys_b):
            same_prefix = same_space and tokens_a[: (i + 1) * block_a] == tokens_b[: (j + 1) * block_b]
            assert (key_a == key_b) == same_prefix


@given(st.binary(max_size=16), st.data())
def test_a_moved_field_border_gives_another_key(joined: bytes, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(joined)))
    second = data.draw(st.integers(0, len(joined)).filter(lambda border: border != first))
    assert block_keys([1], 1, joined[:first], joined[first:]) != block_keys([1], 1, joined[:second], joined[second:])


def test_two_salts_share_nothing() -> None:
    tokens = list(range(512))
    one = block_keys(tokens, 16, b"model", b"tenant-1")
    other = block_keys(tokens, 16, b"model", b"tenant-2")
    assert len(one) == len(other) == 32
    assert not set(one) & set(other)


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 7), st.data())
def test_extending_a_chain_equals_hashing_it_whole(tokens: list[int], block_tokens: int, data: st.DataObject) -> None:
    whole = block_keys(tokens, block_tokens, b"f", b"s")
    assert len(whole) == len(tokens) // block_tokens
    known = whole[: data.draw(st.integers(0, len(whole)))]
    given_keys = list(known)
    assert extend_block_keys(known, tokens, block_tokens, b"f", b"s") == whole
    assert known == given_keys


def test_known_keys_are_not_hashed_again() -> None:
    known = [b"\7" * 32]
    extended = extend_block_keys(known, [1, 2, 3, 4], 2, b"f", b"s")
    assert extended[0] == known[0]
    # The second key hangs on the parent it was given, whatever that is.
    assert extended[1] != block_keys([1, 2, 3, 4], 2, b"f", b"s")[1]


@pytest.mark.parametrize("token", [-1, 2**32, 1.5])
def test_a_token_that_does_not_fit_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match="token ids must be ints from 0 to"):
        block_keys([token], 1, b"", b"")


def test_more_keys_than_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="2 keys were given for 1 full blocks"):
        extend_block_keys([b"a", b"b"], [1, 2, 3], 2, b"", b"")


def test_block_size_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="block_tokens=0"):
        block_keys([1], 0, b"", b"")
