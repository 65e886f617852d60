"""What the home of an instance asks of a worker that hosts parts of it, as messages of a link.

The meta of a question is JSON, checked where it arrives; weights and pages are its tensors.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from actors.engine.grants import BlocksWanted
from actors.engine.lane_table import Lane
from actors.engine.module_transfer import PageChunk


class Kind(enum.IntEnum):
    """Kinds of questions. Numbers are what both workers agree on: append only."""

    STAGE = 1
    """A stage's work: `actors.engine.stage_work`."""
    GRANT = 2
    """Room for lanes and layers: answered with how many blocks, and the layers whose weights are to be sent. Fewer
    blocks than the home has are not granted yet: it is to give up the others and ask again."""
    WRITE_WEIGHTS = 3
    WRITE_PAGES = 4
    USE_VERSION = 5
    RELEASE = 6
    READ_WEIGHTS = 7
    READ_PAGES = 8
    MOVE_BLOCKS = 9
    DIRTY_POINT = 10
    DIRTY_SINCE = 11
    HEADS = 12
    """Attention of heads: `actors.engine.head_work`."""


class QuestionError(ValueError):
    """A question that says something else than its kind."""


@dataclass(frozen=True, slots=True)
class GrantRequest:
    """See `Grants.grant`."""

    lanes: tuple[Lane, ...]
    layers: tuple[int, ...]
    wanted: BlocksWanted
    fingerprint: bytes


def encode(**fields: Any) -> bytes:
    """Meta of a question or an answer."""
    return json.dumps(fields).encode()


def encode_grant(request: GrantRequest) -> bytes:
    return encode(
        lanes=request.lanes,
        layers=request.layers,
        fingerprint=request.fingerprint.hex(),
        **asdict(request.wanted),
    )


def encode_chunk(chunk: PageChunk) -> bytes:
    return encode(lanes=chunk.lanes, blocks=chunk.blocks)


class Fields:
    """What a meta holds. Everything raises QuestionError where it is not there, or something else."""

    def __init__(self, meta: bytes) -> None:
        try:
            fields = json.loads(meta)
        except (ValueError, RecursionError) as error:
            raise QuestionError(f"a question that cannot be read: {error}") from None
        if not isinstance(fields, dict):
            raise QuestionError("a question without fields")
        self._fields: dict[str, Any] = fields

    def number(self, name: str) -> int:
        value = self._fields.get(name)
        if type(value) is not int or value < 0:
            raise QuestionError(f"{name} is {value!r}; it must be a number of at least 0")
        return value

    def numbers(self, name: str) -> tuple[int, ...]:
        return self._as_numbers(name, self._fields.get(name))

    def lanes(self) -> tuple[Lane, ...]:
        value = self._fields.get("lanes")
        if not isinstance(value, list):
            raise QuestionError("lanes must be a list")
        pairs = [self._as_numbers("lanes", pair) for pair in value]
        if any(len(pair) != 2 for pair in pairs):
            raise QuestionError("lanes must be pairs of a layer and a KV head")
        return tuple((pair[0], pair[1]) for pair in pairs)

    def hex(self, name: str) -> bytes:
        value = self._fields.get(name)
        try:
            return bytes.fromhex(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise QuestionError(f"{name} is {str(value)[:40]!r}; it must be hex digits") from None

    def grant(self) -> GrantRequest:
        wanted = BlocksWanted(self.number("least"), self.number("now"), self.number("most"), self.number("live"))
        return GrantRequest(self.lanes(), self.numbers("layers"), wanted, self.hex("fingerprint"))

    def chunk(self) -> PageChunk:
        return PageChunk(self.lanes(), self.numbers("blocks"))

    def moves(self) -> Mapping[int, int]:
        """Blocks, and what they become."""
        sources, targets = self.numbers("sources"), self.numbers("targets")
        if len(sources) != len(targets):
            raise QuestionError(f"{len(sources)} blocks were to become {len(targets)}")
        return dict(zip(sources, targets, strict=True))

    @staticmethod
    def _as_numbers(name: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise QuestionError(f"{name} must be numbers of at least 0")
        return tuple(value)


def encode_moves(moves: Mapping[int, int]) -> bytes:
    return encode(sources=list(moves), targets=list(moves.values()))


def lanes_of(layers: Sequence[int], num_kv_heads: int) -> tuple[Lane, ...]:
    """All lanes of these layers."""
    return tuple((layer, head) for layer in layers for head in range(num_kv_heads))
