"""A second file merged over `args`, so that a configuration written for GPUs can be tried on a laptop unedited."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from app.settings_error import SettingsError, shown

OVERLAY_VARIABLE = "EQUIPOISE_OVERLAY"


def merged_with_overlay(args: Mapping[str, Any], overlay: Path) -> dict[str, Any]:
    """`args` with the mapping in the YAML file `overlay` merged over it; an empty file changes nothing.

    Mappings are merged key by key; anything else, lists and null included, replaces what was there.

    Raises: SettingsError: the file can't be read, or does not hold a mapping.
    """
    source = f"overlay {overlay} (from the argument or {OVERLAY_VARIABLE})"
    try:
        content = yaml.safe_load(overlay.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError([f"{source}: can't be read ({error}); name a YAML file, or unset it"]) from error
    except yaml.YAMLError as error:
        raise SettingsError([f"{source}: is not YAML: {error}"]) from error
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
