"""How a step's rows get through the model: replayed from a CUDA graph where they can be, else run layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from actors.engine.batch import build_batch
from actors.engine.config import EngineConfig
from actors.engine.cuda_graphs import Capture, CudaCapture, DecodeGraphs
from actors.engine.loading import LoadedModel
from actors.engine.scheduler import StepPlan


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Hidden states before the head, valid until the next step."""

    hidden: torch.Tensor
    """[T, hidden]: a row for each of the step's tokens, decodes first"""
    sampled: torch.Tensor
    """[S, hidden]: the rows of the chunks that are sampled from, in the order of the chunks"""


class StepRunner:
    """Runs the steps of one engine. `graphs` is None where nothing is captured."""

    def __init__(self, loaded: LoadedModel, graphs: DecodeGraphs | None) -> None:
        self.graphs = graphs
        self._model = loaded.model
        self._copies = loaded.copies
        self._block_tokens = loaded.layout.block_tokens
        self._device = loaded.arena.pages.device

    def run(self, plan: StepPlan) -> StepOutput:
        """Writes the K and V of the plan's tokens to their pages and returns their hidden states. Before each layer it
        waits for the K and V that are still on their way there. Afterwards, failed or not, the sequences' marks stand
        behind what the device was given."""
        try:
            return self._run(plan)
        finally:
            mark = self._copies.computed()
            if mark is not None:
                for chunk in plan.chunks:
                    chunk.sequence.mark = mark

    def _run(self, plan: StepPlan) -> StepOutput:
        incoming = [chunk.sequence.incoming for chunk in plan.chunks if chunk.sequence.incoming is not None]

        def wait(layer: int) -> None:
            for arrival in incoming:
                arrival.wait(layer + 1)

        may_replay = self.graphs is not None and not plan.prefills and not incoming
        replayed = self.graphs.run(plan.decodes) if self.graphs is not None and may_replay else None
        if replayed is not None:
            hidden, sampled_rows = replayed
        else:
            batch = build_batch(plan.decodes, plan.prefills, self._block_tokens, self._device)
            hidden, sampled_rows = self._model.forward(batch, wait if incoming else None), batch.sampled_rows
        # In a step of decodes alone every row is sampled from; rows rise, so as many as there are means all of them.
        all_sampled = sampled_rows.shape[0] == hidden.shape[0]
        return StepOutput(hidden, hidden if all_sampled else hidden.index_select(0, sampled_rows))


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
