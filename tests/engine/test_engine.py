"""The engine as a whole on a small random model: memory, preemption, sampling, hand-over, log-probabilities."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from actors.engine.engine import Engine
from actors.engine.page_io import read_pages, write_pages
from actors.engine.request import EngineRequest, SamplingParams
from kv.part_range import PartRange
from kv.parts import PartHeader, draft_part
from tests.engine.conftest import MakeEngine
from tests.engine_driver import greedy, make_prompt, run_prompts, run_requests
from tests.reference import assert_greedy, load_reference

BLOCK = 16


def test_two_long_generations_finish_in_a_pool_that_holds_one(llama_folder: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(llama_folder, kv_cache_blocks=10)
    prompts = [make_prompt(30, 1), make_prompt(30, 2)]
    outputs = run_prompts(engine, prompts, greedy(100))
    assert [len(output) for output in outputs] == [100, 100]
    assert engine.scheduler.num_preemptions >= 1
    assert engine.counters.recomputed_tokens > 0
    assert_greedy(load_reference(llama_folder), prompts, outputs)


def test_request_beyond_the_pool_or_the_context_is_refused(llama_folder: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(llama_folder, kv_cache_blocks=4)
    fits = EngineRequest("fits", make_prompt(60), greedy(4))
    beyond = EngineRequest("beyond", make_prompt(60), greedy(5))
    answers = run_requests(engine, [fits, beyond])
    assert len(answers["fits"].tokens) == 4
    assert answers["beyond"].finish_reason == "error"
    assert "60 prompt tokens and 5 to generate exceed the context of 64 tokens" in (
        answers["beyond"].events[0].error or ""
    )
    assert make_engine(llama_folder, max_context_tokens=100).max_context_tokens == 100
    assert make_engine(llama_folder).max_context_tokens == 512


@pytest.mark.parametrize(
    ("prompt", "words"), [((), "empty"), ((500,), "between 0 and 499"), ((-1,), "between 0 and 499")]
)
def test_bad_tokens_are_refused(
    prompt: tuple[int, ...], words: str, llama_folder: Path, make_engine: MakeEngine
) -> None:
    refused = make_engine(llama_folder).add(EngineRequest("r", prompt, greedy(1)))
    assert refused is not None
    assert words in (refused.error or "")


@pytest.mark.parametrize("what", ["layer", "head"])
def test_departed_lanes_make_room_for_tokens(what: str, llama_folder: Path, make_engine: MakeEngine) -> None:
    """Design decision D2: slabs of departed lanes, and a departed layer's weights, are dealt to the lanes that stay."""
    engine = make_engine(llama_folder, kv_cache_blocks=8, slab_pages=1)
    spec, arena, lanes = engine.loaded.spec, engine.loaded.arena, engine.loaded.lanes
    request = EngineRequest("big", make_prompt(8 * BLOCK + 1), greedy(1))
    assert engine.refusal(request) is not None
    num_lanes = spec.num_layers * spec.num_kv_heads
    if what == "layer":
        freed = spec.num_kv_heads * 8 + len(engine.loaded.weight_slabs[2])
        grown = engine.lanes_departed([], layers=[2])
        staying = num_lanes - spec.num_kv_heads
        assert 2 not in engine.loaded.model.layers
    else:
        freed = 8
        grown = engine.lanes_departed([(1, 0)])
        staying = num_lanes - 1
    assert grown == freed // staying >= 1
    assert engine.refusal(request) is None
    assert engine.add(request) is None
    (sequence,) = engine.scheduler.waiting
    engine.scheduler.schedule()
    assert len(sequence.block_ids) == 9
    # No page serves two lanes, and none lies in a slab that holds weights.
    pages = torch.cat([lanes.pages(layer).flatten() for layer in range(spec.num_layers) if lanes.heads(layer)])
    assert len(pages.unique()) == len(pages)
    weights = {slab for run in engine.loaded.weight_slabs.values() for slab in run}
    assert not weights & {int(page) // arena.slab_pages for page in pages}


def test_seeded_sampling_is_the_same_alone_and_in_a_batch(llama_folder: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(llama_folder)

    def request(index: int) -> EngineRequest:
        sampling = SamplingParams(
            max_tokens=24, temperature=0.9, top_p=(1.0, 0.9)[index % 2], top_k=(0, 40)[index % 3 == 0], seed=index,
            ignore_eos=True,
        )  # fmt: skip
        return EngineRequest(f"r{index}", make_prompt(20 + index, index), sampling)

    alone = {}
    for index in range(16):
        alone |= run_requests(engine, [request(index)])
    batch = run_requests(make_engine(llama_folder), [request(index) for index in range(16)])
    assert {name: a.tokens for name, a in batch.items()} == {name: a.tokens for name, a in alone.items()}
    assert len({tuple(a.tokens) for a in batch.values()}) == 16


def test_resumed_request_goes_on_as_if_it_had_never_stopped(llama_folder: Path, make_engine: MakeEngine) -> None:
    """Decision D5: tokens and position are all the state that sampling has."""
    sampling = SamplingParams(
        max_tokens=30, temperature=1.0, seed=5, ignore_eos=True, frequency_penalty=0.5, repetition_penalty=1.2
    )
    prompt = make_prompt(20, 4)
    whole = run_requests(make_engine(llama_folder), [EngineRequest("r", prompt, sampling)])["r"].tokens
    resumed = EngineRequest("r", prompt, sampling, output_token_ids=tuple(whole[:11]))
    assert run_requests(make_engine(llama_folder), [resumed])["r"].tokens == whole[11:]


def test_end_of_sequence_and_stop_tokens_end_the_answer(llama_folder: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(llama_folder)
    prompt = make_prompt(12, 8)
    tokens = run_prompts(engine, [prompt], greedy(20))[0]
    stop = tokens[7]
    cut = tokens.index(stop) + 1

    def end(**more: object) -> tuple[list[int], str | None]:
        eos = (stop,) if more.pop("eos", False) else ()
        answer = run_requests(engine, [EngineRequest("r", prompt, greedy(20, **more), eos_token_ids=eos)])["r"]
        return answer.tokens, answer.finish_reason

    assert end(stop_token_ids=(stop,)) == (tokens[:cut], "stop")
    assert end(eos=True, ignore_eos=False) == (tokens[:cut], "stop")
    assert end(eos=True, ignore_eos=True) == (tokens, "length")
    longer, _ = end(stop_token_ids=(stop,), min_tokens=cut + 3)
    assert len(longer) > cut + 2
    assert stop not in longer[: cut + 3]


def test_aborts_at_any_moment_free_everything(llama_folder: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(llama_folder, kv_cache_blocks=20)
    rng = random.Random(0)
    for round_ in range(60):
        names = [f"{round_}-{i}" for i in range(4)]
        for index, name in enumerate(names):
            engine.add(EngineRequest(name, make_prompt(rng.randrange(1, 60), index), greedy(20)))
        for _ in range(rng.randrange(6)):
            engine.step()
        for name in names:
            engine.abort(name)
        assert engine.num_live_requests == 0
        assert engine.blocks.num_live == 0
        engine.check_idle()
    assert not engine.abort("never seen")


def hand_over(source: Engine, target: Engine, request: EngineRequest, parts: int = 1) -> list[int]:
    """Prefill on one engine, decode on the other, as the workers do it; returns the whole answer."""
    prefill = EngineRequest(
        request.request_id, request.prompt_token_ids, request.sampling, salt=request.salt, hand_over=True
    )
    answer = run_to_hand_over(source, prefill)
    held = source.export_content(request.request_id)
    block_ids, num_tokens = held.block_ids, held.num_tokens
    decode = EngineRequest(
        request.request_id, request.prompt_token_ids, request.sampling, output_token_ids=(answer,), salt=request.salt,
        external_tokens=num_tokens,
    )  # fmt: skip
    assert target.add(decode) is None
    (fetch,) = target.step().fetches
    layout, step = source.loaded.layout, source.loaded.layout.num_layers // parts
    for group in range(parts):
        part = PartRange(0, len(block_ids), group * step, step, 0, layout.num_kv_heads)
        header = PartHeader(
            layout, source.loaded.fingerprint, part, (b"",) * layout.full_blocks(num_tokens),
            num_tokens % layout.block_tokens or layout.block_tokens,
        )  # fmt: skip
        draft = draft_part(header)
        read_pages(source.loaded, part, block_ids, draft.payload)
        draft.payload.setflags(write=False)
        write_pages(target.loaded, part, fetch.sequence.block_ids[: part.num_blocks], draft.payload)
    assert source.release_export(request.request_id)
    assert target.fetched(request.request_id, num_tokens)
    tokens = [answer]
    while target.has_work:
        tokens += [event.token_id for event in target.step().events if event.token_id is not None]
    source.check_idle()
    target.check_idle()
    return tokens


def run_to_hand_over(engine: Engine, request: EngineRequest) -> int:
    assert engine.add(request) is None
    while True:
        for event in engine.step().events:
            assert event.awaits_export
            assert event.token_id is not None
            return event.token_id


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_hand_over_computes_no_prompt_token_again(
    family: str, length: int, family_folders: dict[str, Path], make_engine: MakeEngine
) -> None:
    source, target = make_engine(family_folders[family]), make_engine(family_folders[family])
    prompt = make_prompt(length, 9)
    tokens = hand_over(source, target, EngineRequest("r", prompt, greedy(20)), parts=3)
    assert_greedy(load_reference(family_folders[family]), [prompt], [tokens])
    assert len(tokens) == 20
    assert target.counters.computed_prompt_tokens == 0
    assert target.counters.fetched_tokens == length
    assert source.counters.computed_prompt_tokens == length
    assert (source.counters.prompt_tokens, target.counters.prompt_tokens) == (length, 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_hand_over_in_half_precision_copies_bits(dtype: str, llama_folder: Path, make_engine: MakeEngine) -> None:
    prompt = make_prompt(37, 2)
    whole = run_prompts(make_engine(llama_folder, dtype=dtype), [prompt], greedy(12))[0]
    source, target = make_engine(llama_folder, dtype=dtype), make_engine(llama_folder, dtype=dtype)
    assert hand_over(source, target, EngineRequest("r", prompt, greedy(12))) == whole


def test_prompt_logprobs_do_not_depend_on_the_cache(llama_folder: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(llama_folder, max_batch_tokens=16, max_running_requests=4)
    prompt = make_prompt(40, 6)
    sampling = greedy(1, prompt_logprobs=2, logprobs=1)
    cold = run_requests(engine, [EngineRequest("r", prompt, sampling)])["r"].events[0]
    warm = run_requests(engine, [EngineRequest("r", prompt, sampling)])["r"].events[0]
    with torch.inference_mode():
        expected = load_reference(llama_folder)(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    for event in (cold, warm):
        assert event.prompt_logprobs is not None
        assert event.prompt_logprobs[0] is None
        assert len(event.prompt_logprobs) == len(prompt)
        for position, entry in enumerate(event.prompt_logprobs[1:]):
            assert entry is not None
            assert entry.token_id == prompt[position + 1]
            assert entry.logprob == pytest.approx(float(expected[position, prompt[position + 1]]), abs=1e-4)
            assert [token for token, _ in entry.top] == expected[position].topk(2).indices.tolist()
        assert event.logprobs is not None
        assert event.logprobs.logprob == pytest.approx(float(expected[-1].max()), abs=1e-4)


def test_zero_tokens_scores_the_prompt_only(llama_folder: Path, make_engine: MakeEngine) -> None:
    request = EngineRequest("r", make_prompt(5), greedy(0, prompt_logprobs=0))
    answer = run_requests(make_engine(llama_folder), [request])["r"]
    assert (answer.tokens, answer.finish_reason) == ([], "length")
    assert len(answer.events[0].prompt_logprobs or ()) == 5


def test_prompt_as_long_as_the_context_is_scored(llama_folder: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(llama_folder, kv_cache_blocks=4)
    request = EngineRequest("r", make_prompt(4 * BLOCK), greedy(0, prompt_logprobs=0))
    answer = run_requests(engine, [request])["r"]
    assert (answer.tokens, answer.finish_reason) == ([], "length")
    assert len(answer.events[0].prompt_logprobs or ()) == 4 * BLOCK


def test_salts_share_nothing(llama_folder: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(llama_folder)
    prompt = make_prompt(40)
    for salt, cached in ((b"a", 0), (b"b", 0), (b"a", 32)):
        answer = run_requests(engine, [EngineRequest("r", prompt, greedy(2), salt=salt)])["r"]
        assert answer.events[0].cached_tokens == cached


def test_damaged_logits_end_one_request_and_spare_the_others(llama_folder: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(llama_folder)
    prompts = {name: make_prompt(20, seed) for seed, name in enumerate(("good", "bad"))}
    expected = run_prompts(engine, [prompts["good"]], greedy(8))[0]
    bad = EngineRequest("bad", prompts["bad"], greedy(8, logit_bias=((7, float("nan")),)))
    answers = run_requests(engine, [EngineRequest("good", prompts["good"], greedy(8)), bad])
    assert answers["good"].tokens == expected
    assert answers["bad"].finish_reason == "error"


POISON = 499
"""A token whose embedding the tests damage: it spoils every position from its own on."""


@pytest.fixture
def poisoned(family_folders: dict[str, Path], make_engine: MakeEngine) -> Engine:
    """An engine with a damaged embedding and a small pool."""
    engine = make_engine(family_folders["qwen3"], kv_cache_blocks=20, max_batch_tokens=64)
    with torch.no_grad():
        engine.loaded.model._outer["embedding.weight"][POISON] = float("nan")
    return engine


@pytest.mark.parametrize("length", [20, 200], ids=["in one step", "in several"])
def test_damaged_logits_of_a_prompt_end_one_request_and_spare_the_others(length: int, poisoned: Engine) -> None:
    good = make_prompt(20, 1)
    expected = run_prompts(poisoned, [good], greedy(8))[0]
    prompt = (*make_prompt(length, 2, vocab=400), POISON, 5, 6)
    bad = EngineRequest("bad", prompt, greedy(8, prompt_logprobs=2))
    answers = run_requests(poisoned, [bad, EngineRequest("good", good, greedy(8))])
    assert answers["good"].tokens == expected
    assert answers["bad"].tokens == []
    assert answers["bad"].finish_reason == "error"
    assert "NaN" in (answers["bad"].events[-1].error or "")
    assert poisoned.counters.failed_requests == 1


@pytest.mark.parametrize("aborted", [False, True], ids=["fails", "is aborted"])
def test_what_a_damaged_request_leaves_in_its_blocks_harms_no_later_one(aborted: bool, poisoned: Engine) -> None:
    prompts = [make_prompt(18, seed, vocab=400) for seed in range(10, 20)]
    expected = run_prompts(poisoned, prompts, greedy(20))
    bad = EngineRequest("bad", (POISON, *make_prompt(300, 2, vocab=400)), greedy(8))
    if aborted:
        poisoned.add(bad)
        for _ in range(4):
            poisoned.step()
        assert poisoned.abort("bad")
    else:
        assert run_requests(poisoned, [bad])["bad"].finish_reason == "error"
    assert run_prompts(poisoned, prompts, greedy(20)) == expected


def test_a_step_that_breaks_ends_its_requests_but_loses_no_fetch(llama_folder: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(llama_folder)
    engine.add(EngineRequest("breaks", make_prompt(20), greedy(4)))
    engine.add(EngineRequest("fetches", make_prompt(70, 3), greedy(4), external_tokens=64))
    layer = engine.loaded.model.layers.pop(2)
    with pytest.raises(KeyError):
        engine.step()
    engine.loaded.model.layers[2] = layer
    result = engine.fail_all("broken")
    assert [(event.request_id, event.finish_reason) for event in result.events] == [("breaks", "error")]
    assert [fetch.sequence.request_id for fetch in result.fetches] == ["fetches"]
    # Nothing came of the fetch; the request is computed, and served as if nothing had happened.
    assert engine.fetched("fetches", 0)
    tokens = [event.token_id for _ in range(4) for event in engine.step().events]
    assert [tokens] == run_prompts(make_engine(llama_folder), [make_prompt(70, 3)], greedy(4))
    engine.check_idle()
