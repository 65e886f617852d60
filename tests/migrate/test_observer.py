from __future__ import annotations

from dataclasses import replace

import pytest

from migrate.controller import Observation
from migrate.cost_model import LinkSpeed, ModelSizes
from migrate.link_estimates import FIRST_GUESS, FIRST_LOADED_BYTES_PER_S, LinkEstimates
from migrate.move_history import Happened
from migrate.observer import Observer
from migrate.placement import Placement
from migrate.step_times import StepTimes
from migrate.worker_reading import WorkerReading, figures_between, figures_of

SIZES = ModelSizes(4, 4, layer_weight_bytes=1000, page_bytes=10, hidden_bytes=8, query_bytes=4, key_bytes=2)


def reading(name: str, taken_s: float, *, steps: int = 0, **counts: int) -> WorkerReading:
    """With so many steps of 2 to 9 prompt tokens that took 1 ms a token."""
    times = StepTimes()
    for number in range(steps):
        tokens = 2 + number % 8
        times.count(prefill_tokens=tokens, decode_rows=0, prefill_pairs=0, decode_pairs=0, layers_s=0.001 * tokens)
    return WorkerReading(
        name, taken_s, SIZES, memory_bytes=20_000, full_batch=8, total_blocks=100, step_times=times, **counts
    )


def home(name: str) -> Placement:
    return Placement.at_home(name, 4, 4)


def seen(observer: Observer, *readings: WorkerReading, names: str = "ab", window_s: float = 2.0) -> Observation:
    answer = observer.look(readings, {name: home(name) for name in names}, 7.0, window_s)
    assert isinstance(answer, Observation)
    return answer


def test_two_readings_make_rates() -> None:
    before = reading("a", 10.0, pending_prefill_tokens=300, prefill_tokens=1000, prefill_steps=5, decode_rows=70)
    after = reading(
        "a",
        12.0,
        pending_prefill_tokens=500,
        prefill_tokens=1800,
        prefill_steps=9,
        decode_rows=100,
        decode_steps=6,
        decoding_requests=48,
        finished_requests=10,
        generated_tokens=200,
        waiting_answers=3,
        waiting_answer_tokens=1000,
        live_blocks=40,
        cached_blocks=7,
    )
    figures = figures_between(before, after)
    # 800 computed, and 200 more wait: 1,000 arrived in 2 s. 30 were decoded, and 3 requests came that are likely to
    # generate 20 tokens each, as others did.
    assert (figures.prefill_tokens_per_s, figures.decode_tokens_per_s) == (500, 45)
    assert figures.prefilled_tokens_per_s == 400
    assert (figures.pending_prefill_tokens, figures.pending_decode_tokens) == (500, 60)
    assert (figures.prefill_step_tokens, figures.running) == (200, 8)
    assert (figures.memory_bytes, figures.total_blocks) == (20_000, 100)
    assert (figures.live_blocks, figures.cached_blocks) == (40, 7)


def test_no_request_generates_more_than_it_may() -> None:
    counts = {"finished_requests": 1, "generated_tokens": 500, "waiting_answers": 3, "waiting_answer_tokens": 90}
    assert figures_of(reading("a", 1.0, **counts)).pending_decode_tokens == 90
    nothing = {"waiting_answers": 3, "waiting_answer_tokens": 90}
    assert figures_of(reading("a", 1.0, **nothing)).pending_decode_tokens == 0


def test_no_traffic_gives_zeros() -> None:
    figures = figures_between(reading("a", 1.0), reading("a", 3.0))
    assert (figures.prefill_tokens_per_s, figures.decode_tokens_per_s, figures.running) == (0, 0, 0)
    assert figures.prefill_step_tokens == 0


@pytest.mark.parametrize("after", [reading("b", 3.0), reading("a", 1.0), reading("a", 0.5), reading("a", 3.0, epoch=1)])
def test_readings_that_do_not_follow_one_another_are_refused(after: WorkerReading) -> None:
    with pytest.raises(ValueError, match="give two of one worker and epoch, the earlier"):
        figures_between(reading("a", 1.0), after)


