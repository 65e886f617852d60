"""One simulation of Vidur (https://github.com/microsoft/vidur), timed: `python -I vidur_run.py JOB.json`.

Runs in a Python that has what Vidur needs, and imports nothing of ours; `beside_vidur` writes the job and starts it.
Two of Vidur's versions are known: "repository", the code of its repository, and "wheel", PyPI's 0.0.26, whose look-ups
of times are native if the job says so.

Vidur learns from profiles how long each operation takes, and tabulates that before the simulation begins, which looks
it up. The tables are filled by `Times` here, so nothing is learned, and no profile is needed. What is timed is
`Simulator.run` alone: no import, no reading of the trace, no table, no plot; and no metrics, unless the job says so.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

GRANULARITY = 1024
"""Contexts are rounded up to it in the tables. Vidur's own is 64 or 256; the tables would not fit into memory with the
long prompts and chunks here."""
CHUNK_GRAIN = 32
"""Lengths of chunks in the wheel's table."""
SHARES = {"attn_pre_proj": 0.12, "attn_post_proj": 0.08, "mlp_up_proj": 0.5, "mlp_down_proj": 0.25, "mlp_act": 0.05}
"""What products with weights are made of, about."""
DATE = "2023-08-21"
"""The wheel takes the rows of one day."""
FREE = ("attn_rope", "attn_kv_cache_save", "input_layernorm", "post_attention_layernorm", "add")


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of one layer, as `tuning.timing.Timing` has them for the whole model."""

    token_ms: float
    weights_ms: float
    square_ms: float
    context_token_ms: float


def tables(times: Times, job: dict[str, Any]) -> dict[str, dict[tuple[int, ...], float]]:
    """What Vidur's predictors would have tabulated."""
    wheel = job["version"] == "wheel"
    contexts = range(0, job["max_tokens"] + GRANULARITY, GRANULARITY)
    tokens = range(1, job["chunk_tokens"] + 8)
    filled: dict[str, dict[tuple[int, ...], float]] = {
        name: {(count,): share * max(times.weights_ms, count * times.token_ms) for count in tokens}
        for name, share in SHARES.items()
    }
    filled |= {name: {(count,): 0.0 for count in tokens} for name in FREE}
    filled["attn_decode"] = {
        (batch, context): batch * context * times.context_token_ms
        for batch, context in product(range(1, job["batch_size"] + 1), contexts)
    }
    chunks = range(CHUNK_GRAIN, job["chunk_tokens"] + CHUNK_GRAIN, CHUNK_GRAIN) if wheel else tokens
    filled["attn_prefill"] = {
        # The wheel counts a chunk's own tokens in its context.
        (context, chunk if wheel else chunk**2): times.square_ms
        * chunk
        * (max(0, 2 * context - chunk) if wheel else 2 * context + chunk)
        for context, chunk in product(contexts, chunks)
    }
    return filled


def make_config(job: dict[str, Any]) -> Any:
    """Vidur's configuration: one device a replica, Llama-3-8B on an A100, Sarathi's chunked prefill."""
    config = importlib.import_module("vidur.config")
    out = str(Path(job["trace"]).parent / "vidur")
    wheel = job["version"] == "wheel"
    blocks = {"block_size": 16, "num_blocks": job["pool_tokens"] // 16}
    batching = {"batch_size_cap": job["batch_size"], "chunk_size": job["chunk_tokens"]}
    predicting: dict[str, Any] = {
        "prediction_max_prefill_chunk_size": job["chunk_tokens"],
        "prediction_max_batch_size": job["batch_size"],
        "prediction_max_tokens_per_request": job["max_tokens"],
        "kv_cache_prediction_granularity": GRANULARITY,
    }
    if wheel:
        replica = config.ReplicaConfig(
            model_name="meta-llama/Llama-3-8B",
            num_pipeline_stages=1,
            tensor_parallel_size=1,
            device="a100",
            network_device="a100_dgx",
        )
        cluster = {"cache_config": config.CacheConfig(**blocks)}
        predicting |= {"use_native_execution_time_predictor": job["native"], "cache_dir": out}
        traced: dict[str, Any] = {"date": DATE}
    else:
        replica = config.ReplicaConfig(model_name="meta-llama/Meta-Llama-3-8B", device="a100")
        cluster = {}
        batching |= blocks
        traced = {}
    metrics = config.MetricsConfig(
        write_metrics=job["metrics"],
        enable_chrome_trace=False,
        store_plots=False,
        output_dir=out,
        **({} if wheel else {"cache_dir": out}),
    )
    return config.SimulationConfig(
        cluster_config=config.ClusterConfig(
            num_replicas=job["replicas"],
            replica_config=replica,
            global_scheduler_config=config.LORGlobalSchedulerConfig(),
            replica_scheduler_config=config.SarathiSchedulerConfig(**batching),
            **cluster,
        ),
        request_generator_config=config.TraceRequestGeneratorConfig(
            trace_file=job["trace"],
            prefill_scale_factor=1,
            decode_scale_factor=1,
            time_scale_factor=1,
            max_tokens=job["max_tokens"],
            **traced,
        ),
        execution_time_predictor_config=config.LinearRegressionExecutionTimePredictorConfig(**predicting),
        metrics_config=metrics,
    )


def simulate(job: dict[str, Any]) -> dict[str, float]:
    """CPU seconds, and what was simulated."""
    sys.path.insert(0, job["folder"])
    predictor = importlib.import_module("vidur.execution_time_predictor.sklearn_execution_time_predictor")
    learned = predictor.SklearnExecutionTimePredictor
    # Where each version would take its tables from a cache, or else learn them.
    if job["version"] == "wheel":
        learned._load_predictions_from_hf = lambda self: tables(Times(**job["times"]), job)
        # Abstract in the release, so that no predictor can be made. Of several devices that share one context only.
        module = importlib.import_module("vidur.execution_time_predictor.linear_regression_execution_time_predictor")
        module.LinearRegressionExecutionTimePredictor.__abstractmethods__ = frozenset()
    else:
        learned._train_models = lambda self: {}
        learned._predict_from_models = lambda self: tables(Times(**job["times"]), job)
    simulator = importlib.import_module("vidur.simulator").Simulator(make_config(job))
    requests = [event._request for _, event in simulator._event_queue]
    begin_s = time.process_time()
    simulator.run()
    cpu_s = time.process_time() - begin_s
    done = [request for request in requests if request.completed]
    return {
        "cpu_s": cpu_s,
        "requests": len(requests),
        "completed": len(done),
        "batches": importlib.import_module("vidur.entities").Batch.generate_id(),
        "makespan_s": float(max(request.completed_at for request in done)),
        "ttft_mean_s": float(sum(each.prefill_completed_at - each.arrived_at for each in done) / len(done)),
        "e2e_mean_s": float(sum(each.completed_at - each.arrived_at for each in done) / len(done)),
    }


if __name__ == "__main__":
    description = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    figures = simulate(description)
    Path(description["result"]).write_text(json.dumps(figures), encoding="utf-8")
