"""A simulation's result in figures: `summarise` gives them by name.

- `ttft`: from arrival to first token. `tpot`: from first to last token, by answer, over its tokens less one. `itl`:
  every time between two tokens of an answer. `e2e`: from arrival to last token. Each as `_mean_s`, `_p50_s`, `_p99_s`,
  and `_worst_window_s`: the highest mean of the requests that arrived in one of the successive five minutes (not for
  `itl`). A percentile is the least value that so many of all do not exceed.
- Throughput over the makespan, and what became of the prompts' tokens.

NaN where nothing was seen, as `tpot` when no answer has two tokens.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tuning.simulator.result import SimulationResult

WINDOW_S: Final = 300.0


def summarise(result: SimulationResult) -> dict[str, float]:
    """See the module."""
    done = ~np.isnan(result.end_s)
    arrival_s, first_s, end_s = result.arrival_s[done], result.first_token_s[done], result.end_s[done]
    outputs = result.output_tokens[done]
    figures: dict[str, float] = {}
    figures |= _latency("ttft", first_s - arrival_s, arrival_s)
    several = outputs > 1
    tpot_s = (end_s - first_s)[several] / (outputs[several] - 1)
    figures |= _latency("tpot", tpot_s, arrival_s[several])
    figures |= _distribution("itl", result.gap_s, result.gap_count)
    figures |= _latency("e2e", end_s - arrival_s, arrival_s)
    prompt_tokens = int(result.input_tokens[done].sum())
    span_s = result.makespan_s
    device, dram, disk = (
        int(column.sum()) for column in (result.hit_tokens_device, result.hit_tokens_dram, result.hit_tokens_disk)
    )
    figures |= {
        "completed_requests": float(len(end_s)),
        "refused_requests": float(len(result.refused)),
        "makespan_s": span_s,
        "requests_per_s": _share(len(end_s), span_s),
        "output_tokens_per_s": _share(int(outputs.sum()), span_s),
        "tokens_per_s": _share(prompt_tokens + int(outputs.sum()), span_s),
        "prompt_tokens": float(prompt_tokens),
        "hit_tokens_device": float(device),
        "hit_tokens_dram": float(dram),
        "hit_tokens_disk": float(disk),
        "computed_tokens": float(result.computed_tokens.sum()),
        "token_hit_ratio": _share(device + dram + disk, prompt_tokens),
        "block_hit_ratio": result.block_hit_ratio,
    }
    return figures


def _latency(name: str, seconds: NDArray[np.float64], arrival_s: NDArray[np.float64]) -> dict[str, float]:
    figures = _distribution(name, seconds, np.ones(len(seconds), np.int64))
    worst_s = math.nan
    if len(seconds):
        # Of windows in which somebody came only: an arrival that is years late has millions before it.
        _, windows = np.unique(np.floor(arrival_s / WINDOW_S), return_inverse=True)
        worst_s = float((np.bincount(windows, seconds) / np.bincount(windows)).max())
    return figures | {f"{name}_worst_window_s": worst_s}


def _distribution(name: str, values: NDArray[np.float64], counts: NDArray[np.int64]) -> dict[str, float]:
    """Of values that were seen so many times each."""
    total = int(counts.sum())
    if not total:
        return {f"{name}_{figure}_s": math.nan for figure in ("mean", "p50", "p99")}
    order = np.argsort(values, kind="stable")
    seen = np.cumsum(counts[order])
    figures = {f"{name}_mean_s": float(values @ counts) / total}
    for percent in (50, 99):
        rank = -(-total * percent // 100)
        figures[f"{name}_p{percent}_s"] = float(values[order][np.searchsorted(seen, rank)])
    return figures


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
