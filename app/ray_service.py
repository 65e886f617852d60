"""KubeRay's RayService, as far as we read it: the configuration for Serve that it holds as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from app.settings_error import SettingsError, shown
from app.yaml_mapping import parse_yaml

KIND = "RayService"
PLACE = "spec.serveConfigV2"
"""Where the configuration is."""


def is_kubernetes(content: Mapping[str, Any]) -> bool:
    """Whether a file describes an object of Kubernetes. No configuration for Serve has these keys."""
    return "apiVersion" in content and "kind" in content


def serve_config_in(content: Mapping[str, Any], text: str, name: str) -> Any:
    """The content of `spec.serveConfigV2`; None when that holds nothing.

    Args:
        content: of the file.
        text: of the file, so that messages can name its lines.
        name: what messages call the file.

    Raises: SettingsError: another kind of object, no such text, or text that is no YAML.
    """
    if content["kind"] != KIND:
        raise SettingsError(
            [f"{name} holds kind {shown(content['kind'])}; what can be read is a Serve configuration, or kind {KIND}"]
        )
    spec = content.get("spec")
    inner = spec.get("serveConfigV2") if isinstance(spec, Mapping) else None
    if not isinstance(inner, str):
        raise SettingsError(
            [f"{name}: {PLACE} holds {shown(inner)}, and must be text: a Serve configuration behind `|`"]
        )
    # Empty lines in front make a line's number the file's.
    return parse_yaml("\n" * _lines_before(text) + inner, f"{name}: {PLACE}")


def _lines_before(text: str) -> int:
    """Lines of the file before those of the configuration; 0 where they are not known, because of a merge key."""
    node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    for name in PLACE.split("."):
        node = next((value for key, value in node.value if key.value == name), None)
        if node is None:
            return 0
    return int(node.start_mark.line) + (node.style in ("|", ">"))  # a block begins in the line below its sign
