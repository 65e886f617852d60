"""How a model writes a call of a tool. There is no standard: each family learned its own form."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call is `begin`, a JSON object with the function's name and its arguments, and `end`."""

    begin: str
    """May stand anywhere in a text."""
    end: str
    """"": a call ends with its object."""
    padding: str
    """Between them and the object."""
    arguments_key: str
    separator: str
    """Between two calls."""
    is_bare: bool
    """Whether `begin` may be missing where the answer begins, or goes on after a call. A text that begins so may also
    be no call, so what it is shows late."""

    def opening(self, name: str) -> str:
        """What comes before the arguments, without `begin`."""
        return f'{self.padding}{{"name": {json.dumps(name)}, "{self.arguments_key}": '

    @property
    def closing(self) -> str:
        """What comes after the arguments, without `end`."""
        return f"}}{self.padding}"

    def written(self, calls: list[dict[str, Any]]) -> str:
        """Calls as the model writes them, for a template that has no place for calls."""
        begin = "" if self.is_bare else self.begin
        return self.separator.join(
            begin
            + self.opening(call["function"]["name"])
            + json.dumps(call["function"]["arguments"], ensure_ascii=False)
            + self.closing
            + self.end
            for call in calls
        )


HERMES = ToolFormat("<tool_call>", "</tool_call>", "\n", "arguments", "\n", is_bare=False)
"""Hermes 2 Pro and later, Qwen 2.5 and 3, and others that were tuned on the same data."""
LLAMA_3 = ToolFormat("<|python_tag|>", "", "", "parameters", "; ", is_bare=True)
"""Llama 3.1 and later: the bare object."""

_HERMES_EXAMPLE = re.compile(r'<tool_call>(?:\\n|\s)*\{+\s*\\?"(?:name|arguments)')
_LLAMA_3_EXAMPLE = re.compile(r'\{+\s*\\?"name\\?": function name, \\?"parameters\\?"')


def knows_tools(template: str) -> bool:
    """Whether a chat template tells the model of tools."""
    return "tools" in template


def format_of(template: str) -> ToolFormat | None:
    """The form that a template asks the model for, by the example it gives; None: one that is not read here."""
    if _HERMES_EXAMPLE.search(template):
        return HERMES
    if _LLAMA_3_EXAMPLE.search(template):
        return LLAMA_3
    return None
