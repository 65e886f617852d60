from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tuning.round_figures import measured
from tuning.figure_file import FigureFileError
from tuning.hardware_profile import HardwareProfile, read_hardware
from tuning.model_config import read_model_shape
from tuning.timing import Timing

FOLDER = Path(__file__).parents[2] / "tuning" / "hardware"
A100 = read_hardware("a100-80g")
MEASURED = measured("qwen3-8b")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_profiles_that_come_along_are_named_as_their_files(path: Path) -> None:
    assert read_hardware(path.stem).name == path.stem


def test_data_sheet_figures() -> None:
    h100, h200 = read_hardware("h100-80g"), read_hardware("h200")
    assert (A100.flops_per_s, A100.memory_bytes_per_s) == (312e12, 2.039e12)
    assert (h100.flops_per_s, h100.memory_bytes_per_s) == (1979e12 / 2, 3.35e12)
    assert (h200.flops_per_s, h200.memory_bytes_per_s) == (1979e12 / 2, 4.8e12)
    assert [round(profile.memory_bytes / 2**30, 1) for profile in (A100, h100, h200)] == [80.0, 79.6, 140.4]


def test_an_a100_holds_llama_13b_and_some_tokens() -> None:
    # 0.9 * 80 GiB less 26,031,728,640 bytes of weights, 819,200 bytes a token.
    tokens = Timing(read_model_shape("llama-13b"), A100).kv_pool_tokens()
    assert tokens == (int(0.9 * 80 * 2**30) - 26_031_728_640) // 819_200 == 62_594


def test_70b_needs_several_devices() -> None:
    llama_70b = read_model_shape("llama-3.1-70b")
    with pytest.raises(ValueError, match=r"the weights of llama-3.1-70b take 131.4 GiB, and a100-80g has 72.0 GiB"):
        Timing(llama_70b, A100).kv_pool_tokens()
    four = replace(A100, name="4 x a100-80g", memory_bytes=4 * A100.memory_bytes)
    assert Timing(llama_70b, four).kv_pool_tokens() > 400_000


def test_the_local_cpu_has_the_default_model_measured_in_float32() -> None:
    timing = Timing(read_model_shape("smollm2-135m", "float32"), read_hardware("local-cpu"))
    assert timing.prefill_s(1000, 0) == pytest.approx(0.1094 + 2.32 + 0.7563)
    assert timing.decode_step_s(4, 1000) == pytest.approx(0.0618 + 0.0123 + 4 * 0.007031)
    assert timing.kv_pool_tokens() == 2**30 // 46_080


def test_a_profile_with_measured_times_reads_back_as_it_was_written(tmp_path: Path) -> None:
    profile = replace(A100, name="mine", measured=(MEASURED,))
    path = tmp_path / "mine.yaml"
    content = asdict(profile)
    content["measured"] = list(content["measured"])
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    assert read_hardware(str(path)) == profile


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flops_per_s": 0}, r"line \d+: flops_per_s: given 0.0; allowed: a finite number above 0"),
        ({"memory_bytes": -1}, r"memory_bytes: given -1; allowed: an int of at least 1"),
        ({"network_bytes_per_s": float("inf")}, r"network_bytes_per_s: given inf; allowed: a finite number above 0"),
        ({"prefill_efficiency": 1.2}, r"prefill_efficiency: given 1.2; allowed: a finite number above 0 and at most 1"),
        ({"step_overhead_s": -1.0}, r"step_overhead_s: given -1.0; allowed: a finite number of at least 0"),
        ({"memory_share": float("nan")}, r"memory_share: given nan"),
        ({"decode_eficiency": 0.5}, r"decode_eficiency: unknown key; allowed: name, flops_per_s"),
        ({"measured": [asdict(MEASURED)] * 2}, r"measured.1: qwen3-8b of 2 bytes was there before"),
        ({"measured": [asdict(MEASURED) | {"date": 1}]}, r"measured.0.date: given '1'; allowed: text"),
        (
            {"measured": [asdict(MEASURED) | {"decode": asdict(replace(MEASURED.decode, row_s=-0.0)) | {"row_s": -1}}]},
            r"measured.0.decode.row_s: given -1.0; allowed: a finite number of at least 0",
        ),
        (
            {"measured": [asdict(MEASURED) | {"prefill": asdict(MEASURED.prefill) | {"base_s": 0, "token_s": 0}}]},
            r"measured.0.prefill: base_s and token_s are both 0",
        ),
    ],
)
def test_impossible_figures_are_refused_with_their_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    content = {key: value for key, value in asdict(A100).items() if key != "measured"} | change
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    with pytest.raises(FigureFileError, match=message):
        read_hardware(str(path))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(FigureFileError, match=r"no hardware file named 'a100': .*a100-80g, h100-80g, h200"):
        read_hardware("a100")


def test_names_in_python_are_checked_as_in_files() -> None:
    with pytest.raises(ValueError, match=r"given 0.0; allowed: a finite number above 0"):
        HardwareProfile(**asdict(A100) | {"flops_per_s": 0.0})
