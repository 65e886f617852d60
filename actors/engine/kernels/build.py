"""Builds the C++ kernels of this folder into one shared library, once on a machine.

One library has the functions of every instruction set, each compiled with its own flags; the processor chooses when it
is loaded. So a cache that several machines share fits all of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

_SOURCES = Path(__file__).parent
_COMMON_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fopenmp", "-w")
_AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma")
_SET_FLAGS = {
    "avx2": ("-mavx2", "-mfma"),
    "avx512": _AVX512_FLAGS,
    "amx": (*_AVX512_FLAGS, "-mamx-tile", "-mamx-bf16"),
}
"""By the end of a source's name."""
_PROCESSORS = ("x86_64", "amd64")
_TIMEOUT_S = 600


class BuildError(RuntimeError):
    """The kernels cannot be built here."""


def built_library() -> Path:
    """The library, from torch's folder of extensions or built now; another process that builds it is waited for.

    Raises:
        BuildError: no compiler, not an x86 processor, a folder that cannot be written, or an error of the compiler.
    """
    if platform.machine().lower() not in _PROCESSORS:
        raise BuildError(f"the processor is {platform.machine()}; there are kernels for x86_64")
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        raise BuildError(f"no C++ compiler: {os.environ.get('CXX') or 'g++'} is not found")
    library = _folder() / f"{_digest(compiler)}.so"
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with library.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _build(compiler, library)
    except OSError as error:
        raise BuildError(f"{library.parent} cannot be used: {error}") from error
    return library


def _folder() -> Path:
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is None:
        root = str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions")
    return Path(root) / "equipoise_kernels"


def _digest(compiler: str) -> str:
    """Of all that the library comes from."""
    digest = hashlib.sha256(repr((_COMMON_FLAGS, _SET_FLAGS, torch.__version__)).encode())
    digest.update(_run([compiler, "--version"]).encode())
    for source in sorted(path for path in _SOURCES.iterdir() if path.suffix in (".cpp", ".h", ".inc")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _build(compiler: str, library: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=library.parent) as made:
        objects = []
        for source in sorted(_SOURCES.glob("*.cpp")):
            flags = _SET_FLAGS.get(source.stem.rpartition("_")[2], ("-isystem", str(torch_folder / "include")))
            objects.append(f"{made}/{source.stem}.o")
            _run([compiler, *_COMMON_FLAGS, *flags, "-c", str(source), "-o", objects[-1]])
        whole = Path(made) / library.name
        _run(
            [compiler, "-shared", "-fopenmp", *objects, "-o", str(whole), f"-L{torch_folder / 'lib'}",
             "-lc10", "-ltorch_cpu"]
        )  # fmt: skip
        whole.replace(library)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout
