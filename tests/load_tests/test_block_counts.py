from __future__ import annotations

from typing import Any

import pytest

from load_tests.block_counts import WorkerBlocks, parse_blocks

WORKER = {"worker_id": "w0", "role": "decode", "total_blocks": 10, "free_blocks": 4, "live_blocks": 5}


def test_counts_as_the_server_gives_them() -> None:
    assert parse_blocks({"workers": [WORKER]}) == (WorkerBlocks("w0", "decode", 10, 4, 5),)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "no block counts"),
        ([], "no block counts"),
        ({"workers": [{"worker_id": "w0"}]}, "no block counts"),
        ({"workers": [{**WORKER, "live_blocks": "many"}]}, "no block counts"),
        ({"workers": []}, "name no worker"),
        ({"workers": [{**WORKER, "live_blocks": 7}]}, "impossible"),
        ({"workers": [{**WORKER, "free_blocks": -1}]}, "impossible"),
    ],
)
def test_answers_that_are_no_counts_are_refused(answer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_blocks(answer)
