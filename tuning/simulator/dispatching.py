"""Who gets a request, and when: admission by KV room, then the live system's dispatch, with its reservations."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from migrate.dispatch import choose_decode, make_policy
from migrate.reservations import Reservations
from migrate.view import DispatchRequest, WorkerView
from tuning.simulator.instance import Instance
from tuning.simulator.outcomes import Outcomes
from tuning.simulator.prompts import Prompts

_FOR_EVER_S: Final = 1e18
_KEY_BYTES: Final = 8


class Dispatching:
    """First come, first served: while a request waits for room to decode, none behind it starts.

    A decode (or monolithic) instance has room when it can hold a request to its end beside all that it holds and has
    promised: the simulator knows how long answers get, so that nothing is ever preempted (ours). Reports are never old
    here, and there is one dispatcher, so what is reserved is all that is pending.

    Args:
        send: called with the time, the row, and the instances for prefill and decode; in monolithic mode they are one.
    """

    def __init__(
        self,
        prompts: Prompts,
        outcomes: Outcomes,
        prefill: Sequence[Instance],
        decode: Sequence[Instance],
        *,
        policy: str,
        seed: int,
        max_running_requests: int,
        send: Callable[[float, int, Instance, Instance], None],
    ) -> None:
        self._prompts = prompts
        self._outcomes = outcomes
        self._prefill = prefill
        self._decode = decode
        self._by_id = {instance.worker_id: instance for instance in (*prefill, *decode)}
        self._policy = make_policy(policy, seed=seed)
        self._wants_keys = policy == "prefix_aware"
        self._reservations = Reservations(_FOR_EVER_S)
        self._views: dict[int, WorkerView] = {}
        """By instance, as long as neither its report nor what is reserved on it has changed."""
        self._max_running_requests = max_running_requests
        self._send = send
        self._waiting: deque[tuple[int, int]] = deque()
        self._turn = seed

    def can_ever_run(self, row: int) -> bool:
        """Whether a request fits on empty instances. All of a kind are alike."""
        return (
            self._prompts.num_blocks[row] <= self._prefill[0].pool.capacity_blocks
            and self._prompts.lifetime_blocks[row] <= self._decode[0].pool.capacity_blocks
        )

    def offer(self, now_s: float, row: int, stored_blocks: int) -> None:
        """A request has come that can ever run; the store had so many of its first blocks."""
        if self._waiting or not self._admit(now_s, row, stored_blocks):
            self._waiting.append((row, stored_blocks))

    def room_was_made(self, now_s: float) -> None:
        """A request has ended somewhere."""
        while self._waiting and self._admit(now_s, *self._waiting[0]):
            self._waiting.popleft()

    def first_token(self, row: int) -> None:
        """A prefill is done."""
        self._reservations.release_prefill(str(row))
        self._views.pop(self._outcomes.prefill_instance[row], None)

    def on_decode(self, row: int, instance: Instance) -> None:
        """The decode instance holds a request's blocks itself now."""
        self.without_decode(row, instance)
        instance.running_requests += 1

    def without_decode(self, row: int, instance: Instance) -> None:
        """The first token was the only one: what was promised on the decode instance is not needed."""
        self._reservations.release_decode(str(row))
        self._views.pop(instance.number, None)
        instance.reserved_requests -= 1
        instance.reserved_blocks -= self._prompts.lifetime_blocks[row]

    def off_decode(self, instance: Instance) -> None:
        """It holds them no more."""
        instance.running_requests -= 1

    def _admit(self, now_s: float, row: int, stored_blocks: int) -> bool:
        limit = self._max_running_requests
        lifetime_blocks = self._prompts.lifetime_blocks[row]
        roomy = [
            self._view(instance)
            for instance in self._decode
            if instance.running_requests + instance.reserved_requests < limit
            and instance.pool.held_blocks + instance.reserved_blocks + lifetime_blocks <= instance.pool.capacity_blocks
        ]
        if not roomy:
            return False
        prompts = self._prompts
        input_tokens = prompts.input_tokens[row]
        uncached_tokens = max(1, input_tokens - stored_blocks * prompts.block_tokens)
        request = DispatchRequest(
            str(row),
            uncached_tokens,
            input_tokens,
            prompts.num_blocks[row],
            self._keys(row) if self._wants_keys else (),
            lifetime_blocks,
        )
        prefill, decode = self._choose(request, roomy)
        decode.reserved_requests += 1
        decode.reserved_blocks += lifetime_blocks
        self._reservations.reserve(
            str(row),
            now_s=now_s,
            prefill_worker=prefill.worker_id,
            prefill_tokens=uncached_tokens,
            decode_worker=decode.worker_id,
            decode_blocks=lifetime_blocks,
        )
        self._views.pop(prefill.number, None)
        self._views.pop(decode.number, None)
        self._outcomes.admitted_s[row] = now_s
        self._outcomes.prefill_instance[row] = prefill.number
        self._outcomes.decode_instance[row] = decode.number
        self._send(now_s, row, prefill, decode)
        return True

    def _view(self, instance: Instance) -> WorkerView:
        load = instance.load()
        view = self._views.get(instance.number)
        if view is None or view.load is not load:
            view = self._views[instance.number] = self._reservations.view(load)
        return view

    def _choose(self, request: DispatchRequest, roomy: Sequence[WorkerView]) -> tuple[Instance, Instance]:
        """Instances for prefill and decode."""
        if self._prefill is self._decode:
            both = self._by_id[self._policy.choose(request, roomy)]
            return both, both
        self._turn += 1
        decode = self._by_id[choose_decode(request, roomy, turn=self._turn)]
        views = [self._view(instance) for instance in self._prefill]
        return self._by_id[self._policy.choose(request, views)], decode

    def _keys(self, row: int) -> tuple[bytes, ...]:
        findable = self._prompts.findable_blocks[row]
        return tuple(block.to_bytes(_KEY_BYTES, "big") for block in self._prompts.chain(row)[:findable])
