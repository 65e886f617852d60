"""When a configuration's model counts as the one that was simulated, and which of its settings are compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.settings import DispatchSettings
from app.store_settings import DiskSettings, StoreSettings
from tuning.deployment.deployment import Deployment, ServingOptions
from tuning.deployment.evaluator import DeploymentEvaluator
from tuning.deployment.objectives import Goals
from tuning.hardware_profile import read_hardware
from tuning.job.unlike_simulated import unlike_simulated
from tuning.model_config import read_model_shape
from tuning.price_book import read_prices
from tuning.simulator.settings import Mode
from tuning.trace.generator import SyntheticTraffic, generate

TRACE = generate(SyntheticTraffic(1, 4, requests_per_s=1.0, prefixes=1, turns=1.0, think_s=1.0))
ENGINE = {"max_batch_tokens": 8192, "max_running_requests": 256, "block_tokens": TRACE.block_tokens}


def evaluator(mode: Mode = "static", model: str = "llama-2-13b") -> DeploymentEvaluator:
    return DeploymentEvaluator(
        TRACE,
        read_model_shape(model),
        read_hardware("a100-80g"),
        read_prices("aws-us-east-1"),
        Deployment(mode),
        ServingOptions(max_batch_tokens=8192),
        Goals(),
    )


@pytest.mark.parametrize(
    ("there", "simulated"),
    [
        ("meta-llama/Llama-2-13b-hf", "llama-2-13b"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("llama-2-13b", "llama-2-13b"),
    ],
)
def test_the_same_model_under_the_names_of_both(there: str, simulated: str) -> None:
    assert unlike_simulated({"model": there, "engine": ENGINE}, evaluator(model=simulated)) == []


@pytest.mark.parametrize("there", ["Qwen/Qwen3-8B", "qwen3-8b", "meta-llama/Llama-2-7b-hf", None, 13, ["llama-2-13b"]])
def test_another_model_or_none_is_named(there: object) -> None:
    (warning,) = unlike_simulated({"model": there, "engine": ENGINE}, evaluator())
    if there is None:
        assert warning.startswith("model is not given in the configuration to serve with, which will take the app")
        assert "Simulated was model llama-2-13b: give a --base-config" in warning
    else:
        assert warning.startswith(f"model is {there!r} ")
        assert "and llama-2-13b was simulated" in warning
        assert warning.endswith("simulate that one with --model, or give another --base-config")


def test_all_that_is_not_given_is_one_line() -> None:
    (warning,) = unlike_simulated({}, evaluator())
    assert warning == (
        "model, max_batch_tokens, max_running_requests and block_tokens are not given in the configuration to serve "
        "with, which will take the application's defaults. Simulated was model llama-2-13b, max_batch_tokens 8192, "
        "max_running_requests 256, block_tokens 16: give a --base-config that says so"
    )


@pytest.mark.parametrize(
    ("mode", "roles", "different"),
    [
        ("static", {"prefill": {"engine": {"max_batch_tokens": 4096}}}, ["max_batch_tokens"]),
        ("static", {"decode": {"engine": {"max_batch_tokens": 256}}}, []),
        ("static", {"decode": {"engine": {"max_running_requests": 64}}}, ["max_running_requests"]),
        ("static", {"prefill": {"engine": {"max_running_requests": 64}}}, []),
        ("monolithic", {"monolithic": {"engine": {"max_running_requests": 64}}}, ["max_running_requests"]),
        ("monolithic", {"monolithic": {"engine": {"block_tokens": 256}}}, ["block_tokens"]),
        ("monolithic", {"engine": {"block_tokens": 256}}, ["block_tokens", "max_batch_tokens"]),
        ("static", {"ingress": {"dispatch": {"policy": "prefix_aware"}}}, ["ingress.dispatch.policy"]),
        ("static", {"ingress": {"dispatch": {"policy": "load_aware"}}}, []),
        ("static", {"store": {"share_prefixes": False}}, ["store.share_prefixes"]),
        ("static", {"store": {"disk": {"admission": "on_reuse"}}}, ["store.disk.admission"]),
        ("monolithic", {"store": {"share_prefixes": False}}, ["store.share_prefixes"]),
        ("static", {"decode": {"engine": {"kv_cache_gib": 30}}}, ["kv_cache_gib"]),
        ("static", {"prefill": {"engine": {"kv_cache_blocks": 10}}}, ["kv_cache_blocks"]),
        ("static", {"engine": ENGINE | {"gpu_memory_utilization": 0.8}}, ["gpu_memory_utilization"]),
        ("static", {"engine": ENGINE | {"gpu_memory_utilization": 0.9, "dtype": "float16"}}, []),
        ("static", {"engine": ENGINE | {"dtype": "float32"}}, ["dtype"]),
        ("monolithic", {"engine": ENGINE | {"dtype": "auto", "kv_cache_gib": None}}, []),
        # 0.9 of 80 GiB less 13.02 * 10^9 parameters of 2 bytes.
        ("monolithic", {"engine": ENGINE | {"kv_cache_gib": 47.76}}, []),
    ],
)
def test_settings_of_the_role_that_they_matter_to_are_compared(
    mode: Mode, roles: dict[str, Any], different: list[str]
) -> None:
    settings = {"model": "llama-2-13b", "engine": ENGINE} | roles
    warnings = unlike_simulated(settings, evaluator(mode))
    assert [warning.partition(" ")[0] for warning in warnings] == different


def test_another_dispatch_than_the_default_is_missed_where_none_is_given() -> None:
    simulated = replace(evaluator(), options=ServingOptions(dispatch="round_robin"))
    (warning,) = unlike_simulated({"model": "llama-2-13b", "engine": ENGINE}, simulated)
    assert warning.startswith("ingress.dispatch.policy is 'load_aware' in the configuration to serve with, and round")


def test_what_nobody_has_to_give_is_what_the_app_takes_then() -> None:
    assert DispatchSettings().policy == "load_aware"
    assert StoreSettings().share_prefixes is True
    assert DiskSettings().admission == "always"


def test_a_batch_that_differs_is_named_with_the_option_that_simulates_it() -> None:
    settings = {"model": "llama-2-13b", "engine": ENGINE | {"max_batch_tokens": 4096}}
    (warning,) = unlike_simulated(settings, evaluator())
    assert "simulate it with --max-batch-tokens 4096, or" in warning
