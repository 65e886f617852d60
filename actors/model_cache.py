"""Folders that are made once, whole or not at all, however many processes ask for them at the same time."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

logger = logging.getLogger("ray.serve")


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """Where converted and generated models are kept; not created here.

    `cache_dir` if given, else $EQUIPOISE_CACHE, else $XDG_CACHE_HOME/equipoise, else ~/.cache/equipoise.
    """
    if cache_dir is not None:
        return Path(cache_dir).expanduser().absolute()
    if own := os.environ.get("EQUIPOISE_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser().absolute() if base else Path.home() / ".cache") / "equipoise"


def build_once(folder: Path, build: Callable[[Path], None], is_complete: Callable[[Path], bool]) -> Path:
    """Returns `folder`, calling `build(empty_folder)` first if it isn't there complete.

    One process builds, the others wait for it: they hold a lock on a file beside the folder, which the system lets go
    of when its process ends, however it ends. The work is done in a temporary folder that is renamed when it is
    complete, so that nobody ever sees half of it; what an interrupted build left is removed by the next one.

    Raises: RuntimeError: `build` returned, but `is_complete` says no. What `build` raises passes through; `folder` is
    then not there.
    """
    if is_complete(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock"), folder.name):
        if is_complete(folder):
            return folder
        prefix = f".{folder.name}.partial-"
        for leftover in [folder, *folder.parent.glob(prefix + "*")]:
            if leftover.exists():
                shutil.rmtree(leftover)
        partial = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
        try:
            build(partial)
            if not is_complete(partial):
                raise RuntimeError(f"{folder.name} was built, but is not complete: {sorted(os.listdir(partial))}")
            _share(partial)
            partial.replace(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _share(folder: Path) -> None:
    """Lets other users of the machine read the folder: temporary files are made for their owner alone."""
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)


@contextlib.contextmanager
def _locked(path: Path, what: str) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that is making %s", what)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
