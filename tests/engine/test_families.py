"""Every family's greedy output against transformers, at block borders, cold and warm, alone and batched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.engine.model_spec import UnsupportedModelError
from actors.engine.weights import CheckpointError
from tests.engine.conftest import MakeEngine
from tests.engine_driver import greedy, make_prompt, run_prompts
from tests.reference import FAMILIES, assert_greedy, load_reference, make_model

BLOCK = 16
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 5)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(family: str, family_folders: dict[str, Path], make_engine: MakeEngine) -> None:
    reference = load_reference(family_folders[family])
    engine = make_engine(family_folders[family])
    prompts = [make_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    alone = [run_prompts(engine, [prompt], greedy(20))[0] for prompt in prompts]
    assert_greedy(reference, prompts, alone)
    assert engine.counters.cached_prompt_tokens == 0
    warm = [run_prompts(engine, [prompt], greedy(20))[0] for prompt in prompts]
    assert_greedy(reference, prompts, warm)
    assert engine.counters.cached_prompt_tokens == sum((length - 1) // BLOCK * BLOCK for length in LENGTHS)
    assert engine.counters.device_hit_tokens == engine.counters.cached_prompt_tokens
    batch = [make_prompt(length, 100 + seed) for seed, length in enumerate(LENGTHS * 3)][:16]
    assert_greedy(reference, batch, run_prompts(engine, batch, greedy(20)))


def test_generate_itself_agrees(llama_folder: Path, make_engine: MakeEngine) -> None:
    reference, prompt = load_reference(llama_folder), make_prompt(23, 7)
    expected = reference.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert run_prompts(make_engine(llama_folder), [prompt], greedy(24))[0] == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("budget", [8, 33])
def test_chunked_prefill_changes_nothing(budget: int, llama_folder: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(llama_folder, max_batch_tokens=budget, max_running_requests=8)
    prompts = [make_prompt(length, 200 + length) for length in (5, 40, 70, 100)]
    assert_greedy(load_reference(llama_folder), prompts, run_prompts(engine, prompts, greedy(12)))


def test_sharded_checkpoint_gives_the_same_model(llama_folder: Path, tmp_path: Path, make_engine: MakeEngine) -> None:
    reference = load_reference(llama_folder)
    reference.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    sharded, single = make_engine(tmp_path), make_engine(llama_folder)
    assert sharded.loaded.fingerprint == single.loaded.fingerprint
    prompt = make_prompt(20)
    assert run_prompts(sharded, [prompt], greedy(8)) == run_prompts(single, [prompt], greedy(8))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_close_to_float32(dtype: str, llama_folder: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(llama_folder, dtype=dtype)
    reference, prompt = load_reference(llama_folder), make_prompt(30, 3)
    output = run_prompts(engine, [prompt], greedy(1))[0]
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt])).logits[0, -1]
    # Half precision may pick another token, but one whose float32 logit is near the best.
    assert logits.max() - logits[output[0]] < 0.05 * logits.std() * 4


def test_fingerprint_tells_weights_dtype_and_layout_apart(
    llama_folder: Path, tmp_path: Path, make_engine: MakeEngine
) -> None:
    other_weights = make_model(FAMILIES["llama"], tmp_path / "other", seed=99)
    engines = [
        make_engine(llama_folder),
        make_engine(other_weights),
        make_engine(llama_folder, dtype="bfloat16"),
        make_engine(llama_folder, block_tokens=32),
    ]
    fingerprints = [engine.loaded.fingerprint for engine in engines]
    assert len(set(fingerprints)) == len(fingerprints)
    assert make_engine(llama_folder).loaded.fingerprint == fingerprints[0]


def test_unknown_family_is_refused(tmp_path: Path, make_engine: MakeEngine) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UnsupportedModelError, match=r"gpt2.*llama, mistral, qwen2, qwen3, opt"):
        make_engine(tmp_path)


def test_truncated_checkpoint_is_refused(llama_folder: Path, tmp_path: Path, make_engine: MakeEngine) -> None:
    for file in llama_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        make_engine(tmp_path)
