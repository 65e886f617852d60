"""What an engine's arena holds for whom: its own instance, lanes and layers of others, and its own that come home.

Every move of layers or heads ends in one of these calls, at the worker that gets something and at the one that gives it
away (design decisions D2 and D4). They are made in the engine's thread, between steps.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from actors.engine.exports import EarlyExports
from actors.engine.hosting import HostedInstance
from actors.engine.lane_table import Lane, LaneTable
from actors.engine.layer_memory import OWN_INSTANCE
from actors.engine.loading import LoadedModel
from actors.engine.module_transfer import PageChunk, page_chunks, read_chunk, read_weights
from actors.engine.room import GrantRefusedError, OwnMemory, Room
from actors.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class BlocksWanted:
    """What the home of an instance could do with, in blocks of every lane."""

    least: int
    now: int
    """Of its pool."""
    most: int
    """What stays at home has room for so many."""
    live: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Memory that was given to an instance."""

    instance: str
    lanes: tuple[Lane, ...]
    layers: tuple[int, ...]
    num_blocks: int
    """Blocks that every lane of the instance has here now."""
    layers_to_copy: tuple[int, ...]
    """Those of `layers` whose weights are not here, and must be written before they can be run."""
    blocks_given_up: int
    """By how many the own pool has shrunk."""
    moved_blocks: Mapping[int, int]
    """Blocks of the own instance that have become others. If lanes of it lie elsewhere, their hosts must do the same
    (`HostedInstance.move_blocks`) before its next step."""


