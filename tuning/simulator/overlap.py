"""Fetch, compute and write-back of a prompt's KV, layer by layer, as a pipeline of three stages.

With f, c and w for one layer each and L layers, all three are done after `f + c + w + (L - 1) max(f, c, w)`, and the
computing, which does not wait for writing, after `f + c + (L - 1) max(f, c)` (ours; stages of equal layers, each layer
entering a stage when it has left the one before and the stage is free).
"""

from __future__ import annotations


def exposed_fetch_s(fetch_s: float, compute_s: float, num_layers: int) -> float:
    """By how much later computing ends for the fetch: `f + (L - 1) max(0, f - c)`.

    Args:
        fetch_s: of all layers together.
        compute_s: of all layers together, of the step that needs them.
    """
    return fetch_s / num_layers + (num_layers - 1) / num_layers * max(0.0, fetch_s - compute_s)


def first_layer_done_s(computed_s: float, compute_s: float, fetch_s: float, num_layers: int) -> float:
    """When the first layer was computed, given when the last one was: from then on there is something to write."""
    return computed_s - (num_layers - 1) / num_layers * max(fetch_s, compute_s)
