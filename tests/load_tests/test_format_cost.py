from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from load_tests import format_cost
from load_tests.answer_forms import FREE_TEXT, JSON_SCHEMA, KINDS, TOOL_CALL, FormError, check_forms
from load_tests.cpu_time import LOAD_GENERATOR
from load_tests.format_cost import FormatCost, by_part, cost_table, measure_kinds
from load_tests.measured_run import LoadOptions
from load_tests.processes import ServerProcesses
from load_tests.workloads import Workload

SHAPE = Workload("chat", requests=3, unique_tokens=10, output_tokens=4)


def measured(url: str, pid: int, rounds: int, **changes: Any) -> FormatCost:
    cost = FormatCost()
    options = LoadOptions(in_flight=2, warm_up_requests=1, foreign_limit=changes.get("foreign_limit", 1.0))
    processes = ServerProcesses(root_pids=(pid,))
    asyncio.run(measure_kinds(cost, url, "tiny", processes, SHAPE, rounds=rounds, seed=5, options=options, attempts=2))
    return cost


def run(kind: str, round_number: int, server_ms: float, kept: bool = True) -> dict[str, Any]:
    parts = {"server": server_ms, "workers": server_ms / 2, "ingress": 0.0, "other": server_ms / 2}
    lengths = {"requests": 2, "prompt_tokens": 20, "output_tokens": 16}
    return {"kind": kind, "round": round_number, "kept": kept, "cpu_ms_by_part": parts, **lengths}


def test_parts_add_up_to_the_server_without_the_load_generator() -> None:
    parts = by_part(
        {
            "ray::Worker": 4.0,
            "ray::ServeReplica:equipoise:Ingress": 2.0,
            "ray::ServeReplica:equipoise:DecodeServer": 1.0,
            "raylet": 0.5,
            LOAD_GENERATOR: 100.0,
        }
    )
    assert parts == {"server": 7.5, "workers": 4.0, "ingress": 2.0, "other": 1.5}


def test_ratios_are_those_of_rounds_in_which_both_runs_count() -> None:
    rows = [run(FREE_TEXT, 0, 10.0), run(JSON_SCHEMA, 0, 11.0), run(TOOL_CALL, 0, 99.0, kept=False)]
    rows += [run(JSON_SCHEMA, 1, 99.0), run(FREE_TEXT, 1, 1.0, kept=False), run(FREE_TEXT, 2, 20.0)]
    rows += [run(JSON_SCHEMA, 2, 30.0), run(TOOL_CALL, 2, 25.0)]
    table, records = cost_table(FormatCost(rows))
    by_kind = {record["kind"]: record for record in records if record["part"] == "workers"}
    assert by_kind[FREE_TEXT]["ratio"] is None
    assert by_kind[JSON_SCHEMA]["ratio"] == {"median": 1.3, "low": 1.1, "high": 1.5, "coverage": 0.5, "pairs": 2}
    assert by_kind[TOOL_CALL]["ratio"]["median"] == 1.25
    assert by_kind[JSON_SCHEMA]["cpu_ms_per_output_token"] == {"median": 15.0, "min": 5.5, "max": 49.5}
    assert "| tool call | server | 10.00 | 8.000 | 25.00 (25.00-25.00) | 1.250 | 1.250-1.250 |" in table


def test_kinds_take_turns_with_prompts_of_their_own_and_their_forms(start_server: Callable[..., Any]) -> None:
    server = start_server()
    cost = measured(server.url, server.pid, rounds=2)
    kinds = list(KINDS)
    assert [(row["round"], row["kind"]) for row in cost.rows] == [
        *((0, kind) for kind in kinds),
        *((1, kind) for kind in (*kinds[1:], kinds[0])),
    ]
    assert all(row["kept"] and row["output_tokens"] == 12 for row in cost.rows)
    assert all(list(row["cpu_ms_by_part"]) == ["server", "workers", "ingress", "other"] for row in cost.rows)
    assert [len(cost.pairs(kind, "server")) for kind in kinds] == [2, 2, 2]
    bodies = server.seen()["bodies"]
    prompts = [body["messages"][0]["content"] for body in bodies]
    assert len(set(prompts)) == len(prompts) == 3 * (1 + 2 * 3)
    # Of every kind one to warm up, then three in each round.
    for kind, count in ((FREE_TEXT, 7), (JSON_SCHEMA, 7), (TOOL_CALL, 7)):
        own = {"response_format", "tools", "tool_choice"}
        assert sum({key: body[key] for key in own & body.keys()} == KINDS[kind] for body in bodies) == count
    assert {(body["max_tokens"], body["ignore_eos"], body["temperature"]) for body in bodies} == {(4, True, 0)}


def test_a_run_beside_others_is_repeated_with_new_prompts_and_does_not_count(start_server: Callable[..., Any]) -> None:
    server = start_server()
    # Every share is above this limit.
    cost = measured(server.url, server.pid, rounds=1, foreign_limit=-1.0)
    assert [(row["kind"], row["seed"]) for row in cost.rows] == [(kind, seed) for kind in KINDS for seed in (5, 6)]
    assert cost_table(cost)[1] == []


def test_failed_requests_make_a_run_that_does_not_count(start_server: Callable[..., Any]) -> None:
    server = start_server("--fail-every", "4")
    assert not all(row["kept"] for row in measured(server.url, server.pid, rounds=1).rows)


def test_a_server_that_does_not_hold_to_forms_is_not_measured(start_server: Callable[..., Any]) -> None:
    with pytest.raises(FormError, match=r"free text: .*/v1/chat/completions gave no chat completion"):
        asyncio.run(check_forms(start_server().url, "tiny"))


def test_no_answer_can_keep_to_the_form_and_end_early() -> None:
    schema = KINDS[JSON_SCHEMA]["response_format"]["json_schema"]["schema"]
    assert KINDS[TOOL_CALL]["tools"][0]["function"]["parameters"] == schema
    owner = {"id": 0, "note": ""}
    record = {"name": "", "colour": "red", "count": 0, "weight": 0, "is_new": True, "tags": [""], "owner": owner}
    jsonschema.validate({"records": [record] * 1000}, schema)
    with pytest.raises(jsonschema.ValidationError, match="too short"):
        jsonschema.validate({"records": [record] * 999}, schema)
    for name in record:
        without = {key: value for key, value in record.items() if key != name}
        with pytest.raises(jsonschema.ValidationError, match="required property"):
            jsonschema.validate({"records": [record] * 999 + [without]}, schema)
    # Tokens of ordinary vocabularies hold no more than one word and what surrounds it.
    assert len(re.findall(r"\w+", json.dumps(record))) * 1000 >= format_cost.MOST_OUTPUT_TOKENS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such.yaml"], "there is no Serve config"),
        (["CONFIG", "--overlay", "no/such.yaml"], "there is no overlay"),
        (["CONFIG", "--rounds", "0"], "at least 1"),
        (["CONFIG", "--requests", "0"], "at least 1"),
        (["CONFIG", "--output-tokens", "8001"], "--output-tokens is 8001, must be from 1 to 8000"),
    ],
)
def test_bad_options_exit_with_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "local.yaml"
    config.write_text("applications: []\n")
    with pytest.raises(SystemExit) as stopped:
        format_cost.main([str(config) if argument == "CONFIG" else argument for argument in arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
