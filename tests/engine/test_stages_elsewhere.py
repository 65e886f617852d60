"""An engine some of whose layers other workers run: the same answers as with all of them at home."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.config import ConfigError, EngineConfig
from actors.engine.engine import Engine
from actors.engine.hosted_slice import TRIES
from actors.engine.layer_arrival import LayerArrival
from actors.engine.loading import load_model
from actors.engine.request import EngineRequest, SamplingParams
from actors.engine.stage_work import StageDone
from migrate.placement import Placement
from tests.engine.conftest import MakeEngine
from tests.engine.stage_hosts import HandDriven, Host, put_elsewhere, run_in_flight, take_in
from tests.engine.test_layer_arrival import PREFIX_TOKENS, PROMPT, Source
from tests.engine_driver import Answer, greedy, make_prompt, run_requests
from tests.reference import assert_greedy, load_reference

Apart = tuple[Engine, HandDriven]
MakeApart = Callable[..., Apart]
HOME = Placement.at_home("home", 3, 2)
SPLITS = {
    "first": HOME.with_layers_moved(0, 1, "x"),
    "middle": HOME.with_layers_moved(1, 1, "x"),
    "last": HOME.with_layers_moved(1, 2, "x"),
    "all": HOME.with_layers_moved(0, 3, "x"),
    "two hosts": HOME.with_layers_moved(1, 1, "x").with_layers_moved(2, 1, "y"),
    "between hosts": HOME.with_layers_moved(0, 1, "x").with_layers_moved(2, 1, "y"),
}


@pytest.fixture(scope="module")
def make_apart(make_engine: MakeEngine) -> MakeApart:
    """An engine whose layers lie as in a placement, and its hosts."""

    def make(folder: Path, placement: Placement, **more: object) -> Apart:
        engine = make_engine(folder, **({"max_batch_tokens": 40, "max_running_requests": 8} | more))
        hosts = {name: Host(load_model(folder, engine.config)) for name in placement.workers() - {"home"}}
        remote = HandDriven(hosts)
        put_elsewhere(engine, placement, remote)
        return engine, remote

    return make


def placement_for(engine_heads: int, name: str) -> Placement:
    placement = SPLITS[name]
    lanes = tuple((worker,) * engine_heads for worker in placement.layer_workers)
    return Placement(placement.home, placement.layer_workers, lanes, placement.version)


@pytest.mark.parametrize(
    ("family", "split"),
    [*(("llama", split) for split in SPLITS), *itertools.product(("qwen3", "opt"), ("first", "middle", "last"))],
)
def test_greedy_equals_transformers(
    family: str, split: str, family_folders: dict[str, Path], make_apart: MakeApart
) -> None:
    """Prompts of one and several chunks, and the same again, which finds their blocks."""
    folder = family_folders[family]
    engine, remote = make_apart(folder, placement_for(4 if family == "opt" else 2, split), max_steps_in_flight=3)
    prompts = [make_prompt(length, length) for length in (1, 16, 31, 90, 17)]
    for _ in range(2):
        requests = [EngineRequest(f"r{i}", prompt, greedy(7)) for i, prompt in enumerate(prompts)]
        answers, most = run_in_flight(engine, remote, requests)
        assert_greedy(load_reference(folder), prompts, [answer.tokens for answer in answers.values()])
        assert most == 3
    assert engine.counters.cached_prompt_tokens == 16 + 80 + 16


def sampled(index: int, **more: object) -> EngineRequest:
    sampling = SamplingParams(max_tokens=16, temperature=0.9, top_p=0.95, seed=index, ignore_eos=True)
    return EngineRequest(f"r{index}", make_prompt(9 + 13 * index, index), sampling, **more)  # type: ignore[arg-type]


def test_sampled_answers_are_those_of_an_engine_by_itself(
    llama_folder: Path, make_apart: MakeApart, make_engine: MakeEngine
) -> None:
    requests = [sampled(index) for index in range(6)]
    alone = run_requests(make_engine(llama_folder), requests)
    apart, _ = run_in_flight(*make_apart(llama_folder, SPLITS["middle"]), requests)
    assert {name: a.tokens for name, a in apart.items()} == {name: a.tokens for name, a in alone.items()}


def test_a_pool_too_small_for_all_preempts_and_answers_all(
    llama_folder: Path, make_apart: MakeApart, make_engine: MakeEngine
) -> None:
    requests = [EngineRequest(f"r{i}", make_prompt(30, i), greedy(50)) for i in range(3)]
    alone = run_requests(make_engine(llama_folder), requests)
    engine, remote = make_apart(llama_folder, SPLITS["last"], kv_cache_blocks=11, max_steps_in_flight=3)
    apart, _ = run_in_flight(engine, remote, requests)
    assert engine.scheduler.num_preemptions >= 1
    assert {name: a.tokens for name, a in apart.items()} == {name: a.tokens for name, a in alone.items()}


def test_prompt_logprobs_are_gathered_over_chunks_in_flight(llama_folder: Path, make_apart: MakeApart) -> None:
    engine, remote = make_apart(llama_folder, SPLITS["first"], max_batch_tokens=16)
    prompt = make_prompt(70, 6)
    request = EngineRequest("r", prompt, greedy(2, prompt_logprobs=0))
    answers, _ = run_in_flight(engine, remote, [request, EngineRequest("other", make_prompt(20, 1), greedy(9))])
    with torch.inference_mode():
        expected = load_reference(llama_folder)(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    got = answers["r"].events[0].prompt_logprobs
    assert got is not None
    for position, entry in enumerate(got[1:]):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(expected[position, prompt[position + 1]]), abs=1e-4)


def test_chunks_are_as_long_as_a_host_has_time_for(llama_folder: Path, make_apart: MakeApart) -> None:
    """It takes 1 ms for a token, and 80 ms for a step of its own."""
    engine, remote = make_apart(llama_folder, SPLITS["last"], max_batch_tokens=160)
    host = remote.hosts["x"]
    host.token_us, host.step_us = 1_000, 80_000
    prompts = [make_prompt(length, length) for length in (250, 240, 170, 251, 241, 168)]
    requests = [EngineRequest(f"r{i}", prompt, greedy(2)) for i, prompt in enumerate(prompts)]
    answers, _ = run_in_flight(engine, remote, requests)
    assert_greedy(load_reference(llama_folder), prompts, [answer.tokens for answer in answers.values()])
    # 1,320 tokens: of 160 until enough steps have come back, when one more is in flight. The rest have 80, or what is
    # left: 200 in three.
    assert engine.counters.prefill_steps == TRIES + 1 + 3
    assert engine.scheduler.max_prompt_tokens == 80
    for layer in (1, 2):
        engine.loaded.model.layers[layer] = host.loaded.model.layers[layer]
    engine.use_placement(Placement("home", HOME.layer_workers, HOME.lane_workers, 2))
    assert engine.scheduler.max_prompt_tokens is None


def test_zeros_and_ones_of_tokens_end_as_at_home(llama_folder: Path, make_apart: MakeApart) -> None:
    engine, remote = make_apart(llama_folder, SPLITS["last"])
    scored = EngineRequest("scored", make_prompt(50), greedy(0, prompt_logprobs=0))
    handed = EngineRequest("handed", make_prompt(50, 2), greedy(5), hand_over=True)
    for request in (scored, handed):
        assert engine.add(request) is None
    answers = {"scored": Answer(), "handed": Answer()}
    while engine.has_work:
        while engine.can_begin and engine.begin_step():
            pass
        remote.deliver_all()
        engine.advance()
        result = engine.end_step()
        take_in(answers, result)
        for export in result.exports:
            assert (export.export_id, export.num_tokens) == ("handed", 50)
            assert engine.release_export("handed")
    assert (answers["scored"].tokens, len(answers["scored"].events[0].prompt_logprobs or ())) == ([], 50)
    assert answers["handed"].events[-1].awaits_export
    engine.check_idle()


def test_kv_that_arrives_is_waited_for_whole_where_layers_are_elsewhere(
    llama_folder: Path, make_apart: MakeApart, make_engine: MakeEngine
) -> None:
    """A request that was to be computed while its KV arrives, when layers left, and one that would be then."""
    expected = run_requests(make_engine(llama_folder), [EngineRequest("late", PROMPT, greedy(6))])["late"].tokens
    source = Source(make_engine(llama_folder))
    engine = make_engine(llama_folder)
    engine.add(EngineRequest("late", PROMPT, greedy(6), external_tokens=PREFIX_TOKENS))
    assert not engine.begin_step()
    (fetch,) = engine.take_fetches()
    assert engine.arriving("late", PREFIX_TOKENS, LayerArrival(timeout_s=0.0))
    remote = HandDriven({"x": Host(load_model(llama_folder, engine.config))})
    put_elsewhere(engine, SPLITS["middle"], remote)
    assert not engine.begin_step()
    assert not engine.arriving("late", PREFIX_TOKENS, LayerArrival(timeout_s=0.0))
    for layer in range(3):
        source.bring(engine if layer != 1 else Loaded(remote.hosts["x"].loaded), fetch, layer)  # type: ignore[arg-type]
    assert engine.fetched("late", PREFIX_TOKENS)
    answers = {"late": Answer()}
    while engine.has_work:
        while engine.can_begin and engine.begin_step():
            pass
        drain(engine, remote, answers)
    assert answers["late"].tokens == expected
    assert (engine.counters.fetched_tokens, engine.counters.early_starts) == (PREFIX_TOKENS, 1)
    engine.check_idle()


def test_pages_of_a_fetch_that_brings_less_are_cleared_elsewhere_too(
    llama_folder: Path, make_apart: MakeApart, make_engine: MakeEngine
) -> None:
    """Whoever had the blocks before left numbers there that nobody can compute with. What is fetched ends within a
    block, of which the rest is cleared with it."""
    prompt = PROMPT[: PREFIX_TOKENS + 3]
    expected = run_requests(make_engine(llama_folder), [EngineRequest("late", prompt, greedy(6))])["late"].tokens
    source = Source(make_engine(llama_folder))
    engine, remote = make_apart(llama_folder, SPLITS["middle"])
    remote.hosts["x"].spoil()
    engine.add(EngineRequest("late", prompt, greedy(6), external_tokens=PREFIX_TOKENS + 2))
    assert not engine.begin_step()
    (fetch,) = engine.take_fetches()
    for layer in range(3):
        source.bring(engine if layer != 1 else Loaded(remote.hosts["x"].loaded), fetch, layer)  # type: ignore[arg-type]
    assert engine.fetched("late", PREFIX_TOKENS)  # and not the two tokens behind it
    answers = {"late": Answer()}
    while engine.has_work:
        while engine.can_begin and engine.begin_step():
            pass
        drain(engine, remote, answers)
    assert answers["late"].tokens == expected


class Loaded:
    """As much of an engine as `Source.bring` asks for."""

    def __init__(self, loaded: object) -> None:
        self.loaded = loaded


def lying_on(version: int, *workers: str) -> Placement:
    return Placement("home", workers, tuple((worker, worker) for worker in workers), version)


def drain(engine: Engine, remote: HandDriven, answers: dict[str, Answer]) -> None:
    while engine.num_in_flight:
        remote.deliver_all()
        engine.advance()
        if engine.is_step_over:
            take_in(answers, engine.end_step())


def test_layers_leave_and_come_back_in_the_middle_of_answers(llama_folder: Path, make_engine: MakeEngine) -> None:
    requests = [sampled(index) for index in range(4)]
    expected = {name: a.tokens for name, a in run_requests(make_engine(llama_folder), requests).items()}
    engine = make_engine(llama_folder)
    hosts = {name: Host(load_model(llama_folder, engine.config)) for name in "xy"}
    remote = HandDriven(hosts)
    models = {"home": engine.loaded, **{name: host.loaded for name, host in hosts.items()}}
    answers = {request.request_id: Answer() for request in requests}
    for request in requests:
        engine.add(request)
    before = ("home", "home", "home")
    ways = [before, ("home", "x", "x"), ("home", "y", "x"), ("y", "y", "home"), before]
    for version, workers in enumerate(ways):
        for layer, (old, new) in enumerate(zip(before, workers, strict=True)):
            # All arenas are dealt alike. Only what moved is copied.
            pages = models[old].lanes.pages(layer).flatten()
            models[new].arena.pages[pages] = models[old].arena.pages[pages]
        engine.use_placement(lying_on(version, *workers), remote)
        before = workers
        for _ in range(3):
            while engine.can_begin and engine.begin_step():
                if engine.is_step_over:
                    take_in(answers, engine.end_step())
                    break
            drain(engine, remote, answers)
    while engine.has_work:
        take_in(answers, engine.step())
    assert {name: answer.tokens for name, answer in answers.items()} == expected
    engine.check_idle()


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (lying_on(2, "home", "home", "x"), "version 2; it must be above 2"),
        (lying_on(3, "home", "home", "x"), r"layers \[1\] are to be run at home"),
        (
            Placement("home", ("home", "x", "x"), (("home", "home"), ("x", "home"), ("x", "x")), 3),
            r"layers \[1\] are not at home and have KV heads on another",
        ),
        (Placement("home", ("home", "x", "x"), (("home", "x"), ("x", "x"), ("x", "x")), 3), "give the way to them"),
        (Placement.at_home("home", 4, 2), "4 layers and 2 KV heads; the model has 3 and 2"),
    ],
)
def test_placements_that_cannot_be_are_refused(
    placement: Placement, words: str, llama_folder: Path, make_apart: MakeApart
) -> None:
    engine, remote = make_apart(llama_folder, lying_on(2, "home", "x", "x"))
    with pytest.raises(ValueError, match=words):
        engine.use_placement(placement, remote)
    with pytest.raises(ValueError, match="give the way to them"):
        engine.use_placement(lying_on(3, "home", "x", "x"))
    assert len(run_in_flight(engine, remote, [sampled(0)])[0]["r0"].tokens) == 16


def test_a_slice_of_no_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="hosted_slice_s is 0; it must be above 0"):
        EngineConfig(hosted_slice_s=0)


def test_a_limit_of_no_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_steps_in_flight is 0; it must be at least 1"):
        EngineConfig(max_steps_in_flight=0)


def test_nothing_changes_or_ends_while_a_step_is_in_flight(llama_folder: Path, make_apart: MakeApart) -> None:
    engine, remote = make_apart(llama_folder, SPLITS["last"])
    engine.add(sampled(0))
    assert engine.begin_step()
    with pytest.raises(RuntimeError, match="1 steps are in flight"):
        engine.use_placement(lying_on(5, "home", "x", "x"), remote)
    with pytest.raises(RuntimeError, match="1 steps are in flight"):
        engine.recompute_lost(all_content=False)
    with pytest.raises(RuntimeError, match="the oldest of them is not over"):
        engine.end_step()
    engine.abort("r0")
    engine.check_idle()
    assert engine.blocks.num_live > 0
    drain(engine, remote, {})
    assert engine.blocks.num_live == 0


@pytest.mark.parametrize("all_content", [False, True])
def test_requests_of_a_step_that_another_worker_does_not_run_begin_anew(
    all_content: bool, llama_folder: Path, make_apart: MakeApart, make_engine: MakeEngine
) -> None:
    requests = [sampled(index) for index in range(5)]
    expected = {name: a.tokens for name, a in run_requests(make_engine(llama_folder), requests).items()}
    engine, remote = make_apart(llama_folder, SPLITS["middle"])
    answers = {request.request_id: Answer() for request in requests}
    for request in requests:
        engine.add(request)
    for _ in range(8):
        while engine.can_begin and engine.begin_step():
            pass
        remote.deliver_all()
        engine.advance()
        take_in(answers, engine.end_step())
    assert remote.fail("x", has_run=True)
    engine.advance()
    result = engine.end_step()
    assert result.failure is not None
    assert (result.failure.worker, result.failure.reason) == ("x", "told to fail")
    assert (result.events, engine.can_begin) == ([], False)
    drain(engine, remote, answers)
    assert engine.failure == result.failure
    if all_content:
        remote.hosts["x"].spoil()
    engine.recompute_lost(all_content=all_content)
    num_anew = engine.scheduler.num_begun_anew
    assert 1 <= num_anew <= 5
    if all_content:
        assert (num_anew, engine.blocks.num_cached) == (engine.scheduler.num_unfinished, 0)
    while engine.has_work:
        while engine.can_begin and engine.begin_step():
            pass
        drain(engine, remote, answers)
    assert {name: answer.tokens for name, answer in answers.items()} == expected
    assert (engine.counters.lost_steps, engine.counters.failed_requests) == (1, 0)
    engine.check_idle()


@pytest.mark.parametrize("wrong", ["version", "step", "rows", "dtype"])
def test_an_answer_to_something_else_is_a_failure(wrong: str, llama_folder: Path, make_apart: MakeApart) -> None:
    engine, remote = make_apart(llama_folder, SPLITS["last"])
    engine.add(sampled(0))
    assert engine.begin_step()
    work, done = remote.inboxes["x"].popleft()
    hidden = work.hidden[1:] if wrong == "rows" else work.hidden
    answer = StageDone(
        work.instance, work.version + (wrong == "version"), work.step_id + (wrong == "step"),
        hidden.double() if wrong == "dtype" else hidden,
    )  # fmt: skip
    done(answer)
    engine.advance()
    failure = engine.end_step().failure
    assert failure is not None
    assert "expected" in failure.reason


def test_layers_here_that_break_end_their_requests_when_their_step_ends(
    llama_folder: Path, make_apart: MakeApart
) -> None:
    engine, remote = make_apart(llama_folder, SPLITS["first"])
    for request in (sampled(1), sampled(4)):
        engine.add(request)
    assert engine.begin_step()
    assert engine.begin_step()
    layer = engine.loaded.model.layers.pop(2)
    remote.deliver("x")
    engine.advance()
    engine.loaded.model.layers[2] = layer
    with pytest.raises(KeyError):
        engine.end_step()
    assert {event.request_id for event in engine.fail_all("broken").events} == {"r1", "r4"}
    assert engine.blocks.num_live > 0  # the other step still writes there
    drain(engine, remote, {})
    engine.check_idle()
    assert engine.blocks.num_live == 0


class Session:
    """One engine apart, driven in any order, with the answers that its requests must get."""

    def __init__(self, folder: Path, make_apart: MakeApart, make_engine: MakeEngine) -> None:
        self.requests = [
            EngineRequest("", make_prompt(length, seed), SamplingParams(10, temperature, seed=seed, ignore_eos=True))
            for seed, (length, temperature) in enumerate([(5, 0.0), (33, 0.9), (70, 0.0), (70, 0.9), (16, 0.0)])
        ]
        self.requests[3] = EngineRequest("", self.requests[2].prompt_token_ids, self.requests[3].sampling)
        alone = make_engine(folder)
        self.expected = [
            run_requests(alone, [EngineRequest("r", r.prompt_token_ids, r.sampling)])["r"].tokens for r in self.requests
        ]
        self.engine, self.remote = make_apart(
            folder, SPLITS["between hosts"], kv_cache_blocks=12, max_batch_tokens=24, max_steps_in_flight=3
        )
        self.answers: dict[str, Answer] = {}
        self.kinds: dict[str, int] = {}
        self.numbers = itertools.count()
        self.all_content = False

    def add(self, kind: int) -> None:
        name = f"r{next(self.numbers)}"
        self.kinds[name], self.answers[name] = kind, Answer()
        request = self.requests[kind]
        assert self.engine.add(EngineRequest(name, request.prompt_token_ids, request.sampling)) is None

    def begin(self) -> bool:
        return self.engine.can_begin and self.engine.begin_step()

    def deliver(self, worker: str) -> bool:
        return self.remote.deliver(worker)

    def fail(self, worker: str, has_run: bool, all_content: bool) -> None:
        if self.remote.fail(worker, has_run=has_run):
            self.all_content |= all_content

    def end(self) -> bool:
        had_news = self.engine.has_news
        self.engine.advance()
        if self.engine.is_step_over:
            take_in(self.answers, self.engine.end_step())
            return True
        if self.engine.failure is None or self.engine.num_in_flight:
            return had_news
        if self.all_content:
            for host in self.remote.hosts.values():
                host.spoil()
        self.engine.recompute_lost(all_content=self.all_content)
        self.all_content = False
        return True

    def abort(self, index: int) -> None:
        live = sorted(s.request_id for s in self.engine.scheduler.sequences())
        if live:
            name = live[index % len(live)]
            assert self.engine.abort(name)
            del self.kinds[name]

    def clear(self) -> None:
        """What an example that failed has left is not the next one's."""
        for sequence in list(self.engine.scheduler.sequences()):
            self.engine.abort(sequence.request_id)
        while self.engine.num_in_flight or self.engine.failure:
            self.remote.deliver_all()
            self.end()
        self.answers, self.kinds = {}, {}


