"""Settings of layers that move between workers (mode balanced)."""

from __future__ import annotations

from pydantic import Field

from app.settings_block import SettingsBlock


class MoveLinksSettings(SettingsBlock):
    """How workers that have work for each other deal with one another."""

    timeout_s: float = Field(
        default=10.0,
        ge=0.1,
        le=3600,
        description="A worker that has been silent for so long is lost to its peers; each says something every fifth "
        "of it. Longer than a worker is ever kept from running its threads.",
    )
    answer_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="A worker that has not run its part of a step by then, or done its part of a move, is lost to who "
        "asked: layers come home, and requests are computed anew.",
    )
    move_timeout_s: float = Field(default=60.0, gt=0, description="A move that is not made by then is given up.")


class MovesSettings(SettingsBlock):
    """Layers that move between workers."""

    links: MoveLinksSettings = Field(default_factory=MoveLinksSettings, description="Time limits between two workers.")
