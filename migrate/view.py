"""What a dispatcher knows: the request's lengths, and each worker as one ingress sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from migrate.load import WorkerLoad


class NoWorkerError(Exception):
    """No worker can take the request: none of that role is alive, or none is large enough. The message says which."""


@dataclass(frozen=True, slots=True)
class DispatchRequest:
    """What a policy may know about a request: lengths and hashes, never text.

    Raises:
        ValueError: a length that is impossible.
    """

    request_id: str
    uncached_tokens: int
    """Prompt tokens to compute, by the directory's answer (at least the last one, even on a full hit)."""
    prompt_tokens: int
    num_blocks: int
    """KV blocks of the prompt, a partly filled last one included."""
    block_keys: tuple[bytes, ...] = ()
    """Keys of the prompt's full blocks, first block first. Each key depends on all tokens before it."""
    max_blocks: int | None = None
    """KV blocks when all `max_tokens` are generated. None: one more than the prompt's."""
    turn_s: float = 0.0
    """When it counts as having come, by its ingress's clock: when it did, and its priority in seconds."""

    def __post_init__(self) -> None:
        if not 0 <= self.uncached_tokens <= self.prompt_tokens:
            raise ValueError(
                f"uncached_tokens is {self.uncached_tokens}; allowed is 0 to prompt_tokens={self.prompt_tokens}"
            )
        if self.num_blocks < 1:
            raise ValueError(f"num_blocks is {self.num_blocks}; a prompt takes at least one block")
        if self.max_blocks is not None and self.max_blocks < self.num_blocks:
            raise ValueError(f"max_blocks is {self.max_blocks}; it must be at least num_blocks={self.num_blocks}")

    @property
    def lifetime_blocks(self) -> int:
        """Blocks that a worker must own in all to bring this request to its end, alone if need be."""
        return self.num_blocks + 1 if self.max_blocks is None else self.max_blocks

    @property
    def decode_blocks(self) -> int:
        """Blocks that a decode worker must have free to take this request: its prompt's, and one to grow into."""
        return min(self.num_blocks + 1, self.lifetime_blocks)


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as one ingress sees it: the worker's last report and this ingress's own reservations on it."""

    load: WorkerLoad
    reserved_prefill_tokens: int = 0
    reserved_prefill_requests: int = 0
    reserved_decode_blocks: int = 0
    reserved_decode_requests: int = 0

    @property
    def worker_id(self) -> str:
        return self.load.worker_id

    @property
    def pending_tokens(self) -> int:
        """Uncached prompt tokens ahead of a new request: others' as reported, our own as reserved.

        Our own are counted whole until their first token, so a long prompt half done is over-estimated, never missed.
        """
        others = self.load.pending_prefill_tokens - self.load.from_this_ingress_prefill_tokens
        return max(0, others) + self.reserved_prefill_tokens

    @property
    def pending_s(self) -> float:
        """Estimated seconds until the worker has computed all that is pending."""
        return self.pending_tokens / self.load.prefill_tokens_per_s

    def prefill_end_s(self, request: DispatchRequest) -> float:
        """Estimated seconds until the worker would have computed `request` too."""
        return (self.pending_tokens + request.uncached_tokens) / self.load.prefill_tokens_per_s

    @property
    def requests(self) -> int:
        """Requests running, waiting or on their way. Our own before their first token count once, as reservations."""
        others = self.load.running_requests + self.load.waiting_requests - self.load.from_this_ingress_requests
        return max(0, others) + self.reserved_prefill_requests

    @property
    def used_blocks(self) -> int:
        """Blocks of live requests, and those promised to our requests that have not arrived."""
        return self.load.live_blocks + self.reserved_decode_blocks

    def has_room(self, request: DispatchRequest) -> bool:
        """Whether the request's blocks are free or evictable now."""
        needed = request.num_blocks if self.load.role == "prefill" else request.decode_blocks
        return self.used_blocks + needed <= self.load.total_blocks

    def can_ever_hold(self, request: DispatchRequest) -> bool:
        """Whether the request's blocks fit on the worker when it is empty."""
        return self.blocks_to_hold(request) <= self.load.total_blocks

    def blocks_to_hold(self, request: DispatchRequest) -> int:
        """Blocks of `request` at its longest on this worker: a prefill worker never holds generated tokens."""
        return request.num_blocks if self.load.role == "prefill" else request.lifetime_blocks


def large_enough(request: DispatchRequest, listed: Sequence[WorkerView], role: str) -> list[WorkerView]:
    """Return those of `listed` that can ever hold `request`; `role` is for the message.

    Raises:
        NoWorkerError: nothing is listed, or nothing is large enough.
    """
    if not listed:
        raise NoWorkerError(f"request {request.request_id!r}: no {role} worker is alive; wait until one has joined")
    able = [view for view in listed if view.can_ever_hold(request)]
    if not able:
        needed = listed[0].blocks_to_hold(request)
        largest = max(view.load.total_blocks for view in listed)
        raise NoWorkerError(
            f"request {request.request_id!r} needs {needed} KV blocks; the largest {role} worker has {largest}: "
            "shorten the prompt, lower max_tokens or enlarge the pool"
        )
    return able