@pytest.fixture(scope="module")
def session(family_folders: dict[str, Path], make_apart: MakeApart, make_engine: MakeEngine) -> Session:
    return Session(family_folders["llama"], make_apart, make_engine)


@settings(max_examples=25, deadline=None)
@given(
    actions=st.lists(
        st.tuples(st.just("add"), st.integers(0, 4))
        | st.tuples(st.sampled_from(["begin", "end"]))
        | st.tuples(st.just("deliver"), st.sampled_from("xy"))
        | st.tuples(st.just("abort"), st.integers(0, 4))
        | st.tuples(st.just("fail"), st.sampled_from("xy"), st.booleans(), st.booleans()),
        max_size=60,
    )
)
def test_whatever_the_order_of_events_the_answers_are_the_same(
    session: Session, actions: list[tuple[object, ...]]
) -> None:
    session.clear()
    for action, *arguments in [("add", 2), ("add", 3), *actions]:
        getattr(session, str(action))(*arguments)
        session.engine.blocks.check_integrity()
    engine = session.engine
    for _ in range(2000):
        if not engine.has_work and not engine.num_in_flight and engine.failure is None:
            break
        moved = [session.begin(), session.deliver("x"), session.deliver("y"), session.end()]
        assert any(moved), "nothing moves, though requests wait"
    for name, kind in session.kinds.items():
        assert session.answers[name].tokens == session.expected[kind]
    assert engine.num_live_requests == 0
    engine.check_idle()
    assert engine.blocks.num_live == 0
