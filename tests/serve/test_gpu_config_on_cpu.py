"""The configuration for GPU clusters, with a tiny model of as many layers and heads, through all its replicas."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from app.overlay import merged_with_overlay
from tests.running_app import Deploy, RunningApp

pytestmark = pytest.mark.cluster

CONFIGS = Path(__file__).parents[2] / "serve_configs"


@pytest.fixture(scope="module")
def app(deploy: Deploy) -> RunningApp:
    content = yaml.safe_load((CONFIGS / "llama13b.yaml").read_text())
    return deploy(merged_with_overlay(content["applications"][0]["args"], CONFIGS / "overlays" / "cpu-tiny.yaml"))


def complete(app: RunningApp, prompt: str) -> dict[str, object]:
    body = {"model": app.model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        app.base_url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return dict(json.load(answer))


def test_llama13b_serves_with_all_its_replicas(app: RunningApp) -> None:
    layout = app.members()[0].handle.facts.layout  # type: ignore[attr-defined]
    assert (layout.num_layers, layout.num_kv_heads) == (40, 40)
    assert sorted(member.role for member in app.members()) == ["decode", "decode", "prefill", "prefill"]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: complete(app, f"prompt number {n}"), range(8)))
    assert all(answer["usage"]["completion_tokens"] == 4 for answer in answers)  # type: ignore[index]
    steps = {m.worker_id: s["steps"] for m, s in zip(app.members(), app.stats(), strict=True)}
    assert all(count > 0 for count in steps.values()), steps
    # Whichever worker it goes to, the same request has the same answer.
    again = [complete(app, "prompt number 0")["choices"][0]["text"] for _ in range(4)]  # type: ignore[index]
    assert again == [answers[0]["choices"][0]["text"]] * 4  # type: ignore[index]