def test_the_first_look_is_no_reason_to_plan() -> None:
    observer = Observer()
    first = seen(observer, reading("a", 1.0, steps=40), reading("b", 50.0))
    assert first.not_planned == "nothing is known yet of 2 s of traffic of a, b; wait until they have passed"
    assert first.asked_s == 7.0
    assert first.fleet.figures["a"].prefill_tokens_per_s == 0
    second = seen(observer, reading("a", 3.0, steps=50, prefill_tokens=100), reading("b", 52.0))
    assert second.not_planned == ""
    assert second.fleet.figures["a"].prefill_tokens_per_s == 50
    # 1 ms a token in four layers.
    assert second.fleet.model.times.prefill_token_s == pytest.approx(0.00025)
    assert second.fleet.model.times.full_batch == 8


def test_traffic_is_that_of_the_window() -> None:
    # 100 tokens/s, and 400/s from 7 s on. Before 6 s have passed nothing is planned; then it is their mean.
    observer = Observer()
    rates = []
    for taken_s, tokens in ((1, 100), (3, 300), (5, 500), (7, 700), (9, 1500), (11, 2300), (13, 3100), (15, 3900)):
        last = seen(observer, reading("a", taken_s, steps=40, prefill_tokens=tokens), names="a", window_s=6)
        assert bool(last.not_planned) == (taken_s < 7)
        rates.append(last.fleet.figures["a"].prefilled_tokens_per_s)
    assert rates == [0, 100, 100, 100, 200, 300, 400, 400]
    # A window below a period is a period; a longer one is waited for anew.
    assert seen(observer, reading("a", 17.0, steps=40, prefill_tokens=3900), names="a", window_s=1).not_planned == ""
    again = seen(observer, reading("a", 19.0, steps=40, prefill_tokens=3900), names="a", window_s=6)
    assert "of 6 s of traffic of a" in again.not_planned


def test_nothing_is_planned_before_steps_were_measured() -> None:
    observer = Observer()
    for taken_s in (1.0, 3.0):
        last = seen(observer, reading("a", taken_s, steps=31), names="a")
    assert last.not_planned == "too few steps were run to know what they cost; wait for traffic"


def test_work_of_a_kind_that_was_not_measured_is_waited_for() -> None:
    # The first steps of each worker are not measured. a has run eight prompts' steps, all of them its first; b, which
    # decodes what they left, has run sixty. All that is known would be that b is loaded, and a is not.
    observer, times = Observer(), StepTimes()
    for _ in range(60):
        times.count(prefill_tokens=0, decode_rows=1, prefill_pairs=0, decode_pairs=1024, layers_s=0.03)
    decoding = replace(reading("b", 3.0, decode_rows=60, decode_steps=60), step_times=times)
    seen(observer, reading("a", 1.0), reading("b", 1.0))
    early = seen(observer, reading("a", 3.0, prefill_tokens=4096, prefill_steps=8), decoding)
    assert early.not_planned == "too few steps were run to know what they cost; wait for traffic"
    later = reading("a", 5.0, steps=12, prefill_tokens=8192, prefill_steps=20)
    assert seen(observer, later, replace(decoding, taken_s=5.0)).not_planned == ""


def test_steps_count_once_whoever_answers() -> None:
    observer = Observer()
    seen(observer, reading("a", 1.0, steps=20), reading("b", 1.0))
    for taken_s in (3.0, 5.0, 7.0):
        # Worker a says nothing for a while, then the same as before.
        last = seen(observer, reading("b", taken_s), window_s=10)
        assert last.silent == {"a"}
    last = seen(observer, reading("a", 9.0, steps=20, prefill_tokens=80), reading("b", 9.0), window_s=8)
    assert last.not_planned == "too few steps were run to know what they cost; wait for traffic"
    assert last.fleet.figures["a"].prefill_tokens_per_s == 10


