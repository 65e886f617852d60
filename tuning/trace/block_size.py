"""How many tokens a block has: no trace file says so, but lengths and numbers of hashes together do.

n blocks of b tokens hold a prompt of L tokens when (n - 1) b < L <= n b.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tuning.trace.errors import TraceError, TraceUsageError
from tuning.trace.raw_rows import Blocks, RawRows
from tuning.trace.report import ReadReport

_ANY: Final = 2**31
_POWERS: Final = tuple(2**exponent for exponent in range(17))


def fits(block_tokens: int, input_tokens: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[N] Whether a prompt of that length has that many blocks."""
    matches: NDArray[np.bool_] = -(-input_tokens // block_tokens) == counts
    return matches


def infer(input_tokens: NDArray[np.int64], counts: NDArray[np.int64], usual: int) -> tuple[int, str]:
    """The block size that the rows speak for, each of which has a hash, and in words how it was found.

    The usual one of the format where all rows fit it; else the only one, or the only power of two, that all rows fit;
    else, as some rows must be wrong then, the usual one or the power of two that most rows fit.

    Raises:
        TraceError: several fit all rows equally well, or none fits more than half of them.
    """
    if fits(usual, input_tokens, counts).all():
        return usual, "the usual one of the format, which fits all rows"
    several = counts > 1
    least = int((-(-input_tokens // counts)).max(initial=1))
    most = int(((input_tokens[several] - 1) // (counts[several] - 1)).min(initial=_ANY))
    if least <= most:
        candidates = [power for power in _POWERS if least <= power <= most] if least < most else [least]
        if len(candidates) != 1:
            until = "on" if most == _ANY else f"to {most}"
            raise TraceError(
                f"the block size is not in the file, and all rows fit any from {least} {until}: "
                "say which it is (--block-size)"
            )
        return candidates[0], "the only one, or the only power of two, that fits all rows"
    score, _, best = max(
        (int(fits(size, input_tokens, counts).sum()), size == usual, size) for size in (usual, *_POWERS)
    )
    if 2 * score <= len(counts):
        raise TraceError(
            f"hash_ids contradict input_length: no block size fits more than half of the rows (best is {best}, "
            f"which {score:,} of {len(counts):,} fit). A row of L tokens has ceil(L / block size) hash_ids"
        )
    return best, "the one that most rows fit"


def settle(raw: RawRows, blocks: Blocks, usual: int, asked: int | None, report: ReadReport) -> NDArray[np.bool_]:
    """Decide on the block size, for `report`, and say which rows fit it; the others become problems there.

    Args:
        raw: the rows.
        blocks: their blocks.
        usual: the usual size of the format.
        asked: the one that the user says it is, if so.

    Raises:
        TraceUsageError: the file itself says another one than `asked`.
        TraceError: as `infer`.
    """
    counts, declared = blocks.counts, blocks.block_tokens
    if asked is not None and declared is not None and asked != declared:
        raise TraceUsageError(f"the file says that its blocks are of {declared} tokens, not of {asked}: leave it out")
    if asked is not None:
        size, source = asked, "as given"
    elif declared is not None:
        size, source = declared, "as the file says"
    else:
        has_hashes = counts > 0
        size, source = infer(raw.input_tokens[has_hashes], counts[has_hashes], usual)
    report.block_tokens, report.block_tokens_from = size, source
    matches = fits(size, raw.input_tokens, counts)
    for row in np.flatnonzero(~matches).tolist():
        length, count = int(raw.input_tokens[row]), int(counts[row])
        expected = f"for input_length {length}: blocks of {size} tokens make it {-(-length // size)}"
        if count:
            reason, message = "hash_ids do not match input_length", f"{count} hash_ids {expected}"
        else:
            reason, message = "no hash_ids", f"no hash_ids {expected}. Give all rows theirs, or none"
        report.add(int(raw.line[row]), reason, message)
    return matches
