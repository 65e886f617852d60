"""How a controller goes about its moves, and the same from a mapping that somebody gives while it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

from migrate.move_settings import MoveSettings


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """The planner's settings, and the controller's own.

    Raises:
        ValueError: a time that is not finite and above 0.
    """

    planner: MoveSettings = field(default_factory=MoveSettings)
    automatic: bool = True
    """Whether what the planner says is done. False: modules move only when a person orders it."""
    abandon_after_s: float = 150.0
    """A move that has not ended by then is given up. Longer than the workers' own limit, so that their reason is heard
    where they have one."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.abandon_after_s) and self.abandon_after_s > 0):
            raise ValueError(f"abandon_after_s is {self.abandon_after_s}; it must be finite and above 0")

    def flat(self) -> dict[str, float | bool]:
        """All settings by name, on one level: as people give and read them."""
        return {**asdict(self.planner), "automatic": self.automatic, "abandon_after_s": self.abandon_after_s}

    def changed(self, given: Mapping[str, object]) -> ControllerSettings:
        """These settings with the given ones, by the names of `flat`, in place of theirs.

        Raises:
            ValueError: an unknown name, a value of another type, or values that do not go together.
        """
        known = self.flat()
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"{name!r} is no setting of moves; these are: {', '.join(sorted(known))}")
            wants_bool = isinstance(known[name], bool)
            if wants_bool != isinstance(value, bool) or not isinstance(value, bool | int | float):
                kind = "true or false" if wants_bool else "a number"
                raise ValueError(f"{name} is {value!r}; it must be {kind}")
        merged = {**known, **given}
        own = {name: merged.pop(name) for name in ("automatic", "abandon_after_s")}
        assert merged.keys() == {item.name for item in fields(MoveSettings)}
        return ControllerSettings(MoveSettings(**merged), **own)  # type: ignore[arg-type]  # checked above