def test_what_costs_change_to_is_believed_in_the_end() -> None:
    observer, slow = Observer(), StepTimes()
    seen(observer, reading("a", 1.0, steps=4000), names="a")
    slow = reading("a", 2.0, steps=4000).step_times
    for number in range(20_000):
        tokens = 2 + number % 8
        slow.count(prefill_tokens=tokens, decode_rows=0, prefill_pairs=0, decode_pairs=0, layers_s=0.003 * tokens)
    last = seen(observer, replace(reading("a", 3.0), step_times=slow), names="a")
    assert last.fleet.model.times.prefill_token_s == pytest.approx(0.003 / 4, rel=0.01)


def test_who_is_new_keeps_the_others_waiting_for_one_period_only() -> None:
    observer = Observer()
    seen(observer, reading("a", 1.0, steps=40), names="a")
    joined = seen(observer, reading("a", 3.0, steps=40), reading("b", 3.0))
    assert "traffic of b;" in joined.not_planned
    assert seen(observer, reading("a", 5.0, steps=40), reading("b", 5.0)).not_planned == ""


def test_a_worker_is_known_by_both_its_answers() -> None:
    observer = Observer()
    nothing = "no worker has told yet what it does and where its layers are"
    assert observer.look([], {"a": home("a")}, 0.0, 2.0) == nothing
    assert observer.look([reading("a", 1.0)], {}, 0.0, 2.0) == nothing
    told = {"a": home("a"), "b": None, "c": home("c")}
    only_a = observer.look([reading("a", 1.0), reading("b", 1.0)], told, 0.0, 2.0)
    assert isinstance(only_a, Observation)
    assert (set(only_a.fleet.figures), set(only_a.fleet.placements)) == ({"a"}, {"a"})
    assert only_a.silent == {"b", "c"}


def test_what_is_known_of_a_worker_outlasts_its_silence_and_ends_with_its_life() -> None:
    observer, both = Observer(), {"a": home("a"), "b": home("b")}
    away = home("a").with_layers_moved(3, 1, "b")
    observer.look([reading("a", 1.0, steps=20, live_blocks=30), reading("b", 1.0)], {**both, "a": away}, 0.0, 6.0)
    observer.links.moved("a", "b", took(64, 1.0), busy=0.0)
    for taken_s in (3.0, 5.0):
        quiet = observer.look([reading("b", taken_s)], {"a": None, "b": home("b")}, 0.0, 6.0)
    assert set(observer.links.speeds) == {frozenset("ab")}
    # What b has of it is load and memory of b all the while.
    assert isinstance(quiet, Observation)
    assert quiet.silent == {"a"}
    assert (quiet.fleet.placements["a"], quiet.fleet.figures["a"].live_blocks) == (away, 30)
    back = observer.look([reading("a", 7.0, steps=21, prefill_tokens=60), reading("b", 7.0)], both, 0.0, 6.0)
    assert isinstance(back, Observation)
    # Were the first 20 steps counted again, there would be enough.
    assert back.not_planned == "too few steps were run to know what they cost; wait for traffic"
    assert back.fleet.figures["a"].prefill_tokens_per_s == 10
    observer.look([reading("b", 9.0)], {"b": home("b")}, 0.0, 2.0)
    assert observer.links.speeds == {}


