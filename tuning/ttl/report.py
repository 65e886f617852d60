"""A fit in words and numbers: for people, and for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from kv.policy.groups import REST_NAME
from kv.policy.policy_file import PolicySpec
from tuning.trace.report import counted
from tuning.trace.trace import Trace
from tuning.ttl.comparison import EqualBudget
from tuning.ttl.fit import GroupTtlFit


def as_json(
    trace: Trace, fitted: GroupTtlFit, spec: PolicySpec, same_trace: EqualBudget, second_half: EqualBudget | None
) -> dict[str, Any]:
    """Everything, with times in seconds and null for no limit."""
    plan = fitted.plan
    return {
        "trace": trace.name,
        "requests": len(trace),
        "block_uses": len(fitted.uses.block_ids),
        "horizon_s": fitted.uses.horizon_s,
        "budget_block_s": plan.budget_block_s if plan.budget_block_s < math.inf else None,
        "held_block_s": plan.total_block_s,
        "hits": plan.total_hits,
        "bound_hits": plan.bound_hits,
        "method": plan.method,
        "uniform_ttl_s": fitted.uniform_ttl_s,
        "groups": _groups(fitted, spec),
        "same_trace": _comparison(same_trace),
        "second_half": None if second_half is None else _comparison(second_half),
    }


def _groups(fitted: GroupTtlFit, spec: PolicySpec) -> list[dict[str, Any]]:
    names = [REST_NAME, *(group.name for group in spec.groups)]
    keys = [None, *(group.root.hex() for group in spec.groups)]
    return [
        {
            "name": name,
            "root_block": root,
            "root_key": key,
            "blocks": curve.num_blocks,
            "reuses": len(curve.intervals_s),
            "hits": hits,
            "ttl_s": ttl_s,
            "block_s": block_s,
        }
        for name, root, key, curve, hits, ttl_s, block_s in zip(
            names,
            (None, *fitted.roots),
            keys,
            fitted.curves,
            fitted.plan.hits,
            fitted.plan.ttls_s,
            fitted.plan.block_s,
            strict=True,
        )
    ]


def _comparison(found: EqualBudget) -> dict[str, Any]:
    return {**asdict(found), "gain": found.gain}


def text_lines(report: dict[str, Any]) -> Iterator[str]:
    """What `as_json` says, as tables."""
    horizon_s, budget_block_s = report["horizon_s"], report["budget_block_s"]
    requests, uses = report["requests"], report["block_uses"]
    yield f"{report['trace']}: {counted(requests, 'request')}, {counted(uses, 'block use')} in {horizon_s:,.1f} s"
    budget = "no limit" if budget_block_s is None else f"{budget_block_s:,.0f} block-seconds"
    if budget_block_s is not None and horizon_s:
        budget += f", {budget_block_s / horizon_s:,.1f} blocks on average"
    yield f"budget: {budget}; taken: {report['held_block_s']:,.0f} block-seconds"
    yield (
        f"hits by group: {report['hits']:,} of at most {report['bound_hits']:,.0f} within the budget "
        f"(by {report['method']}); uniform TTL: {_seconds(report['uniform_ttl_s'])}"
    )
    yield ""
    yield from _table(
        ("group", "root block", "blocks", "re-uses", "hits", "TTL", "block-seconds"),
        [
            (
                group["name"],
                "" if group["root_block"] is None else str(group["root_block"]),
                f"{group['blocks']:,}",
                f"{group['reuses']:,}",
                f"{group['hits']:,}",
                _seconds(group["ttl_s"]),
                f"{group['block_s']:,.0f}",
            )
            for group in report["groups"]
        ],
    )
    comparisons = [("same trace", report["same_trace"])]
    if report["second_half"] is not None:
        comparisons.append(("second half by first", report["second_half"]))
    yield ""
    yield from _table(
        ("re-use ratio", "LRU", "uniform TTL", "group TTL", "gain", "group TTL in a pool"),
        [_ratios(name, found) for name, found in comparisons],
    )
    yield ""
    yield from _table(
        ("blocks, mean / most", "LRU", "uniform TTL", "group TTL"),
        [
            (name, f"{found['pool_blocks']:,}", _held(found["uniform_held"]), _held(found["group_held"]))
            for name, found in comparisons
        ],
    )
    second_half = report["second_half"]
    if second_half is None:
        yield "the first half takes no time, or the second uses no block: nothing is known of traffic to come"
        return
    if len(report["groups"]) > 1 and second_half["group_ttl"] <= second_half["uniform_ttl"]:
        yield (
            "TTLs made from the first half are no better on the second than a uniform one: these groups are hindsight. "
            "One TTL for all is had with --max-groups 0"
        )
    if second_half["lru"] >= max(second_half["uniform_ttl"], second_half["group_ttl_in_pool"]):
        yield (
            "LRU alone does as well on the second half, or better: for that serve with store.ttl_s null and without a "
            "policy file"
        )


def _ratios(name: str, found: dict[str, Any]) -> tuple[str, ...]:
    return (
        name,
        f"{found['lru']:.4f}",
        f"{found['uniform_ttl']:.4f}",
        f"{found['group_ttl']:.4f}",
        f"{found['gain']:+.1%}",
        f"{found['group_ttl_in_pool']:.4f}",
    )


def _held(found: dict[str, Any]) -> str:
    return f"{found['mean_blocks']:,.0f} / {found['peak_blocks']:,}"


def _seconds(ttl_s: float | None) -> str:
    return "no limit" if ttl_s is None else f"{ttl_s:,.3f} s"


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    for row in (names, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()
