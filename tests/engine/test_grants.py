"""What an engine gives to others of its memory, what it gets back, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.engine.engine import Engine
from actors.engine.grants import BlocksWanted
from actors.engine.layer_memory import OWN_INSTANCE
from actors.engine.module_transfer import PageChunk, TransferError
from actors.engine.request import EngineRequest
from actors.engine.room import GrantRefusedError
from tests.engine.conftest import MakeEngine
from tests.engine.two_workers import HOME, HOST, TwoWorkers
from tests.engine_driver import greedy, make_prompt, run_prompts
from tests.reference import assert_greedy, load_reference

BLOCK = 16


def all_lanes(*layers: int) -> list[tuple[int, int]]:
    return [(layer, head) for layer in layers for head in range(2)]


def books(engine: Engine) -> object:
    """Everything that a refusal must leave as it was."""
    loaded, blocks = engine.loaded, engine.blocks
    tables = [loaded.lanes, *(hosted.lanes for hosted in engine.grants.instances.values())]
    return (
        [(list(table.places()), table.num_blocks, table.version) for table in tables],
        [loaded.arena.is_free(slab) for slab in range(loaded.arena.num_slabs)],
        {layer: (run, loaded.layer_memory.holders(layer)) for layer, run in loaded.weight_slabs.items()},
        (blocks.num_blocks, blocks.num_live, blocks.num_cached, blocks.num_evictions, blocks.findable()),
        [(s.request_id, s.status, list(s.block_ids)) for s in engine.scheduler.sequences()],
        engine.grants.returning,
        loaded.arena.pages.clone().view(-1).tolist(),
    )


def room(engine: Engine) -> tuple[int, int]:
    """Blocks of its own, and slabs that nobody has."""
    return engine.blocks.num_blocks, engine.loaded.arena.num_free_slabs


def test_departed_layer_gives_exactly_its_bytes_to_the_source(llama_folder: Path, make_engine: MakeEngine) -> None:
    home = make_engine(llama_folder, kv_cache_blocks=8, slab_pages=1)
    host = make_engine(llama_folder, kv_cache_blocks=64, slab_pages=1)
    layout, arena = home.loaded.layout, home.loaded.arena
    refused = EngineRequest("big", make_prompt(10 * BLOCK), greedy(BLOCK))
    assert home.refusal(refused) is not None

    # A layer of the tiny Llama: two norms of 64, q 64x64, k and v 16x64 each, o 64x64, gate, up and down 64x96 each.
    weights = 4 * (2 * 64 + 2 * 64 * 64 + 2 * 16 * 64 + 3 * 64 * 96)
    page = 2 * 16 * 8 * 4
    assert (layout.page_bytes, arena.slab_bytes) == (page, page)
    freed = -(-weights // page) + 2 * 8
    predicted_blocks = 8 + freed // 4

    pair = TwoWorkers(home, host)
    host.grant(HOME, all_lanes(2), [2], predicted_blocks, home.loaded.fingerprint)
    host.grants.instances[HOME].use_version(1)
    home.grants.limit_blocks(HOST, predicted_blocks)
    assert home.lanes_departed([], [2]) == predicted_blocks - 8
    assert arena.num_free_slabs == freed % 4
    pair.place = pair.place.with_layers_moved(2, 1, HOST)
    assert home.refusal(refused) is None
    outputs = run_prompts(home, [refused.prompt_token_ids], greedy(BLOCK))
    assert_greedy(load_reference(llama_folder), [refused.prompt_token_ids], outputs)


def test_pool_of_the_home_grows_no_further_than_its_hosts(llama_folder: Path, make_engine: MakeEngine) -> None:
    home = make_engine(llama_folder, kv_cache_blocks=8, slab_pages=1)
    with pytest.raises(ValueError, match="must grant as many at least"):
        home.grants.limit_blocks("a", 7)
    home.grants.limit_blocks("a", 11)
    home.grants.limit_blocks("b", 9)
    assert home.lanes_departed([], [2]) == 1
    assert home.grants.limit_blocks("b", None) == 2
    assert home.grants.limit_blocks("a", 1000) == home.blocks.num_blocks - 11 > 0
    assert home.blocks.num_blocks == home.loaded.lanes.num_blocks


def test_live_blocks_make_way_and_answers_go_on(llama_folder: Path, make_engine: MakeEngine) -> None:
    """The blocks of two answers lie at the high end when their memory is given away; a third one's are cached."""
    engine = make_engine(llama_folder, kv_cache_blocks=24, slab_pages=4)
    prompts = [make_prompt(60, 1), make_prompt(50, 2)]
    first = EngineRequest("first", make_prompt(200, 3), greedy(1))
    assert engine.add(first) is None
    requests = [EngineRequest(f"r{i}", prompt, greedy(20)) for i, prompt in enumerate(prompts)]
    outputs: dict[str, list[int]] = {"first": [], "r0": [], "r1": []}
    for request in requests:
        assert engine.add(request) is None

    def step() -> None:
        for event in engine.step().events:
            outputs[event.request_id].append(event.token_id or 0)

    for _ in range(3):
        step()
    assert engine.blocks.num_cached > 0
    live = [block for sequence in engine.scheduler.running for block in sequence.block_ids]
    granted = engine.grant("other", all_lanes(0, 1), [0], 12, engine.loaded.fingerprint)
    # Four lanes of three slabs come from six lanes, two each: of six slabs, 24 blocks, four stay, 16 blocks.
    assert (granted.blocks_given_up, engine.blocks.num_blocks) == (8, 16)
    assert granted.moved_blocks.keys() == {block for block in live if block >= 16} != set()
    assert granted.layers_to_copy == ()
    while engine.has_work:
        step()
    engine.check_idle()
    assert_greedy(load_reference(llama_folder), prompts, [outputs["r0"], outputs["r1"]])
    assert engine.release("other") == granted.blocks_given_up
    assert engine.blocks.num_blocks == 24


