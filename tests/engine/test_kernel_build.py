"""How the kernels are built, and that nothing needs them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.engine.kernels.build import BuildError, built_library
from actors.engine.kernels.library import InstructionSet
from tests.engine.conftest import MakeEngine
from tests.engine.kernel_sets import kernels_of
from tests.engine_driver import greedy, make_prompt, run_prompts

PROMPT = make_prompt(20)
PROGRAM = f"""
import logging, sys
from pathlib import Path
logging.basicConfig()
from actors.engine.config import EngineConfig
from actors.engine.engine import Engine
from actors.engine.loading import load_model
from tests.engine_driver import greedy, run_prompts
for _ in range(2):
    config = EngineConfig(device="cpu", dtype="float32", kv_cache_blocks=32, slab_pages=4)
    engine = Engine(load_model(Path(sys.argv[1]), config), config)
    print(engine.loaded.backend_name, *run_prompts(engine, [{PROMPT!r}], greedy(8))[0])
"""
WARNING = "torch's own operators are used on the CPU"


def run_engine(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Two engines, one after the other, in a process of their own."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip


def test_without_a_compiler_everything_works_and_it_is_said_once(
    llama_folder: Path, tmp_path: Path, make_engine: MakeEngine
) -> None:
    done = run_engine(llama_folder, PATH=str(tmp_path), TORCH_EXTENSIONS_DIR=str(tmp_path), CXX="")
    expected = run_prompts(make_engine(llama_folder, kernels="torch"), [PROMPT], greedy(8))[0]
    assert done.stdout.splitlines() == [f"torch {' '.join(map(str, expected))}"] * 2
    assert done.stderr.count(WARNING) == 1
    assert "no C++ compiler: g++ is not found" in done.stderr


def test_kernels_are_built_where_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_of(InstructionSet.AVX2)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "new"))
    library = built_library()
    assert ctypes.CDLL(str(library)).equipoise_instruction_set() >= InstructionSet.AVX2
    built_ns = library.stat().st_mtime_ns
    assert built_library() == library
    assert library.stat().st_mtime_ns == built_ns
    assert sorted(path.name for path in library.parent.iterdir()) == [f"{library.stem}.lock", library.name]


def test_error_of_the_compiler_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "cannot: sorry" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(BuildError, match="cannot: sorry"):
        built_library()
    assert [path.suffix for path in (tmp_path / "equipoise_kernels").iterdir()] == [".lock"]


def test_folder_that_cannot_be_used_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_of(InstructionSet.AVX2)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="cannot be used"):
        built_library()
