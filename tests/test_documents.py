"""What the documents name exists: links, files, modules, configurations. A module that moves takes its page along."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("app", "actors", "migrate", "kv", "tuning", "load_tests")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(params=PAGES, ids=lambda page: page.name)
def page(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path in re.findall(
        r"\b((?:app|actors|migrate|kv|tuning|load_tests|serve_configs|tests|docs)/[\w./-]*[\w/])", text
    ):
        assert (ROOT / path).exists(), path


def test_commands_that_are_named_exist(page: Path) -> None:
    for module in re.findall(r"python -m ([a-z_.]+[a-z_])", page.read_text(encoding="utf-8")):
        assert importlib.util.find_spec(module) is not None, module


def test_the_map_lists_modules_of_their_rooms() -> None:
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    for room in ROOMS:
        section = text.split(f"\n## {room}\n")[1].split("\n## ")[0]
        listed = {name for line in section.splitlines() for name in re.findall(r"`(\w+\.py)`", line.split(" | ")[0])}
        here = {path.name for path in (ROOT / room).rglob("*.py")} - {"__init__.py"}
        attention = {path.name for path in (ROOT / "actors" / "engine" / "attention").glob("*.py")}
        assert listed - here == set()
        assert here - attention - listed == set(), f"not in docs/structure.md: {here - attention - listed}"
