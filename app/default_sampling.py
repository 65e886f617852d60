"""How tokens are chosen where a request does not say: by the settings, else as the model's makers advise, else as
OpenAI does.

The advice is the model's `generation_config.json`, of which vLLM takes the same fields by default
(`--generation-config auto`); the settings are what its `--override-generation-config` is for.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from app.settings_block import SettingsBlock

logger = logging.getLogger(__name__)


class SamplingSettings(SettingsBlock):
    """Defaults of the fields with the same names in a request."""

    from_model: bool = Field(
        default=True,
        description="Whether the model's generation_config.json gives defaults, below those that are given here.",
    )
    temperature: float | None = Field(default=None, ge=0, le=2, description="null: the model's, else 1.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="null: the model's, else 1.")
    top_k: int | None = Field(
        default=None, ge=-1, le=2**31 - 1, description="0 or -1: off. null: the model's, else off."
    )
    min_p: float | None = Field(default=None, ge=0, le=1, description="null: the model's, else 0.")
    repetition_penalty: float | None = Field(
        default=None, ge=0.01, le=100, description="1: off. null: the model's, else 1."
    )


@dataclass(frozen=True, slots=True)
class DefaultSampling:
    """What a request gets for the fields that it leaves out. Without arguments: OpenAI's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def default_sampling(settings: SamplingSettings, model_folder: Path) -> DefaultSampling:
    """The defaults for a model in a Hugging Face folder.

    A file that cannot be read, and a value in it that a request might not have either, is left out, with a warning:
    the model can be served without.
    """
    advice = _model_advice(model_folder) if settings.from_model else {}
    given = settings.model_dump(exclude={"from_model"}, exclude_none=True)
    return replace(DefaultSampling(), **(advice | given))


def _model_advice(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s gives no default sampling: %s", path, error)
        return {}
    advice: dict[str, Any] = {}
    for name in SamplingSettings.model_fields.keys() - {"from_model"}:
        value = document.get(name) if isinstance(document, dict) else None
        try:
            SamplingSettings.model_validate({name: value}, strict=True)
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"]
            logger.warning("%s: %s=%r is left out: %s", path, name, value, reason)
            continue
        if value is not None:
            advice[name] = value
    return advice
