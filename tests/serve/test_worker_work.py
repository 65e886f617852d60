"""Reading the counters of a running application's workers from outside its cluster."""

from __future__ import annotations

import asyncio

import pytest
import ray

from load_tests.client import first_model
from load_tests.measured_run import LoadOptions, send_all
from load_tests.worker_work import ask_work, work_between, work_figures
from load_tests.workloads import Workload, draw_requests
from tests.openai_app import OpenAIApp

pytestmark = [pytest.mark.cluster, pytest.mark.model]


def test_what_workers_computed_is_what_was_sent(openai_app: OpenAIApp) -> None:
    app = openai_app.app
    workload = Workload("w", requests=3, unique_tokens=50, output_tokens=2)
    requests = draw_requests(workload, 1, token_ids=range(3, 250))
    options = LoadOptions()

    async def body() -> None:
        address = ray.get_runtime_context().gcs_address
        before = await ask_work(address)
        async with options.client(app.base_url, await first_model(app.base_url)) as client:
            records = await send_all(client, requests, options.plan(workload, 1))
        assert all(record.succeeded for record in records)
        done = work_between(before, await ask_work(address))
        assert sorted(worker.role for worker in done) == ["decode", "prefill"]
        figures = work_figures(done)
        assert (figures["prefill_computed_tokens"], figures["prefill_fetched_tokens"]) == (150, 0)
        assert all(worker.busy_s > 0 for worker in done)

    asyncio.run(body())
