"""One measured run of one workload against a running server."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from load_tests.arrivals import ArrivalPlan, at_rate, at_times, closed_loop
from load_tests.client import Api, CompletionClient
from load_tests.cpu_time import LOAD_GENERATOR, CpuMeter, CpuUsage
from load_tests.driver import drive
from load_tests.metrics import ServiceLevel, Summary, summarise
from load_tests.processes import ServerProcesses
from load_tests.request_record import RequestRecord
from load_tests.worker_work import WorkerWork, work_between, work_figures
from load_tests.workloads import DEFAULT_TOKEN_IDS, PlannedRequest, PromptKind, Workload, draw_priming, draw_requests

SEEDS_PER_ROUND = 1000
"""Seeds of two rounds are so far apart: an attempt, or a workload, takes the next one."""

Row = dict[str, Any]
"""One run as it is printed and saved: flat, but for the CPU time by process label."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load a server, whichever workload it is."""

    in_flight: int = 16
    burstiness: float = 1.0
    """Of arrivals at a rate."""
    times_s: tuple[float, ...] | None = None
    prompt_kind: PromptKind = "ids"
    token_ids: range = DEFAULT_TOKEN_IDS
    warm_up_requests: int = 4
    level: ServiceLevel | None = None
    foreign_limit: float = 0.05
    api: Api = "completions"
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    extra: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0

    def shaped(self, workload: Workload) -> Workload:
        """The workload as it will be run: given times also give the number of requests."""
        if self.times_s is None or workload.in_flight is not None:
            return workload
        return replace(workload, requests=len(self.times_s))

    def plan(self, workload: Workload, seed: int) -> ArrivalPlan:
        if workload.in_flight is None:
            if self.times_s is not None:
                return at_times(self.times_s)
            if workload.rate_per_s is not None:
                return at_rate(workload.requests, workload.rate_per_s, seed, self.burstiness)
        return self.closed_loop(workload)

    def closed_loop(self, workload: Workload) -> ArrivalPlan:
        return closed_loop(workload.requests, self.in_flight_of(workload))

    def in_flight_of(self, workload: Workload) -> int:
        return self.in_flight if workload.in_flight is None else workload.in_flight

    def arrivals(self, workload: Workload) -> str:
        """The plan in words."""
        if workload.in_flight is None:
            if self.times_s is not None:
                return "at given times"
            if workload.rate_per_s is not None:
                kind = "poisson" if self.burstiness == 1 else f"burstiness {self.burstiness:g}"
                return f"{kind} {workload.rate_per_s:g}/s"
        return f"{self.in_flight_of(workload)} in flight"

    def client(self, base_url: str, model: str) -> CompletionClient:
        return CompletionClient(
            base_url, model, api=self.api, api_key=self.api_key, extra=self.extra, timeout_s=self.timeout_s
        )


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run in figures, with what is needed to judge whether to trust it."""

    workload: str
    seed: int
    arrivals: str
    summary: Summary
    cpu: CpuUsage
    foreign_limit: float
    work: Mapping[str, Any] = field(default_factory=dict)
    """What the server's workers did meanwhile (`work_figures`), where they were asked."""

    @property
    def has_foreign_load(self) -> bool:
        """Whether other processes used more of the machine than the limit; False when that is not known."""
        share = self.cpu.foreign_share
        return share is not None and share > self.foreign_limit

    @property
    def is_usable(self) -> bool:
        return not self.has_foreign_load and self.summary.failed == 0

    def as_row(self) -> Row:
        output_tokens = self.summary.output_tokens
        share = self.cpu.foreign_share
        row: Row = {
            "workload": self.workload,
            "seed": self.seed,
            "arrivals": self.arrivals,
            **self.summary.as_row(),
            "cpu_s": {label: round(cpu_s, 3) for label, cpu_s in sorted(self.cpu.by_label_s.items())},
            "foreign_cpu_share": None if share is None else round(share, 4),
            "foreign_load": self.has_foreign_load,
            **self.work,
        }
        if output_tokens:
            row["cpu_ms_per_output_token"] = {
                label: round(1e3 * cpu_s / output_tokens, 4) for label, cpu_s in sorted(self.cpu.by_label_s.items())
            }
            if self.cpu.server_known:
                server_s = sum(cpu_s for label, cpu_s in self.cpu.by_label_s.items() if label != LOAD_GENERATOR)
                row["server_cpu_ms_per_output_token"] = round(1e3 * server_s / output_tokens, 4)
        return row


async def warm_up(client: CompletionClient, workload: Workload, seed: int, options: LoadOptions) -> None:
    """Sends a few requests of the workload's shape whose prompts no measured run has. Their outcome does not count."""
    if options.warm_up_requests == 0:
        return
    few = replace(workload, requests=options.warm_up_requests)
    requests = draw_requests(few, f"warm-up/{seed}", kind=options.prompt_kind, token_ids=options.token_ids)
    await send_all(client, requests, options.closed_loop(few))


async def measure(
    client: CompletionClient,
    workload: Workload,
    seed: int,
    options: LoadOptions,
    server: ServerProcesses,
    read_work: Callable[[], Awaitable[list[WorkerWork]]] | None = None,
) -> RunResult:
    """Runs `workload` once with prompts and arrivals of `seed`, and measures the CPU time of `server` meanwhile. A
    workload that is to be primed is, before. `read_work` is called before and after.

    Raises:
        CountersError: of `read_work`, or because workers were replaced.
    """
    workload = options.shaped(workload)
    if workload.is_primed:
        priming = draw_priming(workload, seed, kind=options.prompt_kind, token_ids=options.token_ids)
        await send_all(client, priming, closed_loop(len(priming), options.in_flight_of(workload)))
    requests = draw_requests(workload, seed, kind=options.prompt_kind, token_ids=options.token_ids)
    plan = options.plan(workload, seed)
    before = await read_work() if read_work is not None else []
    with CpuMeter(server) as meter:
        records = await send_all(client, requests, plan)
    after = await read_work() if read_work is not None else []
    return RunResult(
        workload=workload.name,
        seed=seed,
        arrivals=options.arrivals(workload),
        summary=summarise(records, options.level),
        cpu=meter.usage,
        foreign_limit=options.foreign_limit,
        work={} if read_work is None else work_figures(work_between(before, after)),
    )


async def send_all(client: CompletionClient, requests: list[PlannedRequest], plan: ArrivalPlan) -> list[RequestRecord]:
    """Sends all requests by the plan; the bodies are encoded before the first one is due."""
    bodies = [client.encode(request) for request in requests]

    async def send(index: int, scheduled_s: float) -> RequestRecord:
        wanted = requests[index].output_tokens
        return await client.send(bodies[index], wanted_output_tokens=wanted, scheduled_s=scheduled_s)

    return await drive(plan, send)


def report_progress(text: str) -> None:
    """One line for the person who waits; results alone go to stdout."""
    print(text, file=sys.stderr, flush=True)
