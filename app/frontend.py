"""What an ingress replica is, without HTTP: from validated requests to running generations, for HTTP and gRPC alike."""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError

from actors.addresses import RosterView, address_of
from actors.engine.request import EngineRequest
from actors.messages import WorkerFacts
from app.api_keys import Principal, derive_salt
from app.chat_protocol import ChatCompletionRequest
from app.chat_template import render_chat
from app.choice_text import ChoiceText
from app.completion_protocol import DEFAULT_MAX_TOKENS, CompletionRequest
from app.default_sampling import DefaultSampling
from app.dispatcher import Dispatcher
from app.generation import Choice, Generation
from app.grammar_check import GrammarCheck
from app.key_limits import KeyUse
from app.openai_errors import model_not_found, unavailable
from app.openai_protocol import GenerationRequest, to_sampling
from app.prompt_tokens import answer_tokens, check_token_ids, encode_prompt
from app.request_metrics import RequestMetrics
from app.request_spans import RequestSpans
from app.roster_watch import RosterWatch
from app.sequence_flow import SequenceFlow, SequencePlan
from app.sequence_times import SequenceTimes
from app.settings import AppSettings
from app.token_bytes import TokenBytes
from app.tokenize_protocol import DetokenizeBody, TokenizeBody
from app.tool_use import ToolUse, tool_use
from kv.directory_client import DirectoryClient
from kv.keys import block_keys
from kv.metrics.ray_exporter import EXPORT_PERIOD_S, RayExporter
from migrate.admission import AdmissionPolicy
from migrate.dispatch import make_policy
from migrate.roster import Member

_MATCH_TIMEOUT_S = 0.2
"""A directory that takes longer is not waited for: the answer only sharpens an estimate."""
_SWEEP_PERIOD_S = 5.0


