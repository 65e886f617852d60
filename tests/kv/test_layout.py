from __future__ import annotations

import pytest

from kv.layout import KvLayout

LLAMA_13B = KvLayout(num_layers=40, num_kv_heads=40, head_dim=128, block_tokens=256, dtype="float16")


def test_llama_13b_takes_800_kib_a_token() -> None:
    # The published figure: 2 * 40 layers * 5120 * 2 bytes = 819,200 bytes a token.
    assert LLAMA_13B.kv_bytes_per_token == 819_200
    assert LLAMA_13B.page_bytes == 2 * 256 * 128 * 2
    assert LLAMA_13B.block_bytes == 200 * 1024 * 1024


def test_float32_is_twice_as_large_as_bfloat16() -> None:
    sizes = {
        dtype: KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_tokens=16, dtype=dtype).block_bytes
        for dtype in ("float32", "bfloat16", "float16")
    }
    assert sizes == {"float32": 737_280, "bfloat16": 368_640, "float16": 368_640}


@pytest.mark.parametrize(
    ("tokens", "blocks_for", "full_blocks"), [(0, 0, 0), (1, 1, 0), (255, 1, 0), (256, 1, 1), (257, 2, 1), (512, 2, 2)]
)
def test_blocks_of_a_number_of_tokens(tokens: int, blocks_for: int, full_blocks: int) -> None:
    assert LLAMA_13B.blocks_for(tokens) == blocks_for
    assert LLAMA_13B.full_blocks(tokens) == full_blocks


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("num_kv_heads", -1),
        ("head_dim", 1.5),
        ("block_tokens", True),
        ("block_tokens", "16"),
        ("dtype", "int8"),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: object) -> None:
    fields = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "block_tokens": 16, "dtype": "float32"}
    with pytest.raises(ValueError, match=f"{field}=.*is not allowed"):
        KvLayout(**{**fields, field: value})  # type: ignore[arg-type]
