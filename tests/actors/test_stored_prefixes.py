"""Greedy tokens are those of transformers wherever a prefix comes from: computed, in the store's DRAM, on its disk,
half of it gone, another worker's, or an answer's (real workers, no Serve). Counters say that each case is what it is
called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from actors.addresses import address_of
from actors.engine.config import EngineConfig
from actors.model_source import resolve_model
from kv.disk.settings import DiskSettings
from kv.extents import Lookup
from kv.keys import block_keys
from migrate.load import Role
from tests.engine_driver import greedy, make_prompt
from tests.flow_client import FlowAnswer, FlowClient
from tests.reference import assert_greedy, load_reference
from tests.store_cell import eventually, get, look_up, stats_of
from tests.worker_cell import worker_cell

pytestmark = pytest.mark.cluster

BLOCK = 16
ENGINE = EngineConfig(dtype="float32", block_tokens=BLOCK, kv_cache_blocks=400, max_batch_tokens=128)
ROLES: dict[Role, int] = {"prefill": 2, "decode": 1}
DRAM_BYTES = DISK_BYTES = 100 << 20
ANSWER = 20
HALF = 6 * BLOCK
"""Tokens of the first half of a prompt, where it is stored in two extents."""


@dataclass(frozen=True)
class Counts:
    """What the store has found, in tokens, and what workers have done."""

    dram_tokens: int
    disk_tokens: int
    fetched_tokens: int
    computed_tokens: int
    decode_computed_tokens: int

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) - getattr(other, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Cell:
    client: FlowClient
    reference: Any

    @property
    def store(self) -> Any:
        return self.client.store

    def over(self, worker: int) -> FlowClient:
        """The same with one of the prefill workers only."""
        prefill = [member for member in self.client.members if member.role == "prefill"]
        return replace(self.client, members=(prefill[worker], *(m for m in self.client.members if m.role == "decode")))

    def ask(self, prompts: Sequence[tuple[int, ...]], worker: int, max_tokens: int = ANSWER) -> list[FlowAnswer]:
        """All at once, of one prefill worker. Checked against transformers; on return nothing is held any more."""
        answers = self.over(worker).run(prompts, greedy(max_tokens), together=True)
        assert {(len(answer.tokens), answer.finish_reason) for answer in answers} == {(max_tokens, "length")}
        assert_greedy(self.reference, prompts, [answer.tokens for answer in answers])
        self.wait_free()
        return answers

    def wait_free(self) -> None:
        def is_free() -> bool:
            stats = [get(address_of(m).actor.stats.remote()) for m in self.client.members]
            held = sum(each[name] for each in stats for name in ("live_blocks", "live_requests", "tracked_requests"))
            directory = get(self.client.directory.stats.remote())
            return not held + directory["num_leases"] + directory["num_puts"] + stats_of(self.store).num_tails

        eventually(is_free)

    def counts(self) -> Counts:
        directory = get(self.client.directory.stats.remote())
        stats = {m.worker_id: (m.role, get(address_of(m).actor.stats.remote())) for m in self.client.members}

        def total(name: str, wanted: Role) -> int:
            return sum(int(each[name]) for role, each in stats.values() if role == wanted)

        # Decode workers look a prompt up as well, and have it from DRAM: theirs is what they fetched.
        assert all(each["store_misses"] == {} for _, each in stats.values())
        for role, each in stats.values():
            if role == "prefill":
                hits = each["device_hit_tokens"] + sum(each["store_hit_tokens"].values())
                assert hits == each["cached_prompt_tokens"]
        found, on_disk = directory["hit_blocks"] * BLOCK, directory["hit_blocks_disk"] * BLOCK
        return Counts(
            dram_tokens=found - on_disk,
            disk_tokens=on_disk,
            fetched_tokens=total("fetched_tokens", "prefill"),
            computed_tokens=total("computed_prompt_tokens", "prefill"),
            decode_computed_tokens=total("computed_prompt_tokens", "decode"),
        )

    def to_disk(self) -> None:
        """All that is stored is on disk only."""
        assert get(self.store.flush.remote(30.0))
        get(self.store.set_limits.remote(0, None))
        eventually(lambda: stats_of(self.store).num_extents == 0)  # readers may still hold some
        get(self.store.set_limits.remote(DRAM_BYTES, None))

    def keys(self, prompt: Sequence[int]) -> list[bytes]:
        facts = address_of(self.client.members[0]).facts
        return block_keys(prompt, BLOCK, facts.fingerprint, b"")

    def lookup(self, prompt: Sequence[int]) -> Lookup:
        """What the store has of a prompt. Nothing is leased afterwards."""
        found = look_up(self.client.directory, self.keys(prompt), 60.0)
        if found.lease_id is not None:
            get(self.client.directory.release.remote([found.lease_id]))
        return found

    def tiers(self, prompt: Sequence[int]) -> list[tuple[int, str]]:
        """(blocks, tier) of each extent of a prompt."""
        return [(piece.count, piece.tier) for piece in self.lookup(prompt).slices]

    def to_dram(self, *prompts: Sequence[int], extent: int | None = None) -> None:
        """Brings extents of prompts from the disk: all of them, or the one of that number."""
        wanted = [piece for prompt in prompts for piece in self.lookup(prompt).slices]
        if extent is not None:
            wanted = [wanted[extent]]
        get(self.store.prefetch.remote([part.part_id for piece in wanted for part in piece.parts]))
        ids = {piece.extent_id for piece in wanted}

        def are_there() -> bool:
            now = [piece for prompt in prompts for piece in self.lookup(prompt).slices if piece.extent_id in ids]
            return {piece.tier for piece in now} == {"dram"}

        eventually(are_there)


# Of the second model all but the smallest extents are several parts, whose layers are fetched one after the other.
@pytest.fixture(scope="module", params=[("random/llama-4x8x2", 1), ("random/llama-8x8", 4)], ids=["whole", "by layers"])
def cell(request: pytest.FixtureRequest, ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    model, layer_groups = request.param
    disk = DiskSettings(str(tmp_path_factory.mktemp("disk") / "kv"), DISK_BYTES)
    with worker_cell(model, ROLES, ENGINE, store_bytes=DRAM_BYTES, disk=disk, layer_groups=layer_groups) as client:
        yield Cell(client, load_reference(resolve_model(model).path))


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return make_prompt(length, seed, vocab=250)


def seed_of(tier: str) -> int:
    return {"dram": 1000, "disk": 2000}[tier]


def known(length: int) -> int:
    """Tokens in full blocks of a prompt; its last token is always computed."""
    return (length - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("last", [1, BLOCK - 1, BLOCK])
def test_nothing_is_found_of_a_new_prompt_and_its_last_block_is_handed_over(cell: Cell, last: int) -> None:
    before = cell.counts()
    asked = prompt(5 * BLOCK + last, last)
    (answer,) = cell.ask([asked], worker=0)
    assert answer.cached_tokens == 0
    done = cell.counts() - before
    # What the decode worker finds is the hand-over of this very request.
    assert (done.disk_tokens, done.fetched_tokens, done.computed_tokens) == (0, 0, len(asked))
    assert done.decode_computed_tokens == 0


@pytest.mark.parametrize("tier", ["dram", "disk"])
def test_what_one_worker_computed_is_anothers_hit_and_then_its_own(cell: Cell, tier: str) -> None:
    lengths = [BLOCK + 1, 4 * BLOCK, 9 * BLOCK + 5]
    prompts = [prompt(length, seed_of(tier) + length) for length in lengths]
    first = cell.ask(prompts, worker=0)
    assert [answer.cached_tokens for answer in first] == [0, 0, 0]
    if tier == "disk":
        cell.to_disk()
    assert {each for asked in prompts for _, each in cell.tiers(asked)} == {tier}
    before, read_before = cell.counts(), stats_of(cell.store).disk.num_read_extents
    second = cell.ask(prompts, worker=1)
    done = cell.counts() - before
    hits = [known(length) for length in lengths]
    assert [answer.cached_tokens for answer in second] == hits
    assert (done.fetched_tokens, done.computed_tokens) == (sum(hits), sum(lengths) - sum(hits))
    if tier == "dram":
        assert done.disk_tokens == 0
    else:
        assert done.disk_tokens >= sum(hits)
    assert stats_of(cell.store).disk.num_read_extents - read_before == (len(prompts) if tier == "disk" else 0)
    # The third time the worker has it on its device.
    before = cell.counts()
    third = cell.ask(prompts, worker=1)
    assert [answer.cached_tokens for answer in third] == hits
    assert (cell.counts() - before).fetched_tokens == 0
    assert [a.tokens for a in first] == [a.tokens for a in second] == [a.tokens for a in third]


@pytest.mark.parametrize("tier", ["dram", "disk"])
def test_the_next_turn_of_a_chat_finds_prompt_and_answer(cell: Cell, tier: str) -> None:
    first = prompt(40, 2 + seed_of(tier))
    (answer,) = cell.ask([first], worker=0, max_tokens=30)
    second = (*first, *answer.tokens, *prompt(9, 201))
    if tier == "disk":
        cell.to_disk()
    before = cell.counts()
    (again,) = cell.ask([second], worker=1)
    done = cell.counts() - before
    # 40 + 30 tokens, the last of which has no KV yet: four full blocks, the last two of them with tokens of the answer.
    assert (again.cached_tokens, done.fetched_tokens) == (4 * BLOCK, 4 * BLOCK)
    assert (done.disk_tokens >= 4 * BLOCK) == (tier == "disk")


def in_two_extents(cell: Cell, seed: int) -> tuple[int, ...]:
    """A prompt of two halves and five tokens that worker 0 has computed, on disk only."""
    whole = prompt(2 * HALF + 5, seed)
    cell.ask([whole[: HALF + 1]], worker=0)
    cell.ask([whole], worker=0, max_tokens=1)
    cell.to_disk()
    assert cell.tiers(whole)[:2] == [(HALF // BLOCK, "disk")] * 2
    return whole


def test_the_second_half_was_evicted_from_dram(cell: Cell) -> None:
    whole = in_two_extents(cell, 300)
    cell.to_dram(whole)
    get(cell.store.set_limits.remote(stats_of(cell.store).used_bytes - 1, None))
    eventually(lambda: cell.tiers(whole) == [(HALF // BLOCK, "dram"), (HALF // BLOCK, "disk")])
    get(cell.store.set_limits.remote(DRAM_BYTES, None))
    assert_hit(cell, whole, 2 * HALF, disk_tokens=HALF)


def test_the_first_half_was_evicted_from_dram(cell: Cell) -> None:
    whole = in_two_extents(cell, 301)
    cell.to_dram(whole, extent=1)
    assert cell.tiers(whole) == [(HALF // BLOCK, "disk"), (HALF // BLOCK, "dram")]
    assert_hit(cell, whole, 2 * HALF, disk_tokens=HALF)


def test_the_second_half_was_evicted_from_all_tiers(cell: Cell) -> None:
    whole = in_two_extents(cell, 302)
    # All else is older, so what is used last is all that stays in so little room.
    only = stats_of(cell.store).disk.used_bytes
    while len(cell.tiers(whole)) == 2:
        only -= 1
        get(cell.store.set_limits.remote(0, only))
        only = stats_of(cell.store).disk.used_bytes
    get(cell.store.set_limits.remote(DRAM_BYTES, DISK_BYTES))
    assert cell.tiers(whole) == [(HALF // BLOCK, "disk")]
    assert_hit(cell, whole, HALF, disk_tokens=HALF)


def test_the_first_half_is_gone_from_all_tiers(cell: Cell) -> None:
    whole = in_two_extents(cell, 303)
    first = cell.lookup(whole).slices[0].extent_id
    get(cell.client.directory.drop_extent.remote(first))
    get(cell.store.drop.remote([first]))
    assert cell.tiers(whole) == []
    assert_hit(cell, whole, 0, disk_tokens=0)


def assert_hit(cell: Cell, whole: tuple[int, ...], hit: int, *, disk_tokens: int) -> None:
    """Worker 1 fetches so many tokens of a prompt, those on disk from there, and computes the rest. Then all is stored
    again."""
    before = cell.counts()
    (answer,) = cell.ask([whole], worker=1, max_tokens=1)
    done = cell.counts() - before
    assert answer.cached_tokens == hit
    assert (done.fetched_tokens, done.computed_tokens, done.disk_tokens) == (hit, len(whole) - hit, disk_tokens)
    assert cell.lookup(whole).num_blocks == 2 * HALF // BLOCK


def test_all_of_it_at_once(cell: Cell) -> None:
    """32 requests, four of each kind, on a worker that has computed none of it."""
    kinds: dict[str, list[tuple[int, ...]]] = {}
    kinds["disk"] = [prompt(150 + number, 400 + number) for number in range(4)]
    cell.ask(kinds["disk"], worker=0, max_tokens=1)
    halves = [prompt(2 * HALF + 5, 410 + number) for number in range(8)]
    cell.ask([whole[: HALF + 1] for whole in halves], worker=0, max_tokens=1)
    cell.ask(halves, worker=0, max_tokens=1)
    cell.to_disk()
    kinds["first half in dram, second on disk"] = halves[:4]
    for whole in halves[:4]:
        cell.to_dram(whole, extent=0)
    kinds["first half on disk, second gone"] = halves[4:]
    for whole in halves[4:]:
        second = cell.lookup(whole).slices[1].extent_id
        get(cell.client.directory.drop_extent.remote(second))
        get(cell.store.drop.remote([second]))
    kinds["dram"] = [prompt(100 + number, 420 + number) for number in range(4)]
    cell.ask(kinds["dram"], worker=0, max_tokens=1)
    turns = [prompt(30, 430 + number) for number in range(4)]
    answers = cell.ask(turns, worker=0)
    kinds["next turn"] = [
        (*first, *answer.tokens, *prompt(7, 440)) for first, answer in zip(turns, answers, strict=True)
    ]
    begun = [prompt(6 * BLOCK + 3, 450 + number) for number in range(4)]
    cell.ask(begun, worker=0, max_tokens=1)
    kinds["a longer prompt"] = [(*asked, *prompt(50, 450)) for asked in begun]
    kinds["cold, last block full"] = [prompt(6 * BLOCK, 460 + number) for number in range(4)]
    kinds["cold, one token in the last block"] = [prompt(6 * BLOCK + 1, 470 + number) for number in range(4)]
    hits = {
        "disk": 9 * BLOCK, "first half in dram, second on disk": 2 * HALF, "first half on disk, second gone": HALF,
        "dram": 6 * BLOCK, "next turn": 3 * BLOCK, "a longer prompt": 6 * BLOCK,
        "cold, last block full": 0, "cold, one token in the last block": 0,
    }  # fmt: skip
    tiers = {kind: {tier for asked in asked_for for _, tier in cell.tiers(asked)} for kind, asked_for in kinds.items()}
    assert tiers["disk"] == tiers["first half on disk, second gone"] == {"disk"}
    assert tiers["first half in dram, second on disk"] == {"dram", "disk"}
    assert tiers["dram"] == tiers["next turn"] == tiers["a longer prompt"] == {"dram"}

    asked_for = [asked for kind in kinds for asked in kinds[kind]]
    assert len(asked_for) == 32
    before = cell.counts()
    got = cell.ask(asked_for, worker=1)
    done = cell.counts() - before
    cached = {kind: {got.pop(0).cached_tokens for _ in kinds[kind]} for kind in kinds}
    assert cached == {kind: {hit} for kind, hit in hits.items()}
    assert done.fetched_tokens == 4 * sum(hits.values())
    assert done.computed_tokens == sum(map(len, asked_for)) - done.fetched_tokens
    assert done.disk_tokens == 4 * (9 * BLOCK + HALF + HALF)
    assert done.decode_computed_tokens == 0