def test_what_was_done_in_a_long_silence_is_no_rate_of_now() -> None:
    observer, both = Observer(), {"a": home("a"), "b": home("b")}
    observer.look([reading("a", 1.0, steps=40), reading("b", 1.0)], both, 0.0, 6.0)
    for taken_s in (3.0, 5.0, 7.0):
        observer.look([reading("b", taken_s)], both, 0.0, 6.0)
    # 8 s, 800 tokens, and nothing says when.
    back = observer.look([reading("a", 9.0, steps=41, prefill_tokens=800), reading("b", 9.0)], both, 0.0, 6.0)
    assert isinstance(back, Observation)
    assert "traffic of a;" in back.not_planned
    for taken_s in (11.0, 13.0, 15.0):
        now = observer.look(
            [reading("a", taken_s, steps=41, prefill_tokens=800), reading("b", taken_s)], both, 0.0, 6.0
        )
    assert isinstance(now, Observation)
    assert (now.not_planned, now.fleet.figures["a"].prefill_tokens_per_s) == ("", 0)


def test_a_worker_that_was_started_again_counts_anew() -> None:
    # Its clock goes on where it runs on the same machine, and its counters do not.
    observer = Observer()
    seen(observer, reading("a", 1.0, steps=20, prefill_tokens=5000), names="a")
    again = seen(observer, reading("a", 3.0, steps=20, prefill_tokens=300, epoch=1), names="a")
    assert "traffic of a;" in again.not_planned
    # 20 steps of each life are enough; 20 in all would not be.
    later = seen(observer, reading("a", 5.0, steps=20, prefill_tokens=500, epoch=1), names="a")
    assert later.not_planned == ""
    assert later.fleet.figures["a"].prefill_tokens_per_s == 100


def took(mebibytes: int, duration_s: float) -> Happened:
    return Happened(weight_bytes=mebibytes << 19, kv_bytes=mebibytes << 19, duration_s=duration_s, held_s=0.25)


def test_links_are_as_fast_as_moves_were() -> None:
    links = LinkEstimates()
    assert (links.speeds, links.usual, links.switch_s) == ({}, FIRST_GUESS, 0)
    links.moved("a", "b", took(128, 2.0), busy=0.0)
    # The first move of a pair says more than a guess; later ones are weighed against it, 64 MiB half.
    assert links.speeds == {frozenset("ab"): LinkSpeed(64 << 20, FIRST_GUESS.latency_s)}
    links.moved("b", "a", took(64, 0.5), busy=0.1)
    assert links.speeds[frozenset("ab")].bytes_per_s == pytest.approx((64 << 20) / 0.75)
    # A few bytes say nothing.
    links.moved("a", "c", Happened(weight_bytes=0, kv_bytes=1000, duration_s=2.0, held_s=0.25), busy=0.0)
    assert set(links.speeds) == {frozenset("ab")}
    assert links.switch_s == pytest.approx(0.25)
    # 0.75 s and 2.25 s for 64 MiB.
    links.moved("a", "c", took(64, 2.25), busy=0.0)
    assert links.usual.bytes_per_s == pytest.approx((64 << 20) / 1.5)
    links.forget(frozenset("ac"))
    assert set(links.speeds) == {frozenset("ac")}


def test_a_small_first_move_that_waited_makes_no_slow_link() -> None:
    links = LinkEstimates()
    # 2 MiB in 0.25 s, of which 0.05 s of waiting were foreseen: a sample of a fiftieth of the guess's weight, that
    # counts as twice as slow at most.
    links.moved("a", "b", took(2, 0.25), busy=0.0, turns_s=0.05)
    kept = 0.5 ** (2 / 64)
    slower = 1 / (kept + 2 * (1 - kept))
    assert links.speeds[frozenset("ab")].bytes_per_s == pytest.approx(FIRST_GUESS.bytes_per_s * slower)
    # Of 16 MiB the first one is believed: 0.25 s without the waiting.
    links.moved("a", "c", took(16, 0.3), busy=0.0, turns_s=0.05)
    assert links.speeds[frozenset("ac")].bytes_per_s == pytest.approx(64 << 20)


def test_a_small_first_move_under_load_hardly_counts() -> None:
    links = LinkEstimates()
    # 2 MiB that took 0.5 s longer: a sample of 0.9 of 2 MiB, which counts as twice the guess at most.
    links.moved("a", "b", took(2, 0.5), busy=0.9)
    kept = 0.5 ** (0.9 * 2 / 64)
    assert links.loaded_byte_s * FIRST_LOADED_BYTES_PER_S == pytest.approx(kept + 2 * (1 - kept), rel=1e-4)


