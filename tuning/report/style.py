"""How the page looks: colours for light and dark, and the style sheet."""

from __future__ import annotations

from typing import Final

PALETTES: Final[dict[str, dict[str, str]]] = {
    "light": {
        "page": "#ffffff",
        "surface": "#f5f7f9",
        "ink": "#1b222b",
        "soft": "#525c68",
        "line": "#d5dbe2",
        "accent": "#1558b0",
        "good": "#19692f",
        "bad": "#b3261e",
    },
    "dark": {
        "page": "#12161c",
        "surface": "#1b212a",
        "ink": "#e6eaef",
        "soft": "#a3adb9",
        "line": "#39424e",
        "accent": "#82b4f5",
        "good": "#72c98a",
        "bad": "#f4897f",
    },
}
"""Text of any colour can be read on page and surface, in light and dark."""

MARKS: Final[dict[str, str]] = {
    "front": "#2f7de1",
    "beaten": "#858d98",
    "misses": "#d1495b",
    "baseline": "#9b5de5",
    "chosen": "#d96c00",
}
"""Of points in plots, the same in light and dark."""


def style_sheet() -> str:
    """The whole of it, without anything that would be fetched."""
    light, dark = (_variables(PALETTES[name]) for name in ("light", "dark"))
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{_RULES}"
    )


def _variables(palette: dict[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in palette.items())


_RULES: Final = """
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 68rem; padding: 2.5rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", sans-serif;
}
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; text-wrap: balance; }
h2 { font-size: 1.35rem; line-height: 1.3; margin: 3rem 0 .6rem; }
h3 { font-size: 1.05rem; margin: 1.8rem 0 .4rem; }
p, ul { margin: 0 0 .8rem; max-width: 46rem; }
li { margin-bottom: .3rem; }
a { color: var(--accent); }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; font-size: .88rem; }
pre { background: var(--surface); padding: .9rem 1rem; border-radius: .4rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.lead { font-size: 1.12rem; }
.soft, figcaption, caption { color: var(--soft); }
.better { color: var(--good); }
.worse { color: var(--bad); }
.summary { border: 1px solid var(--line); border-radius: .6rem; padding: .4rem 1.4rem 1rem;
  background: var(--surface); }
.summary h2 { margin-top: 1rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(12.5rem, 1fr)); gap: .8rem;
  margin: 1rem 0 1.2rem; }
.tiles div { background: var(--page); border: 1px solid var(--line); border-radius: .5rem; padding: .7rem .9rem; }
.tiles dt { color: var(--soft); font-size: .86rem; }
.tiles dd { margin: 0; font-size: .9rem; }
.tiles dd.value { font-size: 1.45rem; font-weight: 600; line-height: 1.3; font-variant-numeric: tabular-nums; }
.warning { border-left: 4px solid var(--bad); padding: .2rem 0 .2rem .9rem; }
nav ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: 1.2rem 0; }
figure { margin: 1rem 0 1.8rem; overflow-x: auto; }
figcaption { max-width: 46rem; margin-bottom: .3rem; }
figcaption strong { color: var(--ink); }
.plot { width: 100%; }
.table { overflow-x: auto; margin: .6rem 0 1.4rem; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; min-width: 50%; }
caption { text-align: left; padding-bottom: .35rem; }
th, td { padding: .38rem .8rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th { font-weight: 600; }
thead th { border-bottom: 2px solid var(--line); vertical-align: bottom; }
td:not(.text) { white-space: nowrap; }
th.text, td.text { text-align: left; }
td.text { min-width: 13rem; }
tbody th { font-weight: 500; min-width: 9rem; }
details { margin: .4rem 0 1.2rem; }
summary { cursor: pointer; color: var(--accent); }
:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav { display: none; }
  h2, h3, figcaption, caption { break-after: avoid; }
  figure, .tiles, tr, pre { break-inside: avoid; }
  .table { overflow: visible; }
  table { font-size: 7.5pt; }
  th, td { padding: .2rem .3rem; }
  .tiles { grid-template-columns: repeat(4, 1fr); }
  .tiles dd.value { font-size: 1.1rem; }
  th:first-child, td.text { min-width: 0; }
  td:not(.text) { white-space: normal; }
  .plot { min-width: 0 !important; height: auto !important; }
  .modebar-container { display: none; }
}
@page { margin: 16mm; }
"""
