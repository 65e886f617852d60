from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from load_tests.arrivals import at_rate
from load_tests.command_line import add_load_options, load_options_from, read_times, seed_from, workloads_from
from load_tests.metrics import ServiceLevel
from load_tests.workloads import WORKLOADS, Workload


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_load_options(parser)
    return parser.parse_args(arguments)


def test_named_workloads_that_need_no_priming_by_default_in_closed_loop() -> None:
    arguments = parse()
    names = [each.name for each in workloads_from(arguments)]
    assert names == ["prefill-heavy", "decode-heavy", "balanced", "shared-prefix"]
    plan = load_options_from(arguments).plan(WORKLOADS["balanced"], seed=1)
    assert plan.max_in_flight == 16
    assert len(plan.due_s) == 48


@pytest.mark.parametrize("arrivals", [(), ("--in-flight", "4"), ("--rate", "2")])
def test_a_load_of_one_request_at_a_time_is_that_whatever_others_are(arrivals: tuple[str, ...]) -> None:
    arguments = parse("-w", "one-at-a-time", "balanced", *arrivals)
    options, (workload, other) = load_options_from(arguments), workloads_from(arguments)
    assert options.plan(workload, seed=1).max_in_flight == 1
    assert options.arrivals(workload) == "1 in flight"
    assert options.plan(other, seed=1).max_in_flight != 1


def test_chosen_workloads_are_scaled_and_never_run_twice() -> None:
    chosen = workloads_from(parse("-w", "balanced", "decode-heavy", "balanced", "--scale", "0.25"))
    assert [(workload.name, workload.requests) for workload in chosen] == [("balanced", 12), ("decode-heavy", 16)]


def test_a_custom_workload_has_the_flags_shape() -> None:
    (workload,) = workloads_from(
        parse(
            *("-w", "custom", "--requests", "10", "--prompt-tokens", "100"),
            *("--output-tokens", "7", "--prefixes", "2", "--prefix-tokens", "60"),
        )
    )
    assert workload == Workload("custom", requests=10, unique_tokens=40, output_tokens=7, prefixes=2, prefix_tokens=60)
    assert workload.prompt_tokens == 100


def test_the_working_set_is_sized_by_the_pool() -> None:
    (default,) = workloads_from(parse("-w", "working-set"))
    assert default == WORKLOADS["working-set"]
    (workload,) = workloads_from(parse("-w", "working-set", "--pool-tokens", "3000", "--pool-multiple", "6.5"))
    assert workload.shared_tokens - workload.prefix_tokens < 6.5 * 3000 <= workload.shared_tokens
    (scaled,) = workloads_from(parse("-w", "working-set", "--pool-tokens", "3000", "--scale", "2"))
    assert scaled.requests == 10 * scaled.prefixes


def test_a_prefix_longer_than_the_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="unique_tokens is 0"):
        workloads_from(parse("-w", "custom", "--prompt-tokens", "60", "--prefixes", "2", "--prefix-tokens", "60"))


def test_open_loops(tmp_path: Path) -> None:
    arguments = parse("-w", "balanced", "--rate", "2", "--burstiness", "0.5")
    options, (workload,) = load_options_from(arguments), workloads_from(arguments)
    assert (workload.name, workload.requests) == ("balanced", 48)
    assert options.plan(workload, seed=1) == at_rate(48, 2.0, 1, burstiness=0.5)
    assert options.arrivals(workload) == "burstiness 0.5 2/s"
    times = tmp_path / "times"
    times.write_text("0.5\n\n1\n")
    options = load_options_from(parse("--times", str(times)))
    assert options.plan(options.shaped(WORKLOADS["balanced"]), seed=1).due_s == (0.5, 1.0)
    assert options.shaped(WORKLOADS["balanced"]).requests == 2
    with pytest.raises(SystemExit):
        parse("--rate", "1", "--in-flight", "4")


