"""One step's work, as the scheduler plans it and everybody else reads it."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.engine.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class Chunk:
    """`num_tokens` tokens of one sequence, from `first_token` on, to run in one step."""

    sequence: SequenceState
    num_tokens: int
    first_token: int

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the last token, so that the next one is sampled from it. As long as the step is in
        flight: nothing is appended to its sequences meanwhile."""
        return self.first_token + self.num_tokens == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class Fetch:
    """KV to bring in from outside for `sequence`, whose blocks are allocated: tokens `first_token` to `last_token`
    (excluded).

    `first_token` is a multiple of the block size; blocks before it are held here already.
    """

    sequence: SequenceState
    first_token: int
    last_token: int


@dataclass(slots=True)
class StepPlan:
    """One step's work. `decodes` are chunks of one token; `prefills` the rest."""

    step_id: int
    """Unique and rising."""
    decodes: list[Chunk] = field(default_factory=list)
    prefills: list[Chunk] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    fresh_blocks: list[int] = field(default_factory=list)
    """Blocks of the step's sequences that hold what some earlier request left there."""

    @property
    def chunks(self) -> list[Chunk]:
        """All chunks, decodes first: the order of the rows in the batch."""
        return self.decodes + self.prefills
