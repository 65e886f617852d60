"""A second file merged over `args`, so that a configuration written for GPUs can be tried on a laptop unedited."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.settings_error import SettingsError, shown
from app.yaml_mapping import read_yaml

OVERLAY_VARIABLE = "EQUIPOISE_OVERLAY"


def merged_with_overlay(args: Mapping[str, Any], overlay: Path) -> dict[str, Any]:
    """`args` with the mapping in the YAML file `overlay` merged over it; an empty file changes nothing.

    Mappings are merged key by key; anything else, lists and null included, replaces what was there.

    Raises: SettingsError: the file can't be read, gives a key twice, or does not hold a mapping.
    """
    source = f"overlay {overlay} (from the argument or {OVERLAY_VARIABLE})"
    content = read_yaml(overlay, source, "name a YAML file, or unset it")
    if content is None:
        return dict(args)
    if not isinstance(content, dict):
        raise SettingsError([f"{source}: holds {shown(content)}, allowed is a mapping in the shape of args"])
    return _deep_merge(args, content)


def _deep_merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _deep_merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged
