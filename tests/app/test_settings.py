from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from app import settings as settings_module
from app.settings import AppSettings, EngineSettings, SettingsError, load_settings


@pytest.fixture(autouse=True)
def _no_overlay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EQUIPOISE_OVERLAY", raising=False)


def problems(args: Any) -> list[str]:
    with pytest.raises(SettingsError) as raised:
        load_settings(args)
    for line in raised.value.problems:
        assert line in str(raised.value)
    return raised.value.problems


def test_defaults_are_a_static_pair_on_whatever_device_there_is() -> None:
    settings = load_settings({})
    assert settings == load_settings(None) == AppSettings()
    assert settings.mode == "static"
    assert settings.roles == ("prefill", "decode")
    assert settings.engine_for("prefill") == settings.engine_for("decode") == EngineSettings()
    assert load_settings({"mode": "monolithic"}).roles == ("monolithic",)


def test_prefixes_are_shared_unless_told_otherwise() -> None:
    assert load_settings({}).store.share_prefixes
    assert not load_settings({"store": {"share_prefixes": False}}).store.share_prefixes
    assert problems({"store": {"share_prefixes": "perhaps"}})


def test_every_field_is_documented() -> None:
    for model in vars(settings_module).values():
        if isinstance(model, type) and issubclass(model, BaseModel):
            for name, field in model.model_fields.items():
                assert field.description, f"{model.__name__}.{name}"
                assert field.description.endswith("."), f"{model.__name__}.{name}"


def test_an_unknown_key_names_its_place_and_the_nearest_known_one() -> None:
    (line,) = problems({"engine": {"blok_tokens": 32}})
    assert line.startswith("engine.blok_tokens: unknown key (given int 32). Did you mean 'block_tokens'?")
    assert "max_batch_tokens" in line
    (line,) = problems({"ingress": {"dispatch": {"zzz": 1}}})
    assert "Did you mean" not in line
    assert line.endswith("Allowed here: policy")


def test_all_problems_are_listed_at_once() -> None:
    lines = problems(
        {
            "mode": "balance",
            "engin": {},
            "engine": {"dtype": "int8", "torch_threads": "1", "gpu_memory_utilization": 1.5},
            "prefill": {"replicas": 0, "engine": {"devic": "cpu"}},
            "ingress": {"dispatch": {"policy": "best"}},
        }
    )
    found = {line.split(":")[0] for line in lines}
    assert found == {
        "mode",
        "engin",
        "engine.dtype",
        "engine.torch_threads",
        "engine.gpu_memory_utilization",
        "prefill.replicas",
        "prefill.engine.devic",
        "ingress.dispatch.policy",
    }
    assert any("given str 'balance'" in line and "'balanced'" in line for line in lines)
    assert any("given str 'int8'" in line and "bfloat16" in line for line in lines)


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ([1], "mapping"),
        ({"engine": 3}, "engine: given int 3"),
        ({"engine": {"block_tokens": 24}}, "multiple of 16"),
        ({"engine": {"block_tokens": 0}}, "16"),
        ({"engine": {"kv_cache_gib": 1.0, "kv_cache_blocks": 5}}, "at most one"),
        ({"engine": {"attention": "flash", "device": "cpu"}}, "CUDA only"),
        ({"engine": {"attention": "flash", "block_tokens": 128}}, "multiples of 256"),
        ({"engine": {"max_batch_tokens": 8}}, "max_running_requests (64)"),
        (
            {"decode": {"engine": {"max_running_requests": 1000}}},
            "decode.engine, merged over engine: max_batch_tokens (512)",
        ),
        ({"engine": {"device": "cuda"}}, "prefill.num_gpus is 0"),
        ({"decode": {"engine": {"dtype": "float32"}}}, "prefill.engine.dtype (auto)"),
        ({"decode": {"engine": {"attention": "torch"}}}, "give engine.block_tokens"),
        ({"model": ""}, "model: given str ''"),
        ({"ingress": {"request_timeout_s": 0}}, "greater than 0"),
        ({"engine": {"cuda_graphs": 1}}, "engine.cuda_graphs: given int 1"),
    ],
)
def test_what_cannot_work_is_refused(args: Any, part: str) -> None:
    assert any(part in line for line in problems(args))


def test_roles_that_the_mode_does_not_use_are_not_held_against_it() -> None:
    args = {"engine": {"device": "cuda"}, "mode": "monolithic", "monolithic": {"num_gpus": 1}}
    assert load_settings(args).engine_for("monolithic").device == "cuda"


