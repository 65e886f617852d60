"""One request's state inside the engine: its tokens, how far their KV is computed, and the blocks that hold it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from actors.engine.device_event import DeviceEvent
from actors.engine.layer_arrival import LayerArrival
from actors.engine.request import EngineRequest, TokenLogprobs
from migrate.waiting_line import Turn

ExtendKeys = Callable[[Sequence[bytes], Sequence[int]], list[bytes]]
"""(keys so far, all tokens) -> the keys of all full blocks; `kv.keys.extend_block_keys` with model and salt filled
in."""


class Status(enum.Enum):
    """Where a sequence is. WAITING -> [FETCHING ->] RUNNING -> FINISHED, and RUNNING -> WAITING when preempted."""

    WAITING = "waiting"
    FETCHING = "fetching"
    """Blocks are allocated and their KV is on its way from the store or from a prefill worker."""
    RUNNING = "running"
    FINISHED = "finished"


class SequenceState:
    """Mutable state of one request. Owned by the scheduler; the runner reads it.

    `num_computed` tokens have their KV in `block_ids`; the token at `len(tokens) - 1` is never among them before it was
    run through the model, since its logits choose the next one.
    """

    def __init__(self, request: EngineRequest, turn: Turn, extend_keys: ExtendKeys) -> None:
        self.request = request
        self.turn = turn
        """Who goes before whom, as long as it lives."""
        self.status = Status.WAITING
        self.tokens: list[int] = [*request.prompt_token_ids, *request.output_token_ids]
        self.output_token_ids: list[int] = list(request.output_token_ids)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_computed = 0
        self.num_in_flight = 0
        """Tokens after these that run in steps which have not come back."""
        self.last_step = 0
        """The step it was last part of."""
        self.gives_way = False
        """It is to be preempted as soon as its steps in flight have come back."""
        self.is_void = False
        """What its blocks hold is not to be relied on: it is to begin anew."""
        self.block_ids: list[int] = []
        self.fresh_blocks: list[int] = []
        """Those of them that hold what some earlier request left there, and were in no step yet."""
        self.num_registered = 0
        self.external_tokens = min(request.external_tokens, len(self.tokens) - 1)
        self.incoming: LayerArrival | None = None
        """KV of tokens before `num_computed` that is still on its way: the step waits for it, layer by layer."""
        self.mark: DeviceEvent | None = None
        """When the device comes to this, it has done all that it was given for this sequence's blocks, and for whoever
        had them before. None: it has done so."""
        self.num_fetched_tokens = 0
        """Tokens whose KV the last fetch brought in."""
        self.num_cached_tokens: int | None = None
        """Prompt tokens whose KV was found rather than computed at the first admission; None before it."""
        self.is_exporting = False
        self.num_exported_blocks = 0
        """Full blocks that an early export has held, or holds while `is_exporting`."""
        self.num_preemptions = 0
        self.num_ever_computed = 0
        """The furthest `num_computed` ever was: what lies below it and runs again is recomputation."""
        self.was_counted = False
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self._extend_keys = extend_keys
        self._keys: list[bytes] = extend_keys((), self.tokens)

    @property
    def request_id(self) -> str:
        """The id the ingress gave."""
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, those of an earlier worker included."""
        return len(self.output_token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to run through the model before the next one can be sampled; 1 in steady decode."""
        return len(self.tokens) - self.num_computed

    @property
    def num_scheduled(self) -> int:
        """Tokens whose KV is computed, or will be by steps in flight."""
        return self.num_computed + self.num_in_flight

    @property
    def num_unscheduled(self) -> int:
        """Tokens that are in no step yet; 0 while the next token is not sampled."""
        return len(self.tokens) - self.num_computed - self.num_in_flight

    @property
    def may_be_scheduled(self) -> bool:
        """Whether it may be in the next step."""
        return self.status is Status.RUNNING and not (self.gives_way or self.is_void)

    @property
    def reuses_prefix(self) -> bool:
        """Prompt log-probabilities need every position's logits, so such a request computes its whole prompt."""
        return self.request.sampling.prompt_logprobs is None

    def append(self, token_id: int) -> None:
        """Adds a generated token."""
        self.tokens.append(token_id)
        self.output_token_ids.append(token_id)

    def keys(self, block_tokens: int) -> list[bytes]:
        """Keys of all full blocks of `tokens`. The chain is extended, never hashed again."""
        if len(self._keys) < len(self.tokens) // block_tokens:
            self._keys = self._extend_keys(self._keys, self.tokens)
        return self._keys
