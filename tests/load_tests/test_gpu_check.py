"""The check for GPU machines, on a CPU: what it needs, what it says, and that it can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.random_model import parse_random_name, write_random_model
from load_tests import gpu_check
from load_tests.gpu_answers import Answer, GreedyJudge, HalfPrecisionJudge
from load_tests.gpu_throughput import Workload
from tests.reference import load_reference

ROOT = Path(__file__).resolve().parents[2]
MODEL = "random/llama-2x4x2"

# A machine that has torch, transformers and xxhash, and none of what else the project uses.
_WITHOUT_THE_REST = """
import runpy, sys
for name in ("ray", "fastapi", "pydantic", "aiohttp", "psutil", "gguf", "accelerate", "openai", "hypothesis", "pytest"):
    sys.modules[name] = None
sys.argv[0] = "gpu_check"
runpy.run_module("load_tests.gpu_check", run_name="__main__")
"""


def run_alone(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", _WITHOUT_THE_REST, *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = parse_random_name(MODEL)
    assert model is not None
    out = tmp_path_factory.mktemp("gpu_check") / "tiny"
    write_random_model(model, out)
    return out


def test_without_a_gpu_it_says_so_and_exits_0() -> None:
    run = run_alone()
    assert run.returncode == 0, run.stderr
    *lines, last = run.stdout.splitlines()
    assert any("No GPU" in line for line in lines)
    report = json.loads(last)
    assert (report["device"], report["passed"]) == (None, None)
    assert report["versions"]["torch"] == torch.__version__


def test_quick_checks_run_on_a_cpu_without_ray() -> None:
    run = run_alone("--device", "cpu", "--quick", "--json", "--model", MODEL)
    assert run.returncode == 0, run.stderr + run.stdout
    report = json.loads(run.stdout)
    assert report["passed"] is True
    assert report["model"] == MODEL
    for dtype in ("float32", "bfloat16"):
        names = [check["name"] for check in report["checks"] if check["dtype"] == dtype]
        assert names == [
            "block borders, cold", "block borders, with a prefix hit", "batch of 16",
            "chunked prefill, 17 tokens a step", "chunked prefill, 46 tokens a step", "preemption",
            "captured decode steps, batch of 1", "captured decode steps, batch of 3",
            "captured decode steps, batch of 16",
        ]  # fmt: skip
    assert all(check["passed"] for check in report["checks"])


def test_damaged_model_fails_every_check(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert gpu_check.main(["--device", "cpu", "--quick", "--model", str(tmp_path)]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    assert report["passed"] is False
    assert report["model"] == tmp_path.name
    assert {check["name"] for check in report["checks"] if not check["passed"]} == {
        "block borders", "batch of 16", "chunked prefill", "preemption", "captured decode steps",
    }  # fmt: skip
    assert all("NaN" in check["detail"] for check in report["checks"])
    assert "SOME CHECKS FAILED" in lines


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("random/gpt-2x4", "family 'gpt' is not one of"),
        ("no/such/folder", "no folder with a config.json"),
    ],
)
def test_model_that_cannot_be_had(model: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(["--device", "cpu", "--model", model])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def greedy_answer(model: Any, prompt: tuple[int, ...], new_tokens: int) -> Answer:
    """By whole passes over the sequence, in the model's own dtype."""
    answer = Answer(prompt)
    with torch.inference_mode():
        for _ in range(new_tokens):
            logits = model(torch.tensor([[*prompt, *answer.tokens]])).logits[0, -1].float()
            answer.tokens.append(int(logits.argmax()))
            answer.logprobs.append(float(logits.log_softmax(-1).max()))
    return answer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_judged_by_what_transformers_loses_in_it(dtype: torch.dtype, folder: Path) -> None:
    reference, half = load_reference(folder), load_reference(folder).to(dtype)
    judge = HalfPrecisionJudge(reference, half)
    answers = [greedy_answer(half, tuple(range(5, 5 + length)), 10) for length in (3, 20, 40)]
    verdict = judge.judge(answers)
    assert verdict.passed, verdict.detail
    for change in (0.3, -0.3, float("nan")):
        wrong = [Answer(answer.prompt, answer.tokens, [x + change for x in answer.logprobs]) for answer in answers]
        assert not judge.judge(wrong).passed
    # One token whose log-probability is far off is enough.
    answers[1].logprobs[4] += 1.0
    assert not judge.judge(answers).passed


def test_float32_is_judged_by_the_tokens(folder: Path) -> None:
    reference = load_reference(folder)
    judge, answer = GreedyJudge(reference), greedy_answer(reference, tuple(range(9, 30)), 12)
    assert judge.judge([answer]).passed
    answer.tokens[5] = (answer.tokens[5] + 1) % 260
    verdict = judge.judge([answer])
    assert not verdict.passed
    assert "output token 5" in verdict.detail


def test_measurements_run_and_say_the_ceiling_first(folder: Path) -> None:
    """The figures of a CPU mean nothing here; that they are made, and from what, is checked."""
    said: list[str] = []
    workload = Workload(
        prefill_prompts=2, prefill_tokens=40, decode_context=20, decode_steps=4, decode_batches=(1, 3), repeats=2
    )
    report = gpu_check.run_throughput(
        folder, torch.device("cpu"), "bfloat16", workload, said.append, copy_bytes=1 << 16, matrix_size=32
    )
    results = report["results"]
    assert [(r["phase"], r["batch"], r["contender"]) for r in results] == [
        (phase, batch, contender)
        for phase, batch in (("prefill", 2), ("decode", 1), ("decode", 3))
        for contender in ("torch", "transformers")
    ]
    assert all(r["share"] == r["tokens_per_s"] / r["allowed_tokens_per_s"] for r in results)
    ceilings = [index for index, line in enumerate(said) if "at most" in line]
    assert len(ceilings) == 3
    for index in ceilings:
        assert [line.split()[0] for line in said[index + 1 : index + 3]] == ["torch", "transformers"]
    # Hand-computed: a decode step of 3 reads every weight once and 20 + 8 + 2 tokens of KV for each sequence. Layers of
    # 4 heads and 2 KV heads of 8 numbers, hidden 32, intermediate 64; the head has its own weights, 260 x 32.
    per_layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64 + 2 * 32
    weight_bytes = 2 * (2 * per_layer + 32 + 260 * 32)
    kv_bytes = 2 * 2 * 2 * 8 * 2
    assert report["costs"] == {
        "weight_bytes": weight_bytes, "kv_bytes_per_token": kv_bytes, "parameters": weight_bytes // 2,
    }  # fmt: skip
    allowed = 3 * report["rates"]["bytes_per_s"] / (weight_bytes + 3 * 30 * kv_bytes)
    assert results[-1]["allowed_tokens_per_s"] == pytest.approx(allowed)
