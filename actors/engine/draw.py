"""Drawing one token per row: temperature, `min_p`, `top_k`, `top_p`, then the inverse of the distribution function.

The rule. A token's weight is `exp((logit - peak) / temperature)` in float64, peak being the row's largest logit; below
`min_p` it is zero. A row whose `top_k` or `top_p` truncates takes its candidates in ranked order (higher logit first,
ties by the lower id): the first `top_k` of them, and of these the shortest run whose share of the weight is at least
`top_p`. Every other row takes the whole vocabulary by rising id. With `u` the row's uniform, the token is the first
candidate at which the running sum of weights exceeds `u` times their total. One uniform a token, always.

Weights are rounded down to multiples of 2**-(62 - bits of the vocabulary size) and summed as int64 (ours). Integer
sums do not depend on the order of adding, so a row's token is the same in any batch, on any path below and whatever way
a device adds; a token whose probability is below about 1e-14 of the most likely one's is never drawn.

Unlike transformers' `TopKLogitsWarper`, `top_k` keeps exactly k candidates where the k-th logit is tied, so that
`top_k=1` is greedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from actors.engine.ranking import ranked_token_ids
from actors.engine.request import SamplingParams
from actors.engine.transfer import to_device

_PREFIX_WIDTHS = (256, 4096)
"""How many leading tokens are ranked before a whole row is sorted. Most rows need few, and for 16 rows of 49,152 on one
core 256 cost 2 ms, 4096 7 ms and a sort 45 ms."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of a batch; one row of each tensor a sequence."""

    logits: torch.Tensor
    """float32 [R, vocab]"""
    peak: torch.Tensor
    """float64 [R, 1], as all below"""
    temperature: torch.Tensor
    top_p: torch.Tensor
    uniform: torch.Tensor
    min_p: torch.Tensor | None
    """None: no row uses it."""

    def select(self, rows: torch.Tensor) -> _Rows:
        """The rows at `rows` (int64 [n], rising)."""
        if rows.shape[0] == self.logits.shape[0]:
            return self
        return _Rows(
            self.logits.index_select(0, rows),
            self.peak.index_select(0, rows),
            self.temperature.index_select(0, rows),
            self.top_p.index_select(0, rows),
            self.uniform.index_select(0, rows),
            None if self.min_p is None else self.min_p.index_select(0, rows),
        )


def draw_tokens(
    logits: torch.Tensor, peaks: torch.Tensor, params: Sequence[SamplingParams], uniforms: NDArray[np.float64]
) -> torch.Tensor:
    """One token id per row, by the rule above.

    Args:
        logits: float32 [B, vocab], penalties and bias applied. Not changed.
        peaks: float32 [B], the largest logit of each row.
        params: B. A row with temperature 0 is not drawn.
        uniforms: float64 [B] in [0, 1).

    Returns:
        int64 [B] on the logits' device. On an accelerator nothing here waits for it. A row with temperature 0 gets 0; a
        row whose peak is not finite gets some valid id, which means nothing.
    """
    num_rows, vocab_size = logits.shape
    settings = to_device(
        torch.from_numpy(
            np.array([(p.temperature, p.top_p, u, p.min_p) for p, u in zip(params, uniforms, strict=True)])
        ),
        logits.device,
    )
    temperature, top_p, uniform, min_p = (column.unsqueeze(1) for column in settings.unbind(1))
    has_min_p = any(p.min_p > 0.0 for p in params)
    batch = _Rows(logits, peaks.double().unsqueeze(1), temperature, top_p, uniform, min_p if has_min_p else None)

    whole: list[int] = []
    nucleus: list[int] = []
    ranked: dict[int, list[int]] = {}
    for row, p in enumerate(params):
        if p.temperature == 0.0:
            continue
        if 0 < p.top_k < vocab_size:
            bucket = next((width for width in _PREFIX_WIDTHS if p.top_k <= width < vocab_size), vocab_size)
            ranked.setdefault(bucket, []).append(row)
        elif p.top_p < 1.0:
            nucleus.append(row)
        else:
            whole.append(row)

    tokens = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
    if whole:
        rows = to_device(torch.tensor(whole), logits.device)
        tokens.index_copy_(0, rows, _draw_whole(batch.select(rows)))
    if nucleus:
        rows = to_device(torch.tensor(nucleus), logits.device)
        tokens.index_copy_(0, rows, _draw_nucleus(batch.select(rows)))
    for bucket, members in ranked.items():
        rows = to_device(torch.tensor(members), logits.device)
        top_k = [params[row].top_k for row in members]
        width = bucket if bucket == vocab_size else max(top_k)
        tokens.index_copy_(0, rows, _draw_top_k(batch.select(rows), top_k, width))
    return tokens


