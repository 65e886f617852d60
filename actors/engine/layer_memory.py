"""Which layers' weights lie in this engine's arena, and for which instances.

Replicas of one model have the same weights, so a layer lies here once, however many instances run it (design decision
D2: reference-counted per worker and layer). It leaves with the last of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from actors.engine.arena import Arena
from actors.engine.weights import LayerWeights, pack, packed_views

OWN_INSTANCE = ""
"""Stands for the engine's own instance where others have the id of their home; no worker's id is empty."""


@dataclass(slots=True)
class _Resident:
    slabs: range
    memory: torch.Tensor
    """uint8 [packed bytes]"""
    holders: set[str] = field(default_factory=set)


class LayerMemory:
    """The layers of one model in one arena. Used from the engine's thread; `bytes_of` a whole layer from any.

    `weights` has the layers that are whole, and is what hosted models run on: a layer that is granted memory, but whose
    weights are still on their way, is not in it.
    """

    def __init__(self, arena: Arena, dtype: torch.dtype) -> None:
        self.weights: dict[int, LayerWeights] = {}
        self._arena = arena
        self._dtype = dtype
        self._shapes: dict[int, dict[str, torch.Size]] = {}
        self._num_bytes: dict[int, int] = {}
        self._residents: dict[int, _Resident] = {}

    def load(self, layer: int, tensors: Mapping[str, torch.Tensor]) -> LayerWeights:
        """Packs a layer of the checkpoint into the arena, for the own instance."""

        def take(num_bytes: int) -> torch.Tensor:
            slabs, memory = self._arena.take_run(num_bytes)
            self._num_bytes[layer] = num_bytes
            self._residents[layer] = _Resident(slabs, memory, {OWN_INSTANCE})
            return memory

        self.weights[layer] = pack(tensors, self._dtype, take)
        self._shapes[layer] = {role: tensor.shape for role, tensor in tensors.items()}
        return self.weights[layer]

    @property
    def slabs(self) -> dict[int, range]:
        """By layer: the slabs its weights take, or will when they have arrived."""
        return {layer: resident.slabs for layer, resident in self._residents.items()}

    def __contains__(self, layer: int) -> bool:
        return layer in self._residents

    def packed_bytes(self, layer: int) -> int:
        """Bytes of a layer's weights, here or not. KeyError: the model has no such layer."""
        return self._num_bytes[layer]

    def bytes_of(self, layer: int) -> torch.Tensor:
        """A layer's memory, uint8 [packed bytes]. KeyError when it is not here."""
        return self._residents[layer].memory

    def holders(self, layer: int) -> frozenset[str]:
        """Instances that run, or are to run, the layer here."""
        return frozenset(self._residents[layer].holders if layer in self._residents else ())

    def place(self, layer: int, run: range) -> None:
        """Gives a layer that is not here the free slabs `run`; its weights are to be written there."""
        self._residents[layer] = _Resident(run, self._arena.claim_run(run, self._num_bytes[layer]))

    def arrived(self, layer: int) -> None:
        """The layer's bytes are all there: it can be run."""
        self.weights[layer] = packed_views(self._shapes[layer], self._dtype, self._residents[layer].memory)

    def hold(self, layer: int, instance: str) -> None:
        """`instance` runs, or is to run, the layer here."""
        self._residents[layer].holders.add(instance)

    def release(self, layer: int, instance: str) -> None:
        """`instance` runs it here no more. With the last one its slabs go back to the arena."""
        resident = self._residents[layer]
        resident.holders.discard(instance)
        if not resident.holders:
            del self._residents[layer]
            self.weights.pop(layer, None)
            self._arena.give_back(resident.slabs)
