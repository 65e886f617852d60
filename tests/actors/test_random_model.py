from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.random_model import FAMILIES, HEAD_DIM, RandomModel, parse_random_name, write_random_model


def test_names_say_the_shape() -> None:
    assert parse_random_name("random/llama-40x40") == RandomModel("llama", 40, 40, 40)
    assert parse_random_name("random/qwen3-2x8x4") == RandomModel("qwen3", 2, 8, 4)
    assert parse_random_name("org/llama-40x40") is None


@pytest.mark.parametrize(
    "name",
    ["random/bert-2x4", "random/llama", "random/llama-2", "random/llama-0x4", "random/llama-2x4x3", "random/opt-2x4x2"],
)
def test_names_that_cannot_be_made_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="random models"):
        parse_random_name(name)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_and_runs_every_family(family: str, tmp_path: Path) -> None:
    kv_heads = 4 if family == "opt" else 2
    write_random_model(RandomModel(family, 2, 4, kv_heads), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.dtype == torch.float32
    assert model.config.num_hidden_layers == 2
    assert model.config.num_attention_heads == 4
    assert model.config.hidden_size == 4 * HEAD_DIM
    assert getattr(model.config, "num_key_value_heads", 4) == kv_heads
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    prompt = torch.tensor([tokenizer("abc").input_ids])
    answer = model.generate(prompt, max_new_tokens=16, do_sample=False, eos_token_id=None)[0, prompt.shape[1] :]
    assert len(answer) == 16
    assert len(set(answer.tolist())) > 3  # a model that only repeats itself would hide mistakes


def test_any_text_survives_the_tokenizer(tmp_path: Path) -> None:
    write_random_model(RandomModel("llama", 1, 2, 2), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("plain", "  two  spaces\n\ttab", "naïve 漢字 🙂", "\x00\x7f", ""):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = [{"role": "user", "content": "hello"}]
    assert "hello" in tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def test_the_same_name_gives_the_same_weights(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_random_model(RandomModel("llama", 1, 2, 2), tmp_path / name)
    write_random_model(RandomModel("llama", 1, 2, 2, seed=1), tmp_path / "other")
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b", "other")}
    assert weights["a"] == weights["b"]
    assert weights["a"] != weights["other"]
