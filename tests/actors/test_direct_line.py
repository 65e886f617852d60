from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from actors.direct_line import DirectLine, LineRefusedError, LineServer
from actors.engine.request import TokenEvent
from actors.messages import HandOver, LineAddress, WorkerMessage
from actors.outbox import Outbox

LONG_S = 1000.0


def run(body: Callable[[Outbox, LineServer, LineAddress], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            outbox = Outbox()
            server = LineServer(outbox.collect)
            address = await server.start("127.0.0.1")
            assert address is not None
            try:
                await body(outbox, server, address)
            finally:
                server.close()

    asyncio.run(limited())


def event(owner: str, token: int) -> TokenEvent:
    return TokenEvent("r", token, owner=owner)


def tokens(message: WorkerMessage) -> list[int | None]:
    return [event.token_id for event in message.events]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_a_line_carries_what_its_owner_would_have_collected() -> None:
    async def body(outbox: Outbox, _: LineServer, address: LineAddress) -> None:
        a, b = [await DirectLine.connect(address, owner) for owner in "ab"]
        assert not (await a.collect(LONG_S)).events  # the first question is answered at once
        outbox.deliver([event("a", 1), event("b", 2), event("a", 3)])
        outbox.deliver_hand_over("a", HandOver("r", 5, ("a receipt",)))
        message = await a.collect(LONG_S)
        assert message.events == [event("a", 1), event("a", 3)]
        assert message.hand_overs == [HandOver("r", 5, ("a receipt",))]
        assert tokens(await b.collect(LONG_S)) == [2]
        outbox.deliver([event("a", 4)])
        outbox.deliver([event("a", 5)])
        assert tokens(await a.collect(LONG_S)) == [4, 5]
        assert not (await a.collect(0.0)).events
        a.close()
        b.close()

    run(body)


def test_a_long_message_arrives_whole() -> None:
    async def body(outbox: Outbox, _: LineServer, address: LineAddress) -> None:
        line = await DirectLine.connect(address, "a")
        outbox.deliver_hand_over("a", HandOver("r", 5, bytes(range(256)) * 20_000))
        message = await line.collect(LONG_S)
        assert [hand_over.receipt for hand_over in message.hand_overs] == [bytes(range(256)) * 20_000]
        line.close()

    run(body)


def test_an_ingress_that_is_gone_has_no_question_open() -> None:
    """What it asked is given up, so that it is found silent, and what comes then is not taken."""
    open_questions: set[str] = set()

    async def collect(owner: str, _: float) -> WorkerMessage:
        open_questions.add(owner)
        try:
            await asyncio.Event().wait()
        finally:
            open_questions.remove(owner)
        return WorkerMessage()

    async def body() -> None:
        server = LineServer(collect)
        address = await server.start("127.0.0.1")
        assert address is not None
        line = await DirectLine.connect(address, "a")
        asking = asyncio.create_task(line.collect(LONG_S))
        await until(lambda: open_questions == {"a"})
        line.close()
        with pytest.raises(ConnectionError):
            await asking
        await until(lambda: not open_questions)
        server.close()

    asyncio.run(asyncio.wait_for(body(), 30))


def test_the_ends_of_lines_are_told_when_the_worker_closes() -> None:
    async def body(_: Outbox, server: LineServer, address: LineAddress) -> None:
        line = await DirectLine.connect(address, "a")
        await line.collect(LONG_S)
        asking = asyncio.create_task(line.collect(LONG_S))
        await asyncio.sleep(0)
        server.close()
        with pytest.raises(ConnectionError):
            await asking
        with pytest.raises(ConnectionRefusedError):
            await DirectLine.connect(address, "a")

    run(body)


def test_who_does_not_know_the_key_gets_nothing_and_disturbs_nobody() -> None:
    async def body(outbox: Outbox, _: LineServer, address: LineAddress) -> None:
        line = await DirectLine.connect(address, "a")
        await line.collect(LONG_S)
        outbox.deliver([event("a", 1)])
        with pytest.raises(LineRefusedError):
            await DirectLine.connect(replace(address, key=bytes(32)), "a")
        for greeting in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(500)):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            challenge = await reader.readexactly(32)
            writer.write(greeting)
            writer.write_eof()
            assert await reader.read() == b""
            assert challenge != bytes(32)
            writer.close()
        assert tokens(await line.collect(LONG_S)) == [1]
        line.close()

    run(body)


def test_a_greeting_that_was_listened_to_is_of_no_use_again() -> None:
    async def body(_: Outbox, __: LineServer, address: LineAddress) -> None:
        heard = bytearray()

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Passes everything on between an ingress and the worker."""
            theirs, ours = await asyncio.open_connection(address.host, address.port)
            writer.write(await theirs.readexactly(32))
            greeting = await reader.readexactly(32 + 32 + 2 + 1)
            heard.extend(greeting)
            ours.write(greeting)
            writer.write(await theirs.readexactly(32))
            ours.close()
            writer.close()

        between = await asyncio.start_server(listen, "127.0.0.1", 0)
        line = await DirectLine.connect(replace(address, port=between.sockets[0].getsockname()[1]), "a")
        line.close()
        between.close()
        reader, writer = await asyncio.open_connection(address.host, address.port)
        await reader.readexactly(32)
        writer.write(heard)
        assert await reader.read() == b""
        writer.close()

    run(body)


class _Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("proof", [bytes(32), None])
def test_nothing_is_unpickled_that_comes_from_somebody_else_at_the_workers_port(
    tmp_path: Path, proof: bytes | None
) -> None:
    packed = pickle.dumps(_Trap(tmp_path / "sprung"))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(32))
        greeting = await reader.readexactly(32 + 32 + 2 + 1)
        # Or the ingress's own proof, given back to it.
        writer.write((proof or greeting[32:64]) + len(packed).to_bytes(4, "big") + packed)
        writer.close()

    async def body() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        address = LineAddress("127.0.0.1", server.sockets[0].getsockname()[1], b"k" * 32)
        with pytest.raises(LineRefusedError):
            await DirectLine.connect(address, "a")
        server.close()

    asyncio.run(asyncio.wait_for(body(), 30))
    assert not (tmp_path / "sprung").exists()


def test_no_line_where_there_is_no_port_to_be_had() -> None:
    async def body() -> LineAddress | None:
        return await LineServer(Outbox().collect).start("192.0.2.1")  # an address of no machine

    assert asyncio.run(body()) is None


def test_the_key_is_not_shown() -> None:
    assert "secret" not in repr(LineAddress("h", 1, b"secret"))
