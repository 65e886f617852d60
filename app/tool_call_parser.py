"""Calls of tools in the text of an answer, as the text comes.

Whether a text is a call is decided as early as it can be: once the function's name and the beginning of its arguments
are there, the arguments are given on as they come, valid or not. What does not become a call is text, unchanged.
The outcome does not depend on how the text was cut.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass

from app.tool_formats import ToolFormat

_BLANKS = " \t\r\n"
_OPENING = re.compile(
    r'[ \t\r\n]*\{[ \t\r\n]*"name"[ \t\r\n]*:[ \t\r\n]*("(?:[^"\\]|\\.)*")'
    r'[ \t\r\n]*,[ \t\r\n]*"(?:arguments|parameters)"[ \t\r\n]*:[ \t\r\n]*(?=\{)'
)


@dataclass(slots=True)
class ToolCallDelta:
    """What a piece of text adds to a call. The first of a call has its id and name."""

    index: int
    """Of the call in its answer."""
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class _ObjectEnd:
    """Finds the end of a JSON object, piece by piece."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int | None:
        """How many characters of `text` belong to the object, if it ends there."""
        for position, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return position + 1
        return None


class ToolCallParser:
    """Parts one answer's text into what is said and what is called. A call of a function that is not among `names` is
    text."""

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        self.num_calls = 0
        self._form = form
        self._names = names
        self._read: Callable[[], bool] = self._read_text
        self._text = ""
        """What has come and is not decided yet."""
        self._begin = ""
        """The marker that was taken off it, with the blanks before."""
        self._scanned = 0
        self._object = _ObjectEnd()
        self._is_first = True
        """Nothing has been said yet."""
        self._after_call = False
        self._out: list[str | ToolCallDelta] = []

    def push(self, text: str) -> list[str | ToolCallDelta]:
        """What is known now, in order: text, and parts of calls."""
        self._text += text
        while self._text and self._read():
            pass
        out, self._out = self._out, []
        return out

    def finish(self) -> list[str | ToolCallDelta]:
        """The rest, after the last `push`. A call that has not come as far as its arguments is text."""
        if self._read == self._read_opening:
            self._say(self._begin + self._text)
        elif self._read == self._read_text:
            self._say(self._text)
        out, self._out = self._out, []
        return out

    # Each reader takes what it can off `_text` and says whether another one can go on with the rest.

    def _read_text(self) -> bool:
        form = self._form
        if self._after_call:
            self._text = self._text.lstrip(_BLANKS + form.separator)
            if not self._text:
                return False
        if form.is_bare and (self._is_first or self._after_call):
            bare = self._text.lstrip(_BLANKS)
            if not bare:
                return False
            if bare[0] == "{":
                return self._open(0, 0)
        at = self._text.find(form.begin)
        if at >= 0:
            said = self._text[:at].rstrip(_BLANKS)
            self._say(said)
            return self._open(len(said), at + len(form.begin))
        # A beginning of the marker may go on, and blanks before a call are no text.
        cut = len(self._text) - _overlap(self._text, form.begin)
        cut = len(self._text[:cut].rstrip(_BLANKS))
        self._say(self._text[:cut])
        self._text = self._text[cut:]
        return False

    def _open(self, start: int, end: int) -> bool:
        """A call may begin: its marker, and blanks before that, lie from `start` to `end`."""
        self._begin, self._text = self._text[start:end], self._text[end:]
        self._object, self._scanned = _ObjectEnd(), 0
        self._read = self._read_opening
        return True

    def _read_opening(self) -> bool:
        bare = self._text.lstrip(_BLANKS)
        if not bare:
            return False
        if bare[0] != "{":
            return self._is_no_call()
        opening = _OPENING.match(self._text)
        if opening:
            name = _loads(opening[1])
            if name not in self._names:
                return self._is_no_call()
            self._call(str(name))
            self._text = self._text[opening.end() :]
            self._object = _ObjectEnd()
            self._read = self._read_arguments
            return True
        length = self._object.feed(self._text[self._scanned :])
        if length is None:
            self._scanned = len(self._text)
            return False
        length += self._scanned
        document = _loads(self._text[:length])
        name, arguments = _name_and_arguments(document)
        if name not in self._names or not isinstance(arguments, dict):
            return self._is_no_call()
        self._call(str(name), json.dumps(arguments, ensure_ascii=False))
        self._text = self._text[length:]
        self._read = self._read_end
        return True

    def _read_arguments(self) -> bool:
        length = self._object.feed(self._text)
        part = self._text[:length]
        self._out.append(ToolCallDelta(self.num_calls - 1, part))
        self._text = self._text[len(part) :]
        self._read = self._read_arguments if length is None else self._read_close
        return length is not None

    def _read_close(self) -> bool:
        """From the arguments' end to the object's. What is missing there makes the call no other one."""
        self._text = self._text.lstrip(_BLANKS)
        if not self._text:
            return False
        if self._text[0] == "}":
            self._text = self._text[1:]
        elif self._text[0] == ",":
            self._object = _ObjectEnd(depth=1)
            self._read = self._read_other_keys
            return True
        self._read = self._read_end
        return True

    def _read_other_keys(self) -> bool:
        length = self._object.feed(self._text)
        self._text = "" if length is None else self._text[length:]
        if length is not None:
            self._read = self._read_end
        return length is not None

    def _read_end(self) -> bool:
        end = self._form.end
        bare = self._text.lstrip(_BLANKS) if end else self._text
        if bare.startswith(end):
            self._text = bare[len(end) :]
        elif end.startswith(bare):
            return False
        self._after_call = True
        self._read = self._read_text
        return True

    def _is_no_call(self) -> bool:
        self._say(self._begin)
        self._is_first = self._after_call = False
        self._read = self._read_text
        return True

    def _call(self, name: str, arguments: str = "") -> None:
        self._out.append(ToolCallDelta(self.num_calls, arguments, f"call_{uuid.uuid4().hex[:24]}", name))
        self.num_calls += 1

    def _say(self, text: str) -> None:
        if text:
            self._is_first = self._after_call = False
            self._out.append(text)


def _overlap(text: str, marker: str) -> int:
    """The longest proper beginning of `marker` that `text` ends with."""
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)


def _loads(text: str) -> object:
    try:
        value: object = json.loads(text)
    except ValueError:
        return None
    return value


def _name_and_arguments(document: object) -> tuple[object, object]:
    if not isinstance(document, dict) or not isinstance(document.get("name"), str):
        return None, None
    return document["name"], document.get("arguments", document.get("parameters"))
