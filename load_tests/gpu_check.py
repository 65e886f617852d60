"""Checks the engine on a GPU against transformers, and measures it.

    python -m load_tests.gpu_check [--model FOLDER | random/FAMILY-LAYERSxHEADS] [--quick] [--json] [--transfer]

For every attention backend that runs here (flash-attn where it is installed, torch's own kernels): greedy equality at
block borders, with prefix hits, in a batch, in chunks, under preemption, and decode steps replayed from CUDA graphs.
Then prefill and decode speed beside transformers' `generate` and beside the speed of the device's memory. With
`--transfer` instead: copies of pages beside computing, and their speed. The last line of standard output is one JSON
object. Exit code: 0, or 1 when a check failed. Without a GPU it says so and exits 0.

Needs torch, transformers and the small package xxhash; no Ray.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.metadata
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging as transformers_logging

from actors.engine.arena import TORCH_DTYPES
from actors.engine.attention.choice import flash_obstacle
from actors.engine.config import EngineConfig
from actors.engine.loading import load_model
from actors.engine.model_spec import read_model_spec
from actors.random_model import parse_random_name, write_random_model
from kv.exit_status import status_of
from load_tests.device_rates import ModelCosts, measure_rates
from load_tests.gpu_answers import GreedyJudge, HalfPrecisionJudge
from load_tests.gpu_correctness import Check, Subject, check_engine
from load_tests.gpu_throughput import Contender, EngineContender, TransformersContender, Workload, measure_throughput
from load_tests.gpu_transfer import Rig, check_transfers, make_rig
from load_tests.gpu_transfer_speed import measure_overlap, measure_transfer_rates
from load_tests.recorded_ops import RecordedOps

RANDOM_1B = "random/llama-1b"
"""The default on a GPU: random weights in the shape of a Llama of a billion parameters."""

_TINY = "random/llama-2x4x2"
_COPY_BYTES, _MATRIX_SIZE = 1 << 30, 8192

Say = Callable[[str], None]


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    say: Say = (lambda line: print(line, file=sys.stderr)) if options.json else (lambda line: print(line, flush=True))
    report: dict[str, Any] = {"command": "gpu_check", "versions": _versions(), "device": None, "passed": None}
    if options.device == "cuda" and not torch.cuda.is_available():
        say(
            "No GPU: torch sees no CUDA device, so nothing was checked. --device cpu --quick checks the logic on a CPU."
        )
        print(json.dumps(report))
        return 0
    device = torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    transformers_logging.disable_progress_bar()
    torch.set_float32_matmul_precision("highest")  # TF32 would not keep the rule of greedy equality
    report["device"] = _describe(device)
    with tempfile.TemporaryDirectory() as scratch:
        name = options.model or (RANDOM_1B if device.type == "cuda" else _TINY)
        try:
            folder = model_folder(name, Path(scratch))
            read_model_spec(folder)
        except ValueError as error:
            parser.error(f"--model: {error}")
        report["model"] = name if folder.is_relative_to(scratch) else folder.resolve().name
        say(f"{report['device']['name']}, torch {torch.__version__}, model {report['model']}")
        checks = []
        new_tokens = 8 if options.quick else 32
        rig = make_rig(folder, device, options.dtype) if options.transfer else None
        running = run_checks(folder, device, new_tokens, say) if rig is None else check_transfers(rig, new_tokens)
        for check in running:
            say(f"{'ok  ' if check.passed else 'FAIL'} {check.backend} {check.dtype}, {check.name}: {check.detail}")
            checks.append(check)
        report["checks"] = [dataclasses.asdict(check) for check in checks]
        report["passed"] = all(check.passed for check in checks)
        if device.type == "cuda" and not options.quick:
            workload = Workload(decode_batches=tuple(options.batches), repeats=options.repeats)
            try:
                if rig is None:
                    report["throughput"] = run_throughput(folder, device, options.dtype, workload, say)
                else:
                    report["transfer"] = run_transfers(rig, options.repeats, say)
            except (RuntimeError, ValueError, MemoryError) as error:
                report |= {"passed": False, "measurement_error": f"{type(error).__name__}: {error}"}
                say(f"FAIL the measurements ended: {report['measurement_error']}")
    say("all checks passed" if report["passed"] else "SOME CHECKS FAILED")
    print(json.dumps(report))
    return 0 if report["passed"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m load_tests.gpu_check",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="example: python -m load_tests.gpu_check --quick --device cpu",
    )
    parser.add_argument(
        "--model",
        help=f"a folder in Hugging Face layout, random/FAMILY-LAYERSxHEADS, or {RANDOM_1B}: random weights in the "
        "shape of a Llama of a billion parameters, made on the spot (2 GB; the default)",
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: the checks alone, to try them; default: cuda"
    )
    parser.add_argument("--transfer", action="store_true", help="copies of pages beside computing, instead of the rest")
    parser.add_argument("--quick", action="store_true", help="fewer tokens, and no measurements")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON object on standard output")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16"], default="bfloat16", help="what speed is measured in"
    )
    parser.add_argument(
        "--batches", type=int, nargs="+", default=list(Workload().decode_batches), help="decode batches to measure"
    )
    parser.add_argument("--repeats", type=int, default=5, help="measurements whose median is taken; default: 5")
    return parser


def model_folder(name: str, scratch: Path) -> Path:
    """The folder of a model's files, made in `scratch` if the name asks for random weights.

    Raises ValueError: there is no such folder, or no such random model.
    """
    if name == RANDOM_1B:
        _write_random_1b(scratch / "model")
        return scratch / "model"
    random_model = parse_random_name(name)
    if random_model is not None:
        write_random_model(random_model, scratch / "model")
        return scratch / "model"
    if not (Path(name) / "config.json").exists():
        raise ValueError(f"{name} is no folder with a config.json; give one, or random/FAMILY-LAYERSxHEADS")
    return Path(name)


def _write_random_1b(out: Path) -> None:
    """The head has weights of its own: with the embedding's, random weights repeat one token for ever."""
    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(out)


