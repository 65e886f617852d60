"""What travels between two workers, and what a link promises whoever uses one.

A link is a standing connection between two workers, for one epoch. Messages arrive whole and in order, or the link is
dead: nothing is lost, doubled or reordered while it lives, and a dead link stays dead. Going on takes a link of a new
epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_TENSORS = 256
"""Tensors in one message."""
MAX_DIMS = 8
"""Dimensions of one tensor."""

DTYPES: tuple[torch.dtype, ...] = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
"""What a tensor of a message may hold. A dtype's index is its code on the wire: append only."""


class LinkError(Exception):
    """A link that could not be made, or does not do what it should. The message says what to do where one can."""


class LinkDeadError(LinkError):
    """A link that has ended, here or at the other end; the message is the reason. Nothing was sent."""


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """One piece of work, or an answer to one. The link looks at sizes only.

    Whoever receives a message owns its tensors: they are fresh memory that nobody else writes.
    """

    kind: int
    """What it is; numbered by the caller. 0 to 2**31 - 1."""
    work_id: int
    """Which piece of work. 0 to 2**63 - 1."""
    version: int
    """Of the placement that the work was made under, so that a stale one can be refused. 0 to 2**63 - 1."""
    meta: bytes = b""
    """Whatever is no tensor."""
    tensors: tuple[torch.Tensor, ...] = ()
    """Contiguous, on the CPU, of any shape. The sender must not write to them until they are sent."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of `meta` and of all tensors: what counters count."""
        return len(self.meta) + sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class LinkHandlers:
    """Who is told what arrives. Called from the link's own threads, one call at a time, and maybe before the call that
    makes the link has returned.

    While a handler runs nothing else is received, and a peer that cannot get rid of its messages for as long as the
    timeout takes the link for dead: hand work to another thread. A handler that raises ends the link.
    """

    on_message: Callable[[Message], None]
    on_dead: Callable[[str], None]
    """Called once, with the reason, when the link has ended otherwise than by `close` at this end; the last call that
    the link makes, to this or to any `on_sent`."""


@dataclass(frozen=True, slots=True)
class LinkCounters:
    """What a link has carried. Bytes are payload bytes, headers apart."""

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0
    heartbeats_sent: int = 0
    heartbeats_received: int = 0


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """How a worker's links are set up; both ends must have the same.

    Raises:
        ValueError: a value that cannot work.
    """

    timeout_s: float = 10.0
    """How long a peer may be silent, or may take for 16 MiB, before the link is dead. A heartbeat goes out every fifth
    of it. Longer than any handler takes, and than a worker is ever kept from running its threads."""
    connect_timeout_s: float = 10.0
    """How long making a link may take, from the first try to an answer from the other end. Where nobody answers at the
    rendezvous, up to twice as long."""
    max_message_bytes: int = 1 << 30
    """Largest payload of a message. A larger one is refused where it is sent, and never allocated where it arrives."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "connect_timeout_s"):
            value = getattr(self, name)
            if not 0.1 <= value <= 3600:
                raise ValueError(f"{name} is {value}; allowed are 0.1 to 3600 seconds")
        if not 1 <= self.max_message_bytes <= 1 << 40:
            raise ValueError(f"max_message_bytes is {self.max_message_bytes}; allowed are 1 to 2**40")


class Link(Protocol):
    """One end of a link."""

    @property
    def counters(self) -> LinkCounters:
        """A snapshot."""

    def send(self, message: Message, on_sent: Callable[[], None] | None = None) -> None:
        """Take `message` for sending, without waiting. The link keeps its tensors until they are sent.

        Args:
            on_sent: called from a thread of the link when the tensors may be written again. That says nothing about
                what the peer does with them. Not called for what was queued or being sent when the link ended: after
                `on_dead`, or `join`, all tensors are the caller's again.

        Raises:
            LinkDeadError: the link has ended.
            ValueError: a message that no link can carry, or larger than the limit.
        """

    def close(self) -> None:
        """End the link, without waiting: what is queued is dropped, the peer's `on_dead` is called, and ours is not.
        A handler that is just being called still runs. Closing again does nothing."""

    def join(self, timeout_s: float) -> bool:
        """Wait until an ended link has no thread left and makes no more calls; whether that came in time.

        Not from a handler. The link is not ended by this. A thread that was in the middle of sending to a peer that
        died may last as long as the timeout, though `on_dead` has been called.
        """


def check_message(message: Message, max_bytes: int) -> None:
    """Refuse what a link cannot carry.

    Raises:
        ValueError: with what was given and what is allowed.
    """
    for name, value, largest in (
        ("kind", message.kind, INT32_MAX),
        ("work_id", message.work_id, INT64_MAX),
        ("version", message.version, INT64_MAX),
    ):
        if not 0 <= value <= largest:
            raise ValueError(f"{name} of a message is {value}; allowed are 0 to {largest}")
    if len(message.tensors) > MAX_TENSORS:
        raise ValueError(
            f"a message has {len(message.tensors)} tensors; allowed are {MAX_TENSORS}: send several messages"
        )
    for index, tensor in enumerate(message.tensors):
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.is_contiguous():
            raise ValueError(
                f"tensor {index} of a message is {tensor.layout} on {tensor.device}, contiguous: "
                f"{tensor.layout == torch.strided and tensor.is_contiguous()}; allowed are contiguous tensors in host "
                "memory: copy it there first"
            )
        if tensor.dtype not in DTYPES or tensor.dim() > MAX_DIMS:
            raise ValueError(
                f"tensor {index} of a message has {tensor.dim()} dimensions of {tensor.dtype}; allowed are {MAX_DIMS} "
                f"dimensions of {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}"
            )
    if message.payload_bytes > max_bytes:
        raise ValueError(
            f"a message has {message.payload_bytes} bytes; allowed are {max_bytes} (max_message_bytes): send it in "
            "pieces"
        )
