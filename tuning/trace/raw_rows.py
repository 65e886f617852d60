"""The rows of a file as they stand in it, before they are checked against each other, sorted and numbered."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Blocks:
    """The block hashes of N rows, one row's after the other."""

    counts: NDArray[np.int64]
    """[N] Hashes a row."""
    hashes: NDArray[np.int64]
    """[sum of counts] Any numbers; equal ones mean an equal block or an equal prefix."""
    block_tokens: int | None
    """Tokens a block, where the file says so."""

    @property
    def offsets(self) -> NDArray[np.int64]:
        """[N + 1] Where each row's hashes begin, and the end."""
        return np.concatenate(([0], np.cumsum(self.counts, dtype=np.int64)))

    def select(self, rows: NDArray[np.int64]) -> Blocks:
        """Those of `rows`, in that order."""
        counts = self.counts[rows]
        ends = np.cumsum(counts, dtype=np.int64)
        shift = np.repeat(self.offsets[rows] - (ends - counts), counts)
        return Blocks(counts, self.hashes[shift + np.arange(len(shift))], self.block_tokens)


@dataclass(frozen=True, slots=True)
class Sessions:
    """Who follows whom, for N rows."""

    chat_id: NDArray[np.int64]
    """[N] Name of the request."""
    parent_chat_id: NDArray[np.int64]
    """[N] Name of the previous turn; -1 at the first."""
    turn: NDArray[np.int32]
    """[N] From 1."""

    def select(self, rows: NDArray[np.int64]) -> Sessions:
        """Those of `rows`, in that order."""
        return Sessions(self.chat_id[rows], self.parent_chat_id[rows], self.turn[rows])


@dataclass(frozen=True, slots=True)
class RawRows:
    """N rows, each valid in itself."""

    line: NDArray[np.int64]
    """[N] Where it stands in the file, from 1."""
    clock: NDArray[Any]
    """[N] Arrival in ticks of the format, from any origin; int64 or float64."""
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    blocks: Blocks | None
    sessions: Sessions | None
    kind: list[str]
    """[N], or empty."""

    def __len__(self) -> int:
        return len(self.line)

    def select(self, rows: NDArray[np.int64]) -> RawRows:
        """`rows` only, in that order."""
        return RawRows(
            line=self.line[rows],
            clock=self.clock[rows],
            input_tokens=self.input_tokens[rows],
            output_tokens=self.output_tokens[rows],
            blocks=self.blocks.select(rows) if self.blocks else None,
            sessions=self.sessions.select(rows) if self.sessions else None,
            kind=[self.kind[row] for row in rows.tolist()] if self.kind else [],
        )


class RowBuilder:
    """Collects the rows of a text file in eight bytes a number.

    Args:
        clock_type: "q" when all ticks are ints, "d" otherwise.
    """

    def __init__(self, clock_type: Literal["q", "d"]) -> None:
        self._line = array("q")
        self._clock: array[Any] = array(clock_type)
        self._input = array("q")
        self._output = array("q")
        self._counts = array("q")
        self._hashes = array("Q")
        self._chat = array("q")
        self._parent = array("q")
        self._turn = array("i")
        self._kind: list[str] = []

    def add(self, line: int, clock: float, input_tokens: int, output_tokens: int) -> None:
        """A row. What a format knows besides follows at once, by the other methods, for all its rows."""
        self._line.append(line)
        self._clock.append(clock)
        self._input.append(input_tokens)
        self._output.append(output_tokens)

    def add_hashes(self, hashes: array[int]) -> None:
        """Its block hashes (type "Q")."""
        self._counts.append(len(hashes))
        self._hashes.extend(hashes)

    def add_session(self, chat_id: int, parent_chat_id: int, turn: int, kind: str) -> None:
        """Its place in a session, and its kind."""
        self._chat.append(chat_id)
        self._parent.append(parent_chat_id)
        self._turn.append(turn)
        self._kind.append(kind)

    def rows(self) -> RawRows:
        """All that was added; without blocks where no row has a hash. The builder is not used any more after this."""
        blocks = Blocks(_numpy(self._counts), _numpy(self._hashes).view(np.int64), None) if self._hashes else None
        sessions = Sessions(_numpy(self._chat), _numpy(self._parent), _numpy(self._turn)) if self._chat else None
        return RawRows(
            line=_numpy(self._line),
            clock=_numpy(self._clock),
            input_tokens=_numpy(self._input),
            output_tokens=_numpy(self._output),
            blocks=blocks,
            sessions=sessions,
            kind=self._kind,
        )


def _numpy(values: array[Any]) -> NDArray[Any]:
    return np.frombuffer(values, dtype=np.dtype(values.typecode))