class Frontend:
    """Serves one model through the workers of one application. Used from one event loop.

    Args:
        tokenizer: a fast one of transformers. ValueError when its decoder belongs to no family that `TokenBytes` knows.
        model_name: what clients must give as `model`.
        control: Serve handle of the control deployment.
        sampling: for what a request leaves out.
    """

    def __init__(
        self, settings: AppSettings, tokenizer: Any, model_name: str, control: Any, sampling: DefaultSampling
    ) -> None:
        self.settings = settings
        self.model_name = model_name
        self.created = int(time.time())
        self.table = TokenBytes(tokenizer)
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._key_use = KeyUse()
        self._owner = f"ingress-{uuid.uuid4().hex[:12]}"
        ingress = settings.ingress
        self._grammars = GrammarCheck(tokenizer, ingress.grammar_cpu_s)
        self.dispatcher = Dispatcher(
            self._owner,
            settings.mode,
            make_policy(ingress.dispatch.policy, seed=secrets.randbits(32)),  # replicas with equal seeds would herd
            AdmissionPolicy(ingress.max_inflight_requests, ingress.max_queued_requests),
            reservation_ttl_s=ingress.request_timeout_s,
            on_suspect=self._suspect,
        )
        self._members: tuple[Member, ...] = ()
        self._directory: DirectoryClient | None = None
        self._watch = RosterWatch(control, self._on_roster)
        self._metrics = RequestMetrics(model_name)
        self._spans = None if ingress.tracing is None else RequestSpans(ingress.tracing, model_name)
        self._sweeper = asyncio.create_task(self._sweep())
        self._exporting = asyncio.create_task(self._export())

    def generation(self, request: GenerationRequest, principal: Principal) -> Generation:
        """The answer to a chat or a completion, ready to run. Raises ApiError for whatever is wrong with the
        request."""
        arrived_s = time.perf_counter()
        self._check_model(request.model)
        if isinstance(request, CompletionRequest):
            return self._completion(request, principal, arrived_s)
        if isinstance(request, ChatCompletionRequest):
            tools = tool_use(self._tokenizer, request)
            prompt = render_chat(self._tokenizer, request)
            return self._generation(
                request, [prompt], principal, arrived_s, default_tokens=None, after_text=False, tools=tools
            )
        raise TypeError(f"{type(request).__name__} is no kind of request that is answered")

    def hold_key(self, principal: Principal) -> AbstractContextManager[None]:
        """One request of a key, as long as it runs. Raises ApiError 429 on entry when it would be one too many."""
        return self._key_use.hold(principal.name, principal.limits, asyncio.get_running_loop().time())

    def tokenize(self, request: TokenizeBody) -> tuple[int, ...]:
        """The prompt's token ids, as `chat` and `completion` make them. Raises ApiError."""
        self._check_model(request.model)
        if request.prompt is not None:
            return encode_prompt(self._tokenizer, request.prompt, vocab_size=self._facts().vocab_size)
        chat = {"model": request.model, "messages": request.messages}
        return render_chat(self._tokenizer, ChatCompletionRequest.model_validate(chat))

    def detokenize(self, request: DetokenizeBody) -> str:
        """The text of token ids, special tokens included. Raises ApiError."""
        self._check_model(request.model)
        if request.tokens:
            check_token_ids(request.tokens, vocab_size=self._facts().vocab_size, param="tokens")
        return str(self._tokenizer.decode(request.tokens))

    @property
    def context_tokens(self) -> int:
        """The longest prompt and answer together that every worker can hold. Raises ApiError 503 before the first
        worker has joined."""
        self._facts()
        return min(member.max_context_tokens for member in self._members)

    def health_problems(self) -> list[str]:
        """Why requests cannot be served now; empty when they can."""
        now_s = asyncio.get_running_loop().time()
        problems = [f"no {role} worker is ready" for role in self.dispatcher.missing_roles()]
        for link in sorted(self.dispatcher.links, key=lambda link: link.worker_id):
            stalled_s = link.progress.stalled_s(now_s)
            if stalled_s > self.settings.ingress.stall_timeout_s:
                problems.append(f"worker {link.worker_id} has made no progress for {stalled_s:.0f} s")
        return problems

    def block_counts(self) -> list[dict[str, Any]]:
        """Blocks by worker, as last reported."""
        loads = [link.load for link in self.dispatcher.links if link.load is not None]
        return [
            {
                "worker_id": load.worker_id,
                "role": load.role,
                "total_blocks": load.total_blocks,
                "live_blocks": load.live_blocks,
                "free_blocks": load.total_blocks - load.live_blocks,
                "running_requests": load.running_requests,
                "waiting_requests": load.waiting_requests,
                "steps": load.steps,
            }
            for load in sorted(loads, key=lambda load: load.worker_id)
        ]

    async def stop(self) -> None:
        """Ends all background work."""
        self._sweeper.cancel()
        self._exporting.cancel()
        await self._watch.stop()
        await self._grammars.stop()
        self.dispatcher.stop()

    def _completion(self, request: CompletionRequest, principal: Principal, arrived_s: float) -> Generation:
        vocab_size = self._facts().vocab_size
        prompts = [encode_prompt(self._tokenizer, prompt, vocab_size=vocab_size) for prompt in request.prompt]
        return self._generation(
            request, prompts, principal, arrived_s, default_tokens=DEFAULT_MAX_TOKENS, after_text=True
        )

    def _generation(
        self,
        request: GenerationRequest,
        prompts: Sequence[tuple[int, ...]],
        principal: Principal,
        arrived_s: float,
        *,
        default_tokens: int | None,
        after_text: bool,
        tools: ToolUse | None = None,
    ) -> Generation:
        facts, context_tokens = self._facts(), self.context_tokens
        salt = derive_salt(principal.salt, request.cache_salt)
        priority = principal.limits.priority_of(request.priority)
        seed, base = secrets.randbits(64), uuid.uuid4().hex
        echo = isinstance(request, CompletionRequest) and bool(request.echo)
        groups = []
        for prompt_index, prompt in enumerate(prompts):
            limit = answer_tokens(
                request, prompt_tokens=len(prompt), context_tokens=context_tokens, default_tokens=default_tokens
            )
            choices = []
            for choice_index in range(request.choices):
                index = prompt_index * request.choices + choice_index
                sampling = to_sampling(
                    request,
                    self._sampling,
                    max_tokens=limit,
                    vocab_size=facts.vocab_size,
                    random_seed=(seed + prompt_index) % 2**64,
                    choice_index=choice_index,
                )
                if tools is not None:
                    sampling = replace(sampling, grammar=tools.grammar)
                engine_request = EngineRequest(
                    f"{base}-{index}",
                    prompt,
                    sampling,
                    owner=self._owner,
                    salt=salt,
                    eos_token_ids=facts.eos_token_ids,
                    priority_s=priority * self.settings.ingress.priority_step_s,
                )
                text = ChoiceText(
                    index,
                    self.table,
                    request.stop,
                    include_stop=bool(request.include_stop_str_in_output),
                    skip_special_tokens=request.skips_special_tokens,
                    echoed_prompt=prompt if echo else None,
                    after_text=after_text,
                    shown_ids=() if tools is None else tools.marker_ids,
                )
                choices.append(Choice(engine_request, text, SequenceTimes(arrived_s, priority, principal.name)))
            groups.append(choices)
        return Generation(
            groups, self._start, self._metrics, self._spans, tools, self._grammar_check(request, tools, facts)
        )

    def _grammar_check(
        self, request: GenerationRequest, tools: ToolUse | None, facts: WorkerFacts
    ) -> Callable[[], Awaitable[None]] | None:
        grammar, param = (request.grammar, request.grammar_param) if tools is None else (tools.grammar, "tools")
        if grammar is None:
            return None
        return functools.partial(
            self._grammars.check, grammar, param, vocab_size=facts.vocab_size, end_token_ids=facts.eos_token_ids
        )

    def _start(self, choice: Choice, admitted: asyncio.Event) -> SequenceFlow:
        facts, request = self._facts(), choice.request
        block_tokens = facts.layout.block_tokens
        keys: tuple[bytes, ...] = ()
        if request.sampling.prompt_logprobs is None:
            keys = tuple(block_keys(request.prompt_token_ids, block_tokens, facts.fingerprint, request.salt))
        plan = SequencePlan(block_tokens, keys, self._cached_tokens, self.settings.mode != "monolithic")
        return SequenceFlow(request, plan, self.dispatcher, admitted, choice.times)

    async def _cached_tokens(self, keys: tuple[bytes, ...]) -> int:
        if not keys or self._directory is None:
            return 0
        try:
            async with asyncio.timeout(_MATCH_TIMEOUT_S):  # wait_for can swallow a cancellation until Python 3.12
                blocks = await self._directory.match_blocks(keys)
        except (RayError, TimeoutError):
            return 0
        return blocks * self._facts().layout.block_tokens

    def _check_model(self, name: str) -> None:
        if name != self.model_name:
            raise model_not_found(name, self.model_name)

    def _facts(self) -> WorkerFacts:
        """All members have the same model, so any one's facts will do."""
        if not self._members:
            raise unavailable("no worker is ready yet", retry_after_s=2.0)
        return address_of(self._members[0]).facts

    def _on_roster(self, view: RosterView) -> None:
        # Without workers the last known facts stay: requests are then queued rather than refused.
        self._members = view.members or self._members
        # Where prefill workers look nothing up, what is stored saves them nothing.
        is_shared = bool(view.directory) and self.settings.store.share_prefixes
        self._directory = DirectoryClient(view.directory) if is_shared else None
        self.dispatcher.update_members(view.members)

    def _suspect(self, member: Member) -> None:
        self._watch.suspect(member.worker_id, member.epoch)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_PERIOD_S)
            self.dispatcher.expire()

    async def _export(self) -> None:
        exporter, dispatcher = RayExporter(), self.dispatcher
        while True:
            await asyncio.sleep(EXPORT_PERIOD_S)
            exporter.export(self._metrics.readings(queued=dispatcher.num_waiting, inflight=dispatcher.num_inflight))
