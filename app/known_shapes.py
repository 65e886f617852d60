"""Shapes of a few well-known models by name, so that a deployment can be planned before anything is downloaded.

Taken from the models' own config.json; only the keys that sizes depend on.
"""

from __future__ import annotations

from typing import Any

_LLAMA_2: dict[str, Any] = {
    "model_type": "llama",
    "max_position_embeddings": 4096,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
_OPT: dict[str, Any] = {
    "model_type": "opt",
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "do_layer_norm_before": True,
    "torch_dtype": "float16",
}

KNOWN_CONFIGS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-2-7b-hf": _LLAMA_2
    | {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
    },
    "meta-llama/Llama-2-13b-hf": _LLAMA_2
    | {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
        "num_key_value_heads": 40,
    },
    "meta-llama/Llama-3.1-8B": {
        "model_type": "llama",
        "max_position_embeddings": 131072,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
    },
    "facebook/opt-125m": _OPT
    | {
        "hidden_size": 768,
        "ffn_dim": 3072,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "word_embed_proj_dim": 768,
    },
    "facebook/opt-13b": _OPT
    | {
        "hidden_size": 5120,
        "ffn_dim": 20480,
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
        "word_embed_proj_dim": 5120,
    },
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        "model_type": "llama",
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
    },
}
"""By Hub id."""
