from __future__ import annotations

import dataclasses
import functools
import re

import pytest

from tests.tuning.report.page_reader import PageReader
from tests.tuning.report.small_job import FAST, FRUGAL, infeasible_job, small_job
from tuning.report.content import Choice, JobReport
from tuning.report.page import html_page

JOB = small_job()
EVIL = "<img src=x onerror=alert(1)></script><b>'\"&amp;</b>"


@functools.cache
def read(name: str) -> PageReader:
    """The page of a job; each is made once."""
    jobs = {"small": small_job, "infeasible": infeasible_job, "evil": evil_job}
    return PageReader(html_page(jobs[name]()))


def evil_job() -> JobReport:
    """Every text that comes from outside is HTML."""
    plan = JOB.ttl_plan
    assert plan is not None
    return dataclasses.replace(
        JOB,
        trace=dataclasses.replace(JOB.trace, name=EVIL),
        model=dataclasses.replace(JOB.model, name=EVIL),
        hardware=dataclasses.replace(JOB.hardware, name=EVIL, timing=EVIL),
        prices=dataclasses.replace(JOB.prices, name=EVIL, as_of=EVIL, source=EVIL, currency=EVIL),
        search=dataclasses.replace(JOB.search, method=EVIL, simulation_settings={EVIL: EVIL}),
        axes=tuple(dataclasses.replace(axis, title=EVIL, unit=EVIL) for axis in JOB.axes),
        objectives=tuple(dataclasses.replace(each, title=EVIL, unit=EVIL) for each in JOB.objectives),
        slos=(dataclasses.replace(JOB.slos[0], name="ttft_mean_s", title=EVIL, unit=EVIL),),
        baseline_title=EVIL,
        choice=dataclasses.replace(JOB.choice, rule=EVIL),
        skipped=(dataclasses.replace(JOB.skipped[0], reason=EVIL),),
        failed=(dataclasses.replace(JOB.failed[0], point={**JOB.failed[0].point, "disk_class": EVIL}, reason=EVIL),),
        hit_curve=dataclasses.replace(JOB.hit_curve, policy=EVIL),
        ttl_plan=dataclasses.replace(plan, method=EVIL, groups=(dataclasses.replace(plan.groups[0], name=EVIL),)),
        warnings=(EVIL,),
        command=EVIL,
        versions={EVIL: EVIL},
        created=EVIL,
    )


def test_the_summary_tells_choice_bill_gain_and_limits() -> None:
    text = read("small").text
    assert "Chosen: DRAM 512 GiB, disk 2,048 GiB, disk class nvme, TTL 600.5 s." in text
    assert "It is the cheapest configuration within the limits." in text
    # (2.40 + 2.00 + 0.32) * 730 = 3,445.60, and the baseline's 5.90 * 730 = 4,307.
    assert "It costs EUR 4.72 an hour, EUR 3,446 a month of 730 h" in text
    assert "EUR 2.40 an hour for GPUs (2), EUR 2.00 for DRAM, EUR 0.32 for disk." in text
    assert "its bill is EUR 861.40 a month less (−20.0 %)" in text
    assert "mean time to first token 0.8 s instead of 2 s: −60.0 % (faster)" in text
    assert "throughput 5,500 tokens/s instead of 5,000 tokens/s: +10.0 % (more)" in text
    assert "cost of the replay EUR 4.72 instead of EUR 5.90: −20.0 % (cheaper)" in text
    assert "99th percentile of the time to first token at most 4 s: holds, with 3.5 s." in text
    assert "In the worst five minutes the mean is 4.5 s, above the limit" in text
    assert "The clock counts from an epoch." in text


def test_extreme_points_stand_against_the_baseline() -> None:
    rows = read("small").tables["Extreme points of the front"]
    assert [row[0] for row in rows[1:]] == [
        "lowest mean time to first token",
        "… against the baseline",
        "highest throughput",
        "… against the baseline",
        "lowest cost of the replay",
        "… against the baseline",
        "Baseline: fixed 1024 GiB of DRAM",
    ]
    assert rows[1][2:] == ["0.5", "5,500", "7.08", "EUR 5,168"]
    assert rows[2][2:] == ["−75.0 % (faster)", "+10.0 % (more)", "+20.0 % (dearer)", "+20.0 % (dearer)"]
    assert rows[6][2:] == ["−60.0 % (faster)", "+10.0 % (more)", "−20.0 % (cheaper)", "−20.0 % (cheaper)"]
    assert rows[7][1:] == ["DRAM 1,024 GiB, disk 0 GiB, disk class none, TTL 600.5 s", "2", "5,000", "5.9", "EUR 4,307"]


