from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from actors.checkpoint_import import ImportFailedError, import_checkpoint
from actors.model_source import is_model_folder
from actors.random_model import RandomModel, write_random_model

HEADS, KV_HEADS, LAYERS = 4, 2, 2
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def _permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF keeps the two halves of each rotary pair side by side, Hugging Face one half after the other."""
    out, into = weight.shape
    return weight.reshape(heads, 2, out // heads // 2, into).swapaxes(1, 2).reshape(out, into)


def _write_gguf(model: LlamaForCausalLM, path: Path, *, extra_tensor: str | None = None) -> None:
    """A Llama as llama.cpp's own converter writes it, with a tokenizer of single bytes."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    bytes_of = AutoTokenizer.from_pretrained(path.parent / "bytes").get_vocab()
    tokens = [*sorted(bytes_of, key=bytes_of.__getitem__), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(3)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    state = model.state_dict()
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    names["lm_head.weight"] = "output.weight"
    for layer in range(LAYERS):
        for theirs, ours in {
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
        }.items():
            names[f"model.layers.{layer}.{theirs}.weight"] = f"blk.{layer}.{ours}.weight"
    for theirs, ours in names.items():
        weight = state[theirs]
        if "attn_q" in ours or "attn_k" in ours:
            weight = _permuted(weight, HEADS if "attn_q" in ours else KV_HEADS)
        writer.add_tensor(ours, weight.numpy())
    if extra_tensor is not None:
        writer.add_tensor(extra_tensor, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=261,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    write_random_model(RandomModel("llama", 1, 2, 2), tmp_path / "bytes")
    (tmp_path / "out").mkdir()
    return tmp_path


def test_a_gguf_comes_back_as_the_model_it_was_written_from(llama: LlamaForCausalLM, scratch: Path) -> None:
    _write_gguf(llama, scratch / "tiny.gguf")
    import_checkpoint(scratch / "tiny.gguf", scratch / "out")
    assert is_model_folder(scratch / "out")

    back = AutoModelForCausalLM.from_pretrained(scratch / "out")
    expected = llama.state_dict()
    assert back.state_dict().keys() == expected.keys()
    for name, weight in back.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    prompt = torch.arange(4, 40)[None]
    with torch.no_grad():
        assert torch.equal(back(prompt).logits, llama(prompt).logits)
    assert back.generation_config.eos_token_id == 2

    tokenizer = AutoTokenizer.from_pretrained(scratch / "out")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "hello"
    assert tokenizer.decode(tokenizer("hello  123 é").input_ids) == "hello  123 é"
    assert tokenizer.tokenize("cab") == ["c", "ab"]
    assert tokenizer.model_max_length == 512


def test_a_gguf_whose_rotary_scaling_would_get_lost_is_refused(llama: LlamaForCausalLM, scratch: Path) -> None:
    _write_gguf(llama, scratch / "tiny.gguf", extra_tensor="rope_freqs.weight")
    with pytest.raises(ImportFailedError, match="use the model's safetensors"):
        import_checkpoint(scratch / "tiny.gguf", scratch / "out")


def test_a_damaged_gguf_is_refused_with_what_the_reader_said(scratch: Path) -> None:
    (scratch / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ImportFailedError, match=r"checkpoint_import .*bad\.gguf"):
        import_checkpoint(scratch / "bad.gguf", scratch / "out")


def test_pytorch_weights_keep_values_and_dtype(llama: LlamaForCausalLM, scratch: Path) -> None:
    source = scratch / "pickled"
    shutil.copytree(scratch / "bytes", source)
    (source / "model.safetensors").unlink()
    half = {name: weight.to(torch.float16) for name, weight in llama.state_dict().items()}
    config = LlamaConfig.from_dict({**llama.config.to_dict(), "dtype": "float16"})
    config.save_pretrained(source)
    torch.save(half, source / "pytorch_model.bin")

    import_checkpoint(source, scratch / "out")
    written = load_file(scratch / "out" / "model.safetensors")
    assert written.keys() == half.keys()
    for name, weight in written.items():
        assert weight.dtype == torch.float16
        assert torch.equal(weight, half[name]), name
