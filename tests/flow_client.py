"""Sends token ids through the real workers as an ingress does and gets ids back: the app without HTTP and text."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import ray

from actors.addresses import address_of
from actors.engine.request import EngineRequest, SamplingParams
from app.dispatcher import Dispatcher
from app.sequence_flow import SequenceFlow, SequencePlan
from kv.keys import block_keys
from kv.wire import pack_keys
from migrate.admission import AdmissionPolicy
from migrate.dispatch import make_policy
from migrate.load import Role
from migrate.roster import Member
from tests.running_app import wait_until


@dataclass(frozen=True)
class FlowAnswer:
    tokens: list[int]
    finish_reason: str | None
    cached_tokens: int | None


@dataclass(frozen=True)
class FlowClient:
    """Over the workers of one application, or some of them. `directory` and `store` are its actors, or None."""

    members: tuple[Member, ...]
    mode: str
    directory: Any = None
    store: Any = None
    policy: str = "load_aware"

    def stats(self, role: Role | None = None) -> list[dict[str, Any]]:
        """What the workers count, or those of one role."""
        members = [member for member in self.members if role in (None, member.role)]
        counts: list[dict[str, Any]] = ray.get([address_of(m).actor.stats.remote() for m in members], timeout=30)
        return counts

    def wait_free(self) -> None:
        """Until no worker holds anything for a request, publications included."""
        names = ("live_blocks", "live_requests", "tracked_requests")
        wait_until(lambda: not any(each[name] for each in self.stats() for name in names), 10.0, "something is held")

    def run(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams], *, together: bool
    ) -> list[FlowAnswer]:
        """One answer a prompt; all in flight at once, or one after the other."""
        if isinstance(sampling, SamplingParams):
            sampling = [sampling] * len(prompts)
        requests = [
            EngineRequest(uuid.uuid4().hex, tuple(prompt), params)
            for prompt, params in zip(prompts, sampling, strict=True)
        ]
        return asyncio.run(self._run(requests, together))

    async def _run(self, requests: Sequence[EngineRequest], together: bool) -> list[FlowAnswer]:
        owner = f"test-{uuid.uuid4().hex}"
        dispatcher = Dispatcher(
            owner, self.mode, make_policy(self.policy), AdmissionPolicy(1000, 1000), 600.0, on_suspect=lambda _: None
        )
        dispatcher.update_members(self.members)
        try:
            flows = [self._answer(replace(request, owner=owner), dispatcher) for request in requests]
            if together:
                return list(await asyncio.gather(*flows))
            return [await flow for flow in flows]
        finally:
            dispatcher.stop()

    async def _answer(self, request: EngineRequest, dispatcher: Dispatcher) -> FlowAnswer:
        facts = address_of(self.members[0]).facts
        block_tokens = facts.layout.block_tokens
        keys = tuple(block_keys(request.prompt_token_ids, block_tokens, facts.fingerprint, request.salt))

        async def cached_tokens(keys: tuple[bytes, ...]) -> int:
            if self.directory is None:
                return 0
            num_blocks: int = await self.directory.match_blocks.remote(pack_keys(keys))
            return block_tokens * num_blocks

        flow = SequenceFlow(
            request, SequencePlan(block_tokens, keys, cached_tokens, self.mode != "monolithic"), dispatcher
        )
        tokens: list[int] = []
        cached, finish_reason = None, None
        async with aclosing(flow.events()) as events:
            async for event in events:
                if event.token_id is not None:
                    tokens.append(event.token_id)
                cached = event.cached_tokens if event.cached_tokens is not None else cached
                finish_reason = event.finish_reason
        return FlowAnswer(tokens, finish_reason, cached)
