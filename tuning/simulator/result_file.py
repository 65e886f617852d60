"""A simulation's requests as a Parquet file, one row each in the order of the trace."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from tuning.simulator.result import SimulationResult

COLUMNS: Final = (
    "arrival_s",
    "admitted_s",
    "prefill_start_s",
    "first_token_s",
    "end_s",
    "input_tokens",
    "output_tokens",
    "hit_tokens_device",
    "hit_tokens_dram",
    "hit_tokens_disk",
    "computed_tokens",
    "prefill_instance",
    "decode_instance",
)


def write_requests(result: SimulationResult, path: Path) -> None:
    """Write `COLUMNS` of a result. Times of refused requests are null.

    Raises:
        OSError: the file cannot be written.
    """
    columns = {name: pa.array(getattr(result, name), from_pandas=True) for name in COLUMNS}
    with path.open("wb") as file:  # of a name pyarrow makes an address
        pq.write_table(pa.table(columns), file)
