from __future__ import annotations

import math
from dataclasses import replace

import pytest

from migrate.cost_model import CostModel, LinkSpeed, MeasuredTimes, ModelSizes
from migrate.move_settings import MoveSettings
from migrate.moves import HeadMove, LayerMove, share_a_module
from migrate.placement import Placement
from tests.migrate.fleets import model

HOME = Placement.at_home("a", 4, 4)


def test_a_move_makes_the_next_placement() -> None:
    away = LayerMove("a", 1, 2, "a", "b").after(HOME)
    assert away.layers_on("b") == (1, 2)
    assert LayerMove("a", 1, 2, "b", "a").after(away).is_home
    heads = HeadMove("a", (0, 3), (2, 3), "a", "b").after(HOME)
    assert heads.lanes_on("b") == ((0, 2), (0, 3), (3, 2), (3, 3))
    assert HeadMove("a", (0, 3), (2, 3), "b", "a").after(heads).is_home


def test_a_move_says_what_it_is() -> None:
    assert str(LayerMove("a", 1, 2, "a", "b")) == "layers 1 to 2 of 'a' from 'a' to 'b'"
    assert str(LayerMove("a", 3, 1, "b", "a")) == "layer 3 of 'a' from 'b' to 'a'"
    assert str(HeadMove("a", (1, 2), (3,), "a", "b")) == "head 3 of 2 layers from 1 on of 'a' from 'a' to 'b'"


def test_a_move_is_of_something_between_two_workers() -> None:
    with pytest.raises(ValueError, match="both 'a'"):
        LayerMove("a", 0, 1, "a", "a")
    with pytest.raises(ValueError, match="both 'b'"):
        HeadMove("a", (0,), (0,), "b", "b")
    for first, count in ((-1, 1), (0, 0)):
        with pytest.raises(ValueError, match="at least one layer"):
            LayerMove("a", first, count, "a", "b")
    for layers in ((), (1, 0), (1, 1), (-1,)):
        with pytest.raises(ValueError, match="ascending"):
            HeadMove("a", layers, (0,), "a", "b")
    for heads in ((), (0, 2), (1, 0)):
        with pytest.raises(ValueError, match="contiguous"):
            HeadMove("a", (0,), heads, "a", "b")


def test_a_move_starts_where_its_modules_are() -> None:
    with pytest.raises(ValueError, match="placement of 'a'"):
        LayerMove("b", 0, 1, "b", "a").after(HOME)
    with pytest.raises(ValueError, match="not on 'b'"):
        LayerMove("a", 0, 1, "b", "a").after(HOME)
    with pytest.raises(ValueError, match="not all on 'b'"):
        HeadMove("a", (0,), (0,), "b", "c").after(HOME)
    with pytest.raises(ValueError, match=r"layers \[4\] do not exist"):
        LayerMove("a", 3, 2, "a", "b").after(HOME)
    with pytest.raises(ValueError, match="one KV head"):
        HeadMove("a", (0,), (0,), "a", "b").after(Placement.at_home("a", 4, 1))
    # Layers 0 and 2 on b, 1 between them at home: one more trip for each token.
    with pytest.raises(ValueError, match="contiguous run"):
        LayerMove("a", 2, 1, "a", "b").after(LayerMove("a", 0, 1, "a", "b").after(HOME))


def test_moves_share_a_module_where_lanes_or_layers_meet() -> None:
    layers = LayerMove("a", 1, 2, "a", "b")
    assert share_a_module(layers, LayerMove("a", 2, 1, "b", "a"))
    assert not share_a_module(layers, LayerMove("a", 3, 1, "a", "b"))
    assert not share_a_module(layers, LayerMove("b", 1, 2, "b", "a"))
    assert share_a_module(layers, HeadMove("a", (0, 2), (1,), "a", "c"))
    assert not share_a_module(layers, HeadMove("a", (0, 3), (1,), "a", "c"))
    heads = HeadMove("a", (0, 2), (1, 2), "a", "c")
    assert share_a_module(heads, HeadMove("a", (2, 3), (2, 3), "a", "c"))
    assert not share_a_module(heads, HeadMove("a", (2, 3), (3,), "a", "c"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"period_s": 0.0}, "period_s"),
        ({"latency_budget_s": -1.0}, "latency_budget_s"),
        ({"horizon_s": math.inf}, "horizon_s"),
        ({"cool_down_s": -0.1}, "cool_down_s"),
        ({"rho": 0.9}, "rho is 0.9; it must be finite and at least 1"),
        ({"max_itl_ratio": math.nan}, "max_itl_ratio"),
        ({"memory_headroom": 0.5}, "memory_headroom"),
        ({"compute_weight": 0.8, "memory_weight": 0.3}, "add up to 1"),
        ({"compute_weight": 1.5, "memory_weight": -0.5}, "memory_weight is -0.5"),
        ({"delta_heads": 0.2}, "delta_home < delta_heads <= delta_layers"),
        ({"delta_home": 0.08}, "delta_home < delta_heads <= delta_layers"),
    ],
)
def test_settings_without_sense_are_refused(settings: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        MoveSettings(**settings)


def test_a_move_takes_its_bytes_and_the_switch() -> None:
    cost = CostModel(
        model().sizes,
        model().times,
        LinkSpeed(1000, 0.1),
        links={frozenset("ab"): LinkSpeed(500, 0.2)},
        loaded_byte_s=0.01,
        switch_s=0.3,
    )
    assert cost.copy_s(2000, "a", "c") == pytest.approx(2 + 0.1 + 0.3)
    assert cost.copy_s(2000, "b", "a") == pytest.approx(4 + 0.2 + 0.3)
    # 20 s longer where an end has no time at all.
    assert [cost.waiting_s(2000, busy) for busy in (0.0, 0.25, 1.0, 3.0)] == pytest.approx([0, 5, 20, 20])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LinkSpeed(0, 0), "bytes_per_s"),
        (lambda: LinkSpeed(1, -1), "latency_s"),
        (lambda: ModelSizes(4, 0, 1, 1, 1, 1, 1), "num_kv_heads"),
        (lambda: MeasuredTimes(-1, 0, 0, 1), "prefill_token_s"),
        (lambda: MeasuredTimes(0, 0, 0, 0), "full_batch"),
        (lambda: MeasuredTimes(0, 0, 0, 1, decode_attention_share=1.1), "0 to 1"),
        (lambda: model(switch_s=math.inf), "switch_s"),
        (lambda: model(hosted_slice_s=-1.0), "hosted_slice_s"),
        (lambda: replace(model(), loaded_byte_s=-1.0), "loaded_byte_s"),
    ],
)
def test_a_cost_model_without_sense_is_refused(make: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()  # type: ignore[operator]
