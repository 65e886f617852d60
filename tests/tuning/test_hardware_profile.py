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
        ({"name": ""}, r"line \d+: name: given ''; allowed: text that says something"),
        ({"flops_per_s": 0}, r"line \d+: flops_per_s: given 0.0; allowed: a finite number above 0"),
        ({"memory_bytes": -1}, r"memory_bytes: given -1; allowed: an int of at least 1"),
        ({"network_bytes_per_s": float("inf")}, r"network_bytes_per_s: given inf; allowed: a finite number above 0"),
        ({"prefill_efficiency": 1.2}, r"prefill_efficiency: given 1.2; allowed: a finite number above 0 and at most 1"),
        ({"step_overhead_s": -1.0}, r"step_overhead_s: given -1.0; allowed: a finite number of at least 0"),
        ({"memory_share": float("nan")}, r"memory_share: given nan"),
        ({"decode_eficiency": 0.5}, r"decode_eficiency: unknown key; allowed: name, flops_per_s"),
        ({"measured": [asdict(MEASURED)] * 2}, r"measured.1: qwen3-8b of 2 bytes was there before"),
        ({"measured": [asdict(MEASURED) | {"date": 1}]}, r"measured.0.date: given '1'; allowed: text"),
        ({"measured": [asdict(MEASURED) | {"date": "May"}]}, r"measured.0.date: given 'May', no date .*YYYY-MM-DD"),
        (
            {"measured": [asdict(MEASURED) | {"prefill": asdict(MEASURED.prefill) | {"token_s": 12}}]},
            r"line \d+: measured.0.prefill.token_s: given 12; allowed: 0 to 1 seconds. Is it in another unit\?",
        ),
        # TFLOPS, GFLOPS and what is a thousand times too much; GB, MiB; GB/s, MB/s; milliseconds.
        ({"flops_per_s": 312}, r"flops_per_s: given 312; allowed: 1e\+09 to 1e\+18 .*312 TFLOPS are written 312e12"),
        ({"flops_per_s": 312e3}, r"flops_per_s: given 312000; allowed"),
        ({"flops_per_s": 312e24}, r"flops_per_s: given 3.12e\+26; allowed"),
        ({"memory_bytes": 80}, r"memory_bytes: given 80; allowed: 1e\+08 to 1e\+15 bytes. .* 80 GB are written 80e9"),
        ({"memory_bytes": 81920}, r"memory_bytes: given 81920; allowed"),
        ({"memory_bytes": 85_899_345_920 * 2**20}, r"memory_bytes: given 9.0\d*e\+16; allowed"),
        ({"memory_bytes_per_s": 2039}, r"memory_bytes_per_s: given 2039; allowed: .*2,039 GB/s are written 2039e9"),
        ({"memory_bytes_per_s": 2.039e21}, r"memory_bytes_per_s: given 2.039e\+21; allowed"),
        (
            {"host_link_bytes_per_s": 25.6},
            r"host_link_bytes_per_s: given 25.6; allowed: 1e\+07 to 1e\+15 bytes a second",
        ),
        ({"network_bytes_per_s": 20}, r"network_bytes_per_s: given 20; allowed: .*200 Gb/s are 25 GB/s"),
        ({"network_bytes_per_s": 20e18}, r"network_bytes_per_s: given 2e\+19; allowed"),
        ({"step_overhead_s": 2}, r"step_overhead_s: given 2; allowed: 0 to 1 seconds. .* 2 ms are written 0.002"),
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