class Grants:
    """See the module. `instances` has the hosted ones by the id of their home.

    Other threads may attend with hosted heads meanwhile, or copy pages and weights: whatever changes where these lie
    holds `lock`.
    """

    def __init__(self, loaded: LoadedModel, scheduler: Scheduler, early_exports: EarlyExports) -> None:
        self.lock = threading.RLock()
        self.instances: dict[str, HostedInstance] = {}
        self.returning: HostedInstance | None = None
        """Own lanes and layers that have memory here again, while another worker runs them still."""
        self.promised_blocks = 1
        """What the own pool holds at least, were everything at home. No grant takes it, so that requests of the length
        that was promised can always be served, and lanes that are away can always come home."""
        self._loaded = loaded
        self._blocks = scheduler.blocks
        self._own = OwnMemory(loaded, scheduler, early_exports)
        self._limits: dict[str, int] = {}

    def grant(
        self, instance: str, lanes: Collection[Lane], layers: Collection[int], num_blocks: int, fingerprint: bytes
    ) -> Grant:
        """Gives memory to lanes of another's instance and to the weights of its layers, beside what it has here.

        Args:
            num_blocks: of every lane of the instance here, those it has already included; at least the home's blocks.
                Where these have more, it is the home that has given up the blocks beyond.
            fingerprint: of the instance's model, which must be the engine's own.

        Raises:
            GrantRefusedError: there is no room, or it cannot be; nothing was changed.
        """
        hosted = self._known(instance)
        self._check(hosted, lanes, layers, num_blocks, fingerprint)
        granted = self._make_room(hosted, lanes, layers, num_blocks)
        self.instances[instance] = hosted
        return granted

    def offer(
        self, instance: str, lanes: Collection[Lane], layers: Collection[int], wanted: BlocksWanted, fingerprint: bytes
    ) -> int:
        """So many blocks could be granted: what the home has, or more where that is fair, or less where there is no
        room for as many. Changes nothing. Raises GrantRefusedError."""
        hosted, blocks = self._known(instance), wanted.least
        self._check(hosted, lanes, layers, blocks, fingerprint)
        num_lanes = len(lanes) + len(hosted.lanes.lanes)
        had = hosted.lanes.slabs_each * len(hosted.lanes.lanes)
        most = (self._spare_slabs() + had) // num_lanes * self._loaded.arena.slab_pages
        fair = self.fair_blocks(instance, lanes, layers, wanted.live)
        blocks = max(wanted.least, min(most, max(wanted.now, min(wanted.most, fair))))
        # A little more than what is live now, so that the grant itself is not refused a moment later.
        kept = min(self._blocks.num_blocks, -(-self._blocks.num_live * 5 // 4))
        while True:
            try:
                if self._plan(hosted, lanes, layers, blocks).num_blocks >= kept or blocks == wanted.least:
                    return blocks
            except GrantRefusedError:
                if blocks == wanted.least:
                    raise
            blocks = (blocks + wanted.least) // 2

    def read_own(self, chunk: PageChunk) -> torch.Tensor:
        """Pages of own lanes: see `read_chunk`. From any thread, while steps go on."""
        with self.lock:
            return read_chunk(self._loaded.arena, self._loaded.lanes, chunk)

    def read_own_weights(self, layer: int) -> tuple[torch.Tensor, bytes]:
        """Of a layer that is at home: see `read_weights`. From any thread."""
        with self.lock:
            return read_weights(self._loaded.layer_memory, layer)

    def page_chunks(self, lanes: Sequence[Lane], blocks: Sequence[int], max_bytes: int) -> list[PageChunk]:
        """See `page_chunks`. From any thread."""
        return list(page_chunks(self._loaded.arena, lanes, blocks, max_bytes)) if blocks else []

    def fair_blocks(self, instance: str, lanes: Collection[Lane], layers: Collection[int], live_blocks: int) -> int:
        """Blocks of each lane of another's instance, those it has here and `lanes`, if the memory of these and of the
        own lanes is shared out by what both instances have live, as the planner takes it to be (ours). Each counts as
        having one block more than it has, so that memory that nobody uses is shared out evenly."""
        own, arena, hosted = self._loaded.lanes, self._loaded.arena, self._known(instance)
        had, num_lanes = hosted.lanes.slabs_each * len(hosted.lanes.lanes), len(lanes) + len(hosted.lanes.lanes)
        slabs = own.slabs_each * len(own.lanes) + had + arena.num_free_slabs - self._weight_slabs(layers)
        ours, theirs = (self._blocks.num_live + 1) * len(own.lanes), (live_blocks + 1) * num_lanes
        return max(0, slabs) * arena.slab_pages * (live_blocks + 1) // (ours + theirs)

    def blocks_without(self, lanes: Collection[Lane], layers: Collection[int]) -> int:
        """Blocks that the own lanes here could hold if `lanes`, and the weights of `layers`, left."""
        own, arena, memory = self._loaded.lanes, self._loaded.arena, self._loaded.layer_memory
        leaving = [layer for layer in layers if memory.holders(layer) == {OWN_INSTANCE}]
        slabs = own.slabs_each * len(own.lanes) + arena.num_free_slabs
        slabs += sum(arena.slabs_for(memory.packed_bytes(layer)) for layer in leaving)
        return slabs // max(1, len(own.lanes) - len(lanes)) * arena.slab_pages

    def release(self, instance: str, lanes: Collection[Lane] | None = None, layers: Collection[int] = ()) -> int:
        """Takes lanes, and the weights of layers, of a hosted instance away: they have gone elsewhere, or its move was
        given up. Without `lanes` layers go with all of theirs, and with neither, all of it. Returns by how many blocks
        the own pool grew.

        Raises:
            ValueError: it is not hosted here, has not all of these, or would keep a layer without a lane.
        """
        if instance not in self.instances:
            raise ValueError(f"instance {instance!r} is not hosted here; hosted are {sorted(self.instances)}")
        hosted = self.instances[instance]
        if lanes is None and not layers:
            lanes, layers = list(hosted.lanes.lanes), set(hosted.layers)
        gone = {lane for lane in hosted.lanes.lanes if lane[0] in layers} if lanes is None else set(lanes)
        if not gone <= set(hosted.lanes.lanes) or not set(layers) <= hosted.layers:
            raise ValueError(f"instance {instance!r} has not all of lanes {sorted(gone)}, layers {sorted(layers)} here")
        if bare := hosted.layers - set(layers) - {layer for layer, _ in hosted.lanes.lanes - gone}:
            raise ValueError(f"layers {sorted(bare)} would be left without a lane: release them too")
        with self.lock:
            hosted.lanes.remove(gone)
            for layer in layers:
                self._loaded.layer_memory.release(layer, instance)
                hosted.layers.discard(layer)
            if not hosted.lanes.lanes and not hosted.layers:
                del self.instances[instance]
        self._loaded.lanes.deal()
        return self._grow_pool()

    def shrink_pool(self, num_blocks: int) -> Mapping[int, int]:
        """The own pool has so many blocks at most from now on, if `limit_blocks` keeps it there. Returns own live
        blocks and what they have become: see `Grant.moved_blocks`. Raises GrantRefusedError, with nothing changed."""
        room = self._own.plan(0, [], self._foreign_tables(), num_blocks)
        with self.lock:
            self._own.make(room, self._foreign_tables())
        return room.block_moves

    @property
    def limits(self) -> Mapping[str, int]:
        """By worker that has lanes of the own instance: the blocks that it has room for."""
        return self._limits

    def limit_blocks(self, host: str, num_blocks: int | None) -> int:
        """`host` has room for so many blocks of the own instance's lanes; None when it has none of them any more. The
        own pool never grows beyond any host's. Returns by how many blocks it grew.

        Raises:
            ValueError: it has more blocks than that now.
        """
        if num_blocks is not None and num_blocks < self._blocks.num_blocks:
            raise ValueError(
                f"{host!r} has room for {num_blocks} blocks, and the pool has {self._blocks.num_blocks}: it must grant "
                "as many at least"
            )
        self._limits.pop(host, None)
        if num_blocks is not None:
            self._limits[host] = num_blocks
        return self._grow_pool()

    def depart(self, lanes: Collection[Lane], layers: Collection[int]) -> int:
        """See `Engine.lanes_departed`."""
        own, model = self._loaded.lanes, self._loaded.model
        gone = set(lanes) | {lane for lane in own.lanes if lane[0] in layers}
        if not gone <= set(own.lanes) or not set(layers) <= model.layers.keys():
            raise ValueError(f"not all of lanes {sorted(gone)}, layers {sorted(layers)} are here")
        for layer in layers:
            del model.layers[layer]
            self._loaded.layer_memory.release(layer, OWN_INSTANCE)
        own.depart(gone)
        return self._grow_pool()

    def blocks_after_return(self, lanes: Collection[Lane], layers: Collection[int]) -> int:
        """Blocks of the own pool once these have come home; 0 when they cannot."""
        each = self._slabs_after_return(lanes, layers)
        return min(self._blocks.num_blocks, each * self._loaded.arena.slab_pages)

    def begin_return(self, lanes: Collection[Lane], layers: Collection[int], *, in_need: bool = False) -> Grant:
        """See `Engine.lanes_returning`."""
        if self.returning is not None:
            raise GrantRefusedError("other lanes are coming home already: one return at a time")
        own, slab_pages = self._loaded.lanes, self._loaded.arena.slab_pages
        if own.lanes & set(lanes) or self._loaded.model.layers.keys() & set(layers):
            raise GrantRefusedError("some of these lanes and layers are at home")
        hosted = HostedInstance(OWN_INSTANCE, self._loaded, self.lock)
        self._check_modules(hosted, lanes, layers)
        each = self._slabs_after_return(lanes, layers)
        least = 1 if in_need else -(-self.promised_blocks // slab_pages)
        if each < least:
            raise GrantRefusedError(
                f"{len(lanes)} lanes and the weights of {len(layers)} layers cannot come home: {each} slabs are left "
                f"for each of {len(own.lanes) + len(lanes)} lanes, which need {least}; layers that this worker hosts "
                "for others must leave first"
            )
        granted = self._make_room(hosted, lanes, layers, each * slab_pages)
        self.returning = hosted
        return granted

    def end_return(self) -> int:
        """See `Engine.lanes_returned`."""
        hosted = self._take_returning(whole=True)
        with self.lock:
            self._loaded.lanes.adopt(hosted.lanes, list(hosted.lanes.lanes))
        for layer in hosted.layers:
            self._loaded.model.layers[layer] = self._loaded.layer_memory.weights[layer]
        self._loaded.lanes.deal()
        return self._grow_pool()

    def abandon_return(self) -> int:
        """The lanes stay where they are. Returns by how many blocks the pool grew."""
        hosted = self._take_returning(whole=False)
        with self.lock:
            hosted.lanes.remove(list(hosted.lanes.lanes))
            for layer in hosted.layers:
                self._loaded.layer_memory.release(layer, OWN_INSTANCE)
            hosted.layers.clear()
        self._loaded.lanes.deal()
        return self._grow_pool()

    def _slabs_after_return(self, lanes: Collection[Lane], layers: Collection[int]) -> int:
        """Of each lane, as if all of them, those at home and those coming home, shared what there is."""
        own = self._loaded.lanes
        total = own.slabs_each * len(own.lanes) + self._loaded.arena.num_free_slabs - self._weight_slabs(layers)
        each = max(0, total) // max(1, len(own.lanes) + len(lanes))
        return min(each, own.slabs_each) if own.lanes else each

    def _weight_slabs(self, layers: Collection[int]) -> int:
        """For those of the layers whose weights have no memory here."""
        arena, memory = self._loaded.arena, self._loaded.layer_memory
        return sum(arena.slabs_for(memory.packed_bytes(layer)) for layer in layers if layer not in memory)

    def _spare_slabs(self) -> int:
        """Slabs that lanes of others can be given so that, were all that is away at home, what is promised is kept."""
        layout, own, arena = self._loaded.layout, self._loaded.lanes, self._loaded.arena
        tables = [own] if self.returning is None else [own, self.returning.lanes]
        have = sum(table.slabs_each * len(table.lanes) for table in tables) + arena.num_free_slabs
        have -= self._weight_slabs(range(layout.num_layers))  # those that come are among these
        return have - layout.num_layers * layout.num_kv_heads * -(-self.promised_blocks // arena.slab_pages)

    def _take_returning(self, *, whole: bool) -> HostedInstance:
        hosted = self.returning
        if hosted is None:
            raise ValueError("no lanes are coming home")
        if whole and (missing := hosted.layers - self._loaded.layer_memory.weights.keys()):
            raise ValueError(f"the weights of layers {sorted(missing)} have not arrived")
        self.returning = None
        return hosted

    def _check(
        self,
        hosted: HostedInstance,
        lanes: Collection[Lane],
        layers: Collection[int],
        num_blocks: int,
        fingerprint: bytes,
    ) -> None:
        self._check_modules(hosted, lanes, layers)
        if fingerprint != self._loaded.fingerprint:
            raise GrantRefusedError(f"instance {hosted.instance!r} is of another model than this worker's")
        if num_blocks < 1:
            raise GrantRefusedError(f"{num_blocks} blocks were asked for; allowed are 1 or more")

    def _check_modules(self, hosted: HostedInstance, lanes: Collection[Lane], layers: Collection[int]) -> None:
        layout = self._loaded.layout
        all_lanes = {(layer, head) for layer in range(layout.num_layers) for head in range(layout.num_kv_heads)}
        if len(set(lanes)) != len(lanes) or not set(lanes) <= all_lanes - set(hosted.lanes.lanes):
            raise GrantRefusedError(f"lanes {sorted(lanes)}: some exist twice, are there already, or cannot be")
        if not set(layers) <= set(range(layout.num_layers)) - hosted.layers:
            raise GrantRefusedError(f"layers {sorted(layers)}: some are there already, or cannot be")
        if not lanes and not hosted.lanes.lanes:
            raise GrantRefusedError("no lanes were asked for")
        if bare := set(layers) - {layer for layer, _ in (*lanes, *hosted.lanes.lanes)}:
            raise GrantRefusedError(f"layers {sorted(bare)} were to come without a lane of theirs")

    def _known(self, instance: str) -> HostedInstance:
        """What an instance has here, if anything."""
        return self.instances.get(instance) or HostedInstance(instance, self._loaded, self.lock)

    def _plan(self, hosted: HostedInstance, lanes: Collection[Lane], layers: Collection[int], num_blocks: int) -> Room:
        memory, is_return = self._loaded.layer_memory, hosted.instance == OWN_INSTANCE
        each, had = -(-num_blocks // self._loaded.arena.slab_pages), hosted.lanes.slabs_each * len(hosted.lanes.lanes)
        lane_slabs = each * (len(lanes) + len(hosted.lanes.lanes)) - had
        absent = [layer for layer in sorted(layers) if layer not in memory]
        room = self._own.plan(lane_slabs, absent, self._foreign_tables(), num_blocks if is_return else None)
        if not is_return:  # what is in the way now is said first
            spare = self._spare_slabs()
            if lane_slabs > spare:
                raise GrantRefusedError(
                    f"{lane_slabs} slabs are needed for lanes; {max(0, spare)} can be given: own requests keep "
                    f"{self.promised_blocks} blocks, and all own layers their room"
                )
        return room

    def _make_room(
        self, hosted: HostedInstance, lanes: Collection[Lane], layers: Collection[int], num_blocks: int
    ) -> Grant:
        memory, before = self._loaded.layer_memory, self._blocks.num_blocks
        room = self._plan(hosted, lanes, layers, num_blocks)
        with self.lock:
            self._own.make(room, self._foreign_tables())
            hosted.lanes.cut(num_blocks)
            hosted.lanes.add(lanes, num_blocks)
        for layer in layers:
            memory.hold(layer, hosted.instance)
            hosted.layers.add(layer)
        to_copy = tuple(layer for layer in sorted(layers) if layer not in memory.weights)
        return Grant(
            hosted.instance, tuple(sorted(lanes)), tuple(sorted(layers)), num_blocks, to_copy,
            before - room.num_blocks, room.block_moves,
        )  # fmt: skip

    def _foreign_tables(self) -> Sequence[LaneTable]:
        hosted = [*self.instances.values(), *([self.returning] if self.returning is not None else [])]
        return [instance.lanes for instance in hosted]

    def _grow_pool(self) -> int:
        """The own pool is what all its lanes can hold, wherever they lie."""
        capacities = list(self._limits.values())
        if self._loaded.lanes.lanes:
            capacities.append(self._loaded.lanes.num_blocks)
        if self.returning is not None:
            capacities.append(self.returning.num_blocks)
        grown = max(0, min(capacities, default=0) - self._blocks.num_blocks)
        self._blocks.grow(grown)
        return grown
