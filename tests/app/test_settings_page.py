from __future__ import annotations

from pathlib import Path

import pytest

from app.settings import AppSettings
from app.settings_page import main, settings_page

ROOT = Path(__file__).resolve().parents[2]


def test_the_committed_page_is_what_the_settings_say() -> None:
    assert main(["--check", str(ROOT / "docs" / "configuration.md")]) == 0


def test_every_setting_has_a_row_with_its_default_and_what_it_does() -> None:
    rows = [line.split(" | ") for line in settings_page().splitlines() if line.startswith("| `")]
    schema = AppSettings.model_json_schema()
    blocks = [schema, *schema["$defs"].values()]
    keys = [(key, entry) for block in blocks for key, entry in block.get("properties", {}).items()]
    assert len(keys) > 40
    for key, entry in keys:
        # pydantic leaves a block's description out where it equals that of its class.
        means = entry.get("description") or schema["$defs"][entry["$ref"].rsplit("/", 1)[1]]["description"]
        matching = [row for row in rows if row[0] == f"| `{key}`" and row[-1] == f"{means} |"]
        assert matching, key
        if isinstance(entry.get("default"), str | int | float) and not isinstance(entry["default"], bool):
            assert [row[1] for row in matching] == [f"`{entry['default']}`"], key


def test_a_page_that_is_out_of_date_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    page = tmp_path / "page.md"
    page.write_text(capsys.readouterr().out, encoding="utf-8")
    assert main(["--check", str(page)]) == 0
    page.write_text(page.read_text(encoding="utf-8").replace("`slab_pages`", "`slabs`"), encoding="utf-8")
    assert main(["--check", str(page)]) == 1
    assert "run python -m app.settings_page" in capsys.readouterr().err
    assert main(["--check", str(tmp_path / "missing.md")]) == 1
