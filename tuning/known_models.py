"""Models by name: what their own config.json says, as far as sizes and times depend on it."""

from __future__ import annotations

from typing import Any


def _llama(
    layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, context: int, **others: Any
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return config | others


def _opt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "ffn_dim": 4 * hidden,
        "num_attention_heads": heads,
        "word_embed_proj_dim": hidden,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "do_layer_norm_before": True,
        "torch_dtype": "float16",
    }


def _qwen3(layers: int, hidden: int, inner: int, heads: int, *, tied: bool = False) -> dict[str, Any]:
    config = _llama(layers, hidden, inner, heads, 8, 151936, 40960, head_dim=128, tie_word_embeddings=tied)
    return config | {"model_type": "qwen3"}


_FP16 = {"torch_dtype": "float16"}

KNOWN_CONFIGS: dict[str, dict[str, Any]] = {
    "llama-7b": _llama(32, 4096, 11008, 32, 32, 32000, 2048, **_FP16),
    "llama-13b": _llama(40, 5120, 13824, 40, 40, 32000, 2048, **_FP16),
    "llama-2-7b": _llama(32, 4096, 11008, 32, 32, 32000, 4096, **_FP16),
    "llama-2-13b": _llama(40, 5120, 13824, 40, 40, 32000, 4096, **_FP16),
    "llama-3.1-8b": _llama(32, 4096, 14336, 32, 8, 128256, 131072),
    "llama-3.1-70b": _llama(80, 8192, 28672, 64, 8, 128256, 131072),
    "mistral-7b-v0.3": _llama(32, 4096, 14336, 32, 8, 32768, 32768, model_type="mistral", sliding_window=None),
    "opt-125m": _opt(12, 768, 12),
    "opt-13b": _opt(40, 5120, 40),
    "qwen2.5-7b": _llama(28, 3584, 18944, 28, 4, 152064, 131072, model_type="qwen2"),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64),
    "smollm2-135m": _llama(30, 576, 1536, 9, 3, 49152, 8192, tie_word_embeddings=True),
}
"""In the spelling of `read_model_shape`."""
