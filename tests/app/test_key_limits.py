"""What a key may ask for, against a count by hand."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from app.key_limits import NO_LIMITS, KeyLimits, KeyUse
from app.openai_errors import ApiError


def is_let_in(use: KeyUse, limits: KeyLimits, now_s: float, name: str = "a") -> bool:
    """One request that ends at once."""
    try:
        with use.hold(name, limits, now_s):
            return True
    except ApiError:
        return False


@pytest.mark.parametrize(
    ("own", "asked", "given"),
    [
        (0, None, 0),
        (5, None, 5),
        (-5, None, -5),
        (0, 0, 0),
        (0, 9, 9),
        (5, 5, 5),
        (-5, -5, -5),
        (-5, 0, 0),
        (5, 100, 100),
    ],
)
def test_a_key_gives_its_priority_and_takes_a_later_one(own: int, asked: int | None, given: int) -> None:
    assert KeyLimits(priority=own).priority_of(asked) == given


@pytest.mark.parametrize(("own", "asked"), [(0, -1), (5, 4), (-5, -6), (5, -100)])
def test_nobody_gets_ahead_by_asking(own: int, asked: int) -> None:
    with pytest.raises(ApiError) as caught:
        KeyLimits(priority=own).priority_of(asked)
    assert (caught.value.status, caught.value.param) == (400, "priority")
    assert f"{asked}. With this key it must be {own} or more" in caught.value.message


def test_without_limits_everything_is_let_in() -> None:
    use = KeyUse()
    with ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(use.hold("a", NO_LIMITS, 5.0))


def test_as_many_at_a_time_as_are_allowed_and_others_when_one_has_ended() -> None:
    use, limits = KeyUse(), KeyLimits(max_inflight=2)
    with ExitStack() as stack:
        stack.enter_context(use.hold("a", limits, 0.0))
        with use.hold("a", limits, 0.0):
            with pytest.raises(ApiError) as caught:
                stack.enter_context(use.hold("a", limits, 0.0))
            assert is_let_in(use, limits, 0.0, name="another")
        assert is_let_in(use, limits, 0.0)
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    assert "2 requests at a time" in caught.value.message


def test_one_that_fails_is_no_longer_in_flight() -> None:
    use, limits = KeyUse(), KeyLimits(max_inflight=1)
    with pytest.raises(RuntimeError), use.hold("a", limits, 0.0):
        raise RuntimeError
    assert is_let_in(use, limits, 0.0)


def test_ten_seconds_worth_at_once_and_then_the_rate() -> None:
    """30 a minute: a bucket of 5, and one more every two seconds."""
    use, limits = KeyUse(), KeyLimits(requests_per_min=30)
    assert [is_let_in(use, limits, 100.0) for _ in range(6)] == [True] * 5 + [False]
    assert [is_let_in(use, limits, at_s) for at_s in (101.9, 102.0, 102.1, 104.0)] == [False, True, False, True]
    assert [is_let_in(use, limits, 1000.0) for _ in range(6)] == [True] * 5 + [False]


def test_a_slow_rate_lets_one_in_and_says_when_to_come_again() -> None:
    use, limits = KeyUse(), KeyLimits(requests_per_min=2)
    assert is_let_in(use, limits, 0.0)
    with pytest.raises(ApiError) as caught, use.hold("a", limits, 6.0):
        pass
    assert caught.value.retry_after_s == pytest.approx(24.0)
    assert is_let_in(use, limits, 30.0)


def test_what_is_refused_costs_nothing() -> None:
    use, limits = KeyUse(), KeyLimits(requests_per_min=60, max_inflight=1)
    with use.hold("a", limits, 0.0):
        assert not any(is_let_in(use, limits, 0.0) for _ in range(20))
    assert [is_let_in(use, limits, 0.0) for _ in range(10)] == [True] * 9 + [False]
