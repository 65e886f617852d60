"""One choice of a chat as its client is told of it: what is said apart from what is called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from app.choice_text import Piece
from app.openai_responses import FinishReason
from app.tool_call_parser import ToolCallDelta
from app.tool_use import ToolUse


class SpokenAnswer:
    """`tools` None: nothing is called, and every piece is text as it is."""

    def __init__(self, tools: ToolUse | None) -> None:
        self._parser = None if tools is None else tools.parser()

    def take(self, piece: Piece) -> tuple[str, list[ToolCallDelta]]:
        """What a piece adds to the text and to the calls. The last one, with a finish reason, brings what was held
        back."""
        if self._parser is None:
            return piece.text, []
        parts = self._parser.push(piece.text)
        if piece.finish_reason is not None:
            parts += self._parser.finish()
        return "".join(part for part in parts if isinstance(part, str)), [
            part for part in parts if isinstance(part, ToolCallDelta)
        ]

    def reason(self, finish_reason: FinishReason) -> FinishReason:
        """The choice's finish reason after its last piece. A cut answer stays a cut one."""
        has_calls = self._parser is not None and self._parser.num_calls > 0
        return "tool_calls" if has_calls and finish_reason == "stop" else finish_reason


def gathered(deltas: Iterable[ToolCallDelta]) -> list[dict[str, Any]]:
    """Whole calls, as OpenAI has them in a message."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if delta.name is not None:
            function = {"name": delta.name, "arguments": ""}
            calls.append({"id": delta.id, "type": "function", "function": function})
        calls[delta.index]["function"]["arguments"] += delta.arguments
    return calls