def test_one_long_switch_is_not_what_all_switches_take() -> None:
    links = LinkEstimates()
    for held_s, known_s in ((11.0, 1.0), (11.0, 1.0 + 0.25 * 3.0), (0.0, 0.75 * 1.75)):
        links.moved("a", "b", replace(took(64, 20.0), held_s=held_s), busy=0.0)
        assert links.switch_s == pytest.approx(known_s)


def test_a_move_under_load_that_is_quicker_than_at_rest_says_that_the_link_is_faster() -> None:
    links = LinkEstimates()
    links.moved("a", "b", took(16, 2.0), busy=0.0)
    assert links.speeds[frozenset("ab")].bytes_per_s == pytest.approx(8 << 20)
    # 64 MiB weigh half: 1/8 and 1/128 s for a MiB.
    links.moved("a", "b", took(64, 0.5), busy=1.0)
    assert links.speeds[frozenset("ab")].bytes_per_s == pytest.approx((1 << 20) / ((1 / 8 + 1 / 128) / 2))
    # One that is slower does not say that it is slower.
    before = links.speeds
    links.moved("a", "b", took(64, 50.0), busy=1.0)
    assert links.speeds == before


def test_load_makes_moves_longer_between_whomever() -> None:
    links = LinkEstimates()
    assert links.loaded_byte_s == 1 / FIRST_LOADED_BYTES_PER_S
    links.moved("a", "b", took(128, 2.0), busy=0.0)
    # At rest 64 MiB take 1 s. With an end busy half of the time they take 3 s: 4 s more if it were always busy.
    links.moved("a", "b", took(64, 3.0), busy=0.5)
    assert links.loaded_byte_s == pytest.approx(4 / (64 << 20))
    assert links.speeds[frozenset("ab")].bytes_per_s == pytest.approx(64 << 20)
    # 32 MiB weigh 1 - 0.5 ** 0.5, 64 MiB would 0.5. More than busy is no more than busy.
    # They take 0.5 s at rest, and 4 s more.
    links.moved("c", "b", took(32, 4.5), busy=1.7)
    kept = 0.5**0.5
    assert links.loaded_byte_s == pytest.approx((4 * kept + 8 * (1 - kept)) / (64 << 20))
    # As quick as at rest, or quicker: next to nothing longer.
    for _ in range(20):
        links.moved("a", "b", took(64, 0.9), busy=1.0)
    assert 0 < links.loaded_byte_s < 0.02 / (64 << 20)


def test_waiting_for_steps_is_not_taken_for_copying() -> None:
    links = LinkEstimates()
    links.moved("a", "b", took(128, 2.0), busy=0.0)
    # 64 MiB take 1 s at rest. Of 5 s, 3 s went by with waiting for steps, and that of the 3.5 s with steps held too.
    links.moved("a", "b", replace(took(64, 5.0), held_s=3.5), busy=1.0, turns_s=3.0)
    assert links.loaded_byte_s == pytest.approx(1 / (64 << 20))
    assert links.switch_s == pytest.approx(0.25 + 0.25 * (0.5 - 0.25))
    links.moved("a", "b", took(64, 5.0), busy=1.0, turns_s=30.0)
    assert links.loaded_byte_s > 0


def test_hosted_work_is_bounded_where_all_homes_bound_it() -> None:
    def slice_of(*slices_s: float | None) -> float | None:
        readings = [replace(reading(name, 1.0), hosted_slice_s=each) for name, each in zip("ab", slices_s, strict=True)]
        return seen(Observer(), *readings).fleet.model.hosted_slice_s

    assert (slice_of(0.05, 0.2), slice_of(None, 0.2), slice_of(None, None)) == (0.2, None, None)
