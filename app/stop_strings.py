"""Stop strings in a stream of text.

The text ends at the first moment at which any stop string is complete, so the earliest *end* wins; of several that end
there, the longest (the one that begins first) is cut off. That does not depend on how the text was chopped.

Aho and Corasick, "Efficient string matching: an aid to bibliographic search" (CACM 1975): the automaton's state is the
longest end of the text that begins some stop string, which is exactly what has to be held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class _Automaton:
    """Tables by state: transitions, the state to fall back to, length of its text, of the longest stop it ends with."""

    next_state: tuple[dict[str, int], ...]
    fallback: tuple[int, ...]
    depth: tuple[int, ...]
    match_length: tuple[int, ...]


@lru_cache(maxsize=32)  # the choices of a request, and a client's requests, share their stop strings
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    next_state: list[dict[str, int]] = [{}]
    depth = [0]
    match_length = [0]
    for stop in stops:
        state = 0
        for character in stop:
            following = next_state[state].get(character)
            if following is None:
                following = len(next_state)
                next_state[state][character] = following
                next_state.append({})
                depth.append(depth[state] + 1)
                match_length.append(0)
            state = following
        match_length[state] = len(stop)
    fallback = [0] * len(next_state)
    queue = deque(next_state[0].values())
    while queue:
        state = queue.popleft()
        match_length[state] = match_length[state] or match_length[fallback[state]]
        for character, following in next_state[state].items():
            shorter = fallback[state]
            while shorter and character not in next_state[shorter]:
                shorter = fallback[shorter]
            fallback[following] = next_state[shorter].get(character, 0)
            queue.append(following)
    return _Automaton(tuple(next_state), tuple(fallback), tuple(depth), tuple(match_length))


class StopMatcher:
    """Finds stop strings in one sequence's text, wherever its pieces are cut.

    Holds back the longest end of the text that could still become a stop string, and no more; each push costs the
    length of its text. With `include_in_output` the stop string is part of the answer, so nothing is ever held back.
    Raises ValueError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        if "" in stops:
            raise ValueError("A stop string must not be empty: it would match everywhere.")
        self._automaton = _automaton(tuple(stops))
        self._include_in_output = include_in_output
        self._active = bool(stops)
        self._state = 0
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be sent, whether a stop string was found). Once found, further text is swallowed."""
        if self.stopped:
            return "", True
        if not self._active:
            return text, False
        machine, state = self._automaton, self._state
        for position, character in enumerate(text):
            while state and character not in machine.next_state[state]:
                state = machine.fallback[state]
            state = machine.next_state[state].get(character, 0)
            if machine.match_length[state]:
                self.stopped = True
                end = position + 1
                if self._include_in_output:
                    return text[:end], True
                known, self._held = self._held + text[:end], ""
                return known[: len(known) - machine.match_length[state]], True
        self._state = state
        if self._include_in_output:
            return text, False
        known = self._held + text
        cut = len(known) - machine.depth[state]
        self._held = known[cut:]
        return known[:cut], False

    def flush(self) -> str:
        """What was held back, once no more text will come (nothing after a stop string was found)."""
        rest, self._held, self._state = self._held, "", 0
        return rest
