"""The Serve ingress: HTTP routes and gRPC methods over a `Frontend`.

Serve pickles this class by value, with what its methods refer to as it was when the class was defined. So nothing else
is defined in this module, and state of the process is set by functions of other modules, which are pickled by name.
Annotations stay objects here (no `from __future__ import annotations`): as strings they would not survive the pickling.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from ray import serve

from app import api_description as described
from app.api_keys import Principal
from app.chat_protocol import ChatCompletionRequest
from app.client_presence import Departures, EventStream, unless_gone
from app.completion_protocol import CompletionRequest
from app.default_sampling import default_sampling
from app.event_answer import EventAnswer
from app.frontend import Frontend
from app.grpc_api.call import Telling, caller
from app.grpc_api.from_proto import generation_request, tokenize_request
from app.grpc_api.inference_pb2 import (
    GenerateChunk,
    GenerateRequest,
    GenerateResponse,
    ListModelsRequest,
    ListModelsResponse,
    Model,
    TokenizeRequest,
    TokenizeResponse,
)
from app.grpc_api.to_proto import chunks, whole_response
from app.http_guard import HeadAsGet, KeyGuard, install_error_handlers, use_keys
from app.key_file import KeyFile
from app.moves_desk import MoveOrder, MovesDesk
from app.openai_answers import OpenAIAnswer
from app.openai_errors import model_not_found, no_embeddings
from app.openai_protocol import GenerationRequest
from app.openai_responses import model_entry, model_list
from app.request_body import read_body
from app.request_parsing import LONG_BODY_BYTES, parse_request
from app.responses_answer import ResponsesAnswer
from app.responses_protocol import ResponsesRequest
from app.running_answer import RunningAnswer
from app.settings import AppSettings
from app.tokenize_protocol import DetokenizeBody, TokenizeBody, tokenized
from app.tokenizer import load_tokenizer

T = TypeVar("T")

http = FastAPI(
    title="Equipoise",
    description="OpenAI-compatible serving with prefill and decode apart.",
    redirect_slashes=False,  # a redirect would name whatever host the client named
)
http.add_middleware(KeyGuard)
http.add_middleware(Departures)
http.add_middleware(HeadAsGet)
install_error_handlers(http)


@serve.deployment
@serve.ingress(http)
class Ingress:
    """Routes. Everything that thinks is in `Frontend` and what it uses."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it, in the loop that requests are served in
        self, settings: Mapping[str, Any], control: Any, workers: list[Any], controller: Any = None
    ) -> None:
        """`control`, `workers` and `controller` (of moves; None without) are Serve handles. The workers are not called:
        they are bound so that Serve deploys them with the ingress."""
        self._settings = AppSettings.model_validate(settings)
        keys_file = self._settings.ingress.api_keys_file
        use_keys(None if keys_file is None else await asyncio.to_thread(KeyFile, keys_file))
        source = await asyncio.to_thread(load_tokenizer, self._settings.model)
        self._frontend = Frontend(
            self._settings,
            source.tokenizer,
            self._settings.served_model_name or source.name,
            control,
            default_sampling(self._settings.default_sampling, source.folder),
        )
        self._moves = MovesDesk(controller, self._settings.mode)

    @http.get(
        "/health",
        responses=described.answers("All is well.", described.HEALTH)
        | {503: described.answers("Not all is.", described.HEALTH)[200]},
    )
    async def health(self) -> Response:
        """200 when a request can be served and every worker makes progress; 503 with the reasons otherwise."""
        problems = self._frontend.health_problems()
        return JSONResponse(
            {"status": "unhealthy" if problems else "ok", "problems": problems}, 503 if problems else 200
        )

    @http.get("/v1/models", responses=described.answers("The models.", described.MODELS, *described.NO_WORKER))
    async def models(self) -> Response:
        """The one model that is served."""
        return JSONResponse(model_list([self._model_entry()]))

    @http.get(
        "/v1/models/{model:path}",
        responses=described.answers("The model.", described.MODEL, 404, *described.NO_WORKER),
        openapi_extra=described.in_path("model", "its name"),
    )
    async def model(self, request: Request) -> Response:
        """The same by its name."""
        model = request.path_params["model"]
        if model != self._frontend.model_name:
            raise model_not_found(model, self._frontend.model_name)
        return JSONResponse(self._model_entry())

    @http.post("/v1/chat/completions", **described.generation(ChatCompletionRequest, described.CHAT_COMPLETION))
    async def chat_completions(self, request: Request) -> Response:
        """OpenAI's chat completions."""
        return await self._answer(request, ChatCompletionRequest)

    @http.post("/v1/completions", **described.generation(CompletionRequest, described.TEXT_COMPLETION))
    async def completions(self, request: Request) -> Response:
        """OpenAI's (legacy) completions, with token ids as prompts too."""
        return await self._answer(request, CompletionRequest)

    @http.post("/v1/responses", **described.generation(ResponsesRequest, described.RESPONSE))
    async def responses(self, request: Request) -> Response:
        """OpenAI's responses, as far as they are chats."""
        body, principal = await read_body(request), request.state.principal

        def answer() -> EventAnswer:
            given = parse_request(body, ResponsesRequest)
            return ResponsesAnswer(self._running(given.as_chat(), principal), given)

        return await self._send(request, await self._read(len(body), answer))

    @http.post("/v1/embeddings", include_in_schema=False)  # there is nothing to describe
    async def embeddings(self) -> Response:
        """A 400 that says that there are none: clients try it on every server."""
        raise no_embeddings()

    @http.post(
        "/tokenize",
        responses=described.answers("The token ids.", described.TOKENS, *described.WITH_BODY),
        openapi_extra=described.reads(TokenizeBody),
    )
    async def tokenize(self, request: Request) -> Response:
        """Token ids of a prompt or of messages, as a request of them would have them."""
        body = await read_body(request)
        token_ids = await self._read(len(body), lambda: self._frontend.tokenize(parse_request(body, TokenizeBody)))
        return JSONResponse(tokenized(token_ids, context_tokens=self._frontend.context_tokens))

    @http.post(
        "/detokenize",
        responses=described.answers("The text.", described.TEXT, *described.WITH_BODY),
        openapi_extra=described.reads(DetokenizeBody),
    )
    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, as vLLM gives it."""
        body = await read_body(request)
        text = await self._read(len(body), lambda: self._frontend.detokenize(parse_request(body, DetokenizeBody)))
        return JSONResponse({"prompt": text})

    @http.get("/debug/blocks", responses=described.answers("What lies where.", described.BLOCKS, *described.FORBIDDEN))
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

    @http.get("/debug/moves", responses=described.answers("What there is.", described.MOVES, *described.NO_CONTROLLER))
    async def moves(self) -> Response:
        """Who has which layers and heads, how loaded the workers are, and what has moved."""
        return JSONResponse(await self._moves.status())

    @http.post(
        "/debug/moves",
        status_code=HTTPStatus.ACCEPTED,
        responses=described.answers("It begins.", described.MOVES, *described.MOVE_ORDER, status=HTTPStatus.ACCEPTED),
        openapi_extra=described.reads(MoveOrder),
    )
    async def order_move(self, request: Request) -> Response:
        """Begins a move that a person wants: 202, and its end is in the history."""
        return JSONResponse(await self._moves.order(parse_request(await read_body(request), MoveOrder)), 202)

    @http.get("/debug/moves/plan", responses=described.answers("The plan.", described.MOVES, *described.NO_CONTROLLER))
    async def plan_moves(self) -> Response:
        """What would move now, and why nothing else; nothing is begun."""
        return JSONResponse(await self._moves.plan())

    @http.post(
        "/debug/moves/home",
        status_code=HTTPStatus.ACCEPTED,
        responses=described.answers(
            "It begins.", described.MOVES, *described.NO_CONTROLLER, status=HTTPStatus.ACCEPTED
        ),
    )
    async def moves_home(self) -> Response:
        """Begins to send everything home: 202."""
        return JSONResponse(await self._moves.home(), 202)

    async def _answer(self, http_request: Request, kind: type[GenerationRequest]) -> Response:
        body, principal = await read_body(http_request), http_request.state.principal
        running = await self._read(len(body), lambda: self._running(parse_request(body, kind), principal))
        return await self._send(http_request, OpenAIAnswer(running, self._frontend.table))

    async def _send(self, http_request: Request, answer: EventAnswer) -> Response:
        if answer.is_streamed:
            try:
                return EventStream(await unless_gone(http_request, answer.stream()), answer.close)
            except BaseException:
                await answer.close()
                raise
        return JSONResponse(await unless_gone(http_request, answer.whole()))

    # gRPC: a method's name is that of the call in inference.proto. The empty messages carry the status of a call that
    # was refused (`Telling`).

    async def Generate(self, request: GenerateRequest, grpc_context: Any) -> GenerateResponse:
        """One answer in one message."""
        async with Telling(grpc_context):
            running = await self._running_grpc(request, await caller(grpc_context))
            return await whole_response(running, self._frontend.table)
        return GenerateResponse()

    async def GenerateStream(self, request: GenerateRequest, grpc_context: Any) -> AsyncGenerator[GenerateChunk]:
        """The same as it is made."""
        async with Telling(grpc_context):
            running = await self._running_grpc(request, await caller(grpc_context))
            async with aclosing(chunks(running, self._frontend.table)) as answer:
                async for chunk in answer:
                    yield chunk
            return
        yield GenerateChunk()

    async def Tokenize(self, request: TokenizeRequest, grpc_context: Any) -> TokenizeResponse:
        """Token ids of a prompt."""
        async with Telling(grpc_context):
            await caller(grpc_context)
            token_ids = await self._read(request.ByteSize(), lambda: self._frontend.tokenize(tokenize_request(request)))
            return TokenizeResponse(token_ids=token_ids, context_tokens=self._frontend.context_tokens)
        return TokenizeResponse()

    async def ListModels(self, request: ListModelsRequest, grpc_context: Any) -> ListModelsResponse:
        """The one model that is served."""
        async with Telling(grpc_context):
            await caller(grpc_context)
            frontend = self._frontend
            model = Model(id=frontend.model_name, created=frontend.created, context_tokens=frontend.context_tokens)
            return ListModelsResponse(models=[model])
        return ListModelsResponse()

    async def _running_grpc(self, message: GenerateRequest, principal: Principal) -> RunningAnswer:
        return await self._read(message.ByteSize(), lambda: self._running(generation_request(message), principal))

    def _running(self, request: GenerationRequest, principal: Principal) -> RunningAnswer:
        frontend, timeout_s = self._frontend, self._settings.ingress.request_timeout_s
        generation = frontend.generation(request, principal)
        return RunningAnswer(
            request, generation, frontend.model_name, timeout_s, lambda: self._frontend.hold_key(principal)
        )

    async def _read(self, num_bytes: int, read: Callable[[], T]) -> T:
        """`read()`, of a request of so many bytes. Template and tokenizer take a second a megabyte, in which no other
        request would get its tokens."""
        return await asyncio.to_thread(read) if num_bytes > LONG_BODY_BYTES else read()

    def _model_entry(self) -> dict[str, Any]:
        frontend = self._frontend
        return model_entry(frontend.model_name, created=frontend.created, context_tokens=frontend.context_tokens)
