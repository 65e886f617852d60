"""What travels between an ingress and a worker, beside the engine's own types of request and token. All of it can be
pickled."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from actors.engine.request import EngineRequest, TokenEvent
from kv.layout import KvLayout
from migrate.load import WorkerLoad


@dataclass(frozen=True, slots=True)
class HandOver:
    """A prefill worker's KV of one request, ready to be taken over by a decode worker."""

    request_id: str
    num_tokens: int
    """Tokens whose KV is to be had: all but the one sampled last."""
    receipt: object
    """The store's `PullReceipt`; None when the KV could not be stored and the decode worker must compute it again."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One request for a worker."""

    request: EngineRequest
    hand_over: HandOver | None = None
    """For a decode worker: where the KV is."""


@dataclass(slots=True)
class WorkerMessage:
    """All that a worker has for one ingress since its last message: one message a step when the ingress keeps up.

    It goes through pickle as bytes of its own, with events as plain tuples: Ray's pickler, which looks at each object
    in Python, takes three times as long for a message of eight tokens.
    """

    events: list[TokenEvent] = field(default_factory=list)
    hand_overs: list[HandOver] = field(default_factory=list)
    load: WorkerLoad | None = None
    session: int = 0
    """Another number than in the message before: the worker took the ingress for dead and freed its requests."""

    def to_bytes(self) -> bytes:
        """The message as bytes."""
        events = [_event_values(event) for event in self.events]
        return pickle.dumps((events, self.hand_overs, self.load, self.session), pickle.HIGHEST_PROTOCOL)

    @classmethod
    def from_bytes(cls, packed: bytes) -> WorkerMessage:
        """What `to_bytes` gave. It is unpickled, so it must come from a worker."""
        events, hand_overs, load, session = pickle.loads(packed)
        return cls([TokenEvent(*values) for values in events], hand_overs, load, session)

    def __reduce__(self) -> tuple[Callable[[bytes], WorkerMessage], tuple[bytes]]:
        return WorkerMessage.from_bytes, (self.to_bytes(),)


_event_values: Callable[[TokenEvent], tuple[Any, ...]] = attrgetter(*(each.name for each in fields(TokenEvent)))


@dataclass(frozen=True, slots=True)
class LineAddress:
    """Where a worker waits for ingresses (`actors.direct_line`)."""

    host: str
    port: int
    key: bytes = field(repr=False)
    """Known inside the application only, where Ray carries it."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What does not change in a worker's life."""

    layout: KvLayout
    fingerprint: bytes
    """Of weights, dtype and layout (16 bytes): with the tokens and the salt it makes a block's key."""
    max_context_tokens: int
    """Prompt and answer together; also the most that the worker's KV pool holds."""
    total_blocks: int
    vocab_size: int
    """Of the model's logits, which may be more than the tokenizer has."""
    eos_token_ids: tuple[int, ...]
    backend: str
    """Name of the attention backend. For people, as is the next."""
    device: str
    line: LineAddress | None = None
    """Where an ingress may ask for news without Ray."""
