from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.model_shape import ModelShape

SMALL = ModelShape(
    name="small",
    num_layers=3,
    hidden_size=8,
    intermediate_size=20,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    vocab_size=100,
    max_context_tokens=64,
    other_parameters=7,
)


def test_a_small_model_by_hand() -> None:
    # A layer: q and output are 8 x 24 each, k and v 8 x 12 each, three matrices of the MLP 8 x 20.
    assert SMALL.layer_matrix_parameters == 3 * (2 * 192 + 2 * 96 + 3 * 160) == 3168
    assert SMALL.parameters == 3168 + 2 * 800 + 7
    assert SMALL.weight_bytes == 2 * 4775
    assert SMALL.step_weight_bytes == 2 * (4775 - 800)  # the embedding's rows are looked up
    assert SMALL.kv_bytes_per_token == 2 * 3 * 2 * 6 * 2
    assert SMALL.flops_per_token == 2 * 3168
    assert SMALL.head_flops == 2 * 800
    assert SMALL.attention_flops_per_pair == 3 * 4 * (2 * 6 + 2 * 6)  # by layer and head: scores, then the sum


def test_a_tied_matrix_counts_once_and_is_read_by_every_step() -> None:
    tied = ModelShape(**asdict(SMALL) | {"tied_embeddings": True})
    assert tied.parameters == SMALL.parameters - 800
    assert tied.step_weight_bytes == tied.weight_bytes == SMALL.step_weight_bytes


def test_a_plain_mlp_has_two_matrices() -> None:
    plain = ModelShape(**asdict(SMALL) | {"gated_mlp": False})
    assert SMALL.parameters - plain.parameters == 3 * 160


@given(cached=st.integers(0, 200), new=st.integers(0, 200))
def test_attention_counts_the_pairs_below_the_diagonal_and_half_of_it(cached: int, new: int) -> None:
    pairs = sum(cached + position for position in range(new)) + new / 2
    assert SMALL.attention_flops(new, cached) == SMALL.attention_flops_per_pair * pairs


@settings(max_examples=50)
@given(chunks=st.lists(st.integers(1, 50), max_size=6), cached=st.integers(0, 100))
def test_chunks_add_up_to_the_whole(chunks: list[int], cached: int) -> None:
    done = cached
    total = 0
    for chunk in chunks:
        total += SMALL.attention_flops(chunk, done)
        done += chunk
    assert total == SMALL.attention_flops(sum(chunks), cached)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, r"num_layers=0 is not allowed: give an int of at least 1"),
        ({"head_dim": 6.0}, r"head_dim=6.0 is not allowed"),
        ({"dtype_bytes": True}, r"dtype_bytes=True is not allowed"),
        ({"other_parameters": -1}, r"other_parameters=-1 is not allowed: give an int of at least 0"),
        ({"num_kv_heads": 3}, r"num_heads=4 is not allowed with num_kv_heads=3: give a multiple"),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelShape(**asdict(SMALL) | change)
