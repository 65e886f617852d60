"""The process in which a client's grammar is compiled for the first time: `GrammarCheck` starts it and talks to it.

A grammar may recurse until the stack is full, which no library call survives, or take memory and time without an end.
So this process may die of it. It reads JSON lines: first what it works with, then grammars. It answers each line with
one of its own: why the grammar cannot be used, or null.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from actors.engine.grammar_limits import LIMITS, reason_of

_MEMORY_BYTES = 1 << 30
"""What a grammar may take beside what the process has at its beginning."""
_WALK_TOKENS = 16
"""Lexers are built as they are needed, and what has no end shows at the first masks."""
_MAX_STEP_S = 0.25
"""CPU time for one token of a grammar. All of a worker's answers wait for it; a few milliseconds are usual."""
_IS_ALLOWED = 200
"""A byte of llguidance's logit bias."""


def why_unusable(tokenizer: LLTokenizer, grammar: str, *, max_step_s: float = _MAX_STEP_S) -> str | None:
    """Compiles a grammar in llguidance's form and takes a short way through it."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        return reason_of(matcher.get_error())
    if warnings := matcher.get_grammar_warnings():
        return reason_of(warnings[0])
    for position in range(_WALK_TOKENS):
        begun_s = time.process_time()
        bias = bytearray(matcher.compute_logit_bias())
        if matcher.is_error():
            return _of_a_step(matcher)
        for end in tokenizer.eos_tokens:
            bias[end] = 0
        # Low ids are short tokens as a rule, and high ones long.
        token_id = (bias.rfind if position % 2 else bias.find)(_IS_ALLOWED)
        if token_id < 0:
            return None
        if not matcher.consume_token(token_id):
            return _of_a_step(matcher)
        if time.process_time() - begun_s > max_step_s:
            return f"it takes more than {max_step_s:g} s of CPU time for one token. Make it simpler"
    return None


def _of_a_step(matcher: LLMatcher) -> str:
    reason = reason_of(matcher.get_error())
    return "no answer keeps to it" if reason.startswith("NoExtension") else reason


def _bound_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statm = Path("/proc/self/statm")
    if statm.exists():  # it is Linux
        limit = int(statm.read_text().split()[0]) * resource.getpagesize() + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    """Runs until there is nothing more to read."""
    lines = sys.stdin.buffer
    given: dict[str, Any] = json.loads(lines.readline())
    try:
        tokenizer = LLTokenizer(given["tokenizer"], n_vocab=given["vocab_size"], eos_token=given["end_token_ids"])
    except ValueError as error:
        _answer(f"the model's tokenizer cannot be used with grammars: {error}")
        return
    _bound_memory()
    _answer(None)
    for line in lines:
        # Nothing catches this signal, so it ends the process in the middle of whatever it does. It counts CPU time: a
        # busy machine refuses nothing.
        signal.setitimer(signal.ITIMER_PROF, given["cpu_limit_s"])
        reason = why_unusable(tokenizer, json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(reason)


def _answer(reason: str | None) -> None:
    sys.stdout.write(json.dumps(reason) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
