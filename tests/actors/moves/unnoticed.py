"""Moves there and back, twice, in the middle of answers and of a prompt of several chunks: what nobody is to notice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from actors.engine.request import SamplingParams
from migrate.move_report import MoveReport
from migrate.moves import Move
from tests.actors.moves.conftest import MakeWorker
from tests.actors.moves.linked_worker import LinkedWorker, join, moves_of
from tests.engine_driver import make_prompt
from tests.reference import assert_greedy, load_reference

PROMPTS = [make_prompt(length, length) for length in (5, 33, 90, 17, 64, 48, 200)]


def assert_nobody_notices(
    wanted: Sequence[Move],
    family: str,
    sampling: SamplingParams,
    folder: Path,
    make_worker: MakeWorker,
    books: Callable[[LinkedWorker], object],
    *,
    tokens_between: int,
) -> None:
    """`wanted` ends with everything at home, and `books` of home and host must be what they were."""
    home, host, alone = make_worker("home", family), make_worker("host", family), make_worker("alone", family)
    join(home, host)
    before = books(home), books(host)
    alone.start(PROMPTS, sampling)
    expected = alone.wait()
    home.start(PROMPTS, sampling)

    async def move() -> list[MoveReport]:
        moves, reports = moves_of(home), []
        for number, each in enumerate([*wanted, *wanted]):
            home.wait_for_tokens(tokens_between * number)
            reports.append(await moves.make(each))
        assert home.home.placement.is_home
        return reports

    reports = asyncio.run(move())
    answers = home.wait()
    if sampling.temperature == 0:
        assert_greedy(load_reference(folder), PROMPTS, answers)
    else:
        assert answers == expected
    assert home.failures == []
    assert (books(home), books(host)) == before
    assert all(report.kv_bytes > 0 for report in reports)
