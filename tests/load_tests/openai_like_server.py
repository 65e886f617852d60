"""A small OpenAI-like server over real HTTP, for the tests of the load generator.

It streams `max_tokens` tokens with a fixed pace, keeps account of KV blocks, and remembers what it was sent. A body may
ask for a fault: {"fault": "http_500" | "error_event" | "named_error" | "cut" | "hang" | "short" | "not_json" | "odd"}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

BLOCK_TOKENS = 16
TOTAL_BLOCKS = 1000


@dataclass
class State:
    options: argparse.Namespace
    bodies: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    peak_in_flight: int = 0
    live_blocks: int = 0
    disconnects: int = 0


STATE = web.AppKey("state", State)


async def health(request: web.Request) -> web.Response:
    return web.Response(status=503 if request.app[STATE].options.unhealthy else 200)


async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})


async def seen(request: web.Request) -> web.Response:
    state = request.app[STATE]
    return web.json_response(
        {
            "bodies": state.bodies,
            "peak_in_flight": state.peak_in_flight,
            "disconnects": state.disconnects,
        }
    )


async def blocks(request: web.Request) -> web.Response:
    live = request.app[STATE].live_blocks
    worker = {
        "worker_id": "w0",
        "role": "monolithic",
        "total_blocks": TOTAL_BLOCKS,
        "free_blocks": TOTAL_BLOCKS - live,
        "live_blocks": live,
    }
    return web.json_response({"workers": [worker]})


async def answer(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    body = await request.json()
    state.bodies.append({**body, "authorization": request.headers.get("Authorization")})
    if body.get("fault") == "http_500" or (
        state.options.fail_every and len(state.bodies) % state.options.fail_every == 0
    ):
        return web.json_response({"error": {"message": "out of order"}}, status=500)
    is_chat = request.path.endswith("/chat/completions")
    prompt = body["messages"][0]["content"] if is_chat else body["prompt"]
    prompt_tokens = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
    held = -(-(prompt_tokens + body["max_tokens"]) // BLOCK_TOKENS)
    state.live_blocks += held
    state.in_flight += 1
    state.peak_in_flight = max(state.peak_in_flight, state.in_flight)
    finished = False
    try:
        response = await stream(request, body, is_chat, prompt_tokens)
        finished = True
        return response
    finally:
        state.in_flight -= 1
        if not finished:
            state.disconnects += 1
        if finished or not state.options.leak:
            state.live_blocks -= held


async def stream(request: web.Request, body: dict[str, Any], is_chat: bool, prompt_tokens: int) -> web.StreamResponse:
    options, fault, wanted = request.app[STATE].options, body.get("fault"), body["max_tokens"]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)

    async def event(payload: Any) -> None:
        await response.write(b"data: " + json.dumps(payload).encode() + b"\n\n")

    def choice(text: str, finish_reason: str | None) -> dict[str, Any]:
        carried = {"delta": {"content": text} if text else {}} if is_chat else {"text": text}
        return {"choices": [{"index": 0, **carried, "finish_reason": finish_reason}]}

    await asyncio.sleep(options.first_token_s)
    if fault == "hang":
        await asyncio.Event().wait()
    if fault == "not_json":
        await response.write(b"data: {oops\n\n")
    if fault == "odd":
        await event({"choices": ["text"]})
    if is_chat:
        await event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    generated = wanted - 1 if fault == "short" else wanted
    for first in range(0, generated, options.tokens_per_chunk):
        if first:
            await asyncio.sleep(options.token_s * options.tokens_per_chunk)
        if first and fault == "error_event":
            await event({"error": {"message": "lost a worker", "code": 500}})
            return response
        if first and fault == "named_error":
            await response.write(b'event: error\ndata: {"message":\ndata: "lost a worker"}\n\n')
            return response
        if first and fault == "cut":
            if request.transport is not None:
                request.transport.close()
            return response
        last = min(first + options.tokens_per_chunk, generated)
        ends = last == generated and not is_chat
        await event(choice("".join(f" t{number}" for number in range(first, last)), "length" if ends else None))
    if is_chat:
        await event(choice("", "length"))
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    if not options.no_usage:
        await event({"choices": [], "usage": usage})
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def leave_a_stray(pid_file: Path) -> None:
    """Starts a process that ignores SIGTERM, is in another session, and whose parent has ended."""
    stray = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(3600)"
    starter = (
        "import subprocess, sys\n"
        f"print(subprocess.Popen([sys.executable, '-c', {stray!r}], start_new_session=True, stdout=2).pid)"
    )
    pid_file.write_text(subprocess.run([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--first-token-s", type=float, default=0.0)
    parser.add_argument("--token-s", type=float, default=0.0)
    parser.add_argument("--tokens-per-chunk", type=int, default=1)
    parser.add_argument("--fail-every", type=int, default=0)
    parser.add_argument("--no-usage", action="store_true")
    parser.add_argument("--unhealthy", action="store_true")
    parser.add_argument("--leak", action="store_true", help="never free the blocks of a request that was closed early")
    parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--stray", type=Path, help="leave a process behind and write its pid to this file")
    options = parser.parse_args()
    app = web.Application(client_max_size=2**26)
    app[STATE] = State(options)
    app.add_routes(
        [
            web.get("/health", health),
            web.get("/v1/models", models),
            web.get("/debug/blocks", blocks),
            web.get("/debug/seen", seen),
            web.post("/v1/completions", answer),
            web.post("/v1/chat/completions", answer),
        ]
    )
    if options.stray:
        leave_a_stray(options.stray)
    listener = socket.create_server(("127.0.0.1", options.port))
    print(listener.getsockname()[1], flush=True)
    if options.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    web.run_app(
        app,
        sock=listener,
        print=None,
        handler_cancellation=True,
        shutdown_timeout=1.0,
        handle_signals=not options.stubborn,
    )


if __name__ == "__main__":
    main()
