"""What of a deployment the application does otherwise than the simulation: its store, and a disk on each node."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kv.store_ledger import StoreLedger
from tuning.deployment.deployment import GIB, Deployment, ServingOptions
from tuning.deployment.evaluator import DeploymentEvaluator
from tuning.deployment.objectives import Goals
from tuning.hardware_profile import read_hardware
from tuning.job.unlike_served import deployment_doubts
from tuning.model_config import read_model_shape
from tuning.price_book import read_prices
from tuning.trace.generator import SyntheticTraffic, generate

PRICES = read_prices("aws-us-east-1")
EVALUATOR = DeploymentEvaluator(
    generate(SyntheticTraffic(1, 20, requests_per_s=1.0, prefixes=1, turns=1.0, think_s=1.0)),
    read_model_shape("qwen3-8b"),
    read_hardware("a100-80g"),
    PRICES,
    Deployment("static"),
    ServingOptions(),
    Goals(),
)
LONGEST_BYTES = int(EVALUATOR.trace.input_tokens.max()) * 147_456
SMALLEST_GIB = -(-LONGEST_BYTES * 100 // GIB) / 100
"""In which the longest prompt has room, in the steps of a configuration."""


def test_dram_that_has_not_room_for_the_longest_prompt_is_doubtful() -> None:
    assert deployment_doubts(Deployment("static", dram_gib=SMALLEST_GIB), 1, EVALUATOR) == []
    assert StoreLedger(int(SMALLEST_GIB * GIB)).reserve(LONGEST_BYTES)
    too_small = Deployment("static", dram_gib=round(SMALLEST_GIB - 0.01, 2))
    assert not StoreLedger(int(too_small.dram_gib * GIB)).reserve(LONGEST_BYTES)
    (doubt,) = deployment_doubts(too_small, 1, EVALUATOR)
    assert f"{too_small.dram_gib:g} GiB on a node" in doubt
    assert "compute again" in doubt
    assert "disk" not in doubt
    assert deployment_doubts(Deployment("static", dram_gib=SMALLEST_GIB), 2, EVALUATOR) != []
    assert deployment_doubts(Deployment("monolithic"), 1, EVALUATOR) == []


def test_without_dram_nothing_gets_to_the_disk() -> None:
    (doubt,) = deployment_doubts(Deployment("static", disk_gib=64, disk_class="gp3"), 1, EVALUATOR)
    assert "0 GiB on a node" in doubt
    assert "does not get to the disk" in doubt
    (doubt,) = deployment_doubts(Deployment("monolithic", disk_gib=64, disk_class="gp3"), 1, EVALUATOR)
    assert "0 GiB on a node" in doubt
    assert "what has no room does not" in doubt


def test_without_reuse_information_hand_overs_still_need_room() -> None:
    trace, nothing = EVALUATOR.trace, np.zeros(0, np.int64)
    offsets = np.zeros(len(trace) + 1, np.int64)
    lengths = replace(trace, block_tokens=None, block_offsets=offsets, block_ids=nothing)
    (doubt,) = deployment_doubts(Deployment("static"), 1, replace(EVALUATOR, trace=lengths))
    assert "nothing of the store was searched" in doubt
    assert f"no less than the {LONGEST_BYTES / GIB:.3g} GiB of the longest prompt" in doubt


def test_nodes_have_a_disk_each_and_pay_for_what_is_provisioned_each() -> None:
    deployment = Deployment("static", dram_gib=1024, disk_gib=2048, disk_class="gp3-2000")
    assert deployment_doubts(deployment, 1, EVALUATOR) == []
    (doubt,) = deployment_doubts(deployment, 4, EVALUATOR)
    size, provisioned = 2048 * 0.08, 77_000 * 0.005 + 1875 * 0.04
    assert f"one disk of 2048 GiB was simulated and priced, at {(size + provisioned) / 730:.4g} USD an hour" in doubt
    assert f"a disk of 512 GiB each, at {(size + 4 * provisioned) / 730:.4g} USD an hour together" in doubt
    assert deployment_doubts(replace(deployment, disk_gib=0), 4, EVALUATOR) == []
