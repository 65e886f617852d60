"""When a worker that runs layers of another's instance begins its next decode step (ours).

A decode step of one row takes nearly as long as one of eight, so steps with few rows are what a host can least afford.
While work of others keeps coming, its own decode steps are therefore kept apart: from the beginning of one to that of
the next goes by twice what the first one takes, so that tokens come twice as far apart and not more. Meanwhile requests
arrive that share the next step, and a stage of another's finds the worker free. As many stages are run in between as
there is time for, and one in any case; what one took too long is made up for in the steps that follow.
"""

from __future__ import annotations

import math


class HostingPace:
    """Of one engine. Times are of one clock, in seconds.

    Args:
        pause: between two decode steps, over what the first one took; 0: none.
    """

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._due_s = -math.inf
        """When the next step may begin, while work of others comes."""
        self._ended_s = self._ended_before_s = -math.inf
        """Of the last own step, and of the one before."""
        self._stage_s = 0.0
        self._stage_ended_s = -math.inf

    def stepped(self, began_s: float, ended_s: float, *, has_prompts: bool) -> None:
        """A step of the engine's own has been run. After one with prompts tokens have waited long enough."""
        step_s = ended_s - began_s
        if has_prompts:
            self._due_s = ended_s
        else:  # from when it should have begun, if that was not long before
            from_s = min(began_s, max(self._due_s, began_s - self._pause * step_s))
            self._due_s = from_s + (1 + self._pause) * step_s
        self._ended_before_s, self._ended_s = self._ended_s, ended_s

    def hosted(self, began_s: float, ended_s: float) -> None:
        """A stage of another's step has been run."""
        self._stage_s, self._stage_ended_s = ended_s - began_s, ended_s

    def wait_s(self, now_s: float, *, stage_waits: bool) -> float:
        """Until the next decode step may begin; 0: now. `stage_waits`: there is one to be run. While the engine may not
        step, it is."""
        left_s = self._due_s - now_s
        if left_s <= 0 or not (stage_waits or self._stage_ended_s > self._ended_before_s):
            return 0.0
        if stage_waits and self._stage_ended_s > self._ended_s and self._stage_s > left_s:
            return 0.0
        return left_s
