"""The planner on cases whose right answer is worked out in their comments. Figures are those of `fleets.model`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from migrate.fleet import Fleet
from migrate.move_settings import MoveSettings
from migrate.moves import EndedMove, HeadMove, LayerMove
from migrate.planner import Plan, plan
from migrate.verdict import Abilities, Reason, Situation
from tests.migrate.fleets import at_home, fleet, model, worker

COMPUTE = MoveSettings(compute_weight=1.0, memory_weight=0.0, busy_from=0.0)
EVEN = MoveSettings(compute_weight=0.5, memory_weight=0.5, busy_from=0.0)
COST = model()
LAST_TWO_ON_B = at_home("a", COST).with_layers_moved(2, 2, "b")


def planned(fleet: Fleet, settings: MoveSettings = COMPUTE, **situation: object) -> Plan:
    return plan(Situation(fleet, **situation), settings)  # type: ignore[arg-type]


def reasons(made: Plan) -> dict[str, Reason]:
    """By number of layers of the candidates."""
    return {str(len(verdict.move.layers)): verdict.reason for verdict in made.verdicts}


@pytest.mark.parametrize(("tokens_per_s", "moves"), [(174, 0), (176, 1)])
def test_nobody_is_relieved_who_has_enough(tokens_per_s: float, moves: int) -> None:
    # 0.696 and 0.704 of a's time beside an idle worker; busy_from is 0.7.
    wanted = replace(COMPUTE, busy_from=0.7)
    assert len(planned(fleet(COST, worker("a", prefill_tokens_per_s=tokens_per_s), worker("b")), wanted).moves) == moves


@pytest.mark.parametrize(("live_blocks", "moves"), [(69, 0), (71, 1)])
def test_memory_may_be_what_is_short(live_blocks: int, moves: int) -> None:
    # Of 100 blocks. Nothing computes; U is 0.345 and 0.355.
    wanted = replace(EVEN, busy_from=0.7)
    made = planned(fleet(COST, worker("a", live_blocks=live_blocks), worker("b")), wanted)
    assert [type(move) for move in made.moves] == [HeadMove] * moves


@pytest.mark.parametrize(("tokens_per_s", "goes"), [(137, True), (138, False)])
def test_modules_go_home_when_home_has_enough_with_them(tokens_per_s: float, goes: bool) -> None:
    # All of a is 0.548 or 0.552, 0.15 below busy_from or not; b has 0.4 of its own. With a's last two layers there
    # it is 0.274 and 0.674, or as much more.
    workers = [worker("a", prefill_tokens_per_s=tokens_per_s), worker("b", prefill_tokens_per_s=100)]
    made = planned(fleet(COST, *workers, placed=(LAST_TWO_ON_B,)), replace(COMPUTE, busy_from=0.7))
    assert made.moves == ((LayerMove("a", 2, 2, "b", "a"),) if goes else ())


@pytest.mark.parametrize(("now_s", "destination"), [(105, "d"), (107, "b")])
def test_what_a_move_has_changed_is_waited_for(now_s: float, destination: str) -> None:
    # Heads of b came home from c, at 100 s. For the window of 6 s the figures of both are partly of before.
    busy = fleet(COST, worker("a", prefill_tokens_per_s=200), worker("b"), worker("c"), worker("d"))
    came_home = EndedMove(HeadMove("b", (0,), (1,), "c", "b"), ended_s=100)
    made = planned(busy, recent=(came_home,), now_s=now_s)
    assert made.moves == (LayerMove("a", 2, 2, "a", destination),)
    unsettled = {verdict.move.destination for verdict in made.verdicts if verdict.reason is Reason.UNSETTLED}
    assert unsettled == ({"b", "c"} if now_s == 105 else set())


def test_half_of_the_layers_leave_a_busy_worker_for_an_idle_one() -> None:
    # 200 tokens/s x 4 ms = 0.8 at a, 0.2 a layer; mean 0.4, gap 0.4. One layer leaves 0.6, two 0.4 on both, three would
    # put 0.6 on b. Nothing is live, so nothing is copied.
    made = planned(fleet(COST, worker("a", prefill_tokens_per_s=200), worker("b")))
    assert made.moves == (LayerMove("a", 2, 2, "a", "b"),)
    assert reasons(made) == {"1": Reason.NOT_BEST, "2": Reason.ACCEPTED, "3": Reason.NEW_PEAK}
    predicted = made.verdicts[1].prediction
    assert predicted is not None
    assert (predicted.peak_before, predicted.peak_after) == pytest.approx((0.8, 0.4))
    assert predicted.before["b"].weighted == 0
    assert (predicted.transfer_bytes, predicted.transfer_s) == (0, 0)
    assert made.mean == pytest.approx(0.4)


def test_a_backlog_is_load_too() -> None:
    # 6,000 tokens within the horizon of 30 s are the 200 tokens/s of the case before.
    made = planned(fleet(COST, worker("a", pending_prefill_tokens=6000), worker("b")))
    assert made.moves == (LayerMove("a", 2, 2, "a", "b"),)


def test_the_destination_does_not_become_the_new_peak() -> None:
    # a 0.8, b 0.2. One layer: 0.6 and 0.4. Two would be 0.4 and 0.6: the same peak, at the other end.
    made = planned(fleet(COST, worker("a", prefill_tokens_per_s=200), worker("b", prefill_tokens_per_s=50)))
    assert made.moves == (LayerMove("a", 3, 1, "a", "b"),)
    assert reasons(made)["2"] is Reason.NEW_PEAK


def test_a_small_gap_is_left_alone() -> None:
    # 0.5 and 0.4: 0.05 from the mean, below delta_heads = 0.08.
    made = planned(fleet(COST, worker("a", prefill_tokens_per_s=125), worker("b", prefill_tokens_per_s=100)))
    assert (made.moves, made.verdicts) == ((), ())


def test_heads_close_a_narrow_gap() -> None:
    # 0.6 and 0.4: gap 0.1, above delta_heads and below delta_layers. Attention is half of 0.15 a layer, so one of 16
    # lanes is 0.6 / 2 / 16 = 0.01875. Four lanes leave 0.525 and 0.475, six would be 0.4875 and 0.5125. Four are one
    # head in all layers, or two in two of them. But two of four heads would be waited for: a token's q, k, v and output
    # are 24 bytes, 0.24 ms, and b, busy for 0.4 of its time, attends in 1.4 x 0.25 ms where those at home take 0.25.
    # Two layers of that are 150 x 2 x 0.34 ms, 0.102. One head takes 0.175 + 0.12 ms, the three at home 0.375.
    half = model(attention=0.5)
    made = planned(fleet(half, worker("a", prefill_tokens_per_s=150), worker("b", prefill_tokens_per_s=100)))
    assert made.moves == (HeadMove("a", (0, 1, 2, 3), (3,), "a", "b"),)
    predicted = {(v.move.layers, v.move.heads): v.prediction for v in made.verdicts if isinstance(v.move, HeadMove)}
    for layers, heads, after in (((0, 1, 2, 3), (3,), 0.525), ((2, 3), (2, 3), 0.525 + 0.102)):
        prediction = predicted[layers, heads]
        assert prediction is not None
        assert prediction.after["a"].weighted == pytest.approx(after)
        assert prediction.after["b"].weighted == pytest.approx(0.475)


def test_heads_that_would_be_waited_for_longer_than_they_save_stay() -> None:
    # As before, where each message takes 1 ms, and prompts come in chunks of 4. One head of all layers is 0.7 + 0.48 +
    # 2 ms there and three are 1.5 ms at home: 37.5 chunks/s wait for 4 x 1.68 ms, 0.252, to save 0.075.
    slow = model(attention=0.5, latency_s=0.001)
    a = worker("a", prefill_tokens_per_s=150, prefill_step_tokens=4)
    made = planned(fleet(slow, a, worker("b", prefill_tokens_per_s=100)))
    assert made.moves == ()
    assert {verdict.reason for verdict in made.verdicts} == {Reason.LITTLE_GAIN, Reason.NOT_BEST}


@pytest.mark.parametrize(("least", "moves"), [(0.0, 1), (0.0029, 1), (0.0031, 0), (0.05, 0)])
def test_what_gains_next_to_nothing_stays(least: float, moves: int) -> None:
    # In chunks of 10 it is 1.75 + 1.2 + 2 ms and 3.75 ms: 15 chunks/s wait for 4 x 1.2 ms, 0.072. The peak falls by
    # 0.003, and moving costs nothing.
    slow = model(attention=0.5, latency_s=0.001)
    a = worker("a", prefill_tokens_per_s=150, prefill_step_tokens=10)
    b = worker("b", prefill_tokens_per_s=100)
    made = planned(fleet(slow, a, b), replace(COMPUTE, min_gain=least))
    assert len(made.moves) == moves
    if not moves:
        assert any(f"it must fall by {least:g} at least" in verdict.detail for verdict in made.verdicts)


def test_heads_move_when_memory_alone_is_the_trouble() -> None:
    # All 100 blocks of a are live, none of b: U 0.5 and 0, a gap of 0.25, but nothing computes. Of 16 lanes eight leave
    # u_m = 8 x 100 x 10 / 16,000 = 0.5 on both. They are 8,000 bytes, 0.08 s.
    # b needs 8 x 125 x 10 bytes for them. Its 1,600 pages are shared 808 to 16: 196 blocks for each lane of a, where a
    # itself would have room for 1,600 / 8 = 200.
    made = planned(fleet(COST, worker("a", live_blocks=100), worker("b")), EVEN)
    assert made.moves == (HeadMove("a", (0, 1, 2, 3), (2, 3), "a", "b"),)
    predicted = next(verdict.prediction for verdict in made.verdicts if verdict.accepted)
    assert predicted is not None
    assert (predicted.weight_bytes, predicted.kv_bytes, predicted.transfer_s) == (0, 8000, 0.08)
    assert (predicted.needed_bytes, predicted.free_bytes, predicted.grant_blocks) == (10_000, 16_000, 196)
    assert predicted.peak_after == pytest.approx(0.25)


@pytest.mark.parametrize(("live_blocks", "moves"), [(60, False), (80, True)])
def test_memory_that_is_not_scarce_is_no_reason_to_move_heads(live_blocks: int, moves: bool) -> None:
    # Both compute for 0.8 of their time, so only u_m makes a gap: 0.3 and 0.4 of U, halved against the mean. That a is
    # short of time does not get better by it.
    busy = {"prefill_tokens_per_s": 200.0}
    settings = replace(EVEN, busy_from=0.7)
    made = planned(fleet(COST, worker("a", live_blocks=live_blocks, **busy), worker("b", **busy)), settings)
    assert [type(move) for move in made.moves] == [HeadMove] * moves
    assert bool(made.verdicts) == moves


@pytest.mark.parametrize(("latency_s", "move"), [(0.0, HeadMove), (0.003, LayerMove)])
def test_layers_relieve_memory_where_heads_would_be_waited_for(latency_s: float, move: type) -> None:
    # Both compute for 0.4 of their time, and a's pool is full: U 0.7 and 0.2. One layer: a 0.3 and 12,000 / 17,000,
    # b 0.5 and 4,000 / 15,000, U 0.503 and 0.383; with two b would have 0.586. Half of the heads: U 0.45 on both, and
    # what is waited for. 10 chunks/s of 10 tokens send 240 bytes a layer, 2.4 ms: 0.048 more, less than one layer
    # leaves. With 3 ms each way as well it is at least 0.168 more. Three heads of two layers alone leave 0.5125.
    busy = {"prefill_tokens_per_s": 100.0, "prefill_step_tokens": 10.0}
    workers = [worker("a", live_blocks=100, **busy), worker("b", **busy)]
    made = planned(fleet(model(latency_s=latency_s), *workers), EVEN)
    assert [type(each) for each in made.moves] == [move]
    layers = [verdict for verdict in made.verdicts if verdict.move == LayerMove("a", 3, 1, "a", "b")]
    assert layers[0].prediction is not None
    assert layers[0].prediction.peak_after == pytest.approx(0.15 + 6 / 17)


def test_a_model_with_one_kv_head_has_its_memory_relieved_by_layers() -> None:
    # As before, with four lanes and 4,000 bytes for KV. One layer takes 1,000 bytes of weights along as well: u_m is
    # 3,000 / 5,000 and 1,000 / 4,000. Two would be 2,000 / 6,000 and 2,000 / 4,000, a new peak.
    workers = [worker("a", live_blocks=100, memory_bytes=8000), worker("b", memory_bytes=8000)]
    made = planned(fleet(model(heads=1), *workers), EVEN)
    assert made.moves == (LayerMove("a", 3, 1, "a", "b"),)
    assert made.verdicts[1].prediction is not None
    assert made.verdicts[1].prediction.after["a"].memory == pytest.approx(0.6)
    assert made.verdicts[1].prediction.after["b"].memory == pytest.approx(0.25)
    heads = [verdict for verdict in made.verdicts if isinstance(verdict.move, HeadMove)]
    assert [verdict.reason for verdict in heads] == [Reason.ONE_KV_HEAD]
    assert "move layers instead" in heads[0].detail


def test_a_narrow_gap_stays_where_there_is_one_kv_head() -> None:
    # 0.6 and 0.4 as above.
    one = model(heads=1, attention=0.5)
    made = planned(fleet(one, worker("a", prefill_tokens_per_s=150), worker("b", prefill_tokens_per_s=100)))
    assert made.moves == ()
    assert [verdict.reason for verdict in made.verdicts] == [Reason.ONE_KV_HEAD]


def test_what_takes_longer_than_the_budget_is_not_moved() -> None:
    # 80 live blocks in 4 lanes of 10 bytes are 3,200 bytes a layer: 0.032 s, 0.064 s for two. The budget is 0.05 s.
    tight = replace(COMPUTE, latency_budget_s=0.05)
    made = planned(fleet(COST, worker("a", prefill_tokens_per_s=200, live_blocks=80), worker("b")), tight)
    assert made.moves == (LayerMove("a", 3, 1, "a", "b"),)
    assert reasons(made) == {"1": Reason.ACCEPTED, "2": Reason.OVER_BUDGET, "3": Reason.OVER_BUDGET}


def test_weights_are_copied_where_they_are_missing_only() -> None:
    # b's own layers 1 to 3 are on c, so b has the weights of layer 0 alone. Of the two ends, a's layers 0 and 1 bring
    # 1,000 bytes, 2 and 3 would bring 2,000.
    away = at_home("b", COST).with_layers_moved(1, 3, "c")
    made = planned(fleet(COST, worker("a", prefill_tokens_per_s=200), worker("b"), worker("c"), placed=(away,)))
    assert made.moves == (LayerMove("a", 0, 2, "a", "b"),)
    predicted = next(verdict.prediction for verdict in made.verdicts if verdict.accepted)
    assert predicted is not None
    assert (predicted.weight_bytes, predicted.transfer_s) == (1000, 0.01)


def test_what_can_go_home_does_before_others_leave() -> None:
    # a has b's layers 2 and 3, half of b's work. Sending layers of a to b instead would lower the peak more, but then
    # every token of both would go to and fro. That is not even considered.
    away = at_home("b", COST).with_layers_moved(2, 2, "a")
    made = planned(
        fleet(COST, worker("a", prefill_tokens_per_s=300), worker("b", prefill_tokens_per_s=40), placed=(away,))
    )
    assert made.moves == (LayerMove("b", 2, 2, "a", "b"),)
    assert {verdict.move.instance for verdict in made.verdicts} == {"b"}


@pytest.mark.parametrize(("switch_s", "moves"), [(7.9, 1), (8.1, 0)])
def test_a_move_must_gain_more_than_it_costs(switch_s: float, moves: int) -> None:
    # The peak falls by 0.4 for 30 s, worth 12 s. 1.5 times the move's duration is 11.85 s or 12.15 s. Moving less takes
    # as long and gains less, and is not tried.
    slow = model(switch_s=switch_s)
    patient = replace(COMPUTE, latency_budget_s=100)
    made = planned(fleet(slow, worker("a", prefill_tokens_per_s=200), worker("b")), patient)
    assert len(made.moves) == moves
    assert reasons(made)["2"] is (Reason.ACCEPTED if moves else Reason.LITTLE_GAIN)
    assert reasons(made)["1"] is Reason.NOT_BEST


@pytest.mark.parametrize(("waiting_s", "moves"), [(14.9, 1), (15.1, 0)])
def test_while_copies_wait_nothing_is_gained(waiting_s: float, moves: int) -> None:
    # Two layers with 80 live blocks are 6,400 bytes; a is busy for 0.8 of its time. As they wait it serves on, and so
    # only the rest of 30 s is worth the fall of the peak by 0.4: 6.04 s or 5.96 s. The move itself takes 4 s, which
    # count one and a half times.
    slow = replace(model(switch_s=4 - 0.064), loaded_byte_s=waiting_s / 6400 / 0.8)
    patient = replace(COMPUTE, latency_budget_s=100)
    made = planned(fleet(slow, worker("a", prefill_tokens_per_s=200, live_blocks=80), worker("b")), patient)
    predicted = made.verdicts[1].prediction
    assert predicted is not None
    assert predicted.waiting_s == pytest.approx(waiting_s)
    assert predicted.transfer_s == pytest.approx(waiting_s + 4)
    assert len(made.moves) == moves


@pytest.mark.parametrize(
    ("chunk_tokens", "hosted_slice_s", "layers", "three_layers_s"),
    [(8, None, 3, 0.048), (12, None, 2, 0.060), (12, 0.024, 3, 0.048)],
)
def test_hosting_may_double_the_latency_of_the_host_and_no_more(
    chunk_tokens: float, hosted_slice_s: float | None, layers: int, three_layers_s: float
) -> None:
    # b decodes one request: 8 x 3 ms = 24 ms a token; two could share a step: 41.7 tokens/s x 8 x 2 ms = 0.667. a is
    # offered 2,500 x 8 ms = 20, 2.5 a layer. Three layers leave 12.5 and 8.17, four 10 and 10.67, a new peak.
    # With three, a computes a token in 5 ms, and keeps b busy 0.6 of the time: a step of b takes 24 / 0.4 = 60 ms, but
    # waits for one chunk at most: 8 tokens are 24 ms, 12 are 36 ms, or 24 ms where the engine sees to it.
    # With two it is 2 ms of 6 ms: 24 / 0.667 = 36 ms.
    a = worker("a", prefill_tokens_per_s=2500, prefill_step_tokens=chunk_tokens)
    b = worker("b", running=1, decode_tokens_per_s=1 / 0.024)
    made = planned(fleet(model(layers=8, hosted_slice_s=hosted_slice_s), a, b))
    assert made.moves == (LayerMove("a", 8 - layers, layers, "a", "b"),)
    assert reasons(made)["3"] is (Reason.ACCEPTED if layers == 3 else Reason.SLOW_TOKENS)
    two, three = made.verdicts[1].prediction, made.verdicts[2].prediction
    assert two is not None
    assert three is not None
    assert three.itl_before_s["b"] == pytest.approx(0.024)
    assert two.itl_after_s["b"] == pytest.approx(0.036)
    assert three.itl_after_s["b"] == pytest.approx(three_layers_s)


@pytest.mark.parametrize(("latency_s", "reason"), [(0.0019, Reason.ACCEPTED), (0.0021, Reason.SLOW_TOKENS)])
def test_a_slow_link_is_not_put_into_a_decode_step(latency_s: float, reason: Reason) -> None:
    # a decodes two requests: 4 x 4 ms = 16 ms a token. Four could share a step: 125 tokens/s x 4 x 1.5 ms = 0.75.
    # Split, each step has one row: 4 x 3 ms and the way there and back, 12 + 3.8 or 12 + 4.2 ms; slower is no gain.
    # A token then costs 2 ms a layer: 125 x 2 ms x 2 layers = 0.5 on both.
    a = worker("a", running=2, decode_tokens_per_s=125)
    made = planned(fleet(model(latency_s=latency_s), a, worker("b")))
    assert reasons(made)["2"] is reason
    predicted = made.verdicts[1].prediction
    assert predicted is not None
    assert predicted.itl_after_s["a"] == pytest.approx(0.012 + 2 * latency_s, abs=2e-4)
    assert predicted.peak_after == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("live_blocks", "prompts", "reason"),
    [
        (0, 0, Reason.SLOW_TOKENS),
        # It is short of memory: a layer elsewhere is room, whatever its tokens wait for.
        (80, 0, Reason.ACCEPTED),
        # 125 tokens/s cost 125 x 1.5 ms a layer, and prompts more than that: they gain by it.
        (0, 180, Reason.SLOW_TOKENS),
        (0, 190, Reason.ACCEPTED),
    ],
)
def test_layers_of_a_decode_loop_stay_where_its_tokens_would_come_later(
    live_blocks: int, prompts: float, reason: Reason
) -> None:
    # As above, with 2 x 5 ms on the way: 22 ms in place of 16. A loop that is busy all the time loses by it.
    a = worker("a", running=2, decode_tokens_per_s=125, live_blocks=live_blocks, prefill_tokens_per_s=prompts)
    made = planned(fleet(model(latency_s=0.005), a, worker("b")), replace(COMPUTE, busy_from=0.7))
    assert reasons(made)["2"] is reason


@pytest.mark.parametrize(("tokens_per_s", "reason"), [(200.0, Reason.ACCEPTED), (230.0, Reason.SLOW_TOKENS)])
def test_hosting_leaves_time_for_the_tokens_that_are_wanted(tokens_per_s: float, reason: Reason) -> None:
    # a is offered 2.4, and one layer of it would keep b busy for a third of the time, since three of its own are 3 ms a
    # token: a step of 4 rows, 24 ms, takes 36 ms. Eight at a time are 222 tokens/s then.
    a = worker("a", prefill_tokens_per_s=600, prefill_step_tokens=16)
    b = worker("b", running=4, decode_tokens_per_s=tokens_per_s)
    made = planned(fleet(COST, a, b))
    assert reasons(made)["1"] is reason
    if reason is Reason.SLOW_TOKENS:
        assert "36 ms apart, now 24 ms; allowed are 34.78 ms, for 230 tokens/s" in made.verdicts[0].detail


def test_what_has_just_moved_stays() -> None:
    # All runs at the end have layer 3, which came home 5 s ago; it may leave 15 s after that.
    busy = fleet(COST, worker("a", prefill_tokens_per_s=200), worker("b"))
    came_home = EndedMove(LayerMove("a", 3, 1, "b", "a"), ended_s=100)
    assert set(reasons(planned(busy, recent=(came_home,), now_s=105)).values()) == {Reason.COOLING}
    assert planned(busy, recent=(came_home,), now_s=115).moves == (LayerMove("a", 2, 2, "a", "b"),)


def test_a_worker_is_in_one_move_at_a_time() -> None:
    # a (0.8) is in a move to b. c has 0.6, d nothing, the mean is 0.35; two layers of c leave 0.3 on both.
    workers = [worker("a", prefill_tokens_per_s=200), worker("b"), worker("c", prefill_tokens_per_s=150), worker("d")]
    made = planned(fleet(COST, *workers), under_way=(LayerMove("a", 3, 1, "a", "b"),))
    assert made.moves == (LayerMove("c", 2, 2, "c", "d"),)


def test_several_pairs_move_at_once() -> None:
    # a 0.8, c 0.7, b 0.3, d 0: mean 0.45. a and d share 0.4 each. Then c and b: one layer of c leaves 0.525 and 0.475.
    workers = [
        worker("a", prefill_tokens_per_s=200),
        worker("b", prefill_tokens_per_s=75),
        worker("c", prefill_tokens_per_s=175),
        worker("d"),
    ]
    made = planned(fleet(COST, *workers))
    assert made.moves == (LayerMove("a", 2, 2, "a", "d"), LayerMove("c", 3, 1, "c", "b"))


def test_a_full_destination_is_passed_over_for_the_next() -> None:
    # b computes nothing, but 90 of its 100 blocks are live: with a quarter more it has none to give. A layer of a, with
    # 40 live blocks, needs 4 lanes x 50 blocks. c (0.1) has room: one layer leaves a 0.6 and c 0.3, two 0.4 and 0.5.
    b = worker("b", live_blocks=90)
    c = worker("c", prefill_tokens_per_s=25)
    made = planned(fleet(COST, worker("a", prefill_tokens_per_s=200, live_blocks=40), b, c))
    assert {verdict.reason for verdict in made.verdicts if verdict.move.destination == "b"} == {Reason.NO_ROOM}
    assert made.moves == (LayerMove("a", 3, 1, "a", "c"),)


@pytest.mark.parametrize(("hosted", "next_layer"), [(3, 2), (0, 1)])
def test_a_hosted_run_grows_at_its_end(hosted: int, next_layer: int) -> None:
    # a has 0.6 left of 0.8, b 0.2 of it: one more layer makes it 0.4 each.
    placed = at_home("a", COST).with_layers_moved(hosted, 1, "b")
    made = planned(fleet(COST, worker("a", prefill_tokens_per_s=200), worker("b"), placed=(placed,)))
    assert made.moves == (LayerMove("a", next_layer, 1, "a", "b"),)


def test_of_equals_what_goes_home_moves() -> None:
    # a has half of its 0.8 on b, which has 0.4 of its own: 0.4 and 0.8. Two layers of b's (0.1 each), or one of a's
    # (0.2), leave 0.6 each.
    workers = [worker("a", prefill_tokens_per_s=200), worker("b", prefill_tokens_per_s=100)]
    made = planned(fleet(COST, *workers, placed=(LAST_TWO_ON_B,)))
    assert made.moves == (LayerMove("a", 3, 1, "b", "a"),)


def test_a_hosted_run_may_leave_as_a_whole() -> None:
    # a has 0.6, and its last layer, 0.2, is on b, which has 0.8 of its own: 0.6 and 1.0. That layer, or one of b's,
    # leaves 0.8 each.
    placed = at_home("a", COST).with_layers_moved(3, 1, "b")
    workers = [worker("a", prefill_tokens_per_s=200), worker("b", prefill_tokens_per_s=200)]
    made = planned(fleet(COST, *workers, placed=(placed,)))
    assert made.moves == (LayerMove("a", 3, 1, "b", "a"),)


def test_without_traffic_loads_are_zero_and_modules_go_home() -> None:
    # Also heads: a's last two layers are on b, and two heads of b's layer 0 are on a. One worker, one move: layers
    # first; the heads have their turn when the layers are home.
    heads = at_home("b", COST).with_heads_moved([0], [2, 3], "a")
    made = planned(fleet(COST, worker("a"), worker("b"), placed=(LAST_TWO_ON_B, heads)), EVEN)
    assert [load.weighted for load in made.utilisation.values()] == [0, 0]
    assert made.moves == (LayerMove("a", 2, 2, "b", "a"),)
    made = planned(fleet(COST, worker("a"), worker("b"), placed=(heads,)), EVEN)
    assert made.moves == (HeadMove("b", (0,), (2, 3), "a", "b"),)
    assert planned(fleet(COST, worker("a"), worker("b")), EVEN).verdicts == ()


@pytest.mark.parametrize(("tokens_per_s", "goes"), [(12, True), (13, False)])
def test_modules_go_home_when_home_is_hardly_loaded_with_them(tokens_per_s: float, goes: bool) -> None:
    # All of a would be 0.048 or 0.052 above the idle b; delta_home is 0.05.
    made = planned(fleet(COST, worker("a", prefill_tokens_per_s=tokens_per_s), worker("b"), placed=(LAST_TWO_ON_B,)))
    assert made.moves == ((LayerMove("a", 2, 2, "b", "a"),) if goes else ())
    assert [verdict.reason for verdict in made.verdicts] == [Reason.ACCEPTED if goes else Reason.HOME_LOADED]


@pytest.mark.parametrize(("own_tokens_per_s", "goes"), [(101, True), (99, False)])
def test_modules_go_home_when_the_host_has_more_to_do(own_tokens_per_s: float, goes: bool) -> None:
    # With its hosted half home a has 0.4; the host alone 0.404 or 0.396. Now they have 0.2 and 0.604 or 0.596, which is
    # a wide gap: with deltas out of the way, only the way home is left.
    calm = replace(COMPUTE, delta_heads=0.5, delta_layers=0.5, delta_home=0)
    workers = [worker("a", prefill_tokens_per_s=100), worker("b", prefill_tokens_per_s=own_tokens_per_s)]
    made = planned(fleet(COST, *workers, placed=(LAST_TWO_ON_B,)), calm)
    assert made.moves == ((LayerMove("a", 2, 2, "b", "a"),) if goes else ())


def test_what_takes_too_long_goes_home_in_pieces() -> None:
    # Home has no weights of layers 2 and 3, since nobody else needs them there: 1,000 bytes, 0.01 s each.
    tight = replace(COMPUTE, latency_budget_s=0.015)
    made = planned(fleet(COST, worker("a"), worker("b"), placed=(LAST_TWO_ON_B,)), tight)
    assert made.moves == (LayerMove("a", 3, 1, "b", "a"),)
    assert reasons(made)["2"] is Reason.OVER_BUDGET


def test_what_lies_on_a_dead_worker_is_not_touched() -> None:
    # a's last layers are on b, which is gone; a and c are the fleet. a's instance is broken, but a as a worker is not:
    # it takes half of c's 0.8, those layers of which it has the weights.
    workers = [worker("a"), worker("c", prefill_tokens_per_s=200)]
    made = planned(fleet(COST, *workers, placed=(LAST_TWO_ON_B,)))
    assert made.moves == (LayerMove("c", 0, 2, "c", "a"),)


def test_no_worker_no_plan() -> None:
    assert planned(Fleet.of([], [], COST)) == Plan((), (), {}, 0.0)


def test_of_two_hosts_in_need_the_one_that_can_be_helped_is() -> None:
    # b hosts two layers of a, and has work of its own: 0.4 + 0.6; c is idle. What b hosts could go on to c, in one move
    # as good as one of b's own layers. Where it cannot, b's own do.
    workers = (worker("a", prefill_tokens_per_s=200), worker("b", prefill_tokens_per_s=150), worker("c"))
    now = fleet(COST, *workers, placed=(LAST_TWO_ON_B,))
    able, unable = planned(now), planned(now, abilities=Abilities(onward=False))
    onward = LayerMove("a", 2, 2, "b", "c")
    assert onward in {verdict.move for verdict in able.verdicts if verdict.reason is not Reason.UNABLE}
    (refused,) = [verdict for verdict in unable.verdicts if verdict.move == onward]
    assert refused.reason is Reason.UNABLE
    assert "move it there first" in refused.detail
    assert unable.moves
    assert all(move.instance == move.source for move in unable.moves)


def test_layers_relieve_memory_where_heads_cannot_move() -> None:
    # As where memory alone is the trouble: U 0.5 and 0, and nothing computes.
    now = fleet(COST, worker("a", live_blocks=100), worker("b"))
    made = planned(now, EVEN, abilities=Abilities(heads=False))
    assert made.moves
    assert all(isinstance(move, LayerMove) for move in made.moves)
    assert {verdict.reason for verdict in made.verdicts if isinstance(verdict.move, HeadMove)} == {Reason.UNABLE}


def test_cached_blocks_are_copied_too_as_far_as_the_destination_takes_them() -> None:
    # Two layers of four lanes: 80 bytes a block. 10 blocks are live.
    for cached in (0, 40, 90):
        busy = worker("a", prefill_tokens_per_s=200, live_blocks=10, cached_blocks=cached)
        made = planned(fleet(COST, busy, worker("b")))
        (chosen,) = [verdict.prediction for verdict in made.verdicts if verdict.accepted]
        assert chosen is not None
        assert chosen.kv_bytes == 80 * (10 + cached)
    # Of 1,600 pages b shares out 1,600 x 3 x 8 / (3 x 8 + 79 x 16) = 29 to the 8 lanes: 3 blocks, of which 2 are live.
    busy = worker("a", prefill_tokens_per_s=200, live_blocks=2, cached_blocks=90)
    made = planned(fleet(COST, busy, worker("b", live_blocks=78)))
    (chosen,) = [verdict.prediction for verdict in made.verdicts if verdict.accepted]
    assert chosen is not None
    assert (chosen.grant_blocks, chosen.kv_bytes) == (3, 80 * 3)