def run_checks(folder: Path, device: torch.device, new_tokens: int, say: Say) -> Iterator[Check]:
    """Every backend that runs here, torch's in float32 first: there the tokens themselves must be the reference's."""
    spec = read_model_spec(folder)
    capture = None if device.type == "cuda" else RecordedOps()
    subjects = [Subject(folder, device.type, "torch", dtype, new_tokens, capture) for dtype in ("float32", "bfloat16")]
    if device.type == "cuda":
        for dtype in ("bfloat16", "float16"):
            obstacle = flash_obstacle(device, dtype, spec.head_dim)
            if obstacle is None:
                subjects.append(Subject(folder, device.type, "flash", dtype, new_tokens))
            else:
                say(f"flash-attn in {dtype} is left out: {obstacle}")
    reference = _transformers_model(folder, "float32", device)
    for subject in subjects:
        if subject.dtype == "float32":
            yield from check_engine(subject, GreedyJudge(reference))
        else:
            half = _transformers_model(folder, subject.dtype, device)
            yield from check_engine(subject, HalfPrecisionJudge(reference, half))
            del half
        _free_memory()


def run_throughput(
    folder: Path,
    device: torch.device,
    dtype: str,
    workload: Workload,
    say: Say,
    *,
    copy_bytes: int = _COPY_BYTES,
    matrix_size: int = _MATRIX_SIZE,
) -> dict[str, Any]:
    """Measures every backend and transformers; a plain object for the report."""
    rates = measure_rates(device, TORCH_DTYPES[dtype], copy_bytes=copy_bytes, matrix_size=matrix_size)
    say(
        f"memory copies at {rates.bytes_per_s / 1e9:,.0f} GB/s, {dtype} products at "
        f"{rates.flop_per_s / 1e12:,.1f} TFLOP/s"
    )
    spec = read_model_spec(folder)
    backends = ["torch"] + ["flash"] * (flash_obstacle(device, dtype, spec.head_dim) is None)
    reference = _transformers_model(folder, dtype, device)
    contenders: list[Contender] = []
    for backend in backends:
        block_tokens = 256 if backend == "flash" else 16
        config = EngineConfig(
            device=device.type,
            dtype=dtype,
            attention=backend,
            kernels="torch",
            block_tokens=block_tokens,
            kv_cache_blocks=workload.kv_blocks(block_tokens),
            max_batch_tokens=max(workload.max_batch_tokens, *workload.decode_batches),
            max_running_requests=max(workload.prefill_prompts, *workload.decode_batches),
        )
        loaded = load_model(folder, config)
        contenders.append(EngineContender(backend, loaded, config))
        kv_bytes_per_token = loaded.layout.kv_bytes_per_token
    contenders.append(TransformersContender(reference))
    costs = model_costs(reference, kv_bytes_per_token)
    results = measure_throughput(contenders, workload, costs, rates, spec.vocab_size, say)
    return {
        "dtype": dtype,
        "rates": dataclasses.asdict(rates),
        "costs": dataclasses.asdict(costs),
        "workload": dataclasses.asdict(workload),
        "results": [dataclasses.asdict(result) | {"share": result.share} for result in results],
    }


def run_transfers(rig: Rig, repeats: int, say: Say, *, num_parts: int = 8, prompt_tokens: int = 2048) -> dict[str, Any]:
    """Measures copies beside plain ones, and beside computing; a plain object for the report."""
    rates = measure_transfer_rates(rig, num_parts)
    for name, rate, plain in (("out of", rates.read, rates.plain_read), ("into", rates.write, rates.plain_write)):
        say(f"{name} pages at {rate / 1e9:,.1f} GB/s, {rate / plain:.0%} of a plain copy with pinned memory")
    overlap = measure_overlap(rig, num_parts, prompt_tokens, repeats)
    say(
        f"prefill {overlap.compute_s * 1e3:,.1f} ms, copies {overlap.transfer_s * 1e3:,.1f} ms, both at once "
        f"{overlap.together_s * 1e3:,.1f} ms: {overlap.hidden_share:.0%} of the shorter is hidden"
    )
    return {
        "rates": dataclasses.asdict(rates),
        "overlap": dataclasses.asdict(overlap) | {"hidden_share": overlap.hidden_share},
    }


def model_costs(model: Any, kv_bytes_per_token: int) -> ModelCosts:
    """From a transformers model: all its parameters but embeddings that are only looked up."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if head is not embedding:
        parameters -= embedding.numel()
    return ModelCosts(parameters * embedding.element_size(), kv_bytes_per_token, parameters)


def _transformers_model(folder: Path, dtype: str, device: torch.device) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=TORCH_DTYPES[dtype])
    return model.to(device).eval()


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _versions() -> dict[str, str | None]:
    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    packages = {package: version(package) for package in ("torch", "transformers", "flash-attn")}
    return {"python": platform.python_version(), **packages, "cuda": torch.version.cuda}


def _describe(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": "CPU"}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
    }


if __name__ == "__main__":
    sys.exit(status_of(main))
