"""From an engine to what a controller is told of its worker."""

from __future__ import annotations

from actors.engine.engine import Engine
from actors.engine.loading import LoadedModel
from actors.load_report import take_snapshot
from migrate.cost_model import ModelSizes
from migrate.worker_reading import WorkerReading


def take_reading(
    worker_id: str, engine: Engine, now_s: float, *, epoch: int = 0, store_has_cached: bool = False
) -> WorkerReading:
    """Reads an engine between two steps. `epoch`: of the worker's life. `store_has_cached`: KV that no request refers
    to stays behind when layers move, as in `LayerMoves`."""
    snapshot, counters, arena = take_snapshot(engine), engine.counters, engine.loaded.arena
    moving_blocks = engine.blocks.num_live + (0 if store_has_cached else engine.blocks.num_cached)
    waiting = [
        sequence
        for sequence in engine.scheduler.sequences()
        if not sequence.request.hand_over and sequence.num_output_tokens == len(sequence.request.output_token_ids)
    ]
    return WorkerReading(
        worker=worker_id,
        taken_s=now_s,
        sizes=model_sizes(engine.loaded),
        memory_bytes=arena.num_slabs * arena.slab_bytes,
        full_batch=engine.config.max_running_requests,
        total_blocks=snapshot.total_blocks,
        live_blocks=snapshot.live_blocks,
        cached_blocks=moving_blocks - snapshot.live_blocks,
        epoch=epoch,
        pending_prefill_tokens=snapshot.pending_tokens.total(),
        waiting_answers=len(waiting),
        waiting_answer_tokens=sum(sequence.request.sampling.max_tokens for sequence in waiting),
        finished_requests=counters.finished_requests,
        generated_tokens=counters.generated_tokens,
        prefill_steps=counters.prefill_steps,
        prefill_tokens=counters.prefill_step_tokens,
        decode_steps=counters.decode_steps,
        decode_rows=counters.decode_step_rows,
        decoding_requests=counters.decoding_requests,
        step_times=engine.clock.times.scaled(1.0),  # a copy: the engine counts on
        hosted_slice_s=engine.config.hosted_slice_s,
    )


def model_sizes(loaded: LoadedModel) -> ModelSizes:
    """What the model's modules take in this engine's arena, and on a link."""
    spec, layout, arena = loaded.spec, loaded.layout, loaded.arena
    head_bytes = layout.head_dim * layout.dtype_bytes
    return ModelSizes(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        # Weights lie in whole slabs.
        layer_weight_bytes=arena.slabs_for(loaded.layer_memory.packed_bytes(0)) * arena.slab_bytes,
        page_bytes=layout.page_bytes,
        hidden_bytes=spec.hidden_size * layout.dtype_bytes,
        query_bytes=spec.group_size * head_bytes,
        key_bytes=head_bytes,
    )