@pytest.mark.parametrize(
    ("lanes", "layers", "blocks", "words"),
    [
        ([(3, 0)], [], 4, "cannot be"),
        ([(0, 2)], [], 4, "cannot be"),
        ([(0, 0), (0, 0)], [], 4, "exist twice"),
        ([(0, 0)], [3], 4, "layers .3.: some are there already, or cannot be"),
        ([(0, 0)], [1], 4, "without a lane"),
        ([], [], 4, "no lanes"),
        ([(0, 0)], [], 0, "allowed are 1"),
        (all_lanes(0, 1, 2), [], 1000, "6 own lanes can give up"),
        (all_lanes(0, 1, 2), [], 24, "a request here may need 140"),
    ],
)
def test_refused_grant_changes_nothing(
    lanes: list[tuple[int, int]],
    layers: list[int],
    blocks: int,
    words: str,
    llama_folder: Path,
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(llama_folder, kv_cache_blocks=32, slab_pages=4)
    run_prompts(engine, [make_prompt(40, 5)], greedy(2))
    assert engine.add(EngineRequest("r", make_prompt(100), greedy(40))) is None
    engine.step()
    before = books(engine)
    with pytest.raises(GrantRefusedError, match=words):
        engine.grant("other", lanes, layers, blocks, engine.loaded.fingerprint)
    assert books(engine) == before


@pytest.mark.parametrize("held_by", ["fetch", "export"])
def test_blocks_that_others_copy_are_not_moved(held_by: str, llama_folder: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(llama_folder, kv_cache_blocks=8, slab_pages=1)
    filler = EngineRequest("filler", make_prompt(5 * BLOCK - 1), greedy(1))
    held = EngineRequest(
        "held", make_prompt(20, 2), greedy(1), external_tokens=16 if held_by == "fetch" else 0,
        hand_over=held_by == "export",
    )  # fmt: skip
    assert engine.add(filler) is None
    assert engine.add(held) is None
    engine.step()
    before = books(engine)
    with pytest.raises(GrantRefusedError, match="being copied by exports or fetches"):
        engine.grant("other", [(0, 0)], [], 8, engine.loaded.fingerprint)
    assert books(engine) == before
    if held_by == "fetch":
        engine.abort("held")
    else:
        engine.release_export("held")
    assert engine.grant("other", [(0, 0)], [], 8, engine.loaded.fingerprint).blocks_given_up == 2


def test_slabs_that_others_copy_make_no_way_for_weights(llama_folder: Path, make_engine: MakeEngine) -> None:
    """A fetch fills block 8. Its pages lie where the weights of layer 2 were, which is the only place for them."""
    engine = make_engine(llama_folder, kv_cache_blocks=8, slab_pages=1)
    engine.lanes_departed([], [2])
    for request_id, length in (("fills 0 to 7", 8 * BLOCK), ("held", BLOCK)):
        prompt = make_prompt(length)
        assert engine.add(EngineRequest(request_id, prompt, greedy(1), external_tokens=length)) is None
    engine.step()
    assert engine.scheduler.fetching["held"].block_ids == [8]
    engine.abort("fills 0 to 7")
    engine.fetched("fills 0 to 7", 0)
    before = books(engine)
    with pytest.raises(GrantRefusedError, match=r"neighbouring slabs, .* lie in between; later they will not"):
        engine.grant("other", all_lanes(2), [2], 4, engine.loaded.fingerprint)
    assert books(engine) == before
    engine.fetched("held", BLOCK - 1)
    assert engine.grant("other", all_lanes(2), [2], 4, engine.loaded.fingerprint).layers_to_copy == (2,)


def test_return_is_refused_where_live_requests_need_the_room(llama_folder: Path, make_engine: MakeEngine) -> None:
    home = make_engine(llama_folder, kv_cache_blocks=8, slab_pages=1)
    home.lanes_departed([], [1, 2])
    grown = home.blocks.num_blocks
    assert home.add(EngineRequest("long", make_prompt(30), greedy(400))) is None
    before = books(home)
    with pytest.raises(GrantRefusedError, match="a request here may need"):
        home.lanes_returning(all_lanes(1, 2), [1, 2])
    assert books(home) == before
    home.abort("long")
    granted = home.lanes_returning(all_lanes(1, 2), [1, 2])
    assert (home.blocks.num_blocks, granted.num_blocks, granted.layers_to_copy) == (8, 8, (1, 2))
    with pytest.raises(ValueError, match=r"weights of layers \[1, 2\] have not arrived"):
        home.lanes_returned()
    returning = home.grants.returning
    assert returning is not None
    assert home.grants.abandon_return() == grown - 8
    # A copy that was on its way when the return was given up.
    after = home.loaded.arena.pages.clone()
    with pytest.raises(TransferError, match=r"lanes .* are not here"):
        returning.write_pages(PageChunk(((1, 0),), (0,)), torch.ones(1, 1, *after.shape[1:]))
    with pytest.raises(TransferError, match="layer 1 was not granted"):
        returning.write_weights(1, torch.zeros(3, dtype=torch.uint8), b"")
    assert torch.equal(home.loaded.arena.pages, after)


def test_shared_weights_lie_once_and_leave_with_the_last(llama_folder: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(llama_folder, kv_cache_blocks=32)
    memory, fingerprint = engine.loaded.layer_memory, engine.loaded.fingerprint
    runs = dict(memory.slabs)
    for name in ("a", "b"):
        assert engine.grant(name, all_lanes(2), [2], 4, fingerprint).layers_to_copy == ()
    engine.lanes_departed([], [2])
    engine.release("a")
    assert memory.slabs == runs
    engine.release("b", layers=[2])
    assert memory.slabs.keys() == {0, 1}
    assert engine.grants.instances == {}


def test_a_layer_that_is_given_back_leaves_the_heads_that_were_there(
    llama_folder: Path, make_engine: MakeEngine
) -> None:
    engine = make_engine(llama_folder, kv_cache_blocks=32)
    fingerprint, before = engine.loaded.fingerprint, room(engine)
    engine.grant("a", [(2, 0)], [], 4, fingerprint)
    hosted, memory = engine.grants.instances["a"], engine.loaded.layer_memory
    with_heads = room(engine), list(hosted.lanes.places())
    engine.grant("a", [(2, 1)], [2], 4, fingerprint)
    engine.release("a", [(2, 1)], [2])
    assert (room(engine), list(hosted.lanes.places())) == with_heads
    assert (hosted.layers, memory.holders(2)) == (set(), {OWN_INSTANCE})
    # Weights alone, where all heads were here.
    engine.grant("a", [(2, 1)], [], 4, fingerprint)
    engine.grant("a", [], [2], 4, fingerprint)
    engine.release("a", [], [2])
    assert (set(hosted.lanes.lanes), hosted.layers) == ({(2, 0), (2, 1)}, set())
    engine.release("a")
    assert room(engine) == before


def test_another_model_is_refused(llama_folder: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(llama_folder)
    with pytest.raises(GrantRefusedError, match="another model"):
        engine.grant("other", [(0, 0)], [], 4, b"x" * 16)
    with pytest.raises(ValueError, match="not hosted here"):
        engine.release("other")


def test_what_is_promised_to_own_requests_is_not_given_away(llama_folder: Path, make_engine: MakeEngine) -> None:
    """Nor is the room for layers that are away: they may have to come home at any moment."""
    engine = make_engine(llama_folder, kv_cache_blocks=12, slab_pages=1)
    fingerprint = engine.loaded.fingerprint
    engine.grants.promised_blocks = 8
    engine.lanes_departed([], [2])
    before = books(engine)
    # Of the 12 blocks of 6 lanes 8 stay, which leaves 24 slabs.
    with pytest.raises(GrantRefusedError, match="24 can be given: own requests keep 8 blocks"):
        engine.grant("other", all_lanes(1), [], 13, fingerprint)
    assert books(engine) == before
    wanted = BlocksWanted(least=1, now=20, most=1000, live=1000)
    assert engine.grants.offer("other", all_lanes(1), [], wanted, fingerprint) == 12
    assert books(engine) == before
    engine.grant("other", all_lanes(1), [], 12, fingerprint)
    granted = engine.lanes_returning(all_lanes(2), [2])
    assert granted.num_blocks == engine.blocks.num_blocks == 8


def test_memory_is_shared_out_by_what_is_live(llama_folder: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(llama_folder, kv_cache_blocks=12, slab_pages=1)
    lanes = all_lanes(1)
    # 72 pages; 6 lanes of its own with nothing live, and two that come: so many blocks live count as one more.
    assert engine.grants.fair_blocks("other", lanes, [], live_blocks=0) == 72 // 8
    assert engine.grants.fair_blocks("other", lanes, [], live_blocks=5) == 72 * 6 // (6 + 12)
    assert engine.add(EngineRequest("r", make_prompt(2 * BLOCK), greedy(9))) is None
    engine.step()
    assert engine.blocks.num_live == 2
    assert engine.grants.fair_blocks("other", lanes, [], live_blocks=5) == 72 * 6 // (3 * 6 + 12)
