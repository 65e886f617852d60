from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from actors.engine import loading
from actors.engine.config import EngineConfig
from actors.random_model import FAMILIES as RANDOM_FAMILIES
from actors.random_model import RandomModel, config_of, write_random_model
from app.known_shapes import KNOWN_CONFIGS
from app.sizing import (
    CUDA_CONTEXT_BYTES,
    DEFAULT_CPU_KV_BYTES,
    GIB,
    GPU_WORKSPACE_BYTES,
    SizingError,
    chosen_dtype,
    room_for_kv,
    shape_of,
)
from tuning.model_config import FAMILIES

LLAMA_2_13B = shape_of(KNOWN_CONFIGS["meta-llama/Llama-2-13b-hf"])


def test_llama_2_13b_by_hand() -> None:
    # 40 layers: q, k, v, o of 5120 x 5120; gate, up, down of 5120 x 13824; two norms.
    layers = 40 * (4 * 5120 * 5120 + 3 * 5120 * 13824 + 2 * 5120)
    # Two matrices of 32000 x 5120 and a norm.
    assert LLAMA_2_13B.parameters == layers + 2 * 32000 * 5120 + 5120 == 13_015_864_320
    assert LLAMA_2_13B.kv_bytes_per_token("float16") == 819_200  # 2 x 40 layers x 40 heads x 128 x 2 bytes
    assert LLAMA_2_13B.kv_bytes_per_token("float32") == 2 * 819_200


def test_llama_2_13b_on_80_gib_by_hand() -> None:
    room = room_for_kv(
        LLAMA_2_13B,
        dtype="float16",
        block_tokens=256,
        slab_pages=4,
        on_gpu=True,
        device_bytes=80 * GIB,
        utilization=0.9,
    )
    # 0.9 x 80 GiB - 26,031,728,640 - 2.5 GiB = 48,593,057,... bytes; a row of slabs is 4 x 256 x 819,200 = 838,860,800.
    left = int(0.9 * 80 * GIB) - 26_031_728_640 - (5 * GIB) // 2
    assert room.weight_bytes == 26_031_728_640
    assert room.blocks == 4 * (left // 838_860_800) == 228
    assert room.kv_tokens == 228 * 256 == 58_368
    assert room.longest_context_tokens == 4096
    assert room.longest_requests == 228 // 16 == 14


def test_qwen2_5_7b_by_hand() -> None:
    # 28 layers: q and o of 3584 x 3584, k and v of 3584 x 512 (4 heads of 128), biases of q, k and v; gate, up, down of
    # 3584 x 18944; two norms.
    layers = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3584 + 2 * 512 + 3 * 3584 * 18944 + 2 * 3584)
    expected = layers + 2 * 152064 * 3584 + 3584
    assert expected == 7_615_616_512
    for name in ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct"):
        assert shape_of(KNOWN_CONFIGS[name]).parameters == expected
        assert shape_of(KNOWN_CONFIGS[name]).kv_bytes_per_token("bfloat16") == 2 * 28 * 4 * 128 * 2 == 57_344


def test_qwen3_8b_by_hand() -> None:
    # 36 layers: q and o of 4096 x 4096, k and v of 4096 x 1024 (8 heads of 128), norms of q and k; gate, up, down of
    # 4096 x 12288; two norms.
    layers = 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 128 + 3 * 4096 * 12288 + 2 * 4096)
    shape = shape_of(KNOWN_CONFIGS["Qwen/Qwen3-8B"])
    assert shape.parameters == layers + 2 * 151936 * 4096 + 4096 == 8_190_735_360
    assert shape.kv_bytes_per_token("bfloat16") == 2 * 36 * 8 * 128 * 2


def test_mistral_7b_by_hand() -> None:
    # 32 layers: q and o of 4096 x 4096, k and v of 4096 x 1024 (8 heads of 128); gate, up, down of 4096 x 14336; two
    # norms.
    layers = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)
    expected = layers + 2 * 32768 * 4096 + 4096
    assert expected == 7_248_023_552
    for name in ("mistralai/Mistral-7B-v0.3", "mistralai/Mistral-7B-Instruct-v0.3"):
        assert shape_of(KNOWN_CONFIGS[name]).parameters == expected


@pytest.mark.parametrize(
    ("tuned", "base"),
    [
        ("meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-hf"),
        ("meta-llama/Llama-2-13b-chat-hf", "meta-llama/Llama-2-13b-hf"),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B-v0.3"),
    ],
)
def test_a_model_tuned_for_chat_has_its_bases_shape(tuned: str, base: str) -> None:
    assert KNOWN_CONFIGS[tuned] == KNOWN_CONFIGS[base]


# Building takes seconds even without memory, and models tuned for chat are built like their bases.
DIFFERENT = {shape_of(config).parameters: name for name, config in KNOWN_CONFIGS.items()}


