"""Orders moves of layers and heads there and back under a steady load, and shows what they did and who noticed.

The application runs in mode balanced, in float32 and with automatic moves off:

    EQUIPOISE_OVERLAY=load_tests/overlays/moves-by-hand.yaml serve run serve_configs/local-balanced.yaml

Some of these moves nobody would plan: with many layers of the prefill worker on the decode worker, or the other way
round, tokens wait for prompts. What planned moves do is seen with `--roles prefill --most-layers 8`, under a load in
which the prefill worker is the busier one.

Afterwards the same prompts are sent once more with everything at home and nothing moving, without what the first
answers have left in caches, and the answers are compared token by token. Figures are explained in
docs/metrics-of-load-tests.md.

Progress goes to stderr; stdout gets Markdown tables and, as its last line, one JSON object. The exit code is 1 when a
request failed, an answer was wrong, a move was not made, or a worker had to take lost layers home.

    python -m load_tests.moves_under_load http://127.0.0.1:8000 --moves 50 --in-flight 8 --save moves-under-load
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from kv.exit_status import status_of
from load_tests.gaps_around import Gap, GapsAround, gaps_around, gaps_of
from load_tests.metrics import distribution, summarise
from load_tests.moves_there_and_back import Movable, there_and_back
from load_tests.moving_program import MovingResult, run_program, steady_parser_of
from load_tests.moving_run import Fleet, NotFitError, Observed
from load_tests.run_tables import markdown_table, number
from migrate.load import ROLES
from migrate.moves import Move
from tuning.option_types import above_0

_MIB = 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1, or 2 when the options are wrong."""
    parser = steady_parser_of("load_tests.moves_under_load", __doc__ or "")
    parser.add_argument("--moves", type=int, default=50, help="an even number: half of them back (default %(default)s)")
    parser.add_argument(
        "--window-s", type=above_0, default=2.0, help="of tokens before and after a move (default %(default)s)"
    )

    parser.add_argument(
        "--roles", nargs="+", choices=ROLES, default=list(ROLES), help="whose layers and heads move (default: all)"
    )
    parser.add_argument(
        "--most-layers", type=int, help="of an instance that are moved at once (default: three quarters)"
    )

    def moves(fleet: Fleet, options: argparse.Namespace) -> list[Move]:
        movers = tuple(worker for worker in fleet.workers if worker.startswith(tuple(options.roles)))
        if not movers:
            raise NotFitError(f"no worker is {' or '.join(options.roles)}; these are: {', '.join(fleet.workers)}")
        size = Movable(fleet.workers, fleet.num_layers, fleet.num_kv_heads, movers, options.most_layers)
        return there_and_back(size, options.moves)

    def check(options: argparse.Namespace) -> None:
        if options.moves < 2 or options.moves % 2:
            raise ValueError(f"--moves is {options.moves}; it must be even and at least 2")
        if options.most_layers is not None and options.most_layers < 1:
            raise ValueError(f"--most-layers is {options.most_layers}; it must be at least 1")

    return asyncio.run(run_program("load_tests.moves_under_load", parser, argv, moves, _report, check))


def _report(result: MovingResult, options: argparse.Namespace) -> tuple[list[tuple[str, str]], dict[str, Any], bool]:
    gaps, done = gaps_of(result.records), [move for move in result.made.moves if move.is_done]
    around = [gaps_around(gaps, move.made.begun_s, move.made.ended_s, options.window_s) for move in done]
    at_home = _percentiles([later - earlier for earlier, later in gaps_of(result.unmoved)])
    meanwhile = _percentiles(_while_moving(gaps, done))
    groups = {
        f"{kind} {way}": [
            place
            for place, row in enumerate(move.as_row() for move in done)
            if (row["kind"], row["is_out"]) == (kind, way == "out")
        ]
        for kind in ("layers", "heads")
        for way in ("out", "back")
    }
    noticed = {
        name: {
            part: _percentiles([gap for place in places for gap in getattr(around[place], f"{part}_s")])
            for part in ("before", "during", "after")
        }
        for name, places in groups.items()
        if places
    }
    effects = {name: _effects([done[place] for place in places]) for name, places in groups.items() if places}
    figures = {
        "moves": [{**move.as_row(), "gaps": _gaps_row(gaps, move, options.window_s)} for move in result.made.moves],
        "itl_by_group": noticed,
        "itl_from_first_to_last": meanwhile,
        "itl_without_moves": at_home,
        "effects_by_group": effects,
        "with_moves": summarise(result.records).as_row(),
        "without_moves": summarise(result.unmoved).as_row(),
    }
    tables = [
        (
            "Time between tokens, ms",
            markdown_table(
                ("moves", "p50 before", "during", "after", "p99 before", "during", "after", "p99 during / before"),
                [(name, *_gap_cells(row)) for name, row in noticed.items()],
            ),
        ),
        (
            "Time between tokens from the first move to the last, and of the same requests without moves, ms",
            markdown_table(
                ("p50 with moves", "without", "p99 with moves", "without", "p99 with / without"),
                [
                    (
                        *(number(row[key]) for key in ("p50_ms", "p99_ms") for row in (meanwhile, at_home)),
                        number(_ratio(meanwhile["p99_ms"], at_home["p99_ms"])),
                    )
                ],
            ),
        ),
        (
            "Bytes and seconds, medians",
            markdown_table(
                ("moves", "number", *_EFFECTS),
                (
                    (name, str(len(groups[name])), *(number(row[key]) for key in _EFFECTS))
                    for name, row in effects.items()
                ),
            ),
        ),
    ]
    return tables, figures, len(done) == options.moves


