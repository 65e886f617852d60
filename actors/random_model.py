"""Small models with random weights and a byte tokenizer, in Hugging Face layout: a test aid that needs no download.

`random/FAMILY-LAYERSxHEADS` (or `...xHEADSxKV_HEADS`) has the shape of a real model of so many layers and heads, with
heads of eight numbers, so that 40 layers of 40 heads fit a laptop. The same name gives the same weights.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "mistral", "opt", "qwen2", "qwen3")

HEAD_DIM = 8
CONTEXT_TOKENS = 4096

_NAME = re.compile(r"random/(?P<family>[a-z0-9]+)-(?P<layers>\d+)x(?P<heads>\d+)(?:x(?P<kv_heads>\d+))?")
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class RandomModel:
    """What a random model is made of.

    Raises: ValueError: an unknown family, a count below one, or heads that KV heads don't divide.
    """

    family: str
    layers: int
    heads: int
    kv_heads: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"random models: family {self.family!r} is not one of {', '.join(FAMILIES)}")
        if self.layers < 1 or self.heads < 1 or self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(
                f"random models: {self.layers} layers, {self.heads} heads, {self.kv_heads} KV heads: all must be at "
                "least 1, and heads a multiple of KV heads"
            )
        if self.family == "opt" and self.kv_heads != self.heads:
            raise ValueError("random models: opt has as many KV heads as heads")


def parse_random_name(name: str) -> RandomModel | None:
    """The model that a name such as random/llama-40x40 asks for; None if the name is of another kind.

    Raises: ValueError: it begins with random/ but can't be made; the message says why.
    """
    if not name.startswith("random/"):
        return None
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(
            f"random models are named random/FAMILY-LAYERSxHEADS or random/FAMILY-LAYERSxHEADSxKV_HEADS, such as "
            f"random/llama-40x40; given {name!r}"
        )
    heads = int(match["heads"])
    return RandomModel(match["family"], int(match["layers"]), heads, int(match["kv_heads"] or heads))


def write_random_model(model: RandomModel, out: Path) -> None:
    """Writes config, float32 safetensors, tokenizer and generation config into the folder `out`. Imports torch."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    out.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    config = AutoConfig.for_model(**config_of(model), **_special_tokens(tokenizer))
    torch.manual_seed(model.seed)
    weights = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights.generation_config = GenerationConfig(**_special_tokens(tokenizer))
    weights.save_pretrained(out)
    weights.generation_config.save_pretrained(out)
    tokenizer.save_pretrained(out)


def config_of(model: RandomModel) -> dict[str, Any]:
    """The keys of the model's config.json that say its shape. Imports neither torch nor transformers."""
    hidden = model.heads * HEAD_DIM
    config: dict[str, Any] = {
        "model_type": model.family,
        "hidden_size": hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "max_position_embeddings": CONTEXT_TOKENS,
        "vocab_size": 260,
        "tie_word_embeddings": model.family == "opt",
        # Wider than the usual 0.02, or every answer of such a narrow model is one token repeated.
        "initializer_range": 0.2,
        "init_std": 0.2,
    }
    if model.family == "opt":
        return config | {"ffn_dim": 2 * hidden, "word_embed_proj_dim": hidden}
    return config | {"intermediate_size": 2 * hidden, "num_key_value_heads": model.kv_heads, "head_dim": HEAD_DIM}


def _special_tokens(tokenizer: Any) -> dict[str, Any]:
    return {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}


def byte_tokenizer() -> Any:
    """One token for each byte, after four special ones: any text goes in and comes back out."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|unk|>", "<|bos|>", "<|eos|>", "<|pad|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(special + alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<|unk|>",
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of `python -m load_tests.make_tiny_model`, and what model_source runs in a subprocess."""
    parser = argparse.ArgumentParser(
        prog="python -m load_tests.make_tiny_model",
        description="Write a small model with random weights and a byte tokenizer, in Hugging Face layout.",
        epilog="example: python -m load_tests.make_tiny_model --family llama --layers 40 --heads 40 --out /tmp/tiny",
    )
    parser.add_argument("--family", choices=FAMILIES, default="llama")
    parser.add_argument("--layers", type=int, default=4, help="default: 4")
    parser.add_argument("--heads", type=int, default=8, help=f"query heads of {HEAD_DIM} numbers each; default: 8")
    parser.add_argument("--kv-heads", type=int, default=None, help="default: as many as heads")
    parser.add_argument("--seed", type=int, default=0, help="of the weights; default: 0")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    options = parser.parse_args(argv)
    kv_heads = options.heads if options.kv_heads is None else options.kv_heads
    try:
        model = RandomModel(options.family, options.layers, options.heads, kv_heads, options.seed)
    except ValueError as error:
        parser.error(str(error))
    write_random_model(model, options.out)
    print(options.out)


if __name__ == "__main__":
    main()
