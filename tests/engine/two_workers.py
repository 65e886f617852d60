"""An instance over two engines in one process, for tests: its home, a host, and moves between them as a coordinator
makes them (grant, copy while serving, copy what is new, switch, release)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from actors.engine.arena import Arena
from actors.engine.batch import PackedStep, pack_step
from actors.engine.dirty_blocks import DirtyBlocks
from actors.engine.engine import Engine
from actors.engine.head_work import HeadDone, HeadTables, HeadWork, decode_head_done, encode_head_done
from actors.engine.hosting import HostedInstance
from actors.engine.lane_table import Lane, LaneTable
from actors.engine.layer_memory import LayerMemory
from actors.engine.module_transfer import page_chunks, read_chunk, read_weights, write_chunk, write_weights
from actors.engine.split_heads import HeadRoute, StepHeads
from actors.engine.stage_work import StageWork
from actors.engine.step_plan import StepPlan
from actors.engine.step_runner import StepOutput
from migrate.placement import Placement

HOME, HOST = "home", "host"


def fill_with_nan(engine: Engine, slabs: Collection[int]) -> None:
    """Every byte 0xFF, which is NaN in every dtype: whoever reads what nobody wrote gets it everywhere."""
    arena = engine.loaded.arena
    arena.pages.view(torch.uint8).view(arena.num_slabs, -1)[list(slabs)] = 0xFF


def free_slabs(arena: Arena) -> list[int]:
    return [slab for slab in range(arena.num_slabs) if arena.is_free(slab)]


def copy_pages(
    source: tuple[Arena, LaneTable], target: tuple[Arena, LaneTable], lanes: Sequence[Lane], blocks: Sequence[int]
) -> None:
    for chunk in page_chunks(source[0], lanes, blocks, 5 * source[0].layout.page_bytes):
        write_chunk(*target, chunk, read_chunk(*source, chunk))


def copy_weights(source: LayerMemory, target: LayerMemory, layers: Sequence[int]) -> None:
    for layer in layers:
        data, checksum = read_weights(source, layer)
        write_weights(target, layer, data.clone(), checksum)


class TwoWorkers:
    """Takes the place of the home's step runner, and is the way to the host's heads; `place` says what lies where."""

    graphs = None

    def __init__(self, home: Engine, host: Engine) -> None:
        spec = home.loaded.spec
        self.home, self.host = home, host
        self.place = Placement.at_home(HOME, spec.num_layers, spec.num_kv_heads)
        self.hidden: list[torch.Tensor] = []
        self.num_remote_stages = self.num_remote_heads = 0
        self._step_id = 0
        self._step: PackedStep | None = None
        self._fresh: list[int] = []
        home._in_flight._runner = self  # type: ignore[assignment]

    @property
    def hosted(self) -> HostedInstance:
        return self.host.grants.instances[HOME]

    # The step runner

    def run(self, plan: StepPlan) -> StepOutput:
        home, model = self.home, self.home.loaded.model
        self._step_id += 1
        self._step = pack_step(plan.decodes, plan.prefills, home.block_tokens)
        self._fresh = plan.fresh_blocks
        batch = self._step.batch(self._step.packed, home.block_tokens)
        hidden = model.embed(batch)
        heads = StepHeads(HeadRoute(self.place, self), self._step_id, self._step, self._fresh)
        for layer in range(self.place.num_layers):
            if self.place.layer_workers[layer] == HOME:
                hidden = model.run_layers(hidden, range(layer, layer + 1), batch, heads=heads)
            elif layer == 0 or self.place.layer_workers[layer - 1] == HOME:
                layers = range(layer, self.place.layers_on(HOST)[-1] + 1)
                hidden = self._run_remote(layers, hidden)
        self.hidden.append(hidden.clone())
        return StepOutput(hidden, hidden.index_select(0, batch.sampled_rows))

    def work(self, layers: range, hidden: torch.Tensor) -> StageWork:
        assert self._step is not None
        fresh = torch.tensor(self._fresh, dtype=torch.int64)
        return StageWork(HOME, self.place.version, self._step_id, layers, self._step, hidden.contiguous(), fresh)

    def _run_remote(self, layers: range, hidden: torch.Tensor) -> torch.Tensor:
        done = self.hosted.run(self.work(layers, hidden))
        assert done.hidden is not None, done.error
        self.num_remote_stages += 1
        return done.hidden

    # The way to heads elsewhere

    def attend(self, worker: str, work: HeadWork, done: Callable[[HeadDone], None]) -> None:
        assert worker == HOST
        answer = self.hosted.attend(work)
        assert answer.error is None
        self.num_remote_heads += 1
        done(decode_head_done(*encode_head_done(answer)))

    def head_work(self, layer: int, heads: range, qkv: torch.Tensor) -> HeadWork:
        assert self._step is not None
        tables = HeadTables(self._step, torch.tensor(self._fresh, dtype=torch.int64))
        return HeadWork(HOME, self.place.version, self._step_id, layer, heads, qkv, tables)

    # Moves

    def move(self, place: Placement, between: Callable[[], object] = lambda: None) -> None:
        """Takes what `place` has elsewhere there. `between` is called while full blocks have been copied and the
        instance serves on."""
        outwards = set(place.lanes_on(HOST)) - set(self.place.lanes_on(HOST))
        layers = [i for i in range(place.num_layers) if place.layer_workers[i] != self.place.layer_workers[i]]
        if outwards:
            self._send(place, sorted(outwards), layers, between)
        else:
            self._fetch(place, sorted(set(self.place.lanes_on(HOST)) - set(place.lanes_on(HOST))), layers, between)

    def _send(self, place: Placement, lanes: list[Lane], layers: list[int], between: Callable[[], object]) -> None:
        home, host = self.home, self.host
        fill_with_nan(host, free_slabs(host.loaded.arena))
        granted = host.grant(HOME, lanes, layers, home.blocks.num_blocks, home.loaded.fingerprint)
        copy_weights(home.loaded.layer_memory, host.loaded.layer_memory, granted.layers_to_copy)
        here, there = (home.loaded.arena, home.loaded.lanes), (host.loaded.arena, self.hosted.lanes)
        self._copy(here, there, lanes, home.scheduler.dirty_blocks, between)
        self.place = place
        self.hosted.use_version(place.version)
        home.grants.limit_blocks(HOST, granted.num_blocks)
        home.lanes_departed(lanes, layers)

    def _fetch(self, place: Placement, lanes: list[Lane], layers: list[int], between: Callable[[], object]) -> None:
        home, host = self.home, self.host
        fill_with_nan(home, free_slabs(home.loaded.arena))
        granted = home.lanes_returning(lanes, layers)
        self.hosted.move_blocks(granted.moved_blocks)
        copy_weights(host.loaded.layer_memory, home.loaded.layer_memory, granted.layers_to_copy)
        assert home.grants.returning is not None
        here, there = (home.loaded.arena, home.grants.returning.lanes), (host.loaded.arena, self.hosted.lanes)
        self._copy(there, here, lanes, self.hosted.dirty_blocks, between)
        self.place = place
        home.lanes_returned()
        if place.is_home:
            home.grants.limit_blocks(HOST, None)
        else:
            self.hosted.use_version(place.version)
        host.release(HOME, lanes, layers)

    def _copy(
        self,
        source: tuple[Arena, LaneTable],
        target: tuple[Arena, LaneTable],
        lanes: list[Lane],
        dirty: DirtyBlocks,
        between: Callable[[], object],
    ) -> None:
        blocks = self.home.blocks
        # Full blocks alone, or in every other move whatever there is: then the last ones are copied twice.
        point, early = dirty.point(), blocks.occupied() if self.place.version % 2 else blocks.findable()
        copy_pages(source, target, lanes, early)
        between()
        written = set(dirty.since(point))
        copy_pages(source, target, lanes, [b for b in blocks.occupied() if b in written or b not in set(early)])
