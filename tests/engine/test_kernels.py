"""Our kernels against torch's operators and float64, for every instruction set that the processor has."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.engine.kernels.layer_ops import NativeLayerOps
from actors.engine.kernels.library import InstructionSet, Kernels
from actors.engine.layer_ops import TorchLayerOps
from actors.engine.model_spec import ModelSpec, read_model_spec
from tests.engine.conftest import MakeEngine
from tests.engine.kernel_sets import SETS, kernels_of
from tests.engine_driver import greedy, make_prompt, run_prompts

HALF_ULP = 2.0**-8
"""Of bfloat16's eight bits, relative to the number."""
ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: HALF_ULP}

relaxed = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


@pytest.fixture(params=SETS, ids=[each.name for each in SETS])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_of(request.param)


@pytest.fixture(scope="module")
def spec(family_folders: dict[str, Path]) -> ModelSpec:
    return read_model_spec(family_folders["llama"])


def randn(seed: int, *size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_product(kernels: Kernels, rows: int, width: int, out: int, seed: int, *, with_bias: bool) -> None:
    x, weight, bias = randn(seed, rows, width), randn(seed + 1, out, width), randn(seed + 2, out)
    y = kernels.product(x, weight, bias if with_bias else None)
    assert y.shape == (rows, out)
    assert y.dtype == torch.bfloat16
    exact = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    # One rounding to bfloat16, and float32 sums of numbers of such sizes.
    allowed = HALF_ULP * exact.abs() + 1e-6 * (x.double().abs() @ weight.double().abs().T + 1)
    assert bool(((y.double() - exact).abs() <= allowed).all())


@relaxed
@given(rows=st.integers(0, 64), width=st.integers(1, 200), out=st.integers(1, 150), seed=st.integers(0, 99),
       with_bias=st.booleans())  # fmt: skip
def test_product_of_odd_shapes(kernels: Kernels, rows: int, width: int, out: int, seed: int, with_bias: bool) -> None:
    check_product(kernels, rows, width, out, seed, with_bias=with_bias)


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 64, 65, 100, 300])
@pytest.mark.parametrize(("width", "out"), [(32, 16), (64, 64), (96, 80), (576, 208), (1024, 48)])
def test_product_of_whole_tiles(kernels: Kernels, rows: int, width: int, out: int) -> None:
    check_product(kernels, rows, width, out, rows, with_bias=out == 80)


@pytest.mark.parametrize(("width", "out"), [(128, 96), (70, 33), (1024, 48)])
def test_a_row_of_a_product_does_not_depend_on_the_others(kernels: Kernels, width: int, out: int) -> None:
    """So that a sequence's tokens do not depend on who is served beside it."""
    x, weight = randn(1, 300, width), randn(2, out, width)
    together = kernels.product(x, weight, None)
    for first, last in [(0, 1), (5, 6), (3, 10), (7, 15), (20, 40), (31, 64), (60, 100), (9, 90), (10, 290)]:
        assert torch.equal(kernels.product(x[first:last], weight, None), together[first:last])


@pytest.mark.parametrize("rows", [40, 130])
def test_more_threads_change_nothing(kernels: Kernels, rows: int) -> None:
    x, weight = randn(1, rows, 2048), randn(2, 1008, 2048)
    alone = kernels.product(x, weight, None)
    torch.set_num_threads(2)
    try:
        assert torch.equal(kernels.product(x, weight, None), alone)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("num_threads", [2, 5])
