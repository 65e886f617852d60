"""What an engine's arena holds for whom: its own instance, lanes and layers of others, and its own that come home.

Every move of layers or heads ends in one of these calls, at the worker that gets something and at the one that gives it
away (design decisions D2 and D4). They are made in the engine's thread, between steps.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from actors.engine.exports import EarlyExports
from actors.engine.hosting import HostedInstance
from actors.engine.lane_table import Lane, LaneTable
from actors.engine.layer_memory import OWN_INSTANCE
from actors.engine.loading import LoadedModel
from actors.engine.room import GrantRefusedError, OwnMemory
from actors.engine.scheduler import Scheduler


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

    Another thread may attend with hosted heads meanwhile: whatever changes where these lie holds `lock`.
    """

    def __init__(self, loaded: LoadedModel, scheduler: Scheduler, early_exports: EarlyExports) -> None:
        self.lock = threading.RLock()
        self.instances: dict[str, HostedInstance] = {}
        self.returning: HostedInstance | None = None
        """Own lanes and layers that have memory here again, while another worker runs them still."""
        self._loaded = loaded
        self._blocks = scheduler.blocks
        self._own = OwnMemory(loaded, scheduler, early_exports)
        self._limits: dict[str, int] = {}

    def grant(
        self, instance: str, lanes: Collection[Lane], layers: Collection[int], num_blocks: int, fingerprint: bytes
    ) -> Grant:
        """Gives memory to lanes of another's instance and to the weights of its layers. What it has here already stays,
        with as many blocks; more lanes, layers and blocks can be added.

        Args:
            num_blocks: of every lane of the instance here, those it has already included; at least the home's blocks.
            fingerprint: of the instance's model, which must be the engine's own.

        Raises:
            GrantRefusedError: there is no room, or it cannot be; nothing was changed.
        """
        known = self.instances.get(instance)
        hosted = known or HostedInstance(instance, self._loaded, self.lock)
        self._check(hosted, lanes, layers)
        if fingerprint != self._loaded.fingerprint:
            raise GrantRefusedError(f"instance {instance!r} is of another model than this worker's")
        if num_blocks < max(1, hosted.num_blocks):
            raise GrantRefusedError(
                f"{num_blocks} blocks were asked for; allowed are {max(1, hosted.num_blocks)}, which it has, or more"
            )
        each = -(-num_blocks // self._loaded.arena.slab_pages)
        had = hosted.lanes.slabs_each * len(hosted.lanes.lanes)
        lane_slabs = each * (len(lanes) + len(hosted.lanes.lanes)) - had
        granted = self._make_room(hosted, lanes, layers, num_blocks, lane_slabs)
        self.instances[instance] = hosted
        return granted

    def release(self, instance: str, lanes: Collection[Lane] | None = None, layers: Collection[int] = ()) -> int:
        """Takes lanes, and layers with all their lanes, of a hosted instance away: they have gone elsewhere, or its
        move was given up. With neither, all of it. Returns by how many blocks the own pool grew.

        Raises:
            ValueError: it is not hosted here, has not all of these, or would keep a layer without a lane.
        """
        if instance not in self.instances:
            raise ValueError(f"instance {instance!r} is not hosted here; hosted are {sorted(self.instances)}")
        hosted = self.instances[instance]
        if lanes is None and not layers:
            lanes, layers = list(hosted.lanes.lanes), set(hosted.layers)
        gone = set(lanes or ()) | {lane for lane in hosted.lanes.lanes if lane[0] in layers}
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

    def begin_return(self, lanes: Collection[Lane], layers: Collection[int]) -> Grant:
        """See `Engine.lanes_returning`."""
        if self.returning is not None:
            raise GrantRefusedError("other lanes are coming home already: one return at a time")
        own, arena, memory = self._loaded.lanes, self._loaded.arena, self._loaded.layer_memory
        if own.lanes & set(lanes) or self._loaded.model.layers.keys() & set(layers):
            raise GrantRefusedError("some of these lanes and layers are at home")
        hosted = HostedInstance(OWN_INSTANCE, self._loaded, self.lock)
        self._check(hosted, lanes, layers)
        weights = sum(arena.slabs_for(memory.packed_bytes(layer)) for layer in layers if layer not in memory)
        # As if all lanes, those at home and those coming home, shared what there is.
        total = own.slabs_each * len(own.lanes) + arena.num_free_slabs - weights
        each = max(0, total) // (len(own.lanes) + len(lanes))
        if own.lanes:
            each = min(each, own.slabs_each)
        if each < 1:
            raise GrantRefusedError(
                f"{len(lanes)} lanes and {weights} slabs of weights cannot come home: {max(0, total)} slabs are left "
                f"for {len(own.lanes) + len(lanes)} lanes, which need one each"
            )
        granted = self._make_room(hosted, lanes, layers, each * arena.slab_pages, each * len(lanes))
        self.returning = hosted
        return granted

    def end_return(self) -> int:
        """See `Engine.lanes_returned`."""
        hosted = self._take_returning(whole=True)
        self._loaded.lanes.adopt(hosted.lanes, list(hosted.lanes.lanes))
        for layer in hosted.layers:
            self._loaded.model.layers[layer] = self._loaded.layer_memory.weights[layer]
        self._loaded.lanes.deal()
        return self._grow_pool()

    def abandon_return(self) -> int:
        """The lanes stay where they are. Returns by how many blocks the pool grew."""
        hosted = self._take_returning(whole=False)
        hosted.lanes.remove(list(hosted.lanes.lanes))
        for layer in hosted.layers:
            self._loaded.layer_memory.release(layer, OWN_INSTANCE)
        self._loaded.lanes.deal()
        return self._grow_pool()

    def _take_returning(self, *, whole: bool) -> HostedInstance:
        hosted = self.returning
        if hosted is None:
            raise ValueError("no lanes are coming home")
        if whole and (missing := hosted.layers - self._loaded.layer_memory.weights.keys()):
            raise ValueError(f"the weights of layers {sorted(missing)} have not arrived")
        self.returning = None
        return hosted

    def _check(self, hosted: HostedInstance, lanes: Collection[Lane], layers: Collection[int]) -> None:
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

    def _make_room(
        self, hosted: HostedInstance, lanes: Collection[Lane], layers: Collection[int], num_blocks: int, lane_slabs: int
    ) -> Grant:
        memory, before = self._loaded.layer_memory, self._blocks.num_blocks
        is_return = hosted.instance == OWN_INSTANCE
        absent = [layer for layer in sorted(layers) if layer not in memory]
        room = self._own.plan(lane_slabs, absent, self._foreign_tables(), num_blocks if is_return else None)
        with self.lock:
            self._own.make(room, self._foreign_tables())
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
