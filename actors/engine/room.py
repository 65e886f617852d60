"""Room for lanes and weights in an engine's arena, beside what lies there: what has to make way, worked out first and
carried out only when all of it can be had.

Three things make way. The engine's own lanes give up their last slabs, which shrinks its pool: blocks with the highest
ids go, cached ones are evicted, live ones become lower blocks. And a lane's slab that lies where weights need a run is
exchanged for another one. What others read or write meanwhile - blocks of exports and of fetches - stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.engine.block_manager import NoFreeBlocksError
from actors.engine.exports import EarlyExports
from actors.engine.lane_table import LaneTable
from actors.engine.loading import LoadedModel
from actors.engine.scheduler import Scheduler
from actors.engine.slab_plan import RunPlan, SlabUse, plan_runs


class GrantRefusedError(Exception):
    """There is no room, or what was asked for cannot be. Nothing was changed; the text says why."""


class NotNowError(GrantRefusedError):
    """What is in the way goes away by itself, and soon: copies of blocks that exports and fetches make."""


@dataclass(frozen=True, slots=True)
class Room:
    """What is to be done, and what for."""

    layers: tuple[int, ...]
    """Layers that get memory for their weights."""
    slabs_given_up: int
    """Of each of the engine's own lanes."""
    num_blocks: int
    """Of the engine's own pool afterwards."""
    block_moves: dict[int, int]
    """Own live blocks, and what they become."""
    runs: RunPlan


class OwnMemory:
    """The arena with its engine's own lanes, pool and requests. Used from the engine's thread, between steps."""

    def __init__(self, loaded: LoadedModel, scheduler: Scheduler, early_exports: EarlyExports) -> None:
        self._loaded = loaded
        self._scheduler = scheduler
        self._early_exports = early_exports

    def plan(
        self,
        lane_slabs: int,
        layers: Sequence[int],
        hosted: Sequence[LaneTable],
        max_blocks: int | None = None,
    ) -> Room:
        """How `lane_slabs` slabs for lanes, and runs for the weights of `layers`, can be had. Changes nothing.

        Args:
            hosted: the lanes of others in this arena. They stay as many, but may be moved.
            max_blocks: the own pool must not be larger afterwards.

        Raises:
            GrantRefusedError: they cannot be had, or (NotNowError) not now.
        """
        arena, lanes, blocks = self._loaded.arena, self._loaded.lanes, self._scheduler.blocks
        counts = [arena.slabs_for(self._loaded.layer_memory.packed_bytes(layer)) for layer in layers]
        needed = lane_slabs + sum(counts)
        given_up = 0
        if needed > arena.num_free_slabs:
            given_up = -(-(needed - arena.num_free_slabs) // max(1, len(lanes.lanes)))
            if given_up >= lanes.slabs_each:
                spare = max(0, lanes.slabs_each - 1) * len(lanes.lanes)
                raise GrantRefusedError(
                    f"{needed} slabs are needed; {arena.num_free_slabs} are free, and the {len(lanes.lanes)} own lanes "
                    f"can give up {spare} of theirs"
                )
        num_blocks = blocks.num_blocks if max_blocks is None else min(blocks.num_blocks, max_blocks)
        if given_up:
            num_blocks = min(num_blocks, (lanes.slabs_each - given_up) * arena.slab_pages)
        pinned = self._scheduler.pinned_blocks() | self._early_exports.pinned_blocks()
        block_moves = self._plan_shrink(num_blocks, pinned) if num_blocks < blocks.num_blocks else {}
        runs = plan_runs(self._slab_uses(given_up, pinned, hosted), counts)
        if runs is None:
            passes = pinned and plan_runs(self._slab_uses(given_up, set(), hosted), counts) is not None
            where = f"weights of {len(layers)} layers need runs of {max(counts)} neighbouring slabs, and "
            if passes:
                raise NotNowError(
                    f"{where}the {len(pinned)} blocks that exports and fetches hold lie in between; later they will not"
                )
            raise GrantRefusedError(f"{where}other weights lie in between")
        return Room(tuple(layers), given_up, num_blocks, block_moves, runs)

    def make(self, room: Room, hosted: Sequence[LaneTable]) -> None:
        """Carries out a plan that was made since the last step."""
        arena, lanes, scheduler = self._loaded.arena, self._loaded.lanes, self._scheduler
        shrunk = scheduler.blocks.num_blocks - room.num_blocks
        if shrunk:
            lanes.copy_blocks(room.block_moves)
            scheduler.relocate(room.block_moves, room.num_blocks)
            scheduler.blocks.shrink(shrunk)
        lanes.give_up(room.slabs_given_up)
        moves = room.runs.moves
        arena.claim(moves.values())
        arena.copy_slabs(moves)
        for table in (lanes, *hosted):
            moved = {place: moves[slab] for place, slab in table.places() if slab in moves}
            if moved:
                table.relocate(moved)
        arena.give_back(moves.keys())
        for layer, run in zip(room.layers, room.runs.runs, strict=True):
            self._loaded.layer_memory.place(layer, run)
        self._loaded.copies.computed()

    def _plan_shrink(self, num_blocks: int, pinned: set[int]) -> dict[int, int]:
        scheduler = self._scheduler
        tokens = num_blocks * scheduler.settings.block_tokens
        longest = max((s.num_prompt_tokens + s.request.sampling.max_tokens for s in scheduler.sequences()), default=0)
        if longest > tokens:
            raise GrantRefusedError(
                f"the own pool would have {num_blocks} blocks, which are {tokens} tokens; a request here may need "
                f"{longest}"
            )
        try:
            moves = scheduler.blocks.plan_shrink(num_blocks)
        except NoFreeBlocksError as error:
            raise GrantRefusedError(f"{error}; when some of them have ended, later, there may be room") from error
        if not pinned.isdisjoint(moves):
            raise NotNowError(
                f"{len(pinned & moves.keys())} blocks beyond the {num_blocks} that would be left are being copied by "
                "exports or fetches; later they will not be"
            )
        return moves

    def _slab_uses(self, given_up: int, pinned: set[int], hosted: Sequence[LaneTable]) -> list[SlabUse]:
        arena, lanes = self._loaded.arena, self._loaded.lanes
        uses = [SlabUse.FREE if arena.is_free(slab) else SlabUse.FIXED for slab in range(arena.num_slabs)]
        for table in hosted:
            for _, slab in table.places():
                uses[slab] = SlabUse.MOVABLE
        pinned_places = {block // arena.slab_pages for block in pinned}
        staying = lanes.slabs_each - given_up
        for (_, index), slab in lanes.places():
            if index >= staying:
                uses[slab] = SlabUse.FREE
            elif index not in pinned_places:
                uses[slab] = SlabUse.MOVABLE
        return uses
