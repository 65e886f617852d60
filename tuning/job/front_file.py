"""All evaluated points as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tuning.deployment.objectives import Goals
from tuning.pareto.result import SearchResult


def write_front(path: Path, result: SearchResult, goals: Goals) -> None:
    """A row for each point in the order of asking: its values, objectives and constraints (`over_` and the figure's
    name: by how much it is over its limit), whether it is feasible and on the front, why it failed, and its figures.

    Raises:
        OSError: it can't be written.
    """
    on_front = [each.point for each in result.front]
    rows: list[dict[str, Any]] = []
    for each in result.evaluated:
        evaluation = each.evaluation
        is_whole = evaluation.failure is None
        row: dict[str, Any] = dict(each.point)
        row |= dict(zip(goals.objective_names, evaluation.objectives if is_whole else (None,) * 3, strict=True))
        over = evaluation.constraints if is_whole else (None,) * len(goals.limits)
        row |= dict(zip((f"over_{name}" for name in goals.limits), over, strict=True))
        row |= {
            "feasible": evaluation.is_feasible,
            "on_front": each.point in on_front,
            "failure": evaluation.failure,
        }
        row |= {name: value for name, value in evaluation.info.items() if not isinstance(value, dict)}
        rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    with path.open("wb") as file:  # of a name pyarrow makes an address
        pq.write_table(pa.table(columns), file)
