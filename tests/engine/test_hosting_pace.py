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


def test_while_stages_come_a_step_waits_as_long_as_the_last_one_took() -> None:
    pace = HostingPace(1.0)
    pace.stepped(1.00, 1.03, has_prompts=False)
    assert pace.wait_s(1.03, stage_waits=True) == pytest.approx(0.03)
    pace.hosted(1.03, 1.04)
    assert pace.wait_s(1.04, stage_waits=False) == pytest.approx(0.02)
    assert pace.wait_s(1.06, stage_waits=True) == 0
    pace.stepped(1.06, 1.09, has_prompts=False)
    assert pace.wait_s(1.10, stage_waits=False) == pytest.approx(0.02)  # there was a stage since the last step but one
    pace.stepped(1.12, 1.15, has_prompts=False)
    assert pace.wait_s(1.15, stage_waits=False) == 0


def test_a_second_stage_has_to_fit() -> None:
    """A step of 30 ms. After a stage of 20 ms there is no time for another one: the step begins."""
    pace = HostingPace(1.0)
    pace.stepped(0.0, 0.03, has_prompts=False)
    pace.hosted(0.03, 0.05)
    assert pace.wait_s(0.05, stage_waits=True) == 0
    assert pace.wait_s(0.05, stage_waits=False) == pytest.approx(0.01)
    pace.stepped(0.06, 0.09, has_prompts=False)
    pace.hosted(0.09, 0.10)
    assert pace.wait_s(0.10, stage_waits=True) == pytest.approx(0.02)


def test_nothing_waits_after_a_step_with_prompts_or_where_it_is_not_wanted() -> None:
    pace = HostingPace(1.0)
    pace.stepped(0.0, 0.2, has_prompts=True)
    assert pace.wait_s(0.2, stage_waits=True) == 0
    never = HostingPace(0.0)
    never.stepped(0.0, 0.2, has_prompts=False)
    assert never.wait_s(0.2, stage_waits=True) == 0


@given(step_s=st.floats(1e-3, 1.0), stage_s=st.floats(1e-3, 2.0))
def test_tokens_come_twice_as_far_apart_at_most_but_for_one_stage_that_is_longer(step_s: float, stage_s: float) -> None:
    """Played through with stages that wait all the time."""
    pace, now_s, num_run = HostingPace(1.0), step_s, 0
    pace.stepped(0.0, step_s, has_prompts=False)
    while pace.wait_s(now_s, stage_waits=True) > 0:
        pace.hosted(now_s, now_s + stage_s)
        now_s, num_run = now_s + stage_s, num_run + 1
    waited_s = now_s - step_s
    assert num_run >= 1
    assert waited_s <= max(step_s, stage_s) * (1 + 1e-9)
    assert num_run == 1 or (num_run + 1) * stage_s > step_s * (1 - 1e-9)


def test_a_pause_of_less_than_nothing_is_refused() -> None:
    for pause in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"hosting_pause is .*; it must be finite and 0 or more"):
            EngineConfig(hosting_pause=pause)
