from __future__ import annotations

import pytest

from app.builder import engine_config
from app.settings import EngineSettings


@pytest.mark.parametrize(
    ("asked", "num_gpus", "device"), [("auto", 0.0, "cpu"), ("auto", 0.5, "auto"), ("cpu", 1.0, "cpu")]
)
def test_a_worker_uses_no_gpu_that_ray_did_not_give_it(asked: str, num_gpus: float, device: str) -> None:
    assert engine_config(EngineSettings.model_validate({"device": asked}), num_gpus).device == device


def test_room_for_kv_is_given_in_gib_and_taken_in_bytes() -> None:
    assert engine_config(EngineSettings(kv_cache_gib=0.5), 0.0).kv_cache_bytes == 512 * 1024**2
    assert engine_config(EngineSettings(), 0.0).kv_cache_bytes is None