@pytest.mark.parametrize("name", sorted(DIFFERENT.values()))
def test_known_models_have_as_many_parameters_as_transformers_builds(name: str) -> None:
    config = AutoConfig.for_model(**KNOWN_CONFIGS[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape_of(KNOWN_CONFIGS[name]).parameters == model.num_parameters()


@settings(max_examples=25, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    tied=st.booleans(),
    bias=st.booleans(),
    narrow=st.booleans(),
)
def test_parameters_are_counted_as_transformers_builds_them(
    family: str, layers: int, kv_heads: int, group: int, tied: bool, bias: bool, narrow: bool
) -> None:
    heads = kv_heads * group
    keys: dict[str, Any] = {
        "model_type": family,
        "hidden_size": heads * 16,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "max_position_embeddings": 32,
        "vocab_size": 50,
        "tie_word_embeddings": tied,
    }
    if family == "opt":
        keys |= {"ffn_dim": 40, "enable_bias": bias, "word_embed_proj_dim": heads * 8 if narrow else heads * 16}
        keys |= {"do_layer_norm_before": not narrow}
    else:
        keys |= {"intermediate_size": 40, "num_key_value_heads": kv_heads, "head_dim": 8 if narrow else 16}
        if family == "llama":
            keys |= {"attention_bias": bias, "mlp_bias": bias}
        if family == "qwen3":
            keys |= {"attention_bias": bias}
    if family == "qwen2":
        del keys["head_dim"]  # it has none of its own
    config = AutoConfig.for_model(**keys)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of(config.to_dict())
    assert shape.parameters == model.num_parameters()


@pytest.mark.parametrize("family", RANDOM_FAMILIES)
def test_the_engine_makes_as_many_blocks(family: str, tmp_path: Path) -> None:
    random = RandomModel(family, 2, 4, 4 if family == "opt" else 2)
    write_random_model(random, tmp_path)
    kv_bytes, slab_pages, block_tokens = 3_000_000, 4, 16
    config = EngineConfig(
        device="cpu", dtype="float32", block_tokens=block_tokens, slab_pages=slab_pages, kv_cache_bytes=kv_bytes
    )
    room = room_for_kv(
        shape_of(config_of(random)),
        dtype="float32",
        block_tokens=block_tokens,
        slab_pages=slab_pages,
        on_gpu=False,
        device_bytes=None,
        utilization=1,
        kv_cache_bytes=kv_bytes,
    )
    assert room.blocks == loading.load_model(tmp_path, config).lanes.num_blocks


def test_what_the_engine_keeps_free_is_what_is_reckoned() -> None:
    assert loading._GPU_WORKSPACE_BYTES == GPU_WORKSPACE_BYTES
    assert loading._DEFAULT_CPU_KV_BYTES == DEFAULT_CPU_KV_BYTES


def _room(**changes: Any) -> Any:
    keys: dict[str, Any] = {
        "dtype": "float16",
        "block_tokens": 256,
        "slab_pages": 4,
        "on_gpu": True,
        "utilization": 0.9,
    }
    return room_for_kv(LLAMA_2_13B, **({**keys, "device_bytes": 80 * GIB} | changes))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"device_bytes": 24 * GIB}, "the weights take 24.24 GiB in float16"),
        ({"dtype": "float32", "device_bytes": 48 * GIB}, "the weights take 48.49 GiB in float32"),
        ({"kv_cache_bytes": 60 * GIB}, "60.00 GiB for KV are asked for"),
        ({"kv_cache_blocks": 1000}, "for KV are asked for"),
        ({"kv_cache_bytes": 1000}, "lower slab_pages"),
        ({"max_context_tokens": 8192}, "the model was made for 4096 tokens"),
        ({"kv_cache_blocks": 8, "max_context_tokens": 4096}, "the KV cache holds 2048 tokens"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(SizingError, match=part):
        _room(**changes)


@given(
    memory_gib=st.integers(30, 200),
    utilization=st.floats(0.9, 1.0),
    block_tokens=st.sampled_from([16, 256]),
    slab_pages=st.integers(1, 16),
)
def test_what_fits_never_takes_more_than_there_is(
    memory_gib: int, utilization: float, block_tokens: int, slab_pages: int
) -> None:
    limit = memory_gib * GIB * utilization
    taken = CUDA_CONTEXT_BYTES + GPU_WORKSPACE_BYTES
    changes = {"block_tokens": block_tokens, "slab_pages": slab_pages, "utilization": utilization}
    try:
        room = _room(device_bytes=memory_gib * GIB, **changes)
    except SizingError:
        left = limit - taken - LLAMA_2_13B.parameters * 2
        assert left < slab_pages * block_tokens * 819_200 + 1
        return
    assert room.weight_bytes + room.kv_bytes + taken <= limit
    assert room.kv_tokens * 819_200 == room.kv_bytes
    assert room.longest_context_tokens <= room.kv_tokens


def test_what_cannot_be_sized_is_refused() -> None:
    with pytest.raises(SizingError, match="'bert'"):
        shape_of({"model_type": "bert"})
    with pytest.raises(SizingError, match=r"quantization_config is .*; allowed: none"):
        shape_of(KNOWN_CONFIGS["facebook/opt-125m"] | {"quantization_config": {"bits": 4}})
    with pytest.raises(SizingError, match="'intermediate_size'"):
        shape_of(
            {
                key: value
                for key, value in KNOWN_CONFIGS["meta-llama/Llama-2-7b-hf"].items()
                if key != "intermediate_size"
            }
        )


@pytest.mark.parametrize("asked", ["auto", "float32"])
@pytest.mark.parametrize("checkpoint", ["float32", "bfloat16", "float16", "float64"])
def test_auto_dtype_is_the_engines(asked: str, checkpoint: str, tmp_path: Path) -> None:
    write_random_model(RandomModel("llama", 1, 1, 1), tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"float32"', f'"{checkpoint}"'))
    spec = loading.read_model_spec(tmp_path)
    assert spec.checkpoint_dtype == checkpoint
    for device in ("cpu", "cuda"):
        expected = loading.choose_dtype(asked, spec, torch.device(device))
        assert chosen_dtype(asked, checkpoint, on_gpu=device == "cuda") == expected
