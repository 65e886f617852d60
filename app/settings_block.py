"""What every block of settings has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

MAX_GIB = 2**20
"""Of any size. More than a pebibyte is a slip."""


class SettingsBlock(BaseModel):
    """Refuses unknown keys, values of another type and numbers that are not finite, and does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), strict=True, allow_inf_nan=False)
