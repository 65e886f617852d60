"""docs/coming-from.md: what it says is here, is here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from ray.serve.schema import ServeDeploySchema

from app.chat_protocol import ChatCompletionRequest
from app.completion_protocol import CompletionRequest
from app.settings import AppSettings
from kv.metrics.table import METRICS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")

RAY_LLM_CONFIG = {
    "runtime_env", "model_loading_config", "model_id", "model_source", "tokenizer_source", "llm_engine",
    "engine_kwargs", "accelerator_type", "accelerator_config", "placement_group_config", "lora_config",
    "deployment_config", "server_cls", "experimental_configs", "log_engine_metrics", "callback_config", "llm_configs",
    "ingress_cls_config", "ingress_deployment_config",
}  # fmt: skip
"""Fields of Ray 2.60's LLMConfig, ModelLoadingConfig and LLMServingArgs, which cannot all be imported without vLLM."""
VLLM_METRICS = [
    "admission_rejections",
    "cache_config_info",
    "corrupted_requests_total",
    "e2e_request_latency_seconds",
    "engine_sleep_state",
    "external_prefix_cache_hits_total",
    "external_prefix_cache_queries_total",
    "generation_tokens_total",
    "inter_token_latency_seconds",
    "iteration_tokens_total",
    "kv_block_idle_before_evict_seconds",
    "kv_block_lifetime_seconds",
    "kv_block_reuse_gap_seconds",
    "kv_cache_usage_perc",
    "lora_requests_info",
    "mm_cache_hits",
    "mm_cache_queries",
    "nixl_bytes_transferred",
    "nixl_num_descriptors",
    "nixl_num_failed_notifications_total",
    "nixl_num_failed_transfers_total",
    "nixl_num_kv_expired_reqs_total",
    "nixl_post_time_seconds",
    "nixl_xfer_time_seconds",
    "num_preemptions_total",
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "prefix_cache_hits_total",
    "prefix_cache_queries_total",
    "prompt_tokens_total",
    "prompt_tokens_by_source_total",
    "prompt_tokens_cached_total",
    "request_decode_time_seconds",
    "request_generation_tokens",
    "request_inference_time_seconds",
    "request_max_num_generation_tokens",
    "request_num_preemptions",
    "request_params_max_tokens",
    "request_params_n",
    "request_prefill_kv_computed_tokens",
    "request_prefill_time_seconds",
    "request_prompt_tokens",
    "request_queue_time_seconds",
    "request_success_total",
    "request_time_per_output_token_seconds",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_drafts",
    "time_to_first_token_seconds",
]
"""Of vLLM 0.32's page of metrics, without `vllm:`; counters with the `_total` that Prometheus shows them with."""


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def last_cells(title: str) -> Iterator[str]:
    """The column of what is here, without rows of what is not."""
    for line in section(title).splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            cell = line.strip("|").split("|")[-1].strip()
            if cell != "here" and not cell.startswith("-"):
                yield cell


def has_setting(path: str, root: type[BaseModel]) -> bool:
    model: type[BaseModel] | None = root
    for name in path.split("."):
        if model is None or name not in model.model_fields:
            return False
        model = inner_model(model.model_fields[name].annotation)
    return True


def inner_model(annotation: Any) -> type[BaseModel] | None:
    """The model in an annotation, be it by itself, optional, or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := inner_model(part)) is not None), None)


def test_settings_exist() -> None:
    named = [name for cell in last_cells("Options of a server") for name in re.findall(r"`([^`]+)`", cell)]
    assert len(named) > 25
    assert [name for name in named if not has_setting(name, AppSettings)] == []


def test_options_of_serve_exist() -> None:
    named = [name for cell in last_cells("Options of Serve") for name in re.findall(r"`([^`]+)`", cell)]
    assert len(named) > 5
    assert [name for name in named if not has_setting(name, ServeDeploySchema)] == []


def test_what_is_not_here_says_why() -> None:
    for line in PAGE.splitlines():
        cell = line.strip("|").split("|")[-1].strip()
        if line.startswith("| ") and not line.startswith("| ---") and not re.search(r"`\w|^here$|^a ratio", cell):
            assert re.match(r"- \w+", cell), line


def test_ray_serve_llm_users_find_their_configuration() -> None:
    here = set(
        re.findall(r"\w+", "".join(re.findall(r"`[^`]+`", section("Starting") + section("Options of a server"))))
    )
    here |= set(re.findall(r"\w+", section("Options of Serve")))
    assert RAY_LLM_CONFIG - here == set()


def test_vllm_users_find_their_metrics() -> None:
    patterns = re.findall(r"`(vllm:[\w*]+)`", section("Metrics"))
    assert [name for name in VLLM_METRICS if not any(fnmatch(f"vllm:{name}", pattern) for pattern in patterns)] == []


def test_fields_exist() -> None:
    named = set(re.findall(r"`([^`]+)`", section("Fields of a request").split("`guided_json`")[0]))
    assert len(named) > 12
    assert named <= ChatCompletionRequest.model_fields.keys() | CompletionRequest.model_fields.keys()


def test_metrics_exist() -> None:
    named = set(re.findall(r"`(equipoise_\w+)`", section("Metrics")))
    assert len(named) > 20
    assert named <= {metric.name for metric in METRICS}
