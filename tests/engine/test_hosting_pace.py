from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.config import ConfigError, EngineConfig
from actors.engine.hosting_pace import HostingPace


def test_decode_steps_follow_at_once_where_nothing_is_hosted() -> None:
    pace = HostingPace(1.0)
    for began_s in (0.0, 0.03, 0.06):
        assert pace.wait_s(began_s, stage_waits=False) == 0
        pace.stepped(began_s, began_s + 0.03, has_prompts=False)


def paced() -> HostingPace:
    """After a step of 30 ms that was due when it began, at 0, and with stages that come."""
    pace = HostingPace(1.0)
    for began_s in (-0.09, -0.06):
        pace.stepped(began_s, began_s + 0.03, has_prompts=False)
    pace.hosted(-0.03, -0.02)
    assert pace.wait_s(-0.02, stage_waits=False) == pytest.approx(0.02)
    pace.stepped(0.0, 0.03, has_prompts=False)
    return pace


def test_while_stages_come_steps_begin_twice_as_far_apart_as_they_take() -> None:
    pace = paced()
    assert pace.wait_s(0.03, stage_waits=True) == pytest.approx(0.03)
    pace.hosted(0.03, 0.04)
    assert pace.wait_s(0.04, stage_waits=False) == pytest.approx(0.02)
    assert pace.wait_s(0.06, stage_waits=True) == 0
    pace.stepped(0.06, 0.09, has_prompts=False)
    assert pace.wait_s(0.10, stage_waits=False) == pytest.approx(0.02)  # there was a stage since the last step but one
    pace.stepped(0.12, 0.15, has_prompts=False)
    assert pace.wait_s(0.15, stage_waits=False) == 0


def test_what_a_stage_took_too_long_is_made_up_for() -> None:
    """50 ms where there were 30: the next pause is of 10 ms. Of 100 ms as much as one pause is."""
    pace = paced()
    pace.hosted(0.03, 0.08)
    assert pace.wait_s(0.08, stage_waits=True) == 0
    pace.stepped(0.08, 0.11, has_prompts=False)
    assert pace.wait_s(0.11, stage_waits=True) == pytest.approx(0.01)
    late = paced()
    late.hosted(0.03, 0.13)
    late.stepped(0.13, 0.16, has_prompts=False)
    assert late.wait_s(0.16, stage_waits=True) == 0
    late.hosted(0.16, 0.17)
    late.stepped(0.17, 0.20, has_prompts=False)
    assert late.wait_s(0.20, stage_waits=False) == pytest.approx(0.02)


def test_a_second_stage_has_to_fit() -> None:
    """In a pause of 30 ms. After a stage of 20 ms there is no time for another one: the step begins."""
    pace = paced()
    pace.hosted(0.03, 0.05)
    assert pace.wait_s(0.05, stage_waits=True) == 0
    assert pace.wait_s(0.05, stage_waits=False) == pytest.approx(0.01)
    pace.hosted(0.05, 0.05)
    assert pace.wait_s(0.05, stage_waits=True) == pytest.approx(0.01)


def test_nothing_waits_after_a_step_with_prompts_or_where_it_is_not_wanted() -> None:
    pace = HostingPace(1.0)
    pace.stepped(0.0, 0.2, has_prompts=True)
    assert pace.wait_s(0.2, stage_waits=True) == 0
    never = HostingPace(0.0)
    never.stepped(0.0, 0.2, has_prompts=False)
    assert never.wait_s(0.2, stage_waits=True) == 0


@given(
    steps_s=st.lists(st.floats(1e-2, 0.1), min_size=2, max_size=20),
    gaps_s=st.lists(st.floats(1e-3, 0.5), min_size=1, max_size=20),
    stage_s=st.floats(1e-3, 0.1),
)
def test_steps_are_twice_as_far_apart_as_they_take_and_a_stage_has_its_turn(
    steps_s: list[float], gaps_s: list[float], stage_s: float
) -> None:
    """Played through: stages of one length, some time after each other. No step waits beyond its due time but for one
    stage that had begun, and none after which one waits begins before that."""
    pace, now_s, next_stage_s = HostingPace(1.0), 0.0, 0.0
    for number, step_s in enumerate(steps_s):
        began_s, stages = now_s, 0
        while (left_s := pace.wait_s(now_s, stage_waits=next_stage_s <= now_s)) > 0:
            if next_stage_s > now_s:
                now_s = min(now_s + left_s, next_stage_s)
                continue
            pace.hosted(now_s, now_s + stage_s)
            now_s, stages = now_s + stage_s, stages + 1
            next_stage_s += gaps_s[(number + stages) % len(gaps_s)]
        before_s = steps_s[number - 1] if number else 0.0
        assert now_s - began_s <= before_s + stage_s + 1e-9
        pace.stepped(now_s, now_s + step_s, has_prompts=False)
        now_s += step_s


def test_a_pause_of_less_than_nothing_is_refused() -> None:
    for pause in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"hosting_pause is .*; it must be finite and 0 or more"):
            EngineConfig(hosting_pause=pause)
