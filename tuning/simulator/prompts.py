"""A trace's requests as the simulator asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import numpy as np

from tuning.trace.trace import Trace

BLOCK_TOKENS_UNKNOWN: Final = 16
"""Tokens a block, to count memory with, where the trace has no blocks."""


class Prompts:
    """Reads a trace and never changes it. Tokens by row; blocks of those that are under way.

    Args:
        partial_blocks: "hit": the last block of a prompt can be found again also where it is not full.
    """

    def __init__(self, trace: Trace, partial_blocks: Literal["miss", "hit"]) -> None:
        self.block_tokens = trace.block_tokens or BLOCK_TOKENS_UNKNOWN
        self.input_tokens: list[int] = trace.input_tokens.tolist()
        # An answer has at least the token that ends it, whose KV is never computed.
        output_tokens = np.maximum(trace.output_tokens, 1)
        self.output_tokens: list[int] = output_tokens.tolist()
        self.num_blocks: list[int] = (-(-trace.input_tokens // self.block_tokens)).tolist()
        """Of each prompt, a partly filled last one included."""
        self.lifetime_blocks: list[int] = (-(-(trace.input_tokens + output_tokens - 1) // self.block_tokens)).tolist()
        """Of each prompt and its answer."""
        self.findable_blocks: list[int] = [0] * len(trace)
        """Of each prompt: those that can be found again."""
        if trace.has_reuse and partial_blocks == "hit":
            self.findable_blocks = self.num_blocks
        elif trace.has_reuse:
            self.findable_blocks = (trace.input_tokens // self.block_tokens).tolist()
        self._has_reuse = trace.has_reuse
        self._offsets = trace.block_offsets
        self._ids = trace.block_ids
        self._child_of = _first_children(trace)
        self._chains: dict[int, list[int]] = {}

    def chain(self, row: int) -> list[int]:
        """Ids of a prompt's blocks; none where the trace has no reuse information. Not to be changed."""
        chain = self._chains.get(row)
        if chain is None:
            chain = self._chains[row] = self._read(row)
        return chain

    def forget(self, row: int) -> None:
        """A request has ended."""
        self._chains.pop(row, None)

    def answer_blocks(self, row: int) -> tuple[Sequence[int], int]:
        """The full blocks that an answer fills.

        A trace has no ids for them. Where the session's next turn is in the trace and goes on from this prompt, its
        prompt's blocks in the same places are taken for them.

        Returns:
            Ids of prompt and answer as far as they are known, and how many blocks of the answer have none.
        """
        tokens = self.input_tokens[row] + self.output_tokens[row] - 1
        start, stop = self.input_tokens[row] // self.block_tokens, tokens // self.block_tokens
        child = int(self._child_of[row]) if self._child_of is not None else -1
        if child < 0 or not self._has_reuse or stop == start:
            return (), stop - start
        # Read apart: the child has not arrived.
        ids = self._read(child)[: min(stop, self.input_tokens[child] // self.block_tokens)]
        if len(ids) <= start or (start and ids[start - 1] != self.chain(row)[start - 1]):
            return (), stop - start
        return ids, stop - len(ids)

    def _read(self, row: int) -> list[int]:
        ids: list[int] = self._ids[self._offsets[row] : self._offsets[row + 1]].tolist()
        return ids


def _first_children(trace: Trace) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
    """By row, the first request that names it as its parent, or -1; None where nobody has a parent."""
    rows = np.flatnonzero(trace.parent_request >= 0)[::-1]
    if len(rows) == 0:
        return None
    children = np.full(len(trace), -1, np.int64)
    children[trace.parent_request[rows]] = rows
    return children
