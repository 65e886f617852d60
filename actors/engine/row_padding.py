"""How many rows a linear product is given on a CPU in bfloat16 or float16.

There torch calls oneDNN, which generates code for every number of rows it has not met and keeps it: 0.65 MiB and a
millisecond a product, of which a model has six or seven sizes (load_tests/LOG.md). A server meets hundreds of row
counts, so it would grow by a gigabyte. Padded to a few sizes it is met with few, and its tiles of 16 rows make the
padding all but free. The rule is ours.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

TILE_ROWS = 16
"""Of the kernels that torch uses on a CPU."""
_STEPS_PER_DOUBLING = 8


def padded_rows(num_rows: int) -> int:
    """`num_rows` rounded up: to a power of two up to 16 (a lone decode stays alone), to a multiple of 16 up to 128, and
    beyond that to an eighth of the power of two below it, so that an eighth of the rows at most is padding."""
    if num_rows <= 1:
        return num_rows
    if num_rows <= TILE_ROWS:
        return 1 << (num_rows - 1).bit_length()
    octave = 1 << (num_rows - 1).bit_length() - 1
    step = max(TILE_ROWS, octave // _STEPS_PER_DOUBLING)
    return -(-num_rows // step) * step


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """x [n, width] with rows of zeros behind it, or x itself where they buy nothing (float32, another device)."""
    if x.device.type != "cpu" or x.dtype == torch.float32:
        return x
    padding = padded_rows(x.shape[0]) - x.shape[0]
    return F.pad(x, (0, 0, 0, padding)) if padding else x