def test_a_role_overrides_single_keys() -> None:
    settings = load_settings(
        {
            "engine": {"max_running_requests": 16, "kv_cache_gib": 2},
            "prefill": {"engine": {"max_batch_tokens": 2048}},
            "decode": {"engine": {"max_batch_tokens": 32, "kv_cache_blocks": 100}},
        }
    )
    prefill, decode = settings.engine_for("prefill"), settings.engine_for("decode")
    assert (prefill.max_batch_tokens, prefill.max_running_requests, prefill.kv_cache_gib) == (2048, 16, 2.0)
    assert (decode.max_batch_tokens, decode.kv_cache_blocks, decode.kv_cache_gib) == (32, 100, None)


def test_settings_survive_being_written_down() -> None:
    settings = load_settings({"decode": {"engine": {"max_batch_tokens": 64}}, "ingress": {"api_keys_file": "keys"}})
    assert load_settings(settings.model_dump()) == settings
    assert load_settings(yaml.safe_load(yaml.safe_dump(settings.model_dump()))) == settings


def test_an_overlay_is_merged_key_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("engine: {device: cpu, kv_cache_gib: null}\nprefill: {num_gpus: 0}\n")
    args = {
        "engine": {"device": "cuda", "dtype": "float16", "kv_cache_gib": 20},
        "prefill": {"replicas": 2, "num_gpus": 1},
    }
    before = yaml.safe_dump(args)
    for settings in (load_settings(args, overlay), load_settings(args, str(overlay))):
        assert settings.engine.device == "cpu"
        assert settings.engine.dtype == "float16"
        assert settings.engine.kv_cache_gib is None
        assert (settings.prefill.replicas, settings.prefill.num_gpus) == (2, 0)
    monkeypatch.setenv("EQUIPOISE_OVERLAY", str(overlay))
    assert load_settings(args).engine.device == "cpu"
    assert yaml.safe_dump(args) == before


def test_a_bad_overlay_is_refused_by_name(tmp_path: Path) -> None:
    cases = {"missing.yaml": None, "list.yaml": "[1, 2]", "broken.yaml": "a: [", "typo.yaml": "engin: {}"}
    for name, content in cases.items():
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(SettingsError, match=name):
            load_settings({}, tmp_path / name)
    (tmp_path / "empty.yaml").write_text("")
    assert load_settings({}, tmp_path / "empty.yaml") == AppSettings()


nested = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@given(base=st.dictionaries(st.sampled_from("abc"), nested), over=st.dictionaries(st.sampled_from("abc"), nested))
def test_a_merged_path_has_the_overlays_value_or_else_the_bases(
    base: dict[str, Any], over: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    from app.overlay import merged_with_overlay

    path = tmp_path_factory.mktemp("overlays") / "overlay.yaml"
    path.write_text(yaml.safe_dump(over))
    merged = merged_with_overlay(base, path)

    def at(tree: Any, keys: tuple[str, ...]) -> Any:
        for key in keys:
            if not isinstance(tree, dict) or key not in tree:
                return "absent"
            tree = tree[key]
        return tree

    for length in (1, 2, 3):
        for keys in itertools.product("abc", repeat=length):
            value = at(over, keys)
            # Where the overlay puts something that is no mapping, whatever the base had below is gone.
            hidden = any(
                not isinstance(at(over, keys[:i]), dict) and at(over, keys[:i]) != "absent" for i in range(1, length)
            )
            expected = value if value != "absent" or hidden else at(base, keys)
            if not isinstance(expected, dict):
                assert at(merged, keys) == expected


def _numbers(model: type[BaseModel], place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The places of all fields that take a float, the same blocks for each role included."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _numbers(field.annotation, (*place, name))
        elif float in (field.annotation, *get_args(field.annotation)):
            yield (*place, name)


NUMBERS = [*_numbers(AppSettings), ("prefill", "engine", "kv_cache_gib")]


@pytest.mark.parametrize("place", NUMBERS, ids=".".join)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_numbers_are_finite(place: tuple[str, ...], value: float) -> None:
    assert any(line.startswith(f"{'.'.join(place)}: given float {value}, ") for line in problems(nested(place, value)))


SIZES = [place for place in NUMBERS if place[-1].endswith("_gib")]


def test_sizes_are_sizes() -> None:
    assert ("store", "dram_gib") in SIZES
    assert ("store", "disk", "limit_gib") in SIZES
    for place in SIZES:
        for value in (2.0**20 + 1, 1e300):
            (line,) = problems(nested(place, value))
            assert line.endswith("should be less than or equal to 1048576"), line
        load_settings(nested(place, 2.0**20))


def nested(place: tuple[str, ...], value: object) -> dict[str, Any]:
    """Settings in which only this is given."""
    name, *rest = place
    return {name: nested(tuple(rest), value) if rest else value}