def _draw_whole(rows: _Rows) -> torch.Tensor:
    running = _weights(rows, rows.logits).cumsum_(1)
    return _pick(running, running[:, -1:], rows.uniform).squeeze(1)


def _draw_top_k(rows: _Rows, top_k: Sequence[int], width: int) -> torch.Tensor:
    token_ids = ranked_token_ids(rows.logits, width)
    running = _weights(rows, rows.logits.gather(1, token_ids)).cumsum_(1)
    last = to_device(torch.tensor(top_k), running.device).unsqueeze(1) - 1
    kept, _ = _nucleus_sum(running, running.gather(1, last), rows.top_p)
    return token_ids.gather(1, _pick(running, kept, rows.uniform)).squeeze(1)


def _draw_nucleus(rows: _Rows) -> torch.Tensor:
    """Rows with `top_p` and no `top_k`: tries growing prefixes, and sorts only rows that none of them covers."""
    vocab_size = rows.logits.shape[1]
    total = _weights(rows, rows.logits).sum(1, keepdim=True)
    tokens = torch.empty(rows.logits.shape[0], dtype=torch.int64, device=rows.logits.device)
    pending = torch.arange(tokens.shape[0], device=tokens.device)
    # Whether a prefix covers a row is known to the device alone. Elsewhere than on a CPU asking would stall it for
    # longer than sorting takes.
    prefixes = [w for w in _PREFIX_WIDTHS if w < vocab_size] if tokens.device.type == "cpu" else []
    for width in [*prefixes, vocab_size]:
        token_ids = ranked_token_ids(rows.logits, width)
        running = _weights(rows, rows.logits.gather(1, token_ids)).cumsum_(1)
        kept, is_covered = _nucleus_sum(running, total, rows.top_p)
        drawn = token_ids.gather(1, _pick(running, kept, rows.uniform)).squeeze(1)
        # Rows that are not covered yet are overwritten by a later width.
        tokens.index_copy_(0, pending, drawn)
        if width == vocab_size:
            break
        left = (~is_covered.squeeze(1)).nonzero().squeeze(1)
        if left.shape[0] == 0:
            break
        rows, total, pending = rows.select(left), total.index_select(0, left), pending.index_select(0, left)
    return tokens


def _weights(rows: _Rows, logits: torch.Tensor) -> torch.Tensor:
    """Integer weights of `logits` [R, n], any n tokens of each row: int64 [R, n]."""
    weights = logits.double().sub_(rows.peak).div_(rows.temperature).exp_()
    if rows.min_p is not None:
        weights.masked_fill_(weights < rows.min_p, 0.0)
    return weights.mul_(2.0 ** (62 - rows.logits.shape[1].bit_length())).long()


def _nucleus_sum(running: torch.Tensor, total: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight of the shortest run from the front with at least `top_p` of `total`, and whether `running` reaches it.

    `running` int64 [R, n], the others [R, 1]; gives int64 [R, 1] and bool [R, 1].
    """
    target = torch.minimum((top_p * total.double()).ceil_().long(), total)
    last = torch.searchsorted(running, target)
    return running.gather(1, last.clamp(max=running.shape[1] - 1)), last < running.shape[1]


def _pick(running: torch.Tensor, total: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The index in `running` (int64 [R, n]) of the first sum above `uniform * total`: int64 [R, 1]."""
    # The product is rounded, and a total near 2**62 times the largest uniform would round up to the total itself.
    threshold = torch.minimum((uniform * total.double()).long(), total - 1)
    # The clamp matters for rows with NaN alone, whose sums mean nothing.
    return torch.searchsorted(running, threshold, right=True).clamp_(max=running.shape[1] - 1)
