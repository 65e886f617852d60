"""Attention of a layer some of whose KV heads lie on other workers: theirs and its own are computed at the same time.

The home alone needs the joined result, for the output projection, so it waits for the others inside the layer: the one
place where a step waits for a link. What it waits for is served by a thread that does nothing else
(`actors.moves.head_service`), so that two homes that attend for each other cannot wait for one another in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from actors.engine.attention.interface import AttentionBackend, LayerKv
from actors.engine.batch import PackedStep
from actors.engine.head_work import HeadDone, HeadTables, HeadWork, RemoteHeads
from migrate.placement import Placement


class HeadsLostError(Exception):
    """Another worker has not attended with its heads: nothing can come of the step."""

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(f"worker {worker!r} did not attend with its heads: {reason}")
        self.worker = worker
        self.reason = reason


@dataclass(frozen=True, slots=True)
class HeadRoute:
    """Where an instance's heads are, and the way to those elsewhere."""

    placement: Placement
    remote: RemoteHeads


class StepHeads:
    """The heads of one step, or of a run of its layers. Used from the engine's thread.

    Args:
        step: the step's integers, on the host CPU.
        fresh_blocks: as in StageWork.
    """

    def __init__(self, route: HeadRoute, step_id: int, step: PackedStep, fresh_blocks: Sequence[int]) -> None:
        self._route = route
        self._step_id = step_id
        self._tables = HeadTables(step, torch.tensor(fresh_blocks, dtype=torch.int64))
        self._told: set[str] = set()

    def are_here(self, layer: int) -> bool:
        """Whether all of the layer's heads lie here."""
        placement = self._route.placement
        return len(placement.local_heads(layer, placement.home)) == placement.num_kv_heads

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: LayerKv, backend: AttentionBackend
    ) -> torch.Tensor:
        """`AttentionBackend.attend` for all heads of a layer; `kv` has the lanes that lie here, `backend` attends with
        them.

        Raises:
            HeadsLostError: another worker's did not come.
        """
        placement, group = self._route.placement, q.shape[1] // k.shape[1]
        if self.are_here(layer):
            return backend.attend(q, k, v, kv)
        own = placement.local_heads(layer, placement.home)
        asked = [
            (worker, heads, self._ask(worker, layer, heads, q, k, v))
            for worker in sorted(set(placement.lane_workers[layer]) - {placement.home})
            for heads in [placement.local_heads(layer, worker)]
        ]
        out = torch.empty_like(q)
        by_head = out.view(len(q), placement.num_kv_heads, group, -1)
        mine = list(own)
        rows = q.view_as(by_head)[:, mine].flatten(1, 2)
        by_head[:, mine] = backend.attend(rows, k[:, mine], v[:, mine], kv).view(len(q), len(mine), group, -1)
        for worker, heads, answer in asked:
            theirs = by_head[:, heads[0] : heads[-1] + 1]
            theirs.copy_(self._result(worker, layer, answer, theirs).view_as(theirs))
        return out

    def _ask(
        self, worker: str, layer: int, heads: Sequence[int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Future[HeadDone]:
        placement, group = self._route.placement, q.shape[1] // k.shape[1]
        first, stop = heads[0], heads[-1] + 1
        qkv = torch.cat((q[:, first * group : stop * group], k[:, first:stop], v[:, first:stop]), dim=1).to("cpu")
        tables = None if worker in self._told else self._tables
        self._told.add(worker)
        answer: Future[HeadDone] = Future()
        work = HeadWork(placement.home, placement.version, self._step_id, layer, range(first, stop), qkv, tables)
        self._route.remote.attend(worker, work, answer.set_result)
        return answer

    def _result(self, worker: str, layer: int, answer: Future[HeadDone], theirs: torch.Tensor) -> torch.Tensor:
        """[T, H * group, head_dim] for `theirs` [T, H, group, head_dim]"""
        done = answer.result()  # RemoteHeads ends every work, if need be with an error
        if done.out is None:
            raise HeadsLostError(worker, done.error or "no output")
        placement = self._route.placement
        expected = placement.home, placement.version, self._step_id, layer
        got = done.instance, done.version, done.step_id, done.layer
        if got != expected:
            raise HeadsLostError(worker, f"the answer is to {got}; expected one to {expected}")
        shape = theirs.flatten(1, 2).shape
        if done.out.shape != shape or done.out.dtype != theirs.dtype:
            raise HeadsLostError(
                worker,
                f"the output is {done.out.dtype} {list(done.out.shape)}; expected {theirs.dtype} {list(shape)}",
            )
        return done.out.to(theirs.device)
