"""docs/coming-from.md: what it says is here, is here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from app.chat_protocol import ChatCompletionRequest
from app.completion_protocol import CompletionRequest
from app.settings import AppSettings
from kv.metrics.table import METRICS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def last_cells(title: str) -> Iterator[str]:
    """The column of what is here, without rows of what is not."""
    for line in section(title).splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            cell = line.strip("|").split("|")[-1].strip()
            if cell != "here" and not cell.startswith("-"):
                yield cell


def has_setting(path: str) -> bool:
    model: type[BaseModel] | None = AppSettings
    for name in path.split("."):
        if model is None or name not in model.model_fields:
            return False
        inner = model.model_fields[name].annotation
        model = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None
    return True


def test_settings_exist() -> None:
    named = [name for cell in last_cells("Options of a server") for name in re.findall(r"`([^`]+)`", cell)]
    assert len(named) > 25
    assert [name for name in named if not has_setting(name)] == []


def test_fields_exist() -> None:
    named = set(re.findall(r"`([^`]+)`", section("Fields of a request").split("`guided_json`")[0]))
    assert len(named) > 12
    assert named <= ChatCompletionRequest.model_fields.keys() | CompletionRequest.model_fields.keys()


def test_metrics_exist() -> None:
    here = [re.findall(r"`([^`]+)`", cell)[0] for cell in last_cells("Metrics")]
    assert len(here) > 4
    assert set(here) <= {metric.name for metric in METRICS}
