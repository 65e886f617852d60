"""Traffic as the tuner sees it: when requests came, how long they were, and which prefixes they shared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

PartialBlocks = Literal["miss", "hit"]
"""Whether a last block that a prompt does not fill can hit."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """N requests in the order of their arrival. The arrays are handed over, and can be read only through the trace.

    Raises:
        ValueError: an array has another dtype or shape, or a value that its description does not allow.
    """

    name: str
    arrival_s: NDArray[np.float64]
    """[N] Seconds, non-decreasing; the first is 0."""
    input_tokens: NDArray[np.int64]
    """[N] Length of the prompt, at least 1."""
    output_tokens: NDArray[np.int64]
    """[N] Tokens generated, at least 0."""
    block_tokens: int | None
    """Tokens a block; None where nothing is known of reuse: then there are no ids, and all offsets are 0."""
    block_offsets: NDArray[np.int64]
    """[N + 1] Request i's blocks are `block_ids[block_offsets[i]:block_offsets[i + 1]]`: ceil(input / block_tokens)."""
    block_ids: NDArray[np.int64]
    """0 to num_ids - 1, numbered by first appearance. Equal ids mean an equal *prefix*, up to and with that block."""
    parent_request: NDArray[np.int64]
    """[N] Row of the previous turn, which is an earlier row; -1 where there is none or it is unknown."""
    turn: NDArray[np.int32]
    """[N] Number of the turn in its session, from 1."""
    kind: tuple[str, ...] = ()
    """[N] What sort of request, in the words of the file; empty where it has none."""
    num_ids: int = field(init=False)
    """Different prefixes, counted in blocks."""
    _block_parent: NDArray[np.int64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, dtype in (
            ("arrival_s", np.float64),
            ("input_tokens", np.int64),
            ("output_tokens", np.int64),
            ("block_offsets", np.int64),
            ("block_ids", np.int64),
            ("parent_request", np.int64),
            ("turn", np.int32),
        ):
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
                raise ValueError(f"{name} must be a one-dimensional array of {np.dtype(dtype)}")
            view = array.view()
            view.flags.writeable = False
            object.__setattr__(self, name, view)
        self._check_requests()
        self._check_offsets()
        ids = self.block_ids
        object.__setattr__(self, "num_ids", int(ids.max()) + 1 if len(ids) else 0)
        object.__setattr__(self, "_block_parent", self._checked_parents())

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def has_reuse(self) -> bool:
        """Whether the trace says which prefixes are shared."""
        return self.block_tokens is not None

    @property
    def block_parent(self) -> NDArray[np.int64]:
        """[num_ids] Id of the block before; -1 for the first of a prompt. Always a smaller id."""
        return self._block_parent

    @property
    def last_is_partial(self) -> NDArray[np.bool_]:
        """[N] Whether a request's last block is not full. False where nothing is known of reuse."""
        if self.block_tokens is None:
            return np.zeros(len(self), dtype=np.bool_)
        partial: NDArray[np.bool_] = self.input_tokens % self.block_tokens != 0
        return partial

    def head(self, num_requests: int) -> Trace:
        """The first `num_requests` requests, or all where there are fewer.

        Raises:
            ValueError: `num_requests` is below 1.
        """
        if num_requests < 1:
            raise ValueError(f"num_requests={num_requests} is not allowed: give at least 1")
        rows = slice(num_requests)
        offsets = self.block_offsets[: num_requests + 1]
        return Trace(
            name=self.name,
            arrival_s=self.arrival_s[rows],
            input_tokens=self.input_tokens[rows],
            output_tokens=self.output_tokens[rows],
            block_tokens=self.block_tokens,
            block_offsets=offsets,
            block_ids=self.block_ids[: offsets[-1]],
            parent_request=self.parent_request[rows],
            turn=self.turn[rows],
            kind=self.kind[rows],
        )

    def scaled(self, rate_factor: float) -> Trace:
        """The same requests, arriving `rate_factor` times as fast.

        Raises:
            ValueError: `rate_factor` is not a finite number above 0.
        """
        if not 0 < rate_factor < np.inf:
            raise ValueError(f"rate_factor={rate_factor!r} is not allowed: give a finite number above 0")
        return Trace(
            name=self.name,
            arrival_s=self.arrival_s / rate_factor,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            block_tokens=self.block_tokens,
            block_offsets=self.block_offsets,
            block_ids=self.block_ids,
            parent_request=self.parent_request,
            turn=self.turn,
            kind=self.kind,
        )

    def _check_requests(self) -> None:
        count = len(self.arrival_s)
        if count == 0:
            raise ValueError("a trace has at least one request")
        for name in ("input_tokens", "output_tokens", "parent_request", "turn"):
            if len(getattr(self, name)) != count:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {count} requests")
        if self.kind and len(self.kind) != count:
            raise ValueError(f"kind has {len(self.kind)} entries for {count} requests: give one each, or none at all")
        arrival_s = self.arrival_s
        if arrival_s[0] != 0 or not np.isfinite(arrival_s).all() or (np.diff(arrival_s) < 0).any():
            raise ValueError("arrival_s must be finite, begin at 0 and never decrease")
        for name, least in (("input_tokens", 1), ("output_tokens", 0), ("turn", 1), ("parent_request", -1)):
            lowest = int(getattr(self, name).min())
            if lowest < least:
                raise ValueError(f"{name} holds {lowest}: {least} is the least that is allowed")
        if (self.parent_request >= np.arange(count)).any():
            raise ValueError("parent_request must name an earlier row, or be -1")

    def _check_offsets(self) -> None:
        count = len(self.arrival_s)
        if self.block_tokens is None:
            blocks = np.zeros(count, dtype=np.int64)
        elif self.block_tokens < 1:
            raise ValueError(f"block_tokens={self.block_tokens} is not allowed: give at least 1, or None")
        else:
            blocks = -(-self.input_tokens // self.block_tokens)
        offsets = self.block_offsets
        if len(offsets) != count + 1 or offsets[0] != 0 or (np.diff(offsets) != blocks).any():
            raise ValueError(
                f"block_offsets must hold {count + 1} entries, begin at 0 and rise by "
                "ceil(input_tokens / block_tokens); without block_tokens they stay 0"
            )
        if len(self.block_ids) != offsets[-1]:
            raise ValueError(f"block_ids has {len(self.block_ids)} entries where block_offsets ends at {offsets[-1]}")

    def _checked_parents(self) -> NDArray[np.int64]:
        ids = self.block_ids
        parents = np.full(self.num_ids, -1, dtype=np.int64)
        if len(ids) == 0:
            return parents
        # The highest id so far: it may rise by one at a time, from 0.
        highest = np.maximum.accumulate(ids)
        if ids.min() < 0 or ids[0] != 0 or (np.diff(highest) > 1).any():
            raise ValueError("block_ids must be numbered from 0 in the order of their first appearance")
        before = np.empty_like(ids)
        before[1:] = ids[:-1]
        before[self.block_offsets[:-1]] = -1
        parents[ids] = before
        if (parents[ids] != before).any():
            raise ValueError("an entry of block_ids has two different predecessors: ids must stand for whole prefixes")
        parents.flags.writeable = False
        return parents
