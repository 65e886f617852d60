"""Server-sent events, decoded from the bytes of a stream as they come in.

Follows the parsing rules of the HTML standard, section 9.2.6 (https://html.spec.whatwg.org/multipage/server-sent-events.html):
lines end in CR, LF or CRLF, several `data` lines of one event are joined by LF, comments and unknown fields are
skipped. `id` and `retry` mean nothing to a load generator and are skipped too. One departure: `finish` also returns a
last event that was not closed by an empty line, because some servers leave it out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    event: str
    """The event's name; "message" when the server gave none."""
    data: str


class EventStreamDecoder:
    """Feed it the body in pieces of any size, cut anywhere; it returns each event once it is complete."""

    def __init__(self) -> None:
        self._unfinished_line = b""
        self._skip_line_feed = False
        self._at_start = True
        self._event = ""
        self._data: list[str] = []

    def feed(self, data: bytes) -> list[ServerSentEvent]:
        """The events that `data` completes, in order."""
        if not data:
            return []
        # A CR ends a line at once, without waiting to see whether an LF follows; that LF is then no line of its own.
        if self._skip_line_feed and data.startswith(b"\n"):
            data = data[1:]
        self._skip_line_feed = data.endswith(b"\r")
        *lines, self._unfinished_line = _LINE_END.split(self._unfinished_line + data)
        events = []
        for line in lines:
            if self._at_start:
                line = line.removeprefix(_BYTE_ORDER_MARK)
                self._at_start = False
            event = self._take_line(line.decode("utf-8", errors="replace"))
            if event is not None:
                events.append(event)
        return events

    def finish(self) -> list[ServerSentEvent]:
        """The event that the end of the stream cut off before its empty line, if it has data."""
        return self.feed(b"\n\n")

    def _take_line(self, line: str) -> ServerSentEvent | None:
        if not line:
            event = ServerSentEvent(self._event or "message", "\n".join(self._data)) if self._data else None
            self._event, self._data = "", []
            return event
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            self._event = value
        elif field == "data":
            self._data.append(value)
        return None