def test_tables_show_the_data() -> None:
    tables = read("small").tables
    assert ["DRAM, an hour", "EUR 2.00", "EUR 3.50", "−42.9 % (cheaper)"] in tables["Bill"]
    assert ["disk, an hour", "EUR 0.32", "EUR 0.00", "was 0 (dearer)"] in tables["Bill"]
    assert ["all, a month", "EUR 3,446", "EUR 4,307", "−20.0 % (cheaper)"] in tables["Bill"]
    waiting = tables["Latency and throughput"]
    assert ["time to first token, mean of the worst 5 min", "4.5 s", "2.5 s", "+80.0 % (slower)"] in waiting
    assert ["time per output token, mean", "not seen", "not seen", ""] in waiting
    groups = tables["Times-to-live by group"]
    assert groups[1] == ["rest", "120 s", "3,900", "1,000", "250", "25.0 %", "123,456"]
    assert groups[2] == ["support-bot", "no limit", "100", "600", "600", "100.0 %", "9,000"]
    listed = tables["Evaluated configurations, in the order in which the search asked for them"]
    statuses = ["on the front, chosen", "on the front", "beaten by another", "misses a limit", "beaten by another"]
    assert [row[-1] for row in listed[1:]] == statuses
    assert listed[4] == ["4", "256", "0", "none", "600.5", "1.9", "4,000", "3.54", "6", "EUR 2,584", "misses a limit"]


def test_what_was_left_out_is_told_in_words() -> None:
    page = read("small")
    assert "5 configurations were evaluated of at most 5, and 3 were considered and left out." in page.text
    assert page.tables["Left out, by reason"][1:] == [
        ["at best 0.00002 to 3e-05 more hypervolume", "2"],
        ["the limit of the 99th percentile of the time to first token is broken at DRAM=0", "1"],
    ]
    assert page.tables["Evaluated without a result"][1][1] == "nothing was completed"


def test_plots_show_the_points_and_mark_those_that_matter() -> None:
    figures = read("small").plots()
    latency = {trace["name"]: trace for trace in figures["cost-latency"]["data"]}
    assert (latency["chosen"]["x"], latency["chosen"]["y"]) == ([pytest.approx(4.72)], [0.8])
    baseline = latency["baseline: fixed 1024 GiB of DRAM"]
    assert (baseline["x"], baseline["y"]) == ([pytest.approx(5.90)], [2.0])
    assert latency["misses a limit"]["y"] == [1.9]
    assert len({str(trace["marker"]["symbol"]) for trace in latency.values()}) == len(latency)
    throughput = {trace["name"]: trace for trace in figures["cost-throughput"]["data"]}
    assert throughput["on the front"]["y"] == [5500.0]
    curve = figures["hit-curve"]["data"][0]
    assert (curve["x"], curve["y"]) == ([256.0, 512.0, 1024.0], [0.1, 0.25, 0.375])
    assert [trace["x"][0] for trace in figures["tiers"]["data"]] == pytest.approx([0.1, 0.3, 0.05, 0.55])
    assert figures["ttl"]["data"][0]["x"] == [120.0]


def test_hovering_shows_the_whole_configuration() -> None:
    for name in ("cost-latency", "cost-throughput", "everything"):
        traces = {trace["name"]: trace for trace in read("small").plots()[name]["data"]}
        lines = traces["chosen"]["hovertext"][0].replace("\u00a0", " ").split("<br>")
        assert lines[1:5] == ["DRAM 512 GiB", "disk 2,048 GiB", "disk class nvme", "TTL 600.5 s"]
        assert "99th percentile of the time to first token: 3.5 s" in lines
        assert "EUR 3,446 a month, GPUs: 2" in lines


def test_settings_and_objectives_side_by_side_have_the_better_end_at_the_top() -> None:
    figure = read("small").plots()["everything"]
    assert figure["layout"]["xaxis"]["ticktext"] == [
        "DRAM<br>(GiB)",
        "disk<br>(GiB)",
        "disk class",
        "mean time to<br>first token<br>(s)",
        "throughput<br>(tokens/s)",
        "cost of the<br>replay<br>(EUR)",
    ]
    chosen = next(trace for trace in figure["data"] if trace["name"] == "chosen")
    # DRAM from 256 to 2304; nvme before none; TTFT from 0.5 to 2; tokens from 4,000 to 5,500; cost from 3.54 to 7.40.
    expected = [256 / 2048, 1, 1, 1.2 / 1.5, 1, 2.68 / 3.86]
    assert chosen["y"][:-1] == pytest.approx(expected)


