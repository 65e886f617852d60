"""Attention over heads that lie on several workers is attention, and what another worker answers is looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from actors.engine.attention.interface import AttentionBackend, LayerKv
from actors.engine.attention.torch_backend import TorchAttention
from actors.engine.batch import PackedStep, StepBatch, StepShape
from actors.engine.head_work import (
    HeadDone,
    HeadTables,
    HeadWork,
    decode_head_done,
    decode_head_work,
    encode_head_done,
    encode_head_work,
)
from actors.engine.split_heads import HeadRoute, HeadsLostError, StepHeads
from actors.engine.step_messages import WorkLimits, WorkMessageError
from migrate.placement import Placement
from tests.engine.attention_contract import AttentionContract
from tests.engine.paged_layout import PagedCase, Piece, Shape, make_case

LAYER = 1
STEP = PackedStep(torch.zeros(5, dtype=torch.int64), StepShape(1, 0, 0), 0, ())


def placement_of(num_heads: int, away: str) -> Placement:
    """Heads of layer 1: the first on x and the last on y, as far as one is left at home."""
    placement = Placement.at_home("home", 2, num_heads)
    if num_heads > 1 and "x" in away:
        placement = placement.with_heads_moved([LAYER], [0], "x")
    if num_heads > 2 and "y" in away:
        placement = placement.with_heads_moved([LAYER], [num_heads - 1], "y")
    return placement


class Others:
    """The way to the other workers, which share the arena with the home: only who computes differs."""

    def __init__(self) -> None:
        self.works: list[tuple[str, HeadWork]] = []
        self.spoil: Callable[[HeadDone], HeadDone] = lambda done: done
        self.backends = {name: TorchAttention() for name in "xy"}
        self.kv: LayerKv
        self.group = 1

    def attend(self, worker: str, work: HeadWork, done: Callable[[HeadDone], None]) -> None:
        self.works.append((worker, work))
        heads = len(work.heads)
        q, k, v = work.qkv.split([heads * self.group, heads, heads], dim=1)
        kv = replace(self.kv, page_of=self.kv.page_of[list(work.heads)])
        out = self.backends[worker].attend(q, k, v, kv)
        answer = HeadDone(work.instance, work.version, work.step_id, work.layer, out.contiguous())
        done(self.spoil(decode_head_done(*encode_head_done(answer))))


class Split:
    """A backend that attends with some heads by itself, and has others attend with the rest."""

    name = "torch"

    def __init__(self, away: str) -> None:
        self.others = Others()
        self._away = away
        self._own = TorchAttention()

    def begin(self, batch: StepBatch) -> None:
        for backend in (self._own, *self.others.backends.values()):
            backend.begin(batch)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: LayerKv) -> torch.Tensor:
        placement = placement_of(k.shape[1], self._away)
        self.others.kv, self.others.group = kv, q.shape[1] // k.shape[1]
        heads = StepHeads(HeadRoute(placement, self.others), 7, STEP, [])
        own = list(placement.local_heads(LAYER, "home"))
        return heads.attend(LAYER, q, k, v, replace(kv, page_of=kv.page_of[own]), self._own)


class TestOneWorkerElsewhere(AttentionContract):
    block_tokens: ClassVar[int] = 4

    def make_backend(self) -> AttentionBackend:
        return Split("x")


class TestTwoWorkersElsewhere(AttentionContract):
    block_tokens: ClassVar[int] = 4

    def make_backend(self) -> AttentionBackend:
        return Split("xy")


def case() -> PagedCase:
    return make_case(Shape(kv_heads=3, group=2, head_dim=8, block_tokens=4), [Piece(5, 1, True), Piece(0, 6, False)], 1)


def test_tables_go_along_once_a_step_and_worker() -> None:
    others, paged = Others(), case()
    for backend in (own := TorchAttention(), *others.backends.values()):
        backend.begin(paged.batch)
    others.kv, others.group = paged.kv, 2
    placement = Placement.at_home("home", 2, 3).with_heads_moved([0, 1], [2], "x").with_heads_moved([1], [0], "y")
    for step_id in (7, 8):
        heads = StepHeads(HeadRoute(placement, others), step_id, STEP, [3, 4])
        for layer in (0, 1):
            kv = replace(paged.kv, page_of=paged.kv.page_of[list(placement.local_heads(layer, "home"))])
            heads.attend(layer, paged.q, paged.k, paged.v, kv, own)
    sent = [(worker, work.step_id, work.layer, work.tables is not None) for worker, work in others.works]
    assert sent == [
        ("x", 7, 0, True), ("x", 7, 1, False), ("y", 7, 1, True),
        ("x", 8, 0, True), ("x", 8, 1, False), ("y", 8, 1, True),
    ]  # fmt: skip
    assert others.works[0][1].tables is not None
    assert others.works[0][1].tables.fresh_blocks.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda done: replace(done, out=None, error="no room"), "worker 'x' did not attend with its heads: no room"),
        (lambda done: replace(done, step_id=6), "expected one to"),
        (lambda done: replace(done, layer=0), "expected one to"),
        (lambda done: replace(done, out=done.out[:, :1]), "the output is"),
        (lambda done: replace(done, out=done.out.double()), "the output is"),
    ],
)
def test_answers_that_are_none(spoil: Callable[[HeadDone], HeadDone], words: str) -> None:
    split, paged = Split("x"), case()
    split.others.spoil = spoil
    split.begin(paged.batch)
    with pytest.raises(HeadsLostError, match=words):
        split.attend(paged.q, paged.k, paged.v, paged.kv)


LIMITS = WorkLimits(num_layers=2, hidden_size=8, dtype=torch.float32, vocab_size=9, block_tokens=4, num_blocks=6)


def test_messages_come_out_as_they_went_in() -> None:
    work = HeadWork("home", 3, 4, 1, range(1, 3), torch.rand(1, 8, 8), None)
    assert decode_head_work(*encode_head_work(work), LIMITS) == work
    done = HeadDone("home", 3, 4, 1, None, "no room")
    assert decode_head_done(*encode_head_done(done)) == done


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda work: replace(work, layer=2), "layer 2"),
        (
            lambda work: replace(work, tables=HeadTables(STEP, torch.zeros(0, dtype=torch.int64))),
            "a step without rows|the",
        ),
        (lambda work: replace(work, version=-1), "version"),
        (lambda work: replace(work, heads=range(-1, 1)), "heads"),
    ],
)
def test_messages_that_are_none(change: Callable[[HeadWork], HeadWork], words: str) -> None:
    work = HeadWork("home", 3, 4, 1, range(1, 3), torch.rand(1, 8, 8), None)
    with pytest.raises(WorkMessageError, match=words):
        decode_head_work(*encode_head_work(change(work)), LIMITS)
    for meta in (b"", b"[]", b"{}", b'{"instance": 1}'):
        with pytest.raises(WorkMessageError):
            decode_head_work(meta, (work.qkv,), LIMITS)
        with pytest.raises(WorkMessageError):
            decode_head_done(meta, (work.qkv,))
