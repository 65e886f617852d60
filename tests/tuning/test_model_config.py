from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tuning.known_models import KNOWN_CONFIGS
from tuning.model_config import FAMILIES, ModelConfigError, counted_shape, read_model_shape, shape_of_config

QWEN3_8B = KNOWN_CONFIGS["qwen3-8b"]

# Parameters as the checkpoints on the Hugging Face Hub count them (a tied head once).
PUBLISHED_PARAMETERS = {
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
}


@pytest.mark.parametrize("name", sorted(PUBLISHED_PARAMETERS))
def test_known_models_have_the_published_number_of_parameters(name: str) -> None:
    assert read_model_shape(name).parameters == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", sorted(KNOWN_CONFIGS))
def test_known_models_have_as_many_parameters_as_transformers_builds(name: str) -> None:
    # Few layers, so that building is quick; the number of layers is checked by the published totals.
    config = KNOWN_CONFIGS[name] | {"num_hidden_layers": 2}
    assert shape_of_config(config, name).parameters == parameters_in_transformers(config)


@pytest.mark.parametrize(
    ("name", "kv_bytes_per_token"),
    [("llama-13b", 819_200), ("qwen3-8b", 147_456), ("opt-13b", 819_200), ("llama-3.1-8b", 131_072)],
)
def test_kv_of_a_token(name: str, kv_bytes_per_token: int) -> None:
    assert read_model_shape(name).kv_bytes_per_token == kv_bytes_per_token


def test_1024_gib_hold_the_qwen3_blocks_that_the_studies_speak_of() -> None:
    assert 2**40 // (512 * read_model_shape("qwen3-8b").kv_bytes_per_token) == 14_563


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("switched", [False, True])
def test_switches_are_counted_as_transformers_builds_them(family: str, switched: bool) -> None:
    config: dict[str, Any] = {
        "model_type": family,
        "num_hidden_layers": 2,
        "hidden_size": 48,
        "num_attention_heads": 6,
        "vocab_size": 50,
        "max_position_embeddings": 32,
        "tie_word_embeddings": switched,
        "dtype": "float32",
    }
    if family == "opt":
        config |= {"ffn_dim": 40, "word_embed_proj_dim": 48, "do_layer_norm_before": switched, "enable_bias": switched}
    else:
        config |= {"intermediate_size": 40, "num_key_value_heads": 2, "head_dim": 10}
    if family in ("llama", "qwen3"):
        config["attention_bias"] = switched
    if family == "llama":
        config["mlp_bias"] = switched
    assert shape_of_config(config, "tiny").parameters == parameters_in_transformers(config)


def test_a_config_file_and_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_8B), encoding="utf-8")
    by_folder = read_model_shape(str(folder))
    assert by_folder.name == "my-model"
    assert by_folder.parameters == read_model_shape("qwen3-8b").parameters
    assert read_model_shape(str(folder / "config.json")) == by_folder


def test_a_key_that_is_given_twice_is_refused_with_its_lines(tmp_path: Path) -> None:
    text = json.dumps(QWEN3_8B, indent=1)[:-2] + ',\n "num_hidden_layers": 48\n}'
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    lines = [number for number, line in enumerate(text.splitlines(), 1) if "num_hidden_layers" in line]
    with pytest.raises(
        ModelConfigError, match=f"num_hidden_layers: given twice, in line {lines[0]} and in line {lines[1]}"
    ):
        read_model_shape(str(tmp_path))


def test_what_transformers_writes_can_be_read(tmp_path: Path) -> None:
    AutoConfig.for_model(**QWEN3_8B).save_pretrained(tmp_path)
    shape = read_model_shape(str(tmp_path))
    assert (shape.parameters, shape.kv_bytes_per_token) == (8_190_735_360, 147_456)


def test_the_dtype_that_is_served_may_be_another() -> None:
    assert read_model_shape("smollm2-135m", "float32").kv_bytes_per_token == 4 * 2 * 30 * 3 * 64
    with pytest.raises(ModelConfigError, match="dtype is 'int8'; allowed: float32, bfloat16, float16"):
        read_model_shape("smollm2-135m", "int8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe'; allowed: one of llama, mistral"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'; allowed: an int from 1 to 2147483647"),
        ({"hidden_size": 10**400}, r"hidden_size is 10{76}\.\.\.; allowed: an int from 1 to 2147483647"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype is 'float8_e4m3fn'; allowed: one of float32"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is .*; allowed: none"),
        ({"num_experts": 8}, "num_experts is 8; allowed: null, 0 or 1"),
        ({"num_local_experts": 2}, "num_local_experts is 2; allowed: null, 0 or 1"),
        ({"n_routed_experts": "64"}, "n_routed_experts is '64'; allowed: null, 0 or 1"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding_window is 4096; allowed: null"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; allowed: true or false"),
        ({"num_key_value_heads": 5}, "num_heads=32 is not allowed with num_kv_heads=5"),
    ],
)
def test_what_is_not_understood_is_refused_by_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=f"the config of broken: {message}"):
        shape_of_config(QWEN3_8B | change, "broken")


@pytest.mark.parametrize("count", [None, 0, 1])
def test_a_dense_config_may_say_that_it_has_no_experts(count: int | None) -> None:
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    assert shape_of_config(QWEN3_8B | dict.fromkeys(keys, count), "m") == shape_of_config(QWEN3_8B, "m")


@pytest.mark.parametrize("key", ["model_type", "torch_dtype", "hidden_size", "vocab_size", "max_position_embeddings"])
def test_a_missing_key_is_named(key: str) -> None:
    config = {name: value for name, value in QWEN3_8B.items() if name != key}
    with pytest.raises(ModelConfigError, match=f"has no '{key}'"):
        shape_of_config(config, "broken")


def test_windows_of_a_mistral_are_refused_where_times_are_asked_for() -> None:
    with pytest.raises(ModelConfigError, match="sliding_window is 4096"):
        shape_of_config(KNOWN_CONFIGS["mistral-7b-v0.3"] | {"sliding_window": 4096}, "old")
    counted = counted_shape(KNOWN_CONFIGS["mistral-7b-v0.3"] | {"sliding_window": 4096}, "new", 2)
    assert counted == replace(read_model_shape("mistral-7b-v0.3"), name="new")


def test_embeddings_of_another_width_are_counted_as_transformers_builds_them() -> None:
    narrow = KNOWN_CONFIGS["opt-125m"] | {"num_hidden_layers": 2, "word_embed_proj_dim": 512}
    shape = shape_of_config(narrow, "narrow")
    assert shape.parameters == parameters_in_transformers(narrow)
    assert shape.head_flops == 2 * 512 * 50272


@pytest.mark.parametrize(("text", "message"), [("{", "can't be read as JSON"), ("[1]", "is no JSON object")])
def test_a_file_that_is_no_config(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelConfigError, match=message):
        read_model_shape(str(tmp_path))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelConfigError, match=r"'llama-14b' is no model known by name .*llama-13b.*no config.json"):
        read_model_shape("llama-14b")


def parameters_in_transformers(config: dict[str, Any]) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    count: int = model.num_parameters()
    return count


@pytest.mark.parametrize("content", ["[" * 100_000, '{"hidden_size": ' + "9" * 5000 + "}"])
def test_json_that_is_too_deep_or_too_long_to_read_is_refused_with_its_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelConfigError, match=r"config\.json can't be read as JSON"):
        read_model_shape(str(tmp_path))
