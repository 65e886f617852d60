"""A prefill and a decode worker that serve requests in a closed loop on simulated time, as engines do: steps of one
chunk of prompts or of decodes, up to two in flight where layers are elsewhere, and at a host one piece of hosted work
between two own steps. They count what real workers count, from which an `Observer` and a `Controller` plan."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import MappingProxyType

from migrate.controller import Controller
from migrate.controller_settings import ControllerSettings
from migrate.cost_model import ModelSizes
from migrate.move_history import Happened, Order
from migrate.moves import LayerMove
from migrate.observer import Observer
from migrate.placement import Placement
from migrate.step_times import StepTimes
from migrate.verdict import Abilities
from migrate.worker_reading import WorkerReading

LAYERS = 30
CHUNK_TOKENS = 256
SIZES = ModelSizes(
    LAYERS, 3, layer_weight_bytes=7_340_032, page_bytes=4096, hidden_bytes=1152, query_bytes=384, key_bytes=128
)
COPY_BYTES_PER_S = 4e7
TOKEN_MS, PREFILL_PAIR_MS, STEP_MS, ROW_MS, DECODE_PAIR_MS = 0.55, 0.0003, 28.0, 0.5, 0.0024
"""SmolLM2-135M in bfloat16 on one core (docs/engine-profile.md): 0.7 ms a token of a prompt of 1,024; a decode step of
16 rows of 256 tokens 46 ms, of 1,024 tokens 75."""


@dataclass(eq=False)
class Request:
    prompt: int
    answer: int
    begun: int = 0
    """Prompt tokens that were given to a step."""
    computed: int = 0
    generated: int = 1
    last_token_s: float = 0.0
    is_in_step: bool = False
    """While it is decoded."""


@dataclass(eq=False)
class Step:
    instance: Side
    rows: dict[int, tuple[Request, int]]
    """Prompt tokens of each request; 0: it decodes one row."""

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.rows.values())

    @property
    def pairs(self) -> float:
        """Of a token and one that it attends to."""
        each = self.rows.values()
        if self.tokens:
            return sum(tokens * (request.begun - tokens / 2) for request, tokens in each)
        return sum(request.prompt + request.generated for request, _ in each)

    @property
    def takes_ms(self) -> float:
        """In all layers."""
        if self.tokens:
            return TOKEN_MS * self.tokens + PREFILL_PAIR_MS * self.pairs
        return STEP_MS + ROW_MS * len(self.rows) + DECODE_PAIR_MS * self.pairs


@dataclass(eq=False)
class Side:
    """A worker, and the instance that is at home there."""

    name: str
    waiting: deque[Request] = field(default_factory=deque)
    decoding: list[Request] = field(default_factory=list)
    hosted: deque[Step] = field(default_factory=deque)
    placement: Placement = field(init=False)
    steps_in_flight: int = 0
    is_busy: bool = False
    was_hosting: bool = False
    times: StepTimes = field(default_factory=StepTimes)
    prefill_steps: int = 0
    prefill_tokens: int = 0
    decode_steps: int = 0
    decode_rows: int = 0
    decoding_requests: int = 0

    def __post_init__(self) -> None:
        self.placement = Placement.at_home(self.name, LAYERS, 3)

    @property
    def away(self) -> int:
        """Layers of its instance at the other worker."""
        return LAYERS - len(self.placement.layers_on(self.name))


class SimulatedServing:
    """Keeps `in_flight` requests of (prompt tokens, answer tokens) under way; `load(now_s)` says of what kind the next
    one is. The controller has its turn each period."""

    def __init__(
        self,
        load: Callable[[float], tuple[int, int]],
        in_flight: int,
        settings: ControllerSettings,
        *,
        away: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`away`: layers of these instances that are at the other worker from the start."""
        self.now_s = 0.0
        self.gaps: list[tuple[float, float]] = []
        """(when, seconds from one token of a request to its next)"""
        self.moved: list[tuple[float, LayerMove]] = []
        self.sides = {name: Side(name) for name in ("prefill", "decode")}
        self._load = load
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._controller = Controller(settings, Abilities(heads=False, onward=False))
        self._observer = Observer()
        for name, layers in away.items():
            side = self.sides[name]
            if layers:
                side.placement = side.placement.with_layers_moved(LAYERS - layers, layers, self._other(side).name)
        self.send(in_flight)
        self._after(settings.planner.period_s, self._turn)

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        self.now_s = until_s

    def send(self, requests: int) -> None:
        """So many more are under way from now on."""
        for _ in range(requests):
            self.sides["prefill"].waiting.append(Request(*self._load(self.now_s)))
        self._go_on()

    def tokens_per_s(self, from_s: float, to_s: float) -> float:
        """Decoded ones."""
        return sum(from_s <= at_s < to_s for at_s, _ in self.gaps) / (to_s - from_s)

    def gap_s(self, from_s: float, to_s: float) -> float:
        """Mean distance of tokens."""
        gaps = [gap for at_s, gap in self.gaps if from_s <= at_s < to_s]
        return sum(gaps) / len(gaps)

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._order), event))

    def _other(self, side: Side) -> Side:
        return self.sides["decode" if side.name == "prefill" else "prefill"]

    def _go_on(self) -> None:
        for side in self.sides.values():
            if side.is_busy:
                continue
            own = None if side.hosted and not side.was_hosting else self._next_step(side)
            if own is not None:
                side.was_hosting = False
                self._run(side, own, LAYERS - side.away)
            elif side.hosted:
                side.was_hosting = True
                step = side.hosted.popleft()
                self._run(side, step, step.instance.away)

    def _next_step(self, side: Side) -> Step | None:
        if side.steps_in_flight >= (2 if side.away else 1):
            return None
        step, room = Step(side, {}), CHUNK_TOKENS
        for request in side.waiting:
            tokens = min(room, request.prompt - request.begun)
            if tokens:
                step.rows[id(request)] = request, tokens
                request.begun += tokens
                room -= tokens
        if not step.rows:
            free = [request for request in side.decoding if not request.is_in_step]
            for request in free[: -(-len(side.decoding) // (2 if side.away else 1))]:
                step.rows[id(request)] = request, 0
                request.is_in_step = True
        if not step.rows:
            return None
        side.steps_in_flight += 1
        return step

    def _run(self, side: Side, step: Step, layers: int) -> None:
        side.is_busy = True
        self._after(step.takes_ms / 1000 * layers / LAYERS, lambda: self._ran(side, step))

    def _ran(self, side: Side, step: Step) -> None:
        side.is_busy = False
        if side is step.instance and side.away:
            self._other(side).hosted.append(step)
        else:
            self._end(step)
        self._go_on()

    def _end(self, step: Step) -> None:
        side, rows = step.instance, len(step.rows)
        side.steps_in_flight -= 1
        if not side.away:
            is_prefill = step.tokens > 0
            side.times.count(
                prefill_tokens=step.tokens,
                decode_rows=0 if is_prefill else rows,
                prefill_pairs=int(step.pairs) if is_prefill else 0,
                decode_pairs=0 if is_prefill else int(step.pairs),
                layers_s=step.takes_ms / 1000,
            )
        if step.tokens:
            side.prefill_steps, side.prefill_tokens = side.prefill_steps + 1, side.prefill_tokens + step.tokens
            for request, tokens in step.rows.values():
                request.computed += tokens
                if request.computed == request.prompt:
                    side.waiting.remove(request)
                    request.last_token_s = self.now_s
                    self.sides["decode"].decoding.append(request)
            return
        side.decode_steps, side.decode_rows = side.decode_steps + 1, side.decode_rows + rows
        side.decoding_requests += len(side.decoding)
        for request, _ in step.rows.values():
            request.is_in_step = False
            self.gaps.append((self.now_s, self.now_s - request.last_token_s))
            request.generated, request.last_token_s = request.generated + 1, self.now_s
            if request.generated == request.answer:
                side.decoding.remove(request)
                self.send(1)

    def _turn(self) -> None:
        period_s, window_s = self._controller.settings.planner.period_s, self._controller.settings.planner.window_s
        seen = self._observer.look(
            [self._reading(side) for side in self.sides.values()],
            {side.placement.home: side.placement for side in self.sides.values()},
            self.now_s,
            window_s,
        )
        assert not isinstance(seen, str)
        for order in self._controller.plan(seen, self.now_s):
            assert isinstance(order.move, LayerMove)
            self.moved.append((self.now_s, order.move))
            took_s = 0.1 + order.prediction.transfer_bytes / COPY_BYTES_PER_S
            self._after(took_s, partial(self._moved, order, took_s))
        self._after(period_s, self._turn)

    def _moved(self, order: Order, took_s: float) -> None:
        move, side = order.move, self.sides[order.move.instance]
        side.placement = move.after(side.placement)
        happened = Happened(order.prediction.weight_bytes, order.prediction.kv_bytes, took_s, 0.05)
        self._observer.links.moved(move.source, move.destination, happened, order.prediction.busy_before)
        self._controller.ended(order.order_id, self.now_s, happened)

    def _reading(self, side: Side) -> WorkerReading:
        requests = [*side.waiting, *side.decoding]
        return WorkerReading(
            side.name, self.now_s, SIZES, memory_bytes=1_287_782_400, full_batch=64, total_blocks=2912,
            live_blocks=min(2912, sum(-(-(item.computed + item.generated) // 16) for item in requests)),
            pending_prefill_tokens=sum(item.prompt - item.computed for item in side.waiting),
            prefill_steps=side.prefill_steps, prefill_tokens=side.prefill_tokens, decode_steps=side.decode_steps,
            decode_rows=side.decode_rows, decoding_requests=side.decoding_requests, step_times=side.times.scaled(1.0),
        )  # fmt: skip
