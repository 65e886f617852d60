"""Whether the workers can use a client's grammar: asked of a process that may die of it (`app.grammar_child`).

What came out is kept, so a grammar that comes again costs nothing. One grammar is checked at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import IO, Any

from app.openai_errors import invalid_request, unavailable

_MAX_KNOWN = 4096
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT})
"""Signals that no grammar sends."""
_PATIENCE_S = 120.0
"""Until a check that has not used up its CPU time is given up: the machine is too busy."""


class GrammarCheck:
    """Used from one event loop. The process is started with the first grammar, and anew after it died.

    Args:
        tokenizer: a fast one of transformers.
        cpu_limit_s: CPU time that a grammar may take.
    """

    def __init__(self, tokenizer: Any, cpu_limit_s: float) -> None:
        self._child = _Child(tokenizer, cpu_limit_s)
        self._one_at_a_time = asyncio.Lock()
        self._known: OrderedDict[bytes, asyncio.Task[str | None]] = OrderedDict()

    async def check(self, grammar: str, param: str, *, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        """Returns when a grammar can be used with a model of so many logits, where these tokens end an answer.

        Raises:
            ApiError: 400 for the field `param` when it cannot; 503 when the machine is too busy to find out.
        """
        key = hashlib.sha256(grammar.encode()).digest()
        task = self._known.get(key)
        if task is None:
            task = self._known[key] = asyncio.create_task(self._find_out(grammar, vocab_size, end_token_ids))
            task.add_done_callback(lambda ended: self._forget_failed(key, ended))
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        reason = await asyncio.shield(task)  # others may wait for it too, and the process is not left in mid-answer
        if reason is not None:
            raise invalid_request(f"'{param}' cannot be used: {reason}.", param=param, code="invalid_grammar")

    async def stop(self) -> None:
        """Ends the process."""
        self._child.kill()
        async with self._one_at_a_time:
            await asyncio.to_thread(self._child.close)

    async def _find_out(self, grammar: str, vocab_size: int, end_token_ids: Sequence[int]) -> str | None:
        async with self._one_at_a_time:
            asking = asyncio.create_task(
                asyncio.to_thread(self._child.why_unusable, grammar, vocab_size, list(end_token_ids))
            )
            done, _ = await asyncio.wait({asking}, timeout=_PATIENCE_S)
            if not done:
                self._child.kill()
            return await asking

    def _forget_failed(self, key: bytes, task: asyncio.Task[str | None]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._known.pop(key, None)


class _Child:
    """The process, as seen from a thread; `kill` is for any thread."""

    def __init__(self, tokenizer: Any, cpu_limit_s: float) -> None:
        self._tokenizer = tokenizer
        self._cpu_limit_s = cpu_limit_s
        self._tokenizer_json: str | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """After `kill`."""
        if self._process is not None:
            self._end()

    def why_unusable(self, grammar: str, vocab_size: int, end_token_ids: list[int]) -> str | None:
        """Raises ApiError 503 when the process was killed from outside, OSError when it cannot be started."""
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            reason = self._start(vocab_size, end_token_ids)
            if reason is not None:
                return reason
        answer = self._exchange(grammar)
        if answer:
            return _reason_in(answer)
        status = self._end()
        if status == -signal.SIGPROF:
            return f"it takes more than {self._cpu_limit_s:g} s of CPU time to compile. Make it simpler"
        if -status in _FROM_OUTSIDE:
            raise unavailable("the check of the request's grammar was ended")
        return "it takes more memory to compile than is allowed, or refers to itself too deeply. Make it simpler"

    def _start(self, vocab_size: int, end_token_ids: list[int]) -> str | None:
        """Why the model has no grammars, or None."""
        if self._tokenizer_json is None:
            backend = copy.copy(self._tokenizer.backend_tokenizer)  # it is changed, and a copy is one of its own
            backend.no_padding()
            backend.no_truncation()
            self._tokenizer_json = backend.to_str()
        # What can be imported here can be imported there, wherever Ray has put it.
        paths = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "app.grammar_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # it may quote grammars
            env={**os.environ, "PYTHONPATH": paths},
        )
        answer = self._exchange(
            {
                "tokenizer": self._tokenizer_json,
                "vocab_size": vocab_size,
                "end_token_ids": end_token_ids,
                "cpu_limit_s": self._cpu_limit_s,
            }
        )
        if not answer:
            raise ChildProcessError(f"the process that checks grammars ended as it began, with status {self._end()}")
        reason = _reason_in(answer)
        if reason is not None:
            self._end()
        return reason

    def _exchange(self, message: object) -> bytes:
        """The answer, which is empty when the process ended without one."""
        assert self._process is not None
        to_child, from_child = _pipes(self._process)
        try:
            to_child.write(json.dumps(message).encode() + b"\n")
            to_child.flush()
        except BrokenPipeError:
            return b""
        return from_child.readline()

    def _end(self) -> int:
        """The status of a process that has ended or is ending."""
        assert self._process is not None
        process, self._process = self._process, None
        for pipe in _pipes(process):
            with contextlib.suppress(BrokenPipeError):  # what it did not read is still in the buffer
                pipe.close()
        return process.wait()


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def _reason_in(answer: bytes) -> str | None:
    reason: str | None = json.loads(answer)
    return reason
