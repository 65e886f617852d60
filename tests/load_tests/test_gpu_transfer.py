"""The check of copies beside computing, on a CPU: that it passes, that it can fail, and what its figures are."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from actors.engine.device_event import DeviceEvent
from actors.engine.staging import StagedCopies
from actors.random_model import parse_random_name, write_random_model
from load_tests import gpu_check
from load_tests.deferred_streams import DeferredEvent, DeferredStreams
from load_tests.gpu_transfer import Rig, check_transfers, make_rig
from load_tests.gpu_transfer_speed import Overlap

MODEL = "random/llama-2x4x2"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    torch.set_num_threads(1)
    model = parse_random_name(MODEL)
    assert model is not None
    folder = tmp_path_factory.mktemp("gpu_transfer") / "tiny"
    write_random_model(model, folder)
    return make_rig(folder, torch.device("cpu"), "float32")


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--transfer"]) == 0
    assert "No GPU" in capsys.readouterr().out


def test_the_checks_pass_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--transfer", "--device", "cpu", "--quick", "--json", "--model", MODEL]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is True
    assert len(report["checks"]) == 3
    assert all(check["passed"] for check in report["checks"])


class Lazy(random.Random):
    """The device does nothing that nobody waits for."""

    def random(self) -> float:
        return 1.0


class Flipped(StagedCopies):
    """One bit of every page that is written changes."""

    def write(self, index: torch.Tensor, source: torch.Tensor, after: DeviceEvent | None) -> DeviceEvent:
        changed = source.clone()
        changed[:, 0] ^= 1 << 62
        return super().write(index, changed, after)


class Unordered(StagedCopies):
    """Computing does not wait for what is written."""

    def write(self, index: torch.Tensor, source: torch.Tensor, after: DeviceEvent | None) -> DeviceEvent:
        event = super().write(index, source, after)
        assert isinstance(event, DeferredEvent)
        event.wait = lambda: None  # type: ignore[method-assign]
        return event


class Refusing(StagedCopies):
    """Copies fail."""

    def read(self, index: torch.Tensor, target: torch.Tensor, after: DeviceEvent | None) -> None:
        raise RuntimeError("the device refuses")


@pytest.mark.parametrize(
    ("copies", "outcomes"),
    [(Flipped, [False, False, False]), (Unordered, [True, True, False]), (Refusing, [False, False, False])],
)
def test_copies_that_go_wrong_fail_it(copies: Callable[..., StagedCopies], outcomes: list[bool], rig: Rig) -> None:
    loaded = rig.loaded
    streams = DeferredStreams(Lazy())
    broken = copies(loaded.arena.page_words, streams, slot_bytes=64 * loaded.layout.page_bytes)
    checks = list(check_transfers(replace(rig, loaded=replace(loaded, copies=broken)), new_tokens=4))
    assert [check.passed for check in checks] == outcomes, checks


def test_figures_are_made_and_said(rig: Rig) -> None:
    """Those of a CPU mean nothing; that they are made, and from what, is checked."""
    said: list[str] = []
    report = gpu_check.run_transfers(rig, 1, said.append, num_parts=2, prompt_tokens=40)
    assert min(report["rates"].values()) > 0
    overlap = report["overlap"]
    assert (
        overlap["hidden_share"]
        == Overlap(overlap["compute_s"], overlap["transfer_s"], overlap["together_s"]).hidden_share
    )
    assert [line.split()[0] for line in said] == ["out", "into", "prefill"]


@pytest.mark.parametrize(
    ("compute_s", "transfer_s", "together_s", "hidden"),
    [(4.0, 2.0, 4.0, 1.0), (2.0, 4.0, 6.0, 0.0), (3.0, 3.0, 4.5, 0.5)],
)
def test_what_is_hidden(compute_s: float, transfer_s: float, together_s: float, hidden: float) -> None:
    assert Overlap(compute_s, transfer_s, together_s).hidden_share == hidden
