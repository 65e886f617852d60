"""Turns a checkpoint that transformers can read, but our weight loader can't, into a folder of safetensors.

Two kinds need it: GGUF files (de-quantized to float32) and folders whose weights are PyTorch files (their own dtype).
Run as a program (`python -m actors.checkpoint_import SOURCE OUT`), so that neither torch nor the copy of the weights
stays in the process that asked for it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kv.exit_status import status_of

CONVERTER_VERSION = 1
"""Part of the cache key of a conversion: raised when the outcome for the same source changes."""

_PROJECT = Path(__file__).resolve().parent.parent


class ImportFailedError(RuntimeError):
    """The checkpoint can't be converted; the message ends with what the converter said."""


def import_checkpoint(source: Path, out: Path) -> None:
    """Converts `source` (a .gguf file, or a folder with PyTorch weights) into the existing folder `out`.

    `out` gets config.json, model*.safetensors, the tokenizer with its chat template, and generation_config.json. The
    work is done in a subprocess.

    Raises: ImportFailedError.
    """
    run_module("actors.checkpoint_import", [str(source), str(out)])


def run_module(module: str, arguments: Sequence[str]) -> None:
    """Runs one of the project's modules in an interpreter of its own, with the Hub left alone, and waits for it.

    Raises: ImportFailedError: it failed; the message ends with the last lines it wrote to its error output.
    """
    command = (
        f"import runpy, sys; sys.path.insert(0, {str(_PROJECT)!r}); runpy.run_module({module!r}, run_name='__main__')"
    )
    result = subprocess.run(
        [sys.executable, "-c", command, *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        said = "\n".join(result.stderr.strip().splitlines()[-12:])
        raise ImportFailedError(f"{module} {' '.join(arguments)} ended with status {result.returncode}:\n{said}")


def _convert(source: Path, out: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    kwargs: dict[str, Any] = {"gguf_file": source.name} if source.is_file() else {}
    folder = source.parent if source.is_file() else source
    if source.is_file():
        _refuse_what_gets_lost(source)
    tokenizer = AutoTokenizer.from_pretrained(folder, **kwargs)
    if source.is_file():
        _restore_pre_tokenizer(tokenizer, source)
    config = AutoConfig.from_pretrained(folder, **kwargs)
    dtype = torch.float32 if source.is_file() else "auto"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **kwargs)
    if source.is_file():
        _take_gguf_marks_off(model)
        # The tokenizer knows best what ends a turn; a GGUF has no generation settings of its own.
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None:
            tokenizer.model_max_length = longest
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    model.generation_config.save_pretrained(out)


def _refuse_what_gets_lost(gguf: Path) -> None:
    """Llama 3.1 and later keep their rotary scaling in a tensor that transformers' reader passes over in silence."""
    from gguf import GGUFReader

    if any(tensor.name == "rope_freqs.weight" for tensor in GGUFReader(gguf).tensors):
        raise SystemExit(
            f"{gguf} scales its rotary frequencies (tensor rope_freqs.weight), which can't be read from GGUF: "
            "use the model's safetensors"
        )


def _take_gguf_marks_off(model: Any) -> None:
    """Makes a de-quantized model one that save_pretrained accepts: it refuses any that is marked as GGUF-quantized."""
    for key in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, key):
            delattr(model.config, key)
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model, "quantization_method"):
        del model.quantization_method


def _restore_pre_tokenizer(tokenizer: Any, source: Path) -> None:
    """Gives a tokenizer read from GGUF back the splitting that it was trained with, where transformers drops it.

    `tokenizer.ggml.pre` names the splitting rule; transformers reads all byte-level ones as GPT-2's. SmolLM splits
    off each digit first, which matters where spaces run up to a digit.
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    field = GGUFReader(source).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m actors.checkpoint_import",
        description="Convert a GGUF file, or a folder with PyTorch weights, into a folder of safetensors.",
        epilog="example: python -m actors.checkpoint_import model.Q4_1.gguf /tmp/model",
    )
    parser.add_argument("source", type=Path, help=".gguf file or Hugging Face folder")
    parser.add_argument("out", type=Path, help="folder to write")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    _convert(options.source, options.out)


if __name__ == "__main__":
    sys.exit(status_of(main))
