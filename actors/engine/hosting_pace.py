"""When a worker that runs layers of another's instance begins its next decode step (ours).

A decode step of one row takes nearly as long as one of eight, so steps with few rows are what a host can least afford.
While work of others keeps coming, its own decode steps are therefore kept apart: from the end of one to the beginning
of the next as long as the first one took, so that tokens come twice as far apart and not more. Meanwhile requests
arrive that share the next step, and a stage of another's finds the worker free. As many stages are run in between as
there is time for, and one in any case.
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
        self._step_s = 0.0
        self._ended_s = self._ended_before_s = -math.inf
        """Of the last own step, and of the one before."""
        self._stage_s = 0.0
        self._stage_ended_s = -math.inf

    def stepped(self, began_s: float, ended_s: float, *, has_prompts: bool) -> None:
        """A step of the engine's own has been run. After one with prompts tokens have waited long enough."""
        self._step_s = 0.0 if has_prompts else ended_s - began_s
        self._ended_before_s, self._ended_s = self._ended_s, ended_s

    def hosted(self, began_s: float, ended_s: float) -> None:
        """A stage of another's step has been run."""
        self._stage_s, self._stage_ended_s = ended_s - began_s, ended_s

    def wait_s(self, now_s: float, *, stage_waits: bool) -> float:
        """Until the next decode step may begin; 0: now. `stage_waits`: there is one to be run. While the engine may not
        step, it is."""
        left_s = self._ended_s + self._pause * self._step_s - now_s
        if left_s <= 0 or not (stage_waits or self._stage_ended_s > self._ended_before_s):
            return 0.0
        if stage_waits and self._stage_ended_s > self._ended_s and self._stage_s > left_s:
            return 0.0
        return left_s
