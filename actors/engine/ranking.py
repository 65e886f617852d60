"""The one order of tokens that sampling and log-probabilities share: higher logit first, ties by the lower id.

`torch.topk` and `torch.sort` leave the order of equal values open, and ties are common in bfloat16. So logit and id are
packed into one integer that has no ties (ours): the result is the same for any width, batch and device.
"""

from __future__ import annotations

import torch

_ID_BITS = 32
_ID_MASK = (1 << _ID_BITS) - 1
_MAGNITUDE_BITS = 0x7FFFFFFF


def ranked_token_ids(logits: torch.Tensor, width: int) -> torch.Tensor:
    """The first `width` token ids of each row in that order: float32 [R, vocab] gives int64 [R, width].

    `1 <= width <= vocab`. A row with NaN gets valid ids in an unspecified order. `logits` is not changed.
    """
    vocab_size = logits.shape[1]
    # Adding zero turns -0.0 into 0.0: the two are equal as logits but not as bits.
    bits = (logits + 0.0).view(torch.int32)
    # As integers, non-negative floats rise with their value and negative ones fall; flipping the latter's magnitude
    # makes one rising order.
    magnitude_flip = (bits >> 31).bitwise_and_(_MAGNITUDE_BITS)
    reversed_ids = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = bits.bitwise_xor_(magnitude_flip).long().bitwise_left_shift_(_ID_BITS).bitwise_or_(reversed_ids)
    # A full-width topk is several times slower than a sort.
    ranked = keys.sort(dim=1, descending=True).values if width == vocab_size else keys.topk(width, dim=1).values
    return ranked.bitwise_and_(_ID_MASK).neg_().add_(vocab_size - 1)
