"""What moves, and steps through a link, cost: sizes of a model, measured times, and arithmetic on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Bytes of a model's modules and of what travels between them. Dtypes are those in use.

    Raises:
        ValueError: a size below 1.
    """

    num_layers: int
    num_kv_heads: int
    layer_weight_bytes: int
    """Weights of one layer."""
    page_bytes: int
    """KV of one block in one lane (`kv.layout.KvLayout.page_bytes`)."""
    hidden_bytes: int
    """Hidden state of one token between two layers."""
    query_bytes: int
    """Queries of one token and one KV head: of all query heads that it serves. Their attention output is as large."""
    key_bytes: int
    """Key of one token and one KV head; the value is as large."""

    def __post_init__(self) -> None:
        for name in (item.name for item in fields(self)):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """Times of one worker. A decode step of `rows` requests takes `step_s + row_s * rows` in each layer.

    Raises:
        ValueError: a time that is negative or not finite, a share outside 0 to 1, a full batch below 1.
    """

    prefill_token_s: float
    """One prompt token in one layer."""
    step_s: float
    """One decode step in one layer, however many rows it has."""
    row_s: float
    """One row of a decode step in one layer."""
    full_batch: int
    """Rows of a decode step when a worker is fully used."""
    known_rows: float = 0.0
    """Rows of the decode steps that were measured, mean over their rows. 0: not known."""
    head_step_s: float = 0.0
    """What a decode step costs at home beside the layers (final norm, output head, sampling), whatever its rows."""
    head_row_s: float = 0.0
    """The same for each row."""
    prefill_attention_share: float = 0.0
    """Part of a layer's prefill time that goes along with its KV heads: scores, softmax, weighted sum."""
    decode_attention_share: float = 0.0
    """The same of a decode step's time."""

    def __post_init__(self) -> None:
        for name in (item.name for item in fields(self)):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; it must be finite and 0 or more")
            if name.endswith("_share") and value > 1:
                raise ValueError(f"{name} is {value}; allowed is 0 to 1")
        if self.full_batch < 1:
            raise ValueError(f"full_batch is {self.full_batch}; it must be at least 1")

    def layer_s(self, rows: float) -> float:
        """A decode step of `rows` rows in one layer."""
        return self.step_s + self.row_s * rows

    def head_s(self, rows: float) -> float:
        """What the same step takes at home beside the layers."""
        return self.head_step_s + self.head_row_s * rows

    def decode_token_s(self, rows: float, groups: int) -> float:
        """One token in one layer when `rows` requests are decoded in `groups` groups, as they are on as many workers
        (ours).

        Two workers keep each other busy by taking turns at two half batches, and each half costs a whole `step_s`.
        """
        return self.step_s * min(groups, rows) / rows + self.row_s

    def head_token_s(self, rows: float, groups: int) -> float:
        """The same for what is done at home beside the layers."""
        return self.head_step_s * min(groups, rows) / rows + self.head_row_s


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """How fast the link between two workers is.

    Raises:
        ValueError: a bandwidth that is not finite and above 0, a latency that is not finite and 0 or more.
    """

    bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bytes_per_s) and self.bytes_per_s > 0):
            raise ValueError(f"bytes_per_s is {self.bytes_per_s}; it must be finite and above 0")
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise ValueError(f"latency_s is {self.latency_s}; it must be finite and 0 or more")

    def trip_s(self, num_bytes: float) -> float:
        """One message of `num_bytes` one way."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class CostModel:
    """Everything that predictions are made from, beside traffic and placements. All workers run the same model.

    Raises:
        ValueError: a time that is negative or not finite.
    """

    sizes: ModelSizes
    times: MeasuredTimes
    link: LinkSpeed
    """Of pairs that `links` does not have."""
    links: Mapping[frozenset[str], LinkSpeed] = field(default_factory=dict)
    """By the two workers' ids, once measured."""
    loaded_byte_s: float = 0.0
    """Seconds that a byte of a move takes longer where an end is busy all the time: pages wait for a step of both."""
    switch_s: float = 0.0
    """Time of a move that is not copying: grant, drain, switch."""
    hosted_slice_s: float | None = None
    """Longest piece of hosted work between two own steps, where the engine bounds it. None: a whole step's."""

    def __post_init__(self) -> None:
        for name in ("loaded_byte_s", "switch_s", "hosted_slice_s"):
            value = getattr(self, name) or 0.0
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; it must be finite and 0 or more")

    def link_between(self, one: str, other: str) -> LinkSpeed:
        return self.links.get(frozenset((one, other)), self.link)

    def copy_s(self, num_bytes: int, source: str, destination: str) -> float:
        """Seconds of a move that copies `num_bytes`: transfer and switch (BanaServe: `S / B_net + T_sync`)."""
        return self.link_between(source, destination).trip_s(num_bytes) + self.switch_s

    def waiting_s(self, num_bytes: int, busy: float) -> float:
        """Seconds that it takes longer where the busier end works for a share `busy` of its time (ours)."""
        return num_bytes * self.loaded_byte_s * min(busy, 1.0)

    def hidden_round_trip_s(self, rows: float, one: str, other: str) -> float:
        """What one step pays to run layers elsewhere: hidden states of `rows` rows there and back."""
        return 2 * self.link_between(one, other).trip_s(rows * self.sizes.hidden_bytes)

    def head_round_trip_s(self, rows: float, heads: int, one: str, other: str) -> float:
        """What one layer of a step pays for `heads` KV heads elsewhere: q, k and v there, the attention output back."""
        link = self.link_between(one, other)
        there = rows * heads * (self.sizes.query_bytes + 2 * self.sizes.key_bytes)
        return link.trip_s(there) + link.trip_s(rows * heads * self.sizes.query_bytes)
