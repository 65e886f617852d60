"""What is generated from inference.proto is what the compiler makes of it today."""

from __future__ import annotations

from pathlib import Path

from grpc_tools import protoc

from tests.conftest import ROOT

FOLDER = "app/grpc_api"
FILES = ("inference_pb2.py", "inference_pb2.pyi", "inference_pb2_grpc.py")


def test_make_proto_was_run(tmp_path: Path) -> None:
    options = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    assert protoc.main(["protoc", f"-I{ROOT}", *options, f"{FOLDER}/inference.proto"]) == 0
    for name in FILES:
        assert (tmp_path / FOLDER / name).read_text() == (ROOT / FOLDER / name).read_text(), f"run make proto: {name}"
