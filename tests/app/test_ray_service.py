"""A RayService of KubeRay is planned and checked as the configuration in it would be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from app import check, plan
from app.serve_config import read_serve_config
from app.settings_error import SettingsError

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "deploy" / "rayservice.yaml"
LOCAL = ROOT / "serve_configs" / "local.yaml"


@pytest.fixture(autouse=True)
def _no_overlay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EQUIPOISE_OVERLAY", raising=False)


def refused(path: Path, text: str) -> list[str]:
    path.write_text(text)
    with pytest.raises(SettingsError) as raised:
        read_serve_config(path)
    return raised.value.problems


def service(served: str) -> str:
    """A file whose configuration begins in its sixth line."""
    block = "".join(f"    {line}\n" for line in served.splitlines())
    return f"# one\napiVersion: ray.io/v1\nkind: RayService\nspec:\n  serveConfigV2: |\n{block}"


def test_it_is_read_as_what_it_serves(tmp_path: Path) -> None:
    (tmp_path / "service.yaml").write_text(service(LOCAL.read_text()))
    assert read_serve_config(tmp_path / "service.yaml") == read_serve_config(LOCAL)


def test_the_shipped_one_is_planned_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "alone.yaml").write_text(yaml.safe_load(SHIPPED.read_text())["spec"]["serveConfigV2"])
    planned = []
    for path in (SHIPPED, tmp_path / "alone.yaml"):
        assert plan.main([str(path), "--json"]) == 0
        planned.append(json.loads(capsys.readouterr().out))
    assert planned[0] == planned[1]
    assert planned[0]["parameters"] == 13_015_864_320
    assert check.main([str(SHIPPED)]) == 0
    printed = capsys.readouterr()
    assert "mode static, model meta-llama/Llama-2-13b-hf" in printed.out
    assert "/keys/keys is not on this machine" in printed.err


def test_a_refusal_says_where_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    (unknown,) = refused(path, service(LOCAL.read_text().replace("http_options", "http_option")))
    assert unknown.startswith("spec.serveConfigV2: http_option: unknown key")
    (setting,) = refused(path, service(LOCAL.read_text().replace("      mode:", "      mood:")))
    assert setting.startswith("spec.serveConfigV2: args: mood: unknown key")


def test_lines_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    (repeated,) = refused(path, service("a: 1\nb: 2\na: 3"))
    assert repeated == f"{path}: spec.serveConfigV2: a: given twice, in line 6 and in line 8; keep one of them"
    (broken,) = refused(path, service("a: 1\nb: ]\nc: 2"))
    assert f"{path}: spec.serveConfigV2 is not YAML" in broken
    assert "line 7" in broken
    merged = (
        "base: &base {serveConfigV2: 'a: 1\n\n  a: 2'}\napiVersion: ray.io/v1\nkind: RayService\nspec: {<<: *base}\n"
    )
    assert "given twice, in line 1 and in line 2" in refused(path, merged)[0]  # of the text by itself


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("apiVersion: v1\nkind: Secret\n", "holds kind str 'Secret'; what can be read is .* kind RayService"),
        ("apiVersion: ray.io/v1\nkind: RayService\n", r"spec\.serveConfigV2 holds NoneType None, and must be text"),
        ("apiVersion: ray.io/v1\nkind: RayService\nspec: 3\n", r"spec\.serveConfigV2 holds NoneType None"),
        ("apiVersion: ray.io/v1\nkind: RayService\nspec: {serveConfigV2: {a: 1}}\n", "holds dict .* must be text"),
        (service("# nothing"), r"spec\.serveConfigV2 is empty"),
        (service("- 1"), r"spec\.serveConfigV2 holds list \[1\], and a Serve configuration is a mapping"),
    ],
)
def test_what_serves_nothing_is_refused(text: str, part: str, tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=part):
        read_serve_config(path)
