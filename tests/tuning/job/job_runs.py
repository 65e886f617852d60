"""A trace, a model and options that make the job take no more than seconds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tuning.job.job import main
from tuning.report.content import JobReport
from tuning.report.summary_file import read_summary
from tuning.trace.generator import SyntheticTraffic, generate
from tuning.trace.writing import write_trace

CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "torch_dtype": "float16",
}


def make_files(folder: Path, trace_suffix: str = ".parquet") -> None:
    """`folder/trace` with sessions that come back, and `folder/config.json` of a model."""
    trace = generate(SyntheticTraffic(3, 150, requests_per_s=8.0, prefixes=8, turns=3.0, think_s=10.0))
    write_trace(trace, folder / f"trace{trace_suffix}", "parquet" if trace_suffix == ".parquet" else "azure")
    (folder / "config.json").write_text(json.dumps(CONFIG))


def arguments(folder: Path, *more: str, out: str = "out", trace: str = "trace.parquet") -> list[str]:
    """The job's command line on those files: 10 evaluations of DRAM and disk, in one process."""
    given = {
        "--trace": str(folder / trace),
        "--model": str(folder / "config.json"),
        "--hardware": "a100-80g",
        "--prices": "aws-us-east-1",
        "--mode": "monolithic",
        "--dram-gib": "0:64:16/4",
        "--disk-gib": "0:64:32/16",
        "--disk-class": "gp3-2000",
        "--baseline-dram-gib": "48",
        "--evaluations": "10",
        "--out": str(folder / out),
    }
    given |= dict(zip(more[::2], more[1::2], strict=True))
    if "--ray" not in given:
        given.setdefault("--local", "1")
    return ["--no-progress", *(word for pair in given.items() for word in pair)]


def run(folder: Path, *more: str, out: str = "out", trace: str = "trace.parquet") -> tuple[int, JobReport]:
    """Exit status and summary."""
    status = main(arguments(folder, *more, out=out, trace=trace))
    return status, read_summary(folder / out / "summary.json")


def found_by(report: JobReport) -> JobReport:
    """Without what is of one run alone: two searches that found the same are equal then."""
    search = replace(report.search, wall_s=0.0)
    return replace(report, search=search, command="", created="")