def test_several_rates_are_as_many_loads_of_each_shape() -> None:
    arguments = parse("-w", "short", "long", "--rate", "0.5", "4", "--duration-s", "30")
    loads = workloads_from(arguments)
    assert [(load.name, load.requests, load.rate_per_s) for load in loads] == [
        ("short 0.5/s", 15, 0.5),
        ("short 4/s", 120, 4.0),
        ("long 0.5/s", 15, 0.5),
        ("long 4/s", 120, 4.0),
    ]
    assert [load.prompt_tokens for load in loads] == [40, 40, 1920, 1920]
    assert load_options_from(arguments).arrivals(loads[1]) == "poisson 4/s"


def test_times_that_are_none_name_their_line(tmp_path: Path) -> None:
    times = tmp_path / "times"
    times.write_text("0.5\nsoon\n")
    with pytest.raises(ValueError, match="line 2: 'soon'"):
        read_times(times)
    times.write_text("\n")
    with pytest.raises(ValueError, match="holds no arrival times"):
        read_times(times)


def test_the_api_key_comes_from_the_environment_and_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sesame")
    options = load_options_from(parse("--api-key-env", "MY_KEY"))
    assert options.api_key == "sesame"
    assert "sesame" not in repr(options)


def test_limits_come_in_pairs() -> None:
    assert load_options_from(parse("--slo-ttft-s", "1", "--slo-tpot-s", "0.1")).level == ServiceLevel(1.0, 0.1)
    with pytest.raises(ValueError, match="--slo-tpot-s"):
        load_options_from(parse("--slo-ttft-s", "1"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--api", "chat"), "--prompt text"),
        (("--extra", "[1]"), "JSON object"),
        (("--in-flight", "0"), "--in-flight is 0"),
        (("--warm-up", "-1"), "--warm-up is -1"),
        (("--rate", "2", "2"), "each once"),
        (("--duration-s", "5"), "give --rate too"),
        (("--burstiness", "0.5"), "give --rate too"),
        (("--rate", "2", "--duration-s", "5", "--scale", "0.5"), "give one of them"),
        (("--rate", "2", "--burstiness", "0"), "at least 0.01"),
        (("--rate", "2", "--burstiness", "nan"), "at least 0.01"),
        (("--rate", "2", "2.0000001"), "each once"),
    ],
)
def test_bad_options_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_options_from(parse(*arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--timeout-s", "-1"), "argument --timeout-s: '-1' is not allowed: give a finite number above 0"),
        (("--slo-ttft-s", "nan"), "argument --slo-ttft-s: 'nan' is not allowed"),
        (("--foreign-limit", "-0.1"), "argument --foreign-limit: '-0.1' is not allowed: give a finite number of at"),
        (("--foreign-limit", "nan"), "argument --foreign-limit: 'nan' is not allowed"),
        (("--duration-s", "inf"), "argument --duration-s: 'inf' is not allowed"),
        (("--scale", "0"), "argument --scale: '0' is not allowed"),
        (("--rate", "2", "1e308"), "argument --rate: '1e308' is not allowed: give a number from 1e-06 to 1e+06"),
        (("--rate", "0"), "argument --rate: '0' is not allowed"),
        (("--rate", "inf"), "argument --rate: 'inf' is not allowed"),
    ],
)
def test_numbers_that_cannot_be_are_refused_with_what_can(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert message in capsys.readouterr().err


def test_a_load_that_would_never_swing_is_refused() -> None:
    with pytest.raises(ValueError, match="36 requests, and the first 36 of them are of one shape"):
        workloads_from(parse("-w", "swinging", "--rate", "2", "--duration-s", "18"))
    with pytest.raises(ValueError, match=r"has 24 requests, .* never swing"):
        workloads_from(parse("-w", "swinging", "--scale", "0.1"))
    (load,) = workloads_from(parse("-w", "swinging", "--rate", "2", "--duration-s", "19"))
    assert load.requests == 38


def test_a_seed_that_is_not_given_is_a_fresh_one() -> None:
    assert seed_from(parse("--seed", "5")) == 5
    assert len({seed_from(parse()) for _ in range(5)}) > 1
