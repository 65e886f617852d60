"""An instance whose last layers another worker runs, over links: engines in their own threads, as workers have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from actors.engine.engine import Engine
from actors.engine.module_transfer import read_weights, write_weights
from migrate.links.memory_network import MemoryNetwork
from migrate.placement import Placement
from tests.actors.moves.conftest import MakeWorker
from tests.actors.moves.linked_worker import LinkedWorker, join
from tests.engine_driver import greedy, make_prompt
from tests.link_ends import WAIT_S
from tests.reference import assert_greedy, load_reference

PROMPTS = [make_prompt(length, length) for length in (5, 33, 90, 17, 64, 48)]
FolderOf = Callable[[str], Path]


def put_last_layers(home: LinkedWorker, host: LinkedWorker, count: int) -> None:
    """The host runs them from now on; home keeps its own."""
    spec = home.engine.loaded.spec
    layers = range(spec.num_layers - count, spec.num_layers)
    lanes = [(layer, head) for layer in layers for head in range(spec.num_kv_heads)]
    placement = home.at_home.with_layers_moved(layers.start, count, host.name)
    num_blocks = 32

    def take(engine: Engine) -> None:
        granted = engine.grant(home.name, lanes, layers, num_blocks, engine.loaded.fingerprint)
        for layer in granted.layers_to_copy:
            data, checksum = read_weights(home.engine.loaded.layer_memory, layer)
            write_weights(engine.loaded.layer_memory, layer, data.clone(), checksum)
        engine.grants.instances[home.name].use_version(placement.version)

    def switch(engine: Engine) -> None:
        engine.blocks.shrink(engine.blocks.num_blocks - num_blocks)
        engine.use_placement(placement, home.stages)

    host.thread.call_drained(take).result(WAIT_S)
    home.thread.call_drained(switch).result(WAIT_S)


def test_answers_are_those_of_one_worker(family_folder: FolderOf, make_worker: MakeWorker) -> None:
    home, host = make_worker("home"), make_worker("host")
    join(home, host)
    put_last_layers(home, host, 2)
    host.start(PROMPTS[:2], greedy(12))  # its own requests go on beside
    home.start(PROMPTS, greedy(12))
    reference = load_reference(family_folder("llama"))
    assert_greedy(reference, PROMPTS, home.wait())
    assert_greedy(reference, PROMPTS[:2], host.wait())
    assert home.failures == []


def test_a_host_that_has_nothing_of_an_instance_says_so(make_worker: MakeWorker) -> None:
    home, host = make_worker("home"), make_worker("host")
    join(home, host)
    put_last_layers(home, host, 1)
    host.thread.call_drained(lambda engine: engine.release("home")).result(WAIT_S)
    home.start(PROMPTS[:1], greedy(4))
    home.wait_for_failure()
    assert "nothing of instance 'home' is hosted here" in home.failures[0]


def test_requests_go_on_at_home_when_the_link_dies(
    family_folder: FolderOf, make_worker: MakeWorker, network: MemoryNetwork
) -> None:
    home, host = make_worker("home"), make_worker("host")
    join(home, host)
    put_last_layers(home, host, 2)
    network.faults("home", "host").die_after(9)
    home.start(PROMPTS, greedy(12))
    home.wait_for_failure()

    def come_home(engine: Engine) -> None:
        at_home = home.at_home
        engine.use_placement(Placement("home", at_home.layer_workers, at_home.lane_workers, version=7))
        engine.recompute_lost(all_content=True)

    home.thread.call_drained(come_home).result(WAIT_S)
    assert_greedy(load_reference(family_folder("llama")), PROMPTS, home.wait())
