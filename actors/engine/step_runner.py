"""How a step's rows get through the model: replayed from a CUDA graph where they can be, else run layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from actors.engine.batch import PackedStep, StepBatch, build_batch, pack_step, rows_of
from actors.engine.config import EngineConfig
from actors.engine.cuda_graphs import Capture, CudaCapture, DecodeGraphs
from actors.engine.layer_arrival import LayerArrival
from actors.engine.loading import LoadedModel
from actors.engine.split_heads import StepHeads
from actors.engine.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Hidden states before the head, valid until the next step."""

    hidden: torch.Tensor | None
    """[T, hidden]: a row for each of the step's tokens, decodes first; None where nobody asked for its prompt's
    log-probabilities, and so for other rows than the sampled ones"""
    sampled: torch.Tensor
    """[S, hidden]: the rows of the chunks that are sampled from, in the order of the chunks"""


class StepRunner:
    """Runs the steps of one engine, or the layers of them that lie here. `graphs` is None where nothing is captured."""

    def __init__(self, loaded: LoadedModel, graphs: DecodeGraphs | None) -> None:
        self.graphs = graphs
        self.block_tokens = loaded.layout.block_tokens
        self.hidden_size = loaded.spec.hidden_size
        self.dtype = loaded.arena.pages.dtype
        self._model = loaded.model
        self._copies = loaded.copies
        self._device = loaded.arena.pages.device

    def run(self, plan: StepPlan) -> StepOutput:
        """Writes the K and V of the plan's tokens to their pages and returns their hidden states. All layers lie here.
        Before each layer it waits for the K and V that are still on their way there. Afterwards, failed or not, the
        sequences' marks stand behind what the device was given."""
        with self._marked(plan):
            return self._run(plan)

    def _run(self, plan: StepPlan) -> StepOutput:
        may_replay = self.graphs is not None and not plan.prefills and not _incoming(plan)
        replayed = self.graphs.run(plan.decodes) if self.graphs is not None and may_replay else None
        if replayed is not None:
            return self.output(*replayed)
        batch = build_batch(plan.decodes, plan.prefills, self.block_tokens, self._device)
        if all(chunk.sequence.reuses_prefix for chunk in plan.chunks):
            return StepOutput(None, self._model.forward_sampled(batch, self._waiting(plan)))
        return self.output(self._model.forward(batch, self._waiting(plan)), batch.sampled_rows)

    def lay_out(self, plan: StepPlan) -> tuple[PackedStep, StepBatch]:
        """The step's tensors, on the host and on the device."""
        pin_memory = self._device.type == "cuda"
        packed = pack_step(plan.decodes, plan.prefills, self.block_tokens, pin_memory=pin_memory)
        return packed, packed.batch(self.to_device(packed.packed), self.block_tokens)

    def embed(self, batch: StepBatch) -> torch.Tensor:
        """Hidden states [T, hidden] before the first layer."""
        return self._model.embed(batch)

    def run_layers(
        self, plan: StepPlan, batch: StepBatch, hidden: torch.Tensor, layers: range, heads: StepHeads | None
    ) -> torch.Tensor:
        """`run` for some layers that lie here, over hidden states [T, hidden], while others lie elsewhere. No K and V
        are on their way then. `heads`: see `CausalModel`."""
        with self._marked(plan):
            return self._model.run_layers(hidden, layers, batch, heads=heads)

    def output(self, hidden: torch.Tensor, sampled_rows: torch.Tensor) -> StepOutput:
        """The step's output from the last layer's hidden states [T, hidden]."""
        return StepOutput(hidden, rows_of(hidden, sampled_rows))

    def to_device(self, values: torch.Tensor) -> torch.Tensor:
        """A host tensor on the engine's device; on a CPU the same one."""
        return values.to(self._device, non_blocking=True)

    @contextmanager
    def _marked(self, plan: StepPlan) -> Iterator[None]:
        """Puts the sequences' marks behind what the device was given within."""
        try:
            yield
        finally:
            mark = self._copies.computed()
            if mark is not None:
                for chunk in plan.chunks:
                    chunk.sequence.mark = mark

    @staticmethod
    def _waiting(plan: StepPlan) -> Callable[[int], None] | None:
        """Waits until all K and V that are still on their way are there up to a layer, or have failed."""
        incoming = _incoming(plan)

        def wait(layer: int) -> None:
            for arrival in incoming:
                arrival.wait(layer + 1)

        return wait if incoming else None


def _incoming(plan: StepPlan) -> list[LayerArrival]:
    return [chunk.sequence.incoming for chunk in plan.chunks if chunk.sequence.incoming is not None]


def make_step_runner(loaded: LoadedModel, config: EngineConfig, capture: Capture | None = None) -> StepRunner:
    """CUDA graphs on a CUDA device if the config wants them; elsewhere only with a `capture` of the caller's."""
    device = loaded.arena.pages.device
    if capture is None and config.cuda_graphs and device.type == "cuda":
        capture = CudaCapture(device)
    if capture is None:
        return StepRunner(loaded, None)
    graphs = DecodeGraphs(
        loaded.model.forward,
        capture,
        lambda: loaded.lanes.version,
        block_tokens=loaded.layout.block_tokens,
        max_rows=config.max_running_requests,
        device=device,
    )
    return StepRunner(loaded, graphs)
