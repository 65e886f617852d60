"""What the tests hold the engine against: transformers' own models, tiny and random or the default one.

Greedy equality follows one rule everywhere, that of `load_tests.greedy_rule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from actors.random_model import byte_tokenizer
from load_tests.greedy_rule import check_greedy


def _shape(**more: object) -> dict[str, object]:
    return {
        "vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 1, "bos_token_id": 0,
        "pad_token_id": None, **more,
    }  # fmt: skip


FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_shape(tie_word_embeddings=True)),
    "llama-rope-scaled": LlamaConfig(
        **_shape(attention_bias=True, mlp_bias=True),
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": MistralConfig(**_shape(head_dim=16, sliding_window=None)),
    "mistral-window": MistralConfig(**_shape(sliding_window=20)),
    "qwen2": Qwen2Config(**_shape(tie_word_embeddings=True)),
    "qwen3": Qwen3Config(**_shape(head_dim=32)),
    "opt": OPTConfig(
        vocab_size=500, hidden_size=64, ffn_dim=96, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=512,
        word_embed_proj_dim=64, eos_token_id=2, bos_token_id=2, pad_token_id=1,
    ),
    "opt-post-norm": OPTConfig(
        vocab_size=500, hidden_size=64, ffn_dim=96, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=512,
        word_embed_proj_dim=32, do_layer_norm_before=False, eos_token_id=2, bos_token_id=2, pad_token_id=1,
    ),
}  # fmt: skip


def make_model(config: PreTrainedConfig, folder: Path, seed: int = 0, **save: object) -> Path:
    """Saves a random float32 model of `config`, with a byte tokenizer. Weights are larger than the default
    initialisation, so that logits differ."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
            elif "bias" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder, **save)
    byte_tokenizer().save_pretrained(folder)
    return folder


def load_reference(folder: Path) -> PreTrainedModel:
    """The same model in transformers, float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def assert_greedy(
    reference: PreTrainedModel, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> None:
    """Fails unless every output is the reference's, by the rule."""
    check_greedy(reference, prompts, outputs)
