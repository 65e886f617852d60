"""Settings of the controller that moves layers and heads between workers (mode balanced)."""

from __future__ import annotations

from pydantic import Field, model_validator

from actors.worker_settings import MoveLimits
from app.settings_block import SettingsBlock
from migrate.controller_settings import ControllerSettings


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
    """When layers and heads move between workers (mode balanced). The planner's page explains U and the defaults.

    The same names stand in `user_config` of the deployment ControllerServer, which changes them while it runs.
    """

    automatic: bool = Field(
        default=True, description="Whether modules move by themselves. false: only when somebody orders it."
    )
    period_s: float = Field(default=2.0, gt=0, description="Seconds between two plans.")
    window_s: float = Field(
        default=6.0,
        gt=0,
        description="Seconds of traffic that each plan is made from, or a period if that is longer. Nothing is planned "
        "before they have passed, nor of workers whose last move ended within them.",
    )
    busy_from: float = Field(
        default=0.7,
        ge=0,
        description="Share of its time, or of its memory, from which a worker is short of it: only then do modules of "
        "its own leave it. They come home when it would have delta_layers less with them. 0: whenever loads differ.",
    )
    delta_layers: float = Field(
        default=0.15,
        gt=0,
        description="How far the most or the least loaded worker's U must be from the mean for layers to move.",
    )
    delta_heads: float = Field(default=0.08, gt=0, description="The same for heads; at most delta_layers.")
    delta_home: float = Field(
        default=0.05,
        ge=0,
        description="Modules go home when home, with all of them, is at most so far above the least loaded worker. "
        "Below delta_heads.",
    )
    latency_budget_s: float = Field(default=10.0, gt=0, description="Longest that a move may be predicted to take.")
    rho: float = Field(default=1.5, ge=1, description="A move must gain so many times what it costs.")
    min_gain: float = Field(
        default=0.05,
        ge=0,
        description="By so much a move must lower the higher U of its two ends, however little it costs: "
        "less is within the error of the figures.",
    )
    horizon_s: float = Field(
        default=30.0,
        gt=0,
        description="How long today's load is taken to last; also the time in which a backlog is to be worked off.",
    )
    cool_down_s: float = Field(default=15.0, ge=0, description="Rest of a module after its move, done or not.")
    compute_weight: float = Field(default=0.8, ge=0, description="Share of compute in U.")
    memory_weight: float = Field(default=0.2, ge=0, description="Share of memory in U: both shares are 1 together.")
    max_itl_ratio: float = Field(
        default=2.0, ge=1, description="How many times as far apart as now a move may put anybody's tokens."
    )
    memory_headroom: float = Field(
        default=1.25, ge=1, description="Room that the destination must have, in live blocks of what moves there."
    )
    abandon_after_s: float = Field(
        default=150.0,
        gt=0,
        description="A move that takes longer is given up, whatever its workers say. They give themselves: "
        "twice links.timeout_s, links.move_timeout_s, links.answer_timeout_s and 10 s, 120 s by default; give more.",
    )

    links: MoveLinksSettings = Field(default_factory=MoveLinksSettings, description="Time limits between two workers.")

    @model_validator(mode="after")
    def _fields_agree(self) -> MovesSettings:
        self.controller()
        return self

    def limits(self) -> MoveLimits:
        """What the workers go by."""
        return MoveLimits(self.links.timeout_s, self.links.answer_timeout_s, self.links.move_timeout_s)

    def controller(self) -> ControllerSettings:
        """The same as the controller takes it."""
        return ControllerSettings().changed({name: getattr(self, name) for name in ControllerSettings().flat()})
