"""A stand-in for a CUDA graph on any device: records the operators a function runs, and replays them.

Like a graph it replays the same operators over the same memory, with nothing of the Python around them: a value, a
shape or a branch that the host chose stays as it was at the capture. What a CUDA graph cannot hold - waiting for a
value on the device, copying from the host - is refused. It is for checking what is captured, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NOT_CAPTURABLE = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique_dim", "_unique2",
    "lift_fresh", "lift", "repeat_interleave",
}  # fmt: skip
"""Operators that wait for the device, make a shape from its values, or bring data over from the host."""


class RecordedOps:
    """An `actors.engine.cuda_graphs.Capture`."""

    def capture(self, function: Callable[[], torch.Tensor]) -> RecordedCall:
        """Runs `function` once to fill its caches, as capturing does, and once to record it.

        Raises RuntimeError: the function runs an operator that no CUDA graph can hold.
        """
        function()
        recorder = _Recorder()
        with recorder:
            output = function()
        return RecordedCall(output, tuple(recorder.steps))

    def forget(self) -> None:
        """Recordings share nothing."""


@dataclass(frozen=True, slots=True)
class _Step:
    operator: Callable[..., Any]
    arguments: Sequence[Any]
    options: dict[str, Any]
    outputs: tuple[torch.Tensor, ...]
    """Tensors to be filled again; empty for an operator that works in place."""

    def run(self) -> None:
        results = tree_leaves(self.operator(*self.arguments, **self.options))
        for output, result in zip(self.outputs, results, strict=bool(self.outputs)):
            output.copy_(result)


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A recorded function: `output` is what it returned, and `replay` fills it anew."""

    output: torch.Tensor
    steps: tuple[_Step, ...]

    def replay(self) -> None:
        """Runs the recorded operators over the recorded memory."""
        for step in self.steps:
            step.run()


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.steps: list[_Step] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        inputs = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]
        is_masked_index = name.startswith("index") and any(leaf.dtype == torch.bool for leaf in inputs[1:])
        if name in _NOT_CAPTURABLE or is_masked_index:
            raise RuntimeError(f"operator {name} cannot be captured: it waits for the device or copies from the host")
        result = func(*args, **options)
        outputs = tuple(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        if func._schema.is_mutable:
            self.steps.append(_Step(func, args, options, ()))
        elif not _are_views(outputs, inputs):
            self.steps.append(_Step(func, args, options, outputs))
        return result


def _are_views(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
    memory = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    return bool(outputs) and all(output.untyped_storage().data_ptr() in memory for output in outputs)
