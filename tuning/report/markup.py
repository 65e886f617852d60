"""Pieces of HTML. Every text that is given to them is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

_VERDICTS: Final = {
    "faster": "better",
    "more": "better",
    "cheaper": "better",
    "slower": "worse",
    "less": "worse",
    "dearer": "worse",
}
"""Classes of the style sheet by the words that comparisons end in, see `tuning.report.wording.Sense`."""


@dataclass(frozen=True, slots=True)
class Html:
    """HTML that is safe to put in the page as it is."""

    text: str


def paragraph(text: str, kind: str = "") -> Html:
    """A paragraph, with a class of the style sheet."""
    return Html(f"<p{_class(kind)}>{escape(text)}</p>")


def bullets(lines: Sequence[str]) -> Html:
    """A list."""
    return Html("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>")


def heading(text: str, level: int = 3) -> Html:
    """A heading within a section."""
    return Html(f"<h{level}>{escape(text)}</h{level}>")


def code_block(text: str) -> Html:
    """Text as it is."""
    return Html(f"<pre>{escape(text)}</pre>")


def section(name: str, title: str, parts: Sequence[Html], kind: str = "") -> Html:
    """A part of the page, with the id that the contents link to."""
    body = "\n".join(part.text for part in parts)
    return Html(
        f'<section id="{escape(name)}" aria-labelledby="{escape(name)}-title"{_class(kind)}>\n'
        f'<h2 id="{escape(name)}-title">{escape(title)}</h2>\n{body}\n</section>'
    )


def details(summary: str, parts: Sequence[Html], *, printed: bool = False) -> Html:
    """What opens when asked for, and on paper where it is to be `printed`."""
    body = "".join(part.text for part in parts)
    return Html(f"<details{_class('printed' * printed)}><summary>{escape(summary)}</summary>\n{body}</details>")


def table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> Html:
    """A table whose first column names the rows. Cells that end in a word of `_VERDICTS` are coloured as well.

    Args:
        text_columns: so many columns from the left are text; the others are numbers, to be aligned at the right.
    """
    head = "".join(
        f'<th scope="col"{_class(_kind(place, "", text_columns))}>{escape(name)}</th>'
        for place, name in enumerate(header)
    )
    body = "".join(
        f'<tr><th scope="row" class="text">{escape(row[0])}</th>'
        + "".join(
            f"<td{_class(_kind(place, text, text_columns))}>{escape(text)}</td>"
            for place, text in enumerate(row[1:], 1)
        )
        + "</tr>\n"
        for row in rows
    )
    return Html(
        f'<div class="table" role="region" tabindex="0" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>"
    )


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure to be seen first."""

    name: str
    value: str
    remark: str
    kind: str = ""
    """A class of the style sheet; of itself that of a remark that ends in a word of `_VERDICTS`."""


def tiles(entries: Sequence[Tile]) -> Html:
    """Figures in a row."""
    return Html(
        '<dl class="tiles">'
        + "".join(
            f'<div><dt>{escape(each.name)}</dt><dd class="value">{escape(each.value)}</dd>'
            f"<dd{_class(each.kind or _verdict(each.remark))}>{escape(each.remark)}</dd></div>"
            for each in entries
        )
        + "</dl>"
    )


def plot(name: str, title: str, caption: str, description: str, height_px: int, least_width_px: int) -> Html:
    """The place of a plot, which the page's script draws. `description` says it in words to who can't see it."""
    return Html(
        f'<figure aria-labelledby="{escape(name)}-caption"><figcaption id="{escape(name)}-caption">'
        f"<strong>{escape(title)}.</strong> {escape(caption)}</figcaption>\n"
        f'<div class="plot" id="{escape(name)}" role="img" aria-label="{escape(description)}" '
        f'style="height: {height_px}px; min-width: {least_width_px}px"></div></figure>'
    )


def _kind(place: int, text: str, text_columns: int) -> str:
    return " ".join(filter(None, ("text" if place < text_columns else "", _verdict(text))))


def _verdict(text: str) -> str:
    return next((kind for word, kind in _VERDICTS.items() if text.endswith(f"({word})")), "")


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