_EFFECTS = (
    "predicted MiB",
    "moved MiB",
    "predicted s",
    "took s",
    "steps held s",
    "link bytes / moved",
    "weights freed / expected",
    "KV freed / expected",
    "steps at source",
    "steps at destination",
)


def _effects(moves: Sequence[Observed]) -> dict[str, float | None]:
    """Medians, but sums of steps: those at the source must be none."""

    def median(values: Sequence[float]) -> float | None:
        return distribution(values).p50

    rows = [move.as_row() for move in moves]
    moved = [row["happened"]["weight_bytes"] + row["happened"]["kv_bytes"] for row in rows]
    predicted = [row["predicted"]["weight_bytes"] + row["predicted"]["kv_bytes"] for row in rows]
    steps = [row["steps_after"] for row in rows if row["steps_after"]["moved_at_source"] is not None]
    return dict(
        zip(
            _EFFECTS,
            (
                median([size / _MIB for size in predicted]),
                median([size / _MIB for size in moved]),
                median([row["predicted"]["transfer_s"] for row in rows]),
                median([row["happened"]["duration_s"] for row in rows]),
                median([row["happened"]["held_s"] for row in rows]),
                median([row["link_bytes"] / size for row, size in zip(rows, moved, strict=True) if size]),
                median(_shares(rows, "weights")),
                median(_shares(rows, "kv")),
                sum(step["moved_at_source"] for step in steps) if steps else None,
                sum(step["moved_at_destination"] for step in steps) if steps else None,
            ),
            strict=True,
        )
    )


def _shares(rows: Sequence[dict[str, Any]], what: str) -> list[float]:
    freed = [row["freed"] for row in rows]
    return [each[what] / each[f"{what}_expected"] for each in freed if each[f"{what}_expected"]]


def _gaps_row(gaps: Sequence[Gap], move: Observed, window_s: float) -> dict[str, Any]:
    around: GapsAround = gaps_around(gaps, move.made.begun_s, move.made.ended_s, window_s)
    return {part: _percentiles(getattr(around, f"{part}_s")) for part in ("before", "during", "after")}


def _percentiles(gaps_s: Sequence[float]) -> dict[str, float | None]:
    found = distribution(gaps_s)
    return {"tokens": found.count, "p50_ms": _ms(found.p50), "p99_ms": _ms(found.p99)}


def _gap_cells(row: dict[str, dict[str, float | None]]) -> list[str]:
    parts = ("before", "during", "after")
    ratio = _ratio(row["during"]["p99_ms"], row["before"]["p99_ms"])
    return [number(row[part][key]) for key in ("p50_ms", "p99_ms") for part in parts] + [number(ratio)]


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def _while_moving(gaps: Sequence[Gap], done: Sequence[Observed]) -> list[float]:
    """Those that end between the first move's beginning and the last one's end."""
    if not done:
        return []
    begun_s, ended_s = min(move.made.begun_s for move in done), max(move.made.ended_s for move in done)
    return [later - earlier for earlier, later in gaps if begun_s <= later <= ended_s]


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else round(1e3 * value_s, 3)


if __name__ == "__main__":
    sys.exit(status_of(main))
