"""The application's answers for reading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from migrate.ctl.names import shown

Json = dict[str, Any]


def status_text(status: Json, num_entries: int) -> str:
    """Workers, placements, what is under way, and the last `num_entries` of the history."""
    lines = list(_table(["worker", "U", "compute", "memory", "busy with"], _workers(status)))
    if status["silent"]:
        lines += ["", f"alive, but without an answer: {', '.join(status['silent'])}"]
    lines += ["", *_table(["instance", "version", "has", "where"], _placements(status))]
    if status["not_planned"]:
        lines += ["", f"nothing is planned: {status['not_planned']}"]
    elif not status["automatic"]:
        lines += ["", "nothing moves by itself: automatic is off"]
    if status["bringing_home"]:
        lines += ["", "everything is being sent home"]
    if status.get("refused_settings"):
        lines += ["", f"user_config is refused: {status['refused_settings']}"]
    entries = status["under_way"] + status["history"][:num_entries]
    if entries:
        lines += ["", *(entry_text(entry) for entry in entries)]
    elif not status["history"]:
        lines += ["", "nothing has moved since the controller started"]
    return "\n".join(lines)


def plan_text(plan: Json) -> str:
    """Each candidate with its verdict, accepted ones first."""
    lines = list(_table(["worker", "U", "compute", "memory"], [[n, *_load(u)] for n, u in plan["utilisation"].items()]))
    lines += ["", f"mean U {plan['mean']:.3f}; {len(plan['moves'])} of {len(plan['verdicts'])} candidates would move"]
    for verdict in sorted(plan["verdicts"], key=lambda verdict: not verdict["accepted"]):
        lines += ["", f"{verdict['reason']}: {verdict['move']['text']}", f"  {verdict['detail']}"]
        if verdict["prediction"] is not None:
            lines += [f"  {_prediction(verdict['prediction'])}"]
    return "\n".join(lines)


def entry_text(entry: Json) -> str:
    """One order in two lines: what and why, what was expected and what happened."""
    age_s = entry["begun_ago_s"] if entry["ended_ago_s"] is None else entry["ended_ago_s"]
    head = f"#{entry['order_id']} {entry['outcome']} {age_s:.0f} s ago, by {entry['cause']}: {entry['move']['text']}"
    predicted, happened = entry["predicted"], entry["happened"]
    expected = f"expected {_size(predicted['weight_bytes'] + predicted['kv_bytes'])} in {predicted['transfer_s']:.2f} s"
    if happened is not None:
        took = _size(happened["weight_bytes"] + happened["kv_bytes"])
        came = f"; took {took} in {happened['duration_s']:.2f} s, held {1000 * happened['held_s']:.0f} ms"
    else:
        came = "" if entry["problem"] is None else f"; {entry['problem']}"
    return f"{head}\n   {entry['why']}\n   {expected}{came}"


def _workers(status: Json) -> Iterator[list[str]]:
    for name, worker in status["workers"].items():
        yield [name, *_load(worker), worker["busy"] or ""]


def _placements(status: Json) -> Iterator[list[str]]:
    for placement in status["placements"]:
        name, version = placement["instance"], str(placement["version"])
        for worker, layers in placement["layers"].items():
            yield [name, version, f"layers {shown(layers)}", "home" if worker == name else worker]
        for part in placement["heads"]:
            yield [name, version, f"heads {shown(part['heads'])} of layers {shown(part['layers'])}", part["worker"]]


def _load(load: Json) -> list[str]:
    return [f"{load[part]:.3f}" for part in ("weighted", "compute", "memory")]


def _prediction(prediction: Json) -> str:
    loads = ", ".join(
        f"{name} {load['weighted']:.3f} -> {prediction['after'][name]['weighted']:.3f}"
        for name, load in prediction["before"].items()
    )
    gaps = ", ".join(
        f"{name} {1000 * before_s:.1f} -> {1000 * prediction['itl_after_s'][name]:.1f} ms"
        for name, before_s in prediction["itl_before_s"].items()
        if before_s or prediction["itl_after_s"][name]
    )
    copied = _size(prediction["weight_bytes"] + prediction["kv_bytes"])
    return f"U {loads}; {f'tokens apart {gaps}; ' if gaps else ''}{copied} in {prediction['transfer_s']:.2f} s"


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def _table(head: Sequence[str], rows: Any) -> Iterator[str]:
    cells = [list(head), *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
