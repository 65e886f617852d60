"""YAML files of settings, with what is wrong said as of all settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from app.settings_error import SettingsError
from kv.repeated_keys import RepeatedKeysError, load_yaml
from kv.yaml_extent import YamlExtentError


def read_yaml(path: Path, name: str, advice: str) -> Any:
    """The content of the one YAML document in a UTF-8 file; None when it holds nothing.

    Args:
        name: what messages call the file.
        advice: what to do about a file that can't be read.

    Raises: SettingsError: the file can't be read, is no YAML, holds too much, or gives a key of a mapping more than
    once (each such key with its lines).
    """
    return parse_yaml(read_text(path, name, advice), name)


def read_text(path: Path, name: str, advice: str) -> str:
    """The text of a UTF-8 file. Raises SettingsError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError([f"{name} can't be read ({error}); {advice}"]) from error


def parse_yaml(text: str, name: str) -> Any:
    """The content of the one YAML document in a text; None when it holds nothing. Raises SettingsError."""
    try:
        return load_yaml(text)
    except RepeatedKeysError as error:
        raise SettingsError([f"{name}: {problem}" for problem in error.problems]) from error
    except YamlExtentError as error:
        raise SettingsError([f"{name} can't be used: {error}"]) from error
    except yaml.YAMLError as error:
        raise SettingsError([f"{name} is not YAML: {error}"]) from error