def test_threads_that_compute_at_once_do_not_meet(kernels: Kernels, num_threads: int) -> None:
    """One has the helpers, the others do without; helpers that come late find the next operation, or none."""
    x = [randn(i, 1 + 13 * i, 512) for i in range(4)]
    weight = randn(9, 2048, 512)
    expected = [kernels.product(one, weight, None) for one in x]
    wrong: list[int] = []

    def compute(i: int) -> None:
        torch.set_num_threads(num_threads)
        wrong.extend(i for _ in range(200) if not torch.equal(kernels.product(x[i], weight, None), expected[i]))

    threads = [threading.Thread(target=compute, args=(i,)) for i in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(1)
    assert not wrong


def test_products_take_turns_with_torch(kernels: Kernels) -> None:
    """Both may use a processor's tile registers, each with its own layout of them."""
    x, weight = randn(1, 33, 256), randn(2, 160, 256)
    ours, torchs = kernels.product(x, weight, None), torch.nn.functional.linear(x, weight)
    for _ in range(3):
        assert torch.equal(kernels.product(x, weight, None), ours)
        assert torch.equal(torch.nn.functional.linear(x, weight), torchs)


@relaxed
@given(rows=st.integers(0, 5), width=st.integers(1, 100), seed=st.integers(0, 99), dtype=dtypes, rms=st.booleans(),
       parts=st.sets(st.sampled_from(["delta", "weight", "bias"])))  # fmt: skip
def test_norm(
    kernels: Kernels, spec: ModelSpec, rows: int, width: int, seed: int, dtype: torch.dtype, rms: bool, parts: set[str]
) -> None:
    """Against torch's in float32, over the same sum: adding rounds as torch does."""
    spec = dataclasses.replace(spec, rms_norm=rms)
    x, delta = randn(seed, rows, width, dtype=dtype) + 1, randn(seed + 1, rows, width, dtype=dtype)
    weight = randn(seed + 2, width, dtype=dtype) if "weight" in parts else None
    bias = randn(seed + 3, width, dtype=dtype) if "bias" in parts and not rms else None
    ops = NativeLayerOps(spec, kernels)
    total, y = ops.add_norm(x, delta, weight, bias) if "delta" in parts else (x, ops.norm(x, weight, bias))
    assert torch.equal(total, x + delta if "delta" in parts else x)
    expected = TorchLayerOps(spec).norm(total.float(), *(None if p is None else p.float() for p in (weight, bias)))
    torch.testing.assert_close(y.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 8)


@relaxed
@given(rows=st.integers(0, 5), heads=st.integers(1, 4), half=st.integers(1, 40), gap=st.integers(0, 3),
       seed=st.integers(0, 99), dtype=dtypes)  # fmt: skip
def test_rotation(
    kernels: Kernels, spec: ModelSpec, rows: int, heads: int, half: int, gap: int, seed: int, dtype: torch.dtype
) -> None:
    """Of some heads of wider rows, as they come out of the projection of q, k and v."""
    x = randn(seed, rows, heads + gap, 2 * half, dtype=dtype)[:, :heads]
    angles = torch.rand(rows, 1, half, generator=torch.Generator().manual_seed(seed)).repeat(1, 1, 2) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    y = NativeLayerOps(spec, kernels).rotate(x, cos, sin)
    expected = TorchLayerOps(spec).rotate(x.float(), cos.float(), sin.float())
    torch.testing.assert_close(y.float(), expected, rtol=TOLERANCE[dtype], atol=1e-6)


@relaxed
@given(rows=st.integers(0, 5), inner=st.integers(1, 100), seed=st.integers(0, 99), dtype=dtypes, gated=st.booleans(),
       activation=st.sampled_from(["silu", "relu", "gelu"]))  # fmt: skip
def test_activation(
    kernels: Kernels, spec: ModelSpec, rows: int, inner: int, seed: int, dtype: torch.dtype, gated: bool,
    activation: str,
) -> None:  # fmt: skip
    spec = dataclasses.replace(spec, activation=activation, gated_mlp=gated)
    up = randn(seed, rows, inner * (1 + gated), dtype=dtype) * 20
    y = NativeLayerOps(spec, kernels).activate(up)
    expected = TorchLayerOps(spec).activate(up.float())
    # torch rounds GELU, which has no kernel of ours, once more in between.
    allowed = TOLERANCE[dtype] * (2 if activation == "gelu" else 1)
    torch.testing.assert_close(y.float(), expected, rtol=allowed, atol=1e-6)


def test_numbers_that_are_none_stay_so(kernels: Kernels, spec: ModelSpec) -> None:
    """An overflow in a model is found by the NaN in its logits."""
    x = randn(1, 3, 64)
    x[1, 5] = torch.nan
    ops = NativeLayerOps(spec, kernels)
    relu = NativeLayerOps(dataclasses.replace(spec, activation="relu", gated_mlp=False), kernels)
    results = ops.linear(x, randn(2, 64, 64)), ops.norm(x, None, None), ops.activate(torch.cat((x, x), 1))
    for y in (*results, relu.activate(x)):
        assert y[1].isnan().any()
        assert not y[[0, 2]].isnan().any()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "opt", "opt-post-norm", "mistral-window"])
def test_engine_with_kernels_gives_the_tokens_of_one_without(
    family: str, family_folders: dict[str, Path], make_engine: MakeEngine
) -> None:
    """In bfloat16 the two round differently, so that float32 is compared; `test_families` has transformers'."""
    kernels_of(InstructionSet.AVX2)
    prompts = [make_prompt(length, length) for length in (1, 16, 33, 50)]
    native, plain = (make_engine(family_folders[family], kernels=name) for name in ("auto", "torch"))
    assert (native.loaded.backend_name, plain.loaded.backend_name) == ("native", "torch")
    assert run_prompts(native, prompts, greedy(16)) == run_prompts(plain, prompts, greedy(16))


_FORKED = """
import os, torch
from actors.engine.kernels.library import load_kernels
kernels = load_kernels()
torch.set_num_threads(2)
x, weight = torch.randn(40, 512).bfloat16(), torch.randn(2048, 512).bfloat16()


def product():  # compared as bytes: OpenMP, which torch compares with, has threads that do not outlive a fork
    return kernels.product(x, weight, None).view(torch.int16).numpy().tobytes()


expected = product()
for _ in range(20):
    if (child := os.fork()) == 0:
        os._exit(product() != expected)
    assert os.waitpid(child, 0)[1] == 0
    assert product() == expected
"""


def test_a_forked_process_computes_too(kernels: Kernels) -> None:
    """It has none of the helpers of the process that it comes from."""
    done = subprocess.run([sys.executable, "-c", _FORKED], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
