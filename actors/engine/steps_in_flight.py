"""Steps that have begun and not come back, and how each gets through its stages.

The home runs its own layers at once and hands the hidden states to the next worker; meanwhile it begins another step,
or goes on with one that came back. Each worker sees the steps in their order, so that the KV of a prompt's chunk is
there when the next chunk is run.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from actors.engine.batch import PackedStep, StepBatch
from actors.engine.split_heads import HeadRoute, HeadsLostError, StepHeads
from actors.engine.stage_work import RemoteStages, StageDone, StageWork
from actors.engine.stages import Stage
from actors.engine.step_plan import StepPlan
from actors.engine.step_runner import StepOutput, StepRunner
from migrate.placement import Placement


@dataclass(frozen=True, slots=True)
class StageFailure:
    """Another worker has not run its part of a step."""

    worker: str
    step_id: int
    reason: str


@dataclass(slots=True, eq=False)
class BegunStep:
    """A step in flight. It is over when it has an output, a failure, or an error."""

    plan: StepPlan
    started_s: float
    output: StepOutput | None = None
    failure: StageFailure | None = None
    error: Exception | None = None
    """What went wrong here, in this worker's own layers."""
    num_stages: int = 0
    """Stages that were begun. All but the last of them are done, and that one too while `hidden` is not None."""
    hidden: torch.Tensor | None = None
    """[T, hidden] after these stages; None while another worker runs the last one."""
    hosted_s: float = 0.0
    """What the longest stage that another worker ran took it."""
    host_step_s: float = 0.0
    """What a step of that worker's own takes; 0: it has none."""

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is left to be run."""
        return not (self.output is None and self.failure is None and self.error is None)


@dataclass(frozen=True, slots=True)
class Route:
    """Where an instance's steps pass through: its placement, as stages, and the way to the other workers."""

    placement: Placement
    stages: Sequence[Stage]
    remote: RemoteStages | None
    """None: all layers are at home, and heads alone are not."""
    heads: HeadRoute | None = None
    """None: every layer at home has all its heads there."""


