"""Checks a configuration file before it is served: `python -m app.check serve_configs/local.yaml`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from actors.model_source import ModelSourceError, resolve_model
from app.api_keys import ApiKeys, ApiKeysError
from app.serve_config import read_serve_config
from app.settings import AppSettings
from app.settings_error import SettingsError
from app.store_settings import StoreSettings
from kv.disk.settings import folder_at
from kv.errors import DiskTierError
from kv.exit_status import status_of
from kv.policy.policy_file import PolicyFileError


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 when all is well, 2 with the problems on the error output when not."""
    parser = argparse.ArgumentParser(
        prog="python -m app.check",
        description="Check every key and value of a Serve configuration, which Serve itself does only in part. "
        "EQUIPOISE_OVERLAY is honoured as in serving.",
        epilog="example: python -m app.check serve_configs/local.yaml --fetch-model",
    )
    parser.add_argument("config", help="file for `serve run` or `serve deploy`, or a RayService's")
    parser.add_argument("--fetch-model", action="store_true", help="also fetch or convert the model, if it isn't here")
    options = parser.parse_args(argv)
    try:
        settings = read_serve_config(options.config).settings
        print(f"{options.config}: mode {settings.mode}, model {settings.model}")
        _check_keys_file(settings.ingress.api_keys_file)
        if settings.has_store:
            _check_store(settings.store)
        if settings.mode == "balanced":
            _check_moves(settings)
        if options.fetch_model:
            print(f"model folder: {resolve_model(settings.model).path}")
    except (SettingsError, ModelSourceError, ApiKeysError, PolicyFileError, DiskTierError, OSError) as error:
        print(f"{options.config}: {error}", file=sys.stderr)
        return 2
    print(f"Keys and values are in order; `python -m app.plan {options.config}` says whether it fits.")
    return 0


def _check_keys_file(path: str | None) -> None:
    """Raises ApiKeysError or OSError for a file that is here and can't be used."""
    if path is None:
        return
    if Path(path).exists():
        ApiKeys.load(path)
    else:
        print(
            f"warning: ingress.api_keys_file {path} is not on this machine, and so is not checked; each ingress "
            "replica reads it on the node where it starts",
            file=sys.stderr,
        )


def _check_store(store: StoreSettings) -> None:
    """Raises PolicyFileError or DiskTierError for what this machine can tell to be of no use."""
    try:
        store.policy()
    except PolicyFileError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        print(
            f"warning: store.policy_file {store.policy_file} is not on this machine, and so is not checked; it is read "
            "where the application is built",
            file=sys.stderr,
        )
    if store.disk.limit_gib:
        try:
            folder_at(store.disk.folder)
        except DiskTierError as error:
            raise DiskTierError(f"store.disk.folder: {error}") from error


def _check_moves(settings: AppSettings) -> None:
    """Warns of what is allowed and hardly meant."""
    moves, order_s = settings.moves, settings.moves.limits().order_s
    if moves.abandon_after_s <= order_s:
        print(
            f"warning: moves.abandon_after_s {moves.abandon_after_s:g} s is no longer than the {order_s:g} s that the "
            "workers of a move give it (moves.links): it is given up before they have said what is wrong; give more",
            file=sys.stderr,
        )
    if any(settings.engine_for(role).device == "cuda" for role in settings.roles):
        print(
            "warning: moves between workers on GPUs go through the host's memory, and have not been run on any yet "
            "(docs/moving-modules.md)",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(status_of(main))
