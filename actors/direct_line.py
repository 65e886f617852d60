"""A socket between an ingress replica and a worker that carries what `Worker.collect` would give: the ingress asks, the
worker answers when it has news. Through Ray such a question takes either end over a millisecond of CPU, and each step
is one.

Lines keep to what open calls keep to (design decision D1): one question at a time, so that news gather while none is
open, and an ingress that is gone has none open.

What comes over a line is unpickled, so both ends prove first that they know the worker's key, which is not sent. An
address is given away inside the application only, by Ray. Beyond that a line is as private as the network is, as Ray's
own calls are.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable

from actors.messages import LineAddress, WorkerMessage

GREETING_TIMEOUT_S = 5.0
"""For all that comes before the first question."""
_KEY_BYTES = 32
_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_OWNER_LENGTH = struct.Struct("!H")
_QUESTION = struct.Struct("!d")
"""The time in seconds after which there is to be an answer without news."""
_ANSWER_LENGTH = struct.Struct("!I")
# A host that is gone without a word is noticed after 10 + 3 * 5 s.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}

Collect = Callable[[str, float], Awaitable[WorkerMessage]]

logger = logging.getLogger("ray.serve")


class LineRefusedError(ConnectionError):
    """Whoever is at the other end does not know the worker's key."""


class DirectLine:
    """The ingress's end. Its calls, like those of a stream, are made one after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, address: LineAddress, owner: str) -> DirectLine:
        """A line for the news of `owner`. Raises OSError, of which LineRefusedError and TimeoutError are kinds."""
        async with asyncio.timeout(GREETING_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            line = cls(reader, writer)
            try:
                line._notice_lost_hosts()
                await _greet(reader, writer, address.key, owner)
            except EOFError as error:
                line.close()
                raise LineRefusedError(f"{address.host}:{address.port} ended the connection") from error
            except BaseException:
                line.close()
                raise
        return line

    async def collect(self, timeout_s: float) -> WorkerMessage:
        """See `Worker.collect`. Raises OSError when the line is lost; news may be lost with it."""
        self._writer.write(_QUESTION.pack(timeout_s))
        try:
            (length,) = _ANSWER_LENGTH.unpack(await self._reader.readexactly(_ANSWER_LENGTH.size))
            return WorkerMessage.from_bytes(await self._reader.readexactly(length))
        except EOFError as error:
            raise ConnectionResetError("the worker ended the line") from error

    def close(self) -> None:
        """Ends the line. Does not wait."""
        self._writer.close()

    def _notice_lost_hosts(self) -> None:
        ours: socket.socket = self._writer.get_extra_info("socket")
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            ours.setsockopt(socket.IPPROTO_TCP, option, value)


class LineServer:
    """The worker's end of all its lines."""

    def __init__(self, collect: Collect) -> None:
        """`collect(owner, timeout_s)`: what questions are answered with."""
        self._collect = collect
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, host: str) -> LineAddress | None:
        """Waits for lines from now on, at a port that is free. None when there is none to be had: ingresses ask through
        Ray then."""
        try:
            self._server = await asyncio.start_server(self._attend, host, 0)
        except OSError as error:
            logger.warning("no lines can be had at %s, so each step's tokens go through Ray: %s", host, error)
            return None
        return LineAddress(host, self._server.sockets[0].getsockname()[1], self._key)

    def close(self) -> None:
        """Ends all lines."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.close()

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer: asyncio.Task[None] | None = None
        self._writers.add(writer)
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                owner = await _receive_greeting(reader, writer, self._key)
            while True:
                (timeout_s,) = _QUESTION.unpack(await reader.readexactly(_QUESTION.size))
                # Beside reading on, which is how the end of the ingress is noticed.
                answer = asyncio.create_task(self._answer(owner, timeout_s, writer))
        except LineRefusedError:
            logger.warning("refused a line from %s, which does not know the key", writer.get_extra_info("peername"))
        except (OSError, EOFError):
            pass  # the other end left, or said nothing
        finally:
            if answer is not None:
                answer.cancel()
            writer.close()
            self._writers.discard(writer)

    async def _answer(self, owner: str, timeout_s: float, writer: asyncio.StreamWriter) -> None:
        try:
            packed = (await self._collect(owner, timeout_s)).to_bytes()
            writer.write(_ANSWER_LENGTH.pack(len(packed)) + packed)
        except Exception:  # a defect of ours; an ingress that waits for ever must not be the way to notice it
            logger.exception("a question over a line cannot be answered")
            writer.close()


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, owner: str) -> None:
    """Each end makes the other one prove by a number of its own, so that no proof can be used again."""
    theirs = await reader.readexactly(_NONCE_BYTES)
    ours, name = secrets.token_bytes(_NONCE_BYTES), owner.encode()
    writer.write(ours + _proof(key, b"ingress", theirs, ours, name) + _OWNER_LENGTH.pack(len(name)) + name)
    if not hmac.compare_digest(await reader.readexactly(_PROOF_BYTES), _proof(key, b"worker", theirs, ours, name)):
        raise LineRefusedError("whoever answers at the worker's address does not know its key")


async def _receive_greeting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> str:
    """Returns the owner whose news are wanted."""
    ours = secrets.token_bytes(_NONCE_BYTES)
    writer.write(ours)
    theirs = await reader.readexactly(_NONCE_BYTES)
    proof = await reader.readexactly(_PROOF_BYTES)
    (length,) = _OWNER_LENGTH.unpack(await reader.readexactly(_OWNER_LENGTH.size))
    name = await reader.readexactly(length)
    if not hmac.compare_digest(proof, _proof(key, b"ingress", ours, theirs, name)):
        raise LineRefusedError("the key is another one")
    writer.write(_proof(key, b"worker", ours, theirs, name))
    return name.decode()


def _proof(key: bytes, side: bytes, workers_nonce: bytes, ingress_nonce: bytes, name: bytes) -> bytes:
    """All parts but the last have a length of their own for each side, so no two greetings are the same bytes."""
    return hmac.digest(key, side + workers_nonce + ingress_nonce + name, "sha256")
