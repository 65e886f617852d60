"""A load that goes on until it is told to stop, and can be sent once more afterwards, prompt by prompt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from load_tests.arrivals import closed_loop
from load_tests.client import CompletionClient
from load_tests.driver import clock_s
from load_tests.measured_run import send_all
from load_tests.request_record import RequestRecord
from load_tests.workloads import PlannedRequest, Workload, draw_requests


class SteadyLoad:
    """So many requests in flight, each with a prompt of its own, drawn from the seed and its number."""

    def __init__(self, shape: Workload, in_flight: int, seed: int, token_ids: range) -> None:
        self._shape, self._in_flight, self._seed, self._token_ids = shape, in_flight, seed, token_ids
        self.requests: list[PlannedRequest] = []
        """What was sent, in order."""
        self.records: list[RequestRecord] = []
        """Of the same requests, once they have ended."""

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """Token ids of the requests, in the same order."""
        return [request.prompt for request in self.requests if not isinstance(request.prompt, str)]

    @contextlib.asynccontextmanager
    async def running(self, client: CompletionClient) -> AsyncIterator[None]:
        """Leaving lets what is in flight end."""
        stopping = asyncio.Event()
        records: dict[int, RequestRecord] = {}

        async def keep_one_in_flight() -> None:
            while not stopping.is_set():
                number = len(self.requests)
                self.requests.append(self._draw(number))
                request = self.requests[number]
                records[number] = await client.send(
                    client.encode(request), wanted_output_tokens=request.output_tokens, scheduled_s=clock_s()
                )

        tasks = [asyncio.create_task(keep_one_in_flight()) for _ in range(self._in_flight)]
        try:
            yield
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
        finally:
            stopping.set()
            await asyncio.wait(tasks)
        for task in tasks:
            task.result()
        self.records = [records[number] for number in range(len(self.requests))]

    async def once_more(self, client: CompletionClient) -> list[RequestRecord]:
        """The same requests in the same order, as many in flight."""
        return await send_all(client, self.requests, closed_loop(len(self.requests), self._in_flight))

    def _draw(self, number: int) -> PlannedRequest:
        (request,) = draw_requests(self._shape, f"{self._seed}/{number}", token_ids=self._token_ids)
        return request
