"""What a request gets for the fields that it leaves out."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from app.completion_protocol import CompletionRequest
from app.default_sampling import DefaultSampling, SamplingSettings, default_sampling
from app.openai_protocol import to_sampling


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "tiny", "prompt": "hello", **fields})


def folder_with(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "generation_config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return tmp_path


ADVICE = {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.1, "repetition_penalty": 1.1, "max_length": 4096}


def test_openais_defaults_where_nobody_says_otherwise(tmp_path: Path) -> None:
    assert default_sampling(SamplingSettings(), tmp_path) == DefaultSampling(1.0, 1.0, 0, 0.0, 1.0)
    assert default_sampling(SamplingSettings(), folder_with(tmp_path, "{}")) == DefaultSampling()


def test_settings_go_before_the_models_advice(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, json.dumps(ADVICE))
    assert default_sampling(SamplingSettings(), folder) == DefaultSampling(0.6, 0.9, 50, 0.1, 1.1)
    given = SamplingSettings(temperature=0, top_k=0)
    assert default_sampling(given, folder) == DefaultSampling(0, 0.9, 0, 0.1, 1.1)
    assert default_sampling(SamplingSettings(from_model=False, top_p=0.5), folder) == DefaultSampling(top_p=0.5)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"text"', b"\xff\xfe\x00"])
def test_a_file_that_says_nothing_useful_is_passed_over(tmp_path: Path, content: str | bytes) -> None:
    assert default_sampling(SamplingSettings(), folder_with(tmp_path, content)) == DefaultSampling()


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1}, {"temperature": 2.5}, {"temperature": "1"}, {"temperature": True}, {"temperature": [1]},
        {"top_p": 0}, {"top_p": 1.5}, {"top_k": 1.5}, {"top_k": -2}, {"min_p": 2}, {"repetition_penalty": 0},
    ],
)  # fmt: skip
def test_advice_that_no_request_might_give_is_left_out_with_a_warning(
    tmp_path: Path, wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = default_sampling(SamplingSettings(), folder_with(tmp_path, json.dumps(ADVICE | wrong)))
    name = next(iter(wrong))
    assert getattr(found, name) == getattr(DefaultSampling(), name)
    assert name in caplog.text
    others = [field for field in ADVICE if field not in (name, "max_length")]
    assert {field: getattr(found, field) for field in others} == {field: ADVICE[field] for field in others}


@pytest.mark.parametrize("wrong", [{"temperature": 3}, {"top_p": 0}, {"top_k": -2}, {"max_tokens": 7}])
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SamplingSettings.model_validate(wrong)


def test_a_request_goes_before_all_defaults() -> None:
    defaults = DefaultSampling(0.6, 0.9, 50, 0.1, 1.1)
    asked = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    chosen = to_sampling(completion(**asked), defaults, max_tokens=7, vocab_size=100, random_seed=1)
    assert (chosen.temperature, chosen.top_p, chosen.top_k, chosen.min_p, chosen.repetition_penalty) == (1, 1, 0, 0, 1)
    left_out = to_sampling(completion(), defaults, max_tokens=7, vocab_size=100, random_seed=1)
    assert (left_out.temperature, left_out.top_p, left_out.top_k) == (0.6, 0.9, 50)
    assert (left_out.min_p, left_out.repetition_penalty) == (0.1, 1.1)
    almost_off = DefaultSampling(temperature=1e-9, top_k=-1)
    off = to_sampling(completion(), almost_off, max_tokens=7, vocab_size=9, random_seed=1)
    assert (off.temperature, off.top_k) == (0, 0)
