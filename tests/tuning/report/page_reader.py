"""A page as a reader of HTML sees it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

_VOID = {"meta", "br"}


class PageReader(HTMLParser):
    """Elements, text, tables and scripts of a page. Every element must be closed in its place."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        """Rows by caption, the header first."""
        self.scripts: list[tuple[str, str]] = []
        """Id and content."""
        self.styles = ""
        self._text: list[str] = []
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self._rows: list[list[str]] = []
        self._caption = ""
        self.feed(page)
        self.close()
        assert not self._open

    @property
    def text(self) -> str:
        """All that is shown, with plain spaces."""
        return _plain(" ".join(self._text))

    def tags(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def plots(self) -> dict[str, Any]:
        """What the page's script draws."""
        figures: dict[str, Any] = json.loads(dict(self.scripts)["plots"])
        return figures

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append((tag, dict(attrs)))
        if tag == "table":
            self._rows = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        name, _ = self._open.pop()
        assert name == tag
        if tag == "table":
            self.tables[self._caption] = [[_plain(cell) for cell in row] for row in self._rows]

    def handle_data(self, data: str) -> None:
        tag, attributes = self._open[-1] if self._open else ("", {})
        if tag == "script":
            self.scripts.append((attributes.get("id") or "", data))
        elif tag == "style":
            self.styles += data
        else:
            self._text.append(data)
        if tag == "caption":
            self._caption = data
        elif tag in ("td", "th"):
            self._rows[-1][-1] += data


def _plain(text: str) -> str:
    return " ".join(text.replace("\u00a0", " ").split())
