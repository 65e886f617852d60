"""Any order of grants, releases, departures, returns and requests: every slab has one owner, the books agree, and
whatever was written is still what is read."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from actors.engine.engine import Engine
from actors.engine.lane_table import Lane, LaneTable
from actors.engine.module_transfer import read_weights, write_weights
from actors.engine.request import EngineRequest
from actors.engine.room import GrantRefusedError
from actors.engine.sequence import SequenceState
from tests.engine.conftest import MakeEngine
from tests.engine_driver import greedy, make_prompt

BLOCK = 16
LANES = [(layer, head) for layer in range(3) for head in range(2)]
NAMES = st.sampled_from(["a", "b"])
Pages = dict[tuple[Lane, int], int]
"""By lane and place in the request: the page that another thread was told."""


class GrantsMachine(RuleBasedStateMachine):
    """Requests are scheduled and counted as computed, but nothing runs: their pages are filled with a number for each
    block of each request, and lane. No two requests have a prefix in common."""

    def __init__(self, make_engine: MakeEngine, folder: Path) -> None:
        super().__init__()
        self.make_engine, self.folder = make_engine, folder
        self.numbers, self.names = itertools.count(1), itertools.count()
        self.content: dict[tuple[str, int], dict[Lane, float]] = {}
        """By request and place in it."""
        self.owner_of_key: dict[bytes, tuple[str, int]] = {}
        self.hosted: dict[str, dict[tuple[Lane, int], float]] = {"a": {}, "b": {}}
        """By instance: what is in each lane and block."""
        self.told: dict[str, Pages] = {}
        """By request: where a fetch writes, or an export reads, whatever is granted meanwhile."""

    @initialize(slab_pages=st.sampled_from([1, 2, 4]), blocks=st.integers(5, 14))
    def start(self, slab_pages: int, blocks: int) -> None:
        self.engine: Engine = self.make_engine(self.folder, kv_cache_blocks=blocks, slab_pages=slab_pages)
        self.weights = {layer: read_weights(self.engine.loaded.layer_memory, layer) for layer in range(3)}
        self.weights = {layer: (data.clone(), checksum) for layer, (data, checksum) in self.weights.items()}

    # Requests

    @rule(
        lengths=st.lists(st.integers(1, 36), min_size=1, max_size=3),
        kind=st.sampled_from(["plain", "fetch", "hand over"]),
        is_first_ended=st.booleans(),
    )
    def add(self, lengths: list[int], kind: str, is_first_ended: bool) -> None:
        names = [self.add_one(tokens, kind if tokens == lengths[-1] else "plain") for tokens in lengths]
        self.step()
        if is_first_ended and len(names) > 1:  # so that the others lie higher than they need to
            self.engine.abort(names[0])

    def add_one(self, tokens: int, kind: str) -> str:
        name = f"r{next(self.names)}"
        self.engine.add(
            EngineRequest(
                name, make_prompt(tokens, seed=int(name[1:])), greedy(8), hand_over=kind == "hand over",
                external_tokens=tokens if kind == "fetch" else 0,
            )
        )  # fmt: skip
        return name

    @rule()
    def step(self) -> None:
        scheduler = self.engine.scheduler
        plan = scheduler.schedule()
        assert all(block < self.engine.blocks.num_blocks for block in plan.fresh_blocks)
        for fetch in plan.fetches:
            self.told[fetch.sequence.request_id] = self.pages_of(fetch.sequence)
        for chunk in scheduler.returned(plan):
            sequence = chunk.sequence
            first, stop = sequence.num_computed, sequence.num_computed + chunk.num_tokens
            indices = range(first // BLOCK, -(-stop // BLOCK))
            point = scheduler.dirty_blocks.point()
            for (lane, index), page in self.pages_of(sequence).items():
                if index in indices:
                    self.write(sequence, lane, index, page)
            scheduler.computed(chunk)
            assert set(scheduler.dirty_blocks.since(point)) == {sequence.block_ids[index] for index in indices}
            self.note_keys(sequence)
            if sequence.num_uncomputed == 0:
                sequence.append(7)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        sequences = self.engine._answers.sequences
        if sequences:
            sequence = sequences[data.draw(st.sampled_from(sorted(sequences)))]
            if sequence.request.hand_over and sequence.num_computed:
                self.told[sequence.request_id] = self.pages_of(sequence)
                self.engine._answers.remove(sequence, keep_blocks=True)
            else:
                self.engine.abort(sequence.request_id)

    @rule()
    def end_exports(self) -> None:
        for name, sequence in list(self.engine.scheduler.exports.items()):
            computed = -(-sequence.num_computed // BLOCK)
            told = [
                (page, self.content[name, at][lane]) for (lane, at), page in self.told[name].items() if at < computed
            ]
            self.expect(told)
            self.engine.release_export(name)

    @rule()
    def end_fetches(self) -> None:
        for name, sequence in list(self.engine.scheduler.fetching.items()):
            for (lane, index), page in self.told[name].items():
                if index >= sequence.num_registered:
                    self.write(sequence, lane, index, page)
            self.engine.fetched(name, sequence.external_tokens)
            self.note_keys(sequence)

    # Memory

    @rule(name=NAMES, data=st.data(), more=st.integers(0, 3))
    def grant(self, name: str, data: st.DataObject, more: int) -> None:
        engine, known = self.engine, self.engine.grants.instances.get(name)
        had, had_layers = (set(known.lanes.lanes), known.layers) if known else (set(), set())
        lanes = data.draw(st.sets(st.sampled_from(LANES), max_size=4)) - had
        layers = data.draw(st.sets(st.sampled_from([0, 1, 2]))) & {layer for layer, _ in lanes | had} - had_layers
        before = self.owners(), engine.blocks.num_blocks
        num_blocks = max(1, known.num_blocks if known else 1) + more
        try:
            granted = engine.grant(name, lanes, layers, num_blocks, engine.loaded.fingerprint)
        except GrantRefusedError:
            assert (self.owners(), engine.blocks.num_blocks) == before
            return
        assert engine.blocks.num_blocks == before[1] - granted.blocks_given_up
        self.arrive(granted.layers_to_copy)
        hosted = engine.grants.instances[name]
        assert hosted.num_blocks == num_blocks
        for lane, pages in self.pages(hosted.lanes).items():
            for block, page in enumerate(pages[: hosted.num_blocks]):
                if (lane, block) not in self.hosted[name]:
                    self.hosted[name][lane, block] = self.fill(page)

    @rule(name=NAMES, data=st.data())
    def release(self, name: str, data: st.DataObject) -> None:
        hosted, before = self.engine.grants.instances.get(name), self.engine.blocks.num_blocks
        if hosted is not None:
            lanes = data.draw(st.none() | st.sets(st.sampled_from(sorted(hosted.lanes.lanes)), min_size=1))
            more = data.draw(st.sets(st.sampled_from([0, 1, 2]))) & hosted.layers
            bare = hosted.layers - {layer for layer, _ in hosted.lanes.lanes - (lanes or set())}
            grown = self.engine.release(name, lanes, bare | more if lanes else ())
            assert self.engine.blocks.num_blocks == before + grown
            here = hosted.lanes.lanes
            self.hosted[name] = {key: value for key, value in self.hosted[name].items() if key[0] in here}

    @rule(data=st.data())
    def depart(self, data: st.DataObject) -> None:
        own, layers = self.engine.loaded.lanes, sorted(self.engine.loaded.model.layers)
        gone = data.draw(st.sets(st.sampled_from(layers), max_size=1)) if len(layers) > 1 else set()
        lanes = data.draw(st.sets(st.sampled_from(sorted(own.lanes)), max_size=2))
        lanes |= {lane for lane in own.lanes if lane[0] in gone}
        if lanes != set(own.lanes):
            self.engine.lanes_departed(lanes, gone)
            for told in self.told.values():
                for key in [key for key in told if key[0] in lanes]:
                    del told[key]

    @rule(data=st.data(), is_given_up=st.booleans())
    def come_home(self, data: st.DataObject, is_given_up: bool) -> None:
        engine, own = self.engine, self.engine.loaded.lanes
        away = sorted(set(LANES) - own.lanes)
        if not away:
            return
        lanes = data.draw(st.sets(st.sampled_from(away), min_size=1))
        layers = {layer for layer, _ in lanes} - engine.loaded.model.layers.keys()
        before = self.owners(), engine.blocks.num_blocks
        try:
            granted = engine.lanes_returning(lanes, layers)
        except GrantRefusedError:
            assert (self.owners(), engine.blocks.num_blocks) == before
            return
        self.check_books()
        self.check_content()
        returning = engine.grants.returning
        assert returning is not None
        if is_given_up:
            engine.grants.abandon_return()
            return
        self.arrive(granted.layers_to_copy)
        for lane, pages in self.pages(returning.lanes).items():
            for block, owner in self.blocks_with_content().items():
                self.content[owner][lane] = self.fill(pages[block])
        engine.lanes_returned()
        for sequence in [*engine.scheduler.fetching.values(), *engine.scheduler.exports.values()]:
            fresh = self.pages_of(sequence).items()
            self.told[sequence.request_id] |= {place: page for place, page in fresh if place[0] in lanes}

    # What must hold

    @invariant()
    def check_books(self) -> None:
        engine, arena = self.engine, self.engine.loaded.arena
        taken = [slab for table in self.tables() for _, slab in table.places()]
        taken += [slab for run in engine.loaded.weight_slabs.values() for slab in run]
        free = [slab for slab in range(arena.num_slabs) if arena.is_free(slab)]
        assert sorted(taken + free) == list(range(arena.num_slabs))
        for table in self.tables():
            assert len(list(table.places())) == table.slabs_each * len(table.lanes)
        engine.blocks.check_integrity()
        assert 1 <= engine.blocks.num_blocks <= engine.loaded.lanes.num_blocks
        if engine.grants.returning is None:
            assert engine.blocks.num_blocks == engine.loaded.lanes.num_blocks
        held = [block for sequence in self.sequences() for block in sequence.block_ids]
        assert len(set(held)) == engine.blocks.num_live
        assert engine.loaded.model.layers.keys() <= engine.loaded.layer_memory.weights.keys()

    @invariant()
    def check_content(self) -> None:
        own = self.pages(self.engine.loaded.lanes)
        blocks = self.blocks_with_content().items()
        expected = [(own[lane][block], self.content[owner][lane]) for block, owner in blocks for lane in own]
        for name, hosted in self.engine.grants.instances.items():
            pages = self.pages(hosted.lanes)
            expected += [(pages[lane][block], value) for (lane, block), value in self.hosted[name].items()]
        self.expect(expected)
        memory = self.engine.loaded.layer_memory
        for layer in memory.weights:
            assert torch.equal(memory.bytes_of(layer), self.weights[layer][0])

    # The test's own

    def sequences(self) -> list[SequenceState]:
        return [*self.engine._answers.sequences.values(), *self.engine.scheduler.exports.values()]

    def blocks_with_content(self) -> dict[int, tuple[str, int]]:
        found = {block: self.owner_of_key[key] for key, block in self.engine.blocks._block_of.items()}
        for sequence in self.sequences():
            for index in range(-(-sequence.num_computed // BLOCK) if sequence.block_ids else 0):
                found[sequence.block_ids[index]] = sequence.request_id, index
        return found

    def note_keys(self, sequence: SequenceState) -> None:
        for index, key in enumerate(sequence.keys(BLOCK)):
            self.owner_of_key[key] = sequence.request_id, index

    def tables(self) -> list[LaneTable]:
        grants = self.engine.grants
        hosted = [*grants.instances.values(), *([grants.returning] if grants.returning else [])]
        return [self.engine.loaded.lanes, *(instance.lanes for instance in hosted)]

    def owners(self) -> list[Any]:
        return [list(table.places()) for table in self.tables()] + [self.engine.loaded.weight_slabs]

    def pages(self, table: LaneTable) -> dict[Lane, list[int]]:
        layers = {layer for layer, _ in table.lanes}
        rows = {layer: table.pages(layer).tolist() for layer in layers}
        return {(layer, head): rows[layer][table.heads(layer).index(head)] for layer, head in table.lanes}

    def pages_of(self, sequence: SequenceState) -> Pages:
        own = self.pages(self.engine.loaded.lanes)
        places = itertools.product(own, enumerate(sequence.block_ids))
        return {(lane, index): own[lane][block] for lane, (index, block) in places}

    def write(self, sequence: SequenceState, lane: Lane, index: int, page: int) -> None:
        self.content.setdefault((sequence.request_id, index), {})[lane] = self.fill(page)

    def fill(self, page: int) -> float:
        value = float(next(self.numbers))
        self.engine.loaded.arena.pages[page] = value
        return value

    def expect(self, expected: list[tuple[int, float]]) -> None:
        """Pages, and the number that each is full of."""
        if expected:
            content = self.engine.loaded.arena.pages[[page for page, _ in expected]].flatten(1)
            values = torch.tensor([value for _, value in expected])
            assert torch.equal(content.amin(1), values)
            assert torch.equal(content.amax(1), values)

    def arrive(self, layers: tuple[int, ...]) -> None:
        memory = self.engine.loaded.layer_memory
        for layer in layers:
            memory.bytes_of(layer).fill_(0xFF)
            write_weights(memory, layer, *self.weights[layer])


def test_any_order_keeps_books_and_contents(llama_folder: Path, make_engine: MakeEngine) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: GrantsMachine(make_engine, llama_folder),
        settings=settings(
            max_examples=30, stateful_step_count=40, deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )  # fmt: skip
