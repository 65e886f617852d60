"""A configuration to serve with, from one to start from and a deployment."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import yaml

from kv.repeated_keys import RepeatedKeysError, load_yaml
from tuning.deployment.deployment import Deployment
from tuning.job.job_error import JobError

IMPORT_PATH = "app.builder:build"
_MINIMAL: dict[str, Any] = {"applications": [{"name": "equipoise", "route_prefix": "/", "import_path": IMPORT_PATH}]}
_ROLES = {"static": ("prefill", "decode"), "monolithic": ("monolithic",)}
_DEPLOYMENT_OF = {"prefill": "PrefillServer", "decode": "DecodeServer", "monolithic": "MonolithicServer"}
_CONTROLLER_OF_MOVES = "ControllerServer"  # of mode balanced, which is never chosen


def read_base(path: Path | None) -> dict[str, Any]:
    """A Serve configuration with one application of ours; without a path the least there can be.

    Raises:
        JobError: it can't be read, or has no such application.
    """
    if path is None:
        return copy.deepcopy(_MINIMAL)
    try:
        base = load_yaml(path.read_text(encoding="utf-8"))
    except RepeatedKeysError as error:
        raise JobError(f"{path}: {error}") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise JobError(f"{path} can't be read ({error}): give a Serve configuration, as of serve_configs/") from error
    if not isinstance(base, dict) or len(_applications(base)) != 1:
        raise JobError(f"{path} must have one application whose import_path is {IMPORT_PATH}")
    _check_blocks(path, _applications(base)[0])
    return base


def serve_config(
    base: dict[str, Any], deployment: Deployment, nodes: int, policy_file: Path | None, *, keeps_store: bool = False
) -> dict[str, Any]:
    """`base` with the deployment's mode, replicas and store; all else is kept. `base` is not changed.

    Limits of the store are those of each node: an even share, rounded down to a hundredth.

    Args:
        policy_file: takes the place of eviction and time-to-live.
        keeps_store: the store is the base's, of which the deployment says nothing: it is not searched where nothing is
            known of re-use, and hand-overs need its DRAM all the same.
    """
    config = copy.deepcopy(base)
    application = _applications(config)[0]
    settings = application["args"] = dict(application.get("args") or {})
    roles = _ROLES[deployment.mode]
    settings["mode"] = deployment.mode
    # A role that the mode has not would be carried along unused; the one that it has may start from it.
    others = [
        settings.pop(role) for names in _ROLES.values() for role in names if role in settings and role not in roles
    ]
    for role in roles:
        start = settings.get(role) or (others[0] if others else {})
        settings[role] = {**start, "replicas": getattr(deployment, f"{role}_instances")}
    _drop_deployments_of_other_modes(application, roles)
    if keeps_store:
        return config
    store = settings["store"] = dict(settings.get("store") or {})
    store["dram_gib"] = share_of_node(deployment.dram_gib, nodes)
    store["disk"] = {**(store.get("disk") or {}), "limit_gib": share_of_node(deployment.disk_gib, nodes)}
    for key in ("eviction", "ttl_s", "policy_file"):
        store.pop(key, None)
    if policy_file is not None:
        store["policy_file"] = str(policy_file)
    else:
        store |= {"eviction": deployment.policy.eviction, "ttl_s": deployment.policy.default_ttl_s}
    return config


def _drop_deployments_of_other_modes(application: dict[str, Any], roles: tuple[str, ...]) -> None:
    """Serve refuses an application with an entry for a deployment that it has not."""
    gone = {_CONTROLLER_OF_MOVES, *(name for role, name in _DEPLOYMENT_OF.items() if role not in roles)}
    deployments = application.get("deployments")
    if isinstance(deployments, list):
        application["deployments"] = [
            each for each in deployments if not (isinstance(each, dict) and each.get("name") in gone)
        ]


def application_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The arguments of our application in what `serve_config` made; they are the config's own."""
    settings: dict[str, Any] = _applications(config)[0]["args"]
    return settings


def dump_config(config: dict[str, Any], about: list[str]) -> str:
    """YAML, with what it is for in comments above, each in one line whatever names of files are in it."""
    comments = "".join(f"# {_printable(line)}\n" for line in about)
    return comments + yaml.safe_dump(config, sort_keys=False, allow_unicode=True)


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)


def _applications(config: dict[str, Any]) -> list[dict[str, Any]]:
    applications = config.get("applications")
    found = applications if isinstance(applications, list) else []
    return [each for each in found if isinstance(each, dict) and each.get("import_path") == IMPORT_PATH]


def _check_blocks(path: Path, application: dict[str, Any]) -> None:
    """Raises JobError where something else stands in the place of a block that is to be changed."""
    args = _block(path, application, "args", "")
    for roles in _ROLES.values():
        for role in roles:
            _block(path, args, role, "args.")
    _block(path, _block(path, args, "store", "args."), "disk", "args.store.")


def _block(path: Path, within: dict[str, Any], key: str, place: str) -> dict[str, Any]:
    block = within.get(key)
    if block is None:
        return {}
    if not isinstance(block, dict):
        shown = repr(block) if len(repr(block)) <= 80 else f"{repr(block)[:77]}..."
        raise JobError(f"{path}: {place}{key} of the application is {shown}; allowed: a mapping of settings")
    return block


def share_of_node(gib: float, nodes: int) -> float:
    """What each of so many nodes has of a store, in GiB, rounded down to a hundredth."""
    hundredths = gib * 100 / nodes
    return math.floor(round(hundredths, 6)) / 100  # 0.29 * 100 is less than 29