class StepsInFlight:
    """The steps of one engine. One thread calls it; other workers' answers come from any.

    `on_news()` is called from any thread when an answer has come, for which `advance` is to be called.
    """

    def __init__(self, runner: StepRunner, on_news: Callable[[], None]) -> None:
        self.route: Route | None = None
        """None: all layers are here. Changed only while no step is in flight."""
        self.whole_steps = 0
        """Steps of which all layers were run here at once."""
        self.layer_steps: Counter[int] = Counter()
        """By layer: the other steps for which it was run here."""
        self._runner = runner
        self._on_news = on_news
        self._steps: deque[BegunStep] = deque()
        self._batches: dict[BegunStep, tuple[PackedStep, StepBatch]] = {}
        self._news: deque[tuple[BegunStep, StageDone]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def has_news(self) -> bool:
        """Whether an answer has come that `advance` has not seen."""
        return bool(self._news)

    @property
    def is_oldest_over(self) -> bool:
        """Whether `end_oldest` may be called."""
        return bool(self._steps) and self._steps[0].is_over

    def begin(self, plan: StepPlan) -> None:
        """Runs the plan as far as it gets without another worker's answer."""
        step = BegunStep(plan, time.perf_counter())
        self._steps.append(step)
        if self.route is not None:
            self._guard(step, self._embed)
            self.advance()
        else:
            self._guard(step, self._run_here)

    def advance(self) -> None:
        """Takes in the answers that have come, and runs what follows from them."""
        while True:
            while self._news:
                self._take_in(*self._news.popleft())
            ahead: BegunStep | None = None
            for step in self._steps:
                self._run_on(step, ahead)
                ahead = step
            if not self._news:  # an answer may come while the work is being handed over
                return

    def end_oldest(self) -> BegunStep:
        """Takes out the oldest step. RuntimeError when it is not over."""
        if not self.is_oldest_over:
            raise RuntimeError(f"{len(self._steps)} steps are in flight, and the oldest of them is not over")
        self._batches.pop(self._steps[0], None)
        return self._steps.popleft()

    def _run_here(self, step: BegunStep) -> None:
        step.output = self._runner.run(step.plan)
        self.whole_steps += 1

    def _embed(self, step: BegunStep) -> None:
        packed, batch = self._runner.lay_out(step.plan)
        self._batches[step] = packed, batch
        step.hidden = self._runner.embed(batch)

    def _run_on(self, step: BegunStep, ahead: BegunStep | None) -> None:
        """Begins the step's next stages, each after the step ahead of it has begun that stage."""
        while not step.is_over and step.hidden is not None:
            if not (ahead is None or ahead.is_over or ahead.num_stages > step.num_stages):
                return
            self._guard(step, self._run_stage)

    def _run_stage(self, step: BegunStep) -> None:
        assert self.route is not None
        assert step.hidden is not None
        packed, batch = self._batches[step]
        placement, stages = self.route.placement, self.route.stages
        stage = stages[step.num_stages]
        step.num_stages += 1
        if stage.worker == placement.home:
            route = self.route.heads
            heads = StepHeads(route, step.plan.step_id, packed, step.plan.fresh_blocks) if route else None
            step.hidden = self._runner.run_layers(step.plan, batch, step.hidden, stage.layers, heads)
            self.layer_steps.update(stage.layers)
            self._finish(step)
            return
        assert self.route.remote is not None
        hidden, step.hidden = step.hidden, None
        work = StageWork(
            placement.home,
            placement.version,
            step.plan.step_id,
            stage.layers,
            packed,
            hidden.to("cpu").contiguous(),
            torch.tensor(step.plan.fresh_blocks, dtype=torch.int64),
        )

        def done(answer: StageDone) -> None:
            self._news.append((step, answer))
            self._on_news()

        self.route.remote.submit(stage.worker, work, done)

    def _take_in(self, step: BegunStep, done: StageDone) -> None:
        if step.is_over:
            return
        assert self.route is not None
        placement, worker = self.route.placement, self.route.stages[step.num_stages - 1].worker
        reason = done.error
        if reason is None:
            reason = self._objection(step, done, placement)
        if reason is not None:
            step.failure = StageFailure(worker, step.plan.step_id, reason)
            return
        assert done.hidden is not None
        if done.stage_us > step.hosted_s * 1e6:
            step.hosted_s, step.host_step_s = done.stage_us / 1e6, done.host_step_us / 1e6
        step.hidden = self._runner.to_device(done.hidden)
        self._guard(step, self._finish)

    def _objection(self, step: BegunStep, done: StageDone, placement: Placement) -> str | None:
        """Why an answer is not the one that was waited for."""
        expected = placement.home, placement.version, step.plan.step_id
        if (done.instance, done.version, done.step_id) != expected:
            return f"the answer is to {(done.instance, done.version, done.step_id)}; expected one to {expected}"
        _, batch = self._batches[step]
        shape, dtype = (len(batch.token_ids), self._runner.hidden_size), self._runner.dtype
        if done.hidden is None or tuple(done.hidden.shape) != shape or done.hidden.dtype != dtype:
            got = None if done.hidden is None else (tuple(done.hidden.shape), done.hidden.dtype)
            return f"the answer has hidden states {got}; expected {(shape, dtype)}"
        return None

    def _finish(self, step: BegunStep) -> None:
        """The step's output, where its last stage is done."""
        assert self.route is not None
        if step.num_stages == len(self.route.stages) and step.hidden is not None:
            _, batch = self._batches[step]
            step.output, step.hidden = self._runner.output(step.hidden, batch.sampled_rows), None

    @staticmethod
    def _guard(step: BegunStep, function: Callable[[BegunStep], None]) -> None:
        try:
            function(step)
        except HeadsLostError as error:
            step.failure = StageFailure(error.worker, step.plan.step_id, error.reason)
        except Exception as error:  # out of memory, a kernel's refusal: raised where the step ends, in its turn
            step.error = error