def test_nothing_is_fetched() -> None:
    page = read("small")
    assert {tag for tag, _ in page.elements}.isdisjoint({"link", "img", "iframe", "object", "embed", "base", "form"})
    for _, attributes in page.elements:
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
        assert not any(name.startswith("on") for name in attributes)
    assert "url(" not in page.styles
    assert "@import" not in page.styles
    policy = next(each["content"] for each in page.tags("meta") if each.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy
    assert sum("plotly.js v" in content for _, content in page.scripts) == 1


@pytest.mark.parametrize("name", ["small", "infeasible"])
def test_who_cannot_see_is_told(name: str) -> None:
    page = read(name)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = [(attributes["href"] or "")[1:] for attributes in page.tags("a")]
    assert targets
    assert set(targets) <= set(ids)
    plots = [each for each in page.tags("div") if each.get("class") == "plot"]
    assert {each["id"] for each in plots} == page.plots().keys()
    assert all(each["role"] == "img" and len(each["aria-label"] or "") > 20 for each in plots)
    assert len(page.tags("table")) == len(page.tags("caption")) == len(page.tables)
    assert all(each.get("scope") in ("row", "col") for each in page.tags("th"))
    assert page.tags("html") == [{"lang": "en"}]


def test_names_are_text_whatever_they_are() -> None:
    page, plain = read("evil"), read("small")
    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in plain.elements} | {"br"}
    assert len(page.tags("script")) == len(plain.tags("script"))
    assert page.text.count(EVIL) > 30
    strings = re.findall(r'"((?:[^"\\]|\\.)*)"', str(dict(page.scripts)["plots"]))
    assert any("onerror" in string for string in strings)
    # plotly takes some HTML in texts: what is not its own is escaped.
    assert not any("\\u003cimg" in string for string in strings)


def test_a_job_that_nothing_satisfies_shows_the_closest_and_the_miss() -> None:
    page = read("infeasible")
    assert "Nothing can be recommended: no configuration that was simulated meets all limits." in page.text
    assert "Closest comes: DRAM 2,048 GiB, disk 0 GiB, disk class none, TTL 600.5 s." in page.text
    assert "at most 1.6 s: missed by 0.4 s (+25.0 %), with 2 s." in page.text
    assert "Chosen" not in page.text
    assert "There is no front" in page.text
    names = [trace["name"] for trace in page.plots()["cost-latency"]["data"]]
    assert names == ["misses a limit", "baseline: fixed 1024 GiB of DRAM", "closest to the limits"]


def test_a_limit_of_a_mean_is_held_against_the_worst_five_minutes() -> None:
    limit = dataclasses.replace(JOB.slos[0], name="ttft_mean_s", title="mean time to first token")
    chosen = dataclasses.replace(JOB, choice=dataclasses.replace(JOB.choice, chosen=FAST), slos=(limit,))
    assert "In the worst five minutes it is 0.9 s: still within the limit." in PageReader(html_page(chosen)).text


def test_a_single_point_makes_a_page() -> None:
    job = dataclasses.replace(JOB, points=JOB.points[:1], baseline=None, skipped=(), failed=())
    page = PageReader(html_page(job))
    assert "Against the baseline" not in page.text
    assert page.tables["Bill"][0] == ["", "Chosen"]
    figure = page.plots()["everything"]
    assert figure["data"][0]["y"][:-1] == [0.5] * 3
    assert [row[0] for row in page.tables["Extreme points of the front"][1:]] == [
        "lowest mean time to first token",
        "highest throughput",
        "lowest cost of the replay",
    ]


def test_a_trace_without_reuse_makes_a_page() -> None:
    trace = dataclasses.replace(JOB.trace, block_tokens=None, different_blocks=None, ideal_block_hit_ratio=None)
    page = PageReader(html_page(dataclasses.replace(JOB, trace=trace, hit_curve=None, ttl_plan=None)))
    assert "no reuse information" in page.text
    assert page.plots().keys() == {"cost-latency", "cost-throughput", "everything", "tiers"}


def test_a_job_in_which_everything_failed_makes_a_page() -> None:
    job = dataclasses.replace(JOB, points=(), baseline=None, choice=Choice("the cheapest", None, None))
    page = PageReader(html_page(job))
    assert "none of the configurations could be simulated" in page.text
    assert page.plots().keys() == {"hit-curve", "ttl"}


def test_overloaded_points_do_not_flatten_the_others() -> None:
    slow = dataclasses.replace(JOB.points[3], objectives=(900.0, 100.0, 90.0), slo_values=(2000.0,))
    page = PageReader(html_page(dataclasses.replace(JOB, points=(*JOB.points[:3], slow))))
    low, high = page.plots()["cost-latency"]["layout"]["yaxis"]["range"]
    assert low < 0.5
    assert 2.0 < high < 5.0
    assert "1 that miss a limit lie outside the first view" in page.text


def test_equal_jobs_make_equal_pages() -> None:
    assert html_page(small_job()) == html_page(JOB)
    assert JOB.choice.chosen == FRUGAL
