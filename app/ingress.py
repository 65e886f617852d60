"""The Serve ingress: HTTP routes over a `Frontend`. gRPC methods join this class when they come.

Serve pickles this class by value, with what its methods refer to as it was when the class was defined. So nothing else
is defined in this module, and state of the process is set by functions of other modules, which are pickled by name.
Annotations stay objects here (no `from __future__ import annotations`): as strings they would not survive the pickling.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from ray import serve

from app.api_keys import ApiKeys
from app.chat_protocol import ChatCompletionRequest
from app.client_presence import Departures, EventStream, unless_gone
from app.completion_protocol import CompletionRequest
from app.default_sampling import default_sampling
from app.frontend import Frontend
from app.generation import Generation
from app.http_guard import KeyGuard, install_error_handlers, use_keys
from app.openai_answers import Answer
from app.openai_errors import model_not_found
from app.openai_protocol import GenerationRequest
from app.openai_responses import model_entry, model_list
from app.request_body import read_body
from app.request_parsing import LONG_BODY_BYTES, parse_request
from app.settings import AppSettings
from app.tokenizer import load_tokenizer

http = FastAPI(
    title="Equipoise",
    description="OpenAI-compatible serving with prefill and decode apart.",
    redirect_slashes=False,  # a redirect would name whatever host the client named
)
http.add_middleware(KeyGuard)
http.add_middleware(Departures)
install_error_handlers(http)


@serve.deployment
@serve.ingress(http)
class Ingress:
    """Routes. Everything that thinks is in `Frontend` and what it uses."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it, in the loop that requests are served in
        self, settings: Mapping[str, Any], control: Any, workers: list[Any]
    ) -> None:
        """`control` and `workers` are Serve handles. The workers are not called: they are bound so that Serve deploys
        them with the ingress."""
        self._settings = AppSettings.model_validate(settings)
        keys_file = self._settings.ingress.api_keys_file
        use_keys(None if keys_file is None else ApiKeys.load(keys_file))
        source = await asyncio.to_thread(load_tokenizer, self._settings.model)
        self._frontend = Frontend(
            self._settings,
            source.tokenizer,
            self._settings.served_model_name or source.name,
            control,
            default_sampling(self._settings.default_sampling, source.folder),
        )

    @http.get("/health")
    async def health(self) -> Response:
        """200 when a request can be served and every worker makes progress; 503 with the reasons otherwise."""
        problems = self._frontend.health_problems()
        return JSONResponse(
            {"status": "unhealthy" if problems else "ok", "problems": problems}, 503 if problems else 200
        )

    @http.get("/v1/models")
    async def models(self) -> Response:
        """The one model that is served."""
        return JSONResponse(model_list([self._model_entry()]))

    @http.get("/v1/models/{model:path}")
    async def model(self, model: str) -> Response:
        """The same by its name."""
        if model != self._frontend.model_name:
            raise model_not_found(model, self._frontend.model_name)
        return JSONResponse(self._model_entry())

    @http.post("/v1/chat/completions")
    async def chat_completions(self, request: Request) -> Response:
        """OpenAI's chat completions."""
        return await self._answer(request, ChatCompletionRequest, self._frontend.chat)

    @http.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        """OpenAI's (legacy) completions, with token ids as prompts too."""
        return await self._answer(request, CompletionRequest, self._frontend.completion)

    @http.get("/debug/blocks")
    async def blocks(self) -> Response:
        """Blocks by worker as last reported, and this ingress's own queues."""
        frontend = self._frontend
        dispatcher = frontend.dispatcher
        return JSONResponse(
            {
                "workers": frontend.block_counts(),
                "inflight_requests": dispatcher.num_inflight,
                "queued_requests": dispatcher.num_waiting,
            }
        )

    async def _answer(self, http_request: Request, kind: type[Any], generate: Callable[..., Generation]) -> Response:
        body = await read_body(http_request)

        def read() -> tuple[GenerationRequest, Generation]:
            request: GenerationRequest = parse_request(body, kind)
            return request, generate(request, http_request.state.principal)

        # Template and tokenizer take a second a megabyte, in which no other request would get its tokens.
        request, generation = await asyncio.to_thread(read) if len(body) > LONG_BODY_BYTES else read()
        frontend = self._frontend
        timeout_s = self._settings.ingress.request_timeout_s
        answer = Answer(request, generation, frontend.model_name, frontend.table, timeout_s)
        if request.stream:
            try:
                return EventStream(await unless_gone(http_request, answer.stream()), answer.close)
            except BaseException:
                await answer.close()
                raise
        return JSONResponse(await unless_gone(http_request, answer.whole()))

    def _model_entry(self) -> dict[str, Any]:
        frontend = self._frontend
        return model_entry(frontend.model_name, created=frontend.created, context_tokens=frontend.context_tokens)
