"""Where the application serves otherwise than was simulated, whatever its configuration says: what the store is for."""

from __future__ import annotations

from tuning.deployment.deployment import GIB, Deployment
from tuning.deployment.evaluator import DeploymentEvaluator
from tuning.job.serve_config import share_of_node


def deployment_doubts(deployment: Deployment, nodes: int, evaluator: DeploymentEvaluator) -> list[str]:
    """Of one deployment: DRAM too small to hand prompts over in, and a disk that is several."""
    return [*_small_dram(deployment, nodes, evaluator), *_several_disks(deployment, nodes, evaluator)]


def _small_dram(deployment: Deployment, nodes: int, evaluator: DeploymentEvaluator) -> list[str]:
    """In the simulation bytes only pass through DRAM on their way to decode instances and to the disk; the live store
    takes room of its limit for them."""
    if deployment.mode == "monolithic" and deployment.disk_gib == 0:
        return []
    room_gib = share_of_node(deployment.dram_gib, nodes)
    longest_gib = int(evaluator.trace.input_tokens.max()) * evaluator.model.kv_bytes_per_token / GIB
    if not evaluator.trace.has_reuse:
        return [
            "nothing of the store was searched, so that it stays what it was in the configuration, and is not in the "
            f"bill. Hand-overs need its DRAM: no less than the {longest_gib:.3g} GiB of the longest prompt on a node"
        ]
    if room_gib >= longest_gib:
        return []
    if deployment.mode == "monolithic":
        return [
            f"what the application writes to disk passes through DRAM of the store: {room_gib:g} GiB on a node are "
            f"less than the {longest_gib:.3g} GiB of the longest prompt. Simulated was that all gets there; in the "
            "application what has no room does not"
        ]
    lost = "decode workers compute again what of a prompt has no room"
    if deployment.disk_gib > 0:
        lost += ", and that does not get to the disk either"
    return [
        f"the application hands prompts over in DRAM of the store: {room_gib:g} GiB on a node are less than the "
        f"{longest_gib:.3g} GiB of the longest prompt. Simulated was that all is handed over whatever there is; in the "
        f"application {lost}"
    ]


def _several_disks(deployment: Deployment, nodes: int, evaluator: DeploymentEvaluator) -> list[str]:
    if nodes == 1 or deployment.disk_gib == 0:
        return []
    prices, share_gib = evaluator.prices, deployment.disk_gib / nodes
    one = prices.disk_per_hour(deployment.disk_class, deployment.disk_gib)
    several = nodes * prices.disk_per_hour(deployment.disk_class, share_gib)
    return [
        f"one disk of {deployment.disk_gib:g} GiB was simulated and priced, at {one:.4g} {prices.currency} an hour; "
        f"{nodes} nodes have a disk of {share_gib:.4g} GiB each, at {several:.4g} {prices.currency} an hour together, "
        "and as fast as that size is"
    ]
