"""The metrics: what each is called, which tags it has, what it says. docs/metrics.md has the same table.

Counters and amounts, no ratios: a ratio of two counters can be had for any span of time, and an absent one is no NaN.
Where the meaning is that of one of vLLM's, so are the words of the name. Tags have few values: nothing of a prompt, and
no id that comes with each request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """Ray exports it with `ray_` before its name, and with tags of its own beside these."""

    name: str
    kind: Kind
    tags: tuple[str, ...]
    help: str
    bounds: tuple[float, ...] = ()
    """Of a histogram: the upper bounds of its buckets but the last, growing. What lies on a bound is below it."""


Series: TypeAlias = tuple[Metric, tuple[str, ...]]
"""A metric and the values of its tags, in their order."""
Readings: TypeAlias = dict[Series, float]
"""Totals of counters and values of gauges, as they are at one moment."""

METRICS: list[Metric] = []
"""All of them, in the order of the page."""


def _add(name: str, kind: Kind, tags: tuple[str, ...], help_: str, bounds: tuple[float, ...] = ()) -> Metric:
    METRICS.append(Metric(f"equipoise_{name}", kind, tags, help_, bounds))
    return METRICS[-1]


# Of requests

_REQUEST_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 2.5, 5.0, 10.0, 40.0,
)  # fmt: skip

TTFT = _add(
    "time_to_first_token_seconds",
    "histogram",
    ("model", "priority"),
    "From a request that has been read to a choice's first token.",
    _REQUEST_BOUNDS_S,
)
ITL = _add(
    "inter_token_latency_seconds",
    "histogram",
    ("model",),
    "From one token of a choice to its next.",
    _TOKEN_BOUNDS_S,
)
E2E = _add(
    "e2e_request_latency_seconds",
    "histogram",
    ("model",),
    "From a request that has been read to the end of a choice.",
    _REQUEST_BOUNDS_S,
)
QUEUE_TIME = _add(
    "request_queue_time_seconds",
    "histogram",
    ("model", "priority"),
    "Until a choice was admitted: tokenizing, and waiting for room in the pools or for another choice's first token.",
    _REQUEST_BOUNDS_S,
)
PREFILL_TIME = _add(
    "request_prefill_time_seconds",
    "histogram",
    ("model",),
    "From there to the first token: waiting on the worker, what is fetched from the store, and the prompt's steps.",
    _REQUEST_BOUNDS_S,
)
TRANSFER_TIME = _add(
    "request_transfer_time_seconds",
    "histogram",
    ("model",),
    "From the first token to the first one of the decode worker: hand-over, store, fetch, and one step.",
    _REQUEST_BOUNDS_S,
)
DECODE_TIME = _add(
    "request_decode_time_seconds",
    "histogram",
    ("model",),
    "From there, or from the first token where nothing is handed over, to the last token.",
    _REQUEST_BOUNDS_S,
)
PROMPT_TOKENS = _add(
    "prompt_tokens_total",
    "counter",
    ("model",),
    "Tokens of prompts that had a first token, each prompt once, whatever it is computed on and for how many choices.",
)
GENERATION_TOKENS = _add("generation_tokens_total", "counter", ("model",), "Tokens of answers.")
REQUESTS = _add(
    "requests_total",
    "counter",
    ("model", "finished_reason"),
    "Choices that ended, or were not begun: by themselves (stop, length, tool_calls), since the client left (abort), "
    "the time was up (timeout), there was no room or a key's limit was reached (refused), or something broke (error).",
)
KEY_REQUESTS = _add(
    "key_requests_total",
    "counter",
    ("model", "key", "finished_reason"),
    "The same by the name of the API key that asked: public where no keys are configured.",
)
KEY_PROMPT_TOKENS = _add(
    "key_prompt_tokens_total",
    "counter",
    ("model", "key"),
    "Tokens of prompts, as above, by the name of the key.",
)
KEY_GENERATION_TOKENS = _add(
    "key_generation_tokens_total",
    "counter",
    ("model", "key"),
    "Tokens of answers by the name of the key.",
)
QUEUED = _add("num_requests_queued", "gauge", ("model",), "Choices that wait at the ingress to be admitted.")
INFLIGHT = _add("num_requests_inflight", "gauge", ("model",), "Choices that were admitted and have not ended.")

# Of workers

RUNNING = _add("num_requests_running", "gauge", ("role", "worker"), "Choices that a worker computes.")
WAITING = _add(
    "num_requests_waiting", "gauge", ("role", "worker"), "Choices that wait on it for a step, for blocks or for KV."
)
KV_BLOCKS = _add("kv_cache_blocks", "gauge", ("role", "worker"), "Blocks of its KV cache.")
KV_USED = _add("kv_cache_used_blocks", "gauge", ("role", "worker"), "Of these, blocks of requests that have not ended.")
PREEMPTIONS = _add(
    "num_preemptions_total", "counter", ("role",), "Times that a choice gave its blocks to others and began anew."
)
HOSTED_STAGES = _add(
    "hosted_stages_total", "counter", ("role", "worker"), "Steps of other workers that were run through layers here."
)
HOSTED_S = _add("hosted_seconds_total", "counter", ("role", "worker"), "Seconds that these took.")
AWAITED_S = _add(
    "awaited_seconds_total",
    "counter",
    ("role", "worker"),
    "Seconds in which a worker had nothing to do, since other workers were to run their layers of its steps first.",
)
REPAIRS = _add(
    "placement_repairs_total",
    "counter",
    ("role", "worker"),
    "Times that a host of the worker's layers or heads was lost, and these were taken home.",
)

PREFIX_QUERIES = _add(
    "prefix_cache_queries_tokens_total",
    "counter",
    ("role",),
    "Prompt tokens of requests that began on a worker. A hand-over, and what is computed again, is not counted again.",
)
PREFIX_HITS = _add(
    "prefix_cache_hits_tokens_total",
    "counter",
    ("role", "tier"),
    "Of these, tokens whose KV was not computed: it was on the worker (device) or came from the store (dram, disk).",
)
LOOKUPS = _add(
    "store_lookups_total",
    "counter",
    ("role",),
    "Look-ups of workers that were answered, those for hand-overs included.",
)
QUERIED = _add("store_queried_tokens_total", "counter", ("role",), "Tokens in full blocks that were looked up.")
FOUND = _add(
    "store_found_tokens_total", "counter", ("role", "tier"), "Of these, tokens that the store had, by the fastest tier."
)
DECLINED = _add(
    "store_declined_tokens_total",
    "counter",
    ("role",),
    "Of those found, tokens that were left to be computed, since that is faster.",
)
MISSES = _add(
    "store_misses_total",
    "counter",
    ("role", "reason"),
    "Times that something which was found, or the store itself, could not be had by a worker.",
)
BROKEN_PARTS = _add(
    "store_broken_parts_total",
    "counter",
    ("at", "reason"),
    "Parts that are missing, damaged, foreign or of another format, where it was noticed: at a fetch, at a pull from a "
    "worker, or in a file on disk.",
)

# Of stores

LIMIT = _add(
    "store_limit_bytes",
    "gauge",
    ("store", "tier"),
    "What a tier may hold. That of a disk tier whose file system was found full is what it had then, for a while.",
)
USED = _add("store_used_bytes", "gauge", ("store", "tier"), "What it holds, reserved bytes included.")
EXTENTS = _add("store_extents", "gauge", ("store", "tier"), "Extents that it holds.")
DISK_QUEUE = _add("store_disk_queue_extents", "gauge", ("store",), "Extents that wait to be written to disk.")
TAILS = _add("store_tails", "gauge", ("store",), "Partly filled last blocks that wait for a decode worker.")
MOVED = _add(
    "store_moved_bytes_total",
    "counter",
    ("store", "direction"),
    "Bytes of extents: taken over from workers (dram_write), given to readers from DRAM (dram_read), written to disk "
    "(disk_write), read from it (disk_read); of those read, put back into DRAM (promote); of those written, the ones "
    "that had to be before they could leave DRAM (demote).",
)
PULLS = _add("store_pulls_total", "counter", ("store",), "Exports of workers that were taken over, well or not.")
STORED = _add("store_stored_blocks_total", "counter", ("store",), "Blocks that became visible by pulls.")
REFUSALS = _add(
    "store_refusals_total",
    "counter",
    ("store", "tier", "reason"),
    "Times that something was not stored (a put into DRAM, a write to disk), or not read from disk, or that upkeep had "
    "to wait (reasons housekeeping_...). Broken parts are counted by themselves.",
)
EXPIRED_TAILS = _add("store_expired_tails_total", "counter", ("store",), "Tails that nobody claimed in time.")

# Of the directory, shard by shard

BLOCKS = _add("store_blocks", "gauge", ("shard",), "Blocks that can be found.")
LEASES = _add("store_leases", "gauge", ("shard",), "Leases that readers hold.")
LEASES_GRANTED = _add("store_leases_granted_total", "counter", ("shard",), "Leases that look-ups took.")
LEASES_EXPIRED = _add("store_leases_expired_total", "counter", ("shard",), "Leases that ended by their time.")
PUTS = _add(
    "store_puts_total",
    "counter",
    ("shard", "outcome"),
    "Puts that ended: committed, aborted, expired, or refused at the commit.",
)
EVICTIONS = _add(
    "store_evictions_total",
    "counter",
    ("shard", "tier", "cause"),
    "Copies of extents that went: to make room (capacity), since the limit was lowered or found exceeded (limit), by "
    "their time-to-live (ttl), with their store (lost). What a restarted store finds on its disk is lost and adopted.",
)
EVICTIONS_REFUSED = _add(
    "store_evictions_refused_total",
    "counter",
    ("shard",),
    "Demands for room that could not be met, since too much is held.",
)
BROKEN_EXTENTS = _add(
    "store_broken_extents_total",
    "counter",
    ("shard",),
    "Extents that readers reported as broken or gone, and that went.",
)
ADOPTED = _add(
    "store_adopted_extents_total", "counter", ("shard",), "Extents that stores brought along from an earlier run."
)

# Of the controller of moves

MOVES = _add(
    "moves_total", "counter", ("kind", "outcome"), "Moves of layers or heads that ended: done, failed or abandoned."
)
MOVE_BYTES = _add(
    "moved_module_bytes_total",
    "counter",
    ("kind", "what"),
    "Bytes that moves have copied between workers: weights, kv.",
)
MOVE_HELD = _add(
    "moves_held_seconds_total", "counter", (), "Seconds, over all moves, in which the moved instance began no step."
)
MOVES_UNDER_WAY = _add("moves_under_way", "gauge", (), "Moves that have begun and not ended.")
MODULES_AWAY = _add(
    "modules_away",
    "gauge",
    ("kind",),
    "Layers that are not at home, and heads of single layers apart from their layer.",
)
WORKER_LOADS = _add(
    "moves_worker_load",
    "gauge",
    ("of",),
    "U, the load by which moves are planned: of the most and the least loaded worker (highest, lowest), and the mean.",
)
