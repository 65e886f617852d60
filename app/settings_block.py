"""What every block of settings has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class SettingsBlock(BaseModel):
    """Refuses unknown keys and values of another type, and does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), strict=True)
