"""Time to first token of a long prefix with an end of its own, by where the prefix is: nowhere (it is computed), on
the device, in the store's DRAM, or on its disk.

Needs a running application in mode static, with one prefill worker and a store with a disk, which nobody else uses, on
this machine. Every round sends a new prefix (recompute), the same prefix once more (device hit), a prefix of some
rounds ago, which others have pushed out of the device's pool since (DRAM hit), and one of many rounds ago, which others
have pushed out of DRAM too (disk hit). Before that last one the pages of the files in --disk-folder are dropped (fsync,
posix_fadvise), and it is checked that they are gone. Each request is sent when nothing is held for others any more. A
sample counts only when the answer's own count of cached tokens and the counters of worker, directory and store all say
that the prefix was where it should be; else it is thrown away, with the reason. The smaller pool and DRAM tier are, the
fewer rounds are needed before the first sample: see the example.

Progress goes to stderr; stdout gets a Markdown table and, as its last line, one JSON object. The exit code is 1 when a
state has fewer samples than were asked for.

Where several Ray clusters run, RAY_ADDRESS says which one the application is in.

    # engine: {kv_cache_blocks: 160}, store: {dram_gib: 0.4, disk: {limit_gib: 4, folder: ~/tmp/kv}}
    python -m load_tests.hit_ttft http://127.0.0.1:8000 --disk-folder ~/tmp/kv --save hit-ttft
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kv.exit_status import status_of
from load_tests.app_counters import APP_NAME, AppCounters, AppError
from load_tests.client import CompletionClient, first_model
from load_tests.command_line import add_save_options, add_token_ids_option, save, seed_from
from load_tests.hit_states import STATES, HitState, plan_rounds, why_not
from load_tests.measured_run import report_progress
from load_tests.page_cache import PagesKeptError, drop_pages
from load_tests.paired_ratio import paired_ratio
from load_tests.run_tables import markdown_table
from load_tests.workloads import PlannedRequest

_OUTPUT_TOKENS = 2
"""The second one makes the request go on to a decode worker, as requests do."""
_MOST_ROUNDS = 2
"""Times the number of samples."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request."""

    round_number: int
    state: HitState
    ttft_s: float | None
    cached_tokens: int | None
    rejected: str | None
    """Why it does not count."""


class HitProbe:
    """Brings about the states and measures them.

    Args:
        disk_folder: of the store's disk tier.
        token_ids: prompts are drawn from these.
    """

    def __init__(
        self,
        client: CompletionClient,
        counters: AppCounters,
        disk_folder: Path,
        *,
        prefix_tokens: int,
        tail_tokens: int,
        seed: int,
        token_ids: range,
    ) -> None:
        self._client = client
        self._counters = counters
        self._disk_folder = disk_folder
        self._prefix_tokens = prefix_tokens
        self._tail_tokens = tail_tokens
        self._rng = random.Random(f"hit-ttft/{seed}")
        self._token_ids = token_ids
        self._prefixes: list[tuple[int, ...]] = []

    async def run(self, samples: int) -> list[Sample]:
        """So many good samples of each state, if that can be had in twice as many rounds.

        Raises:
            AppError, PagesKeptError, OSError.
        """
        prompt_tokens = self._prefix_tokens + self._tail_tokens + _OUTPUT_TOKENS
        plan = plan_rounds(self._counters.sizes, prompt_tokens, _MOST_ROUNDS * samples)
        report_progress(f"{plan.disk_after} rounds until the first prefix is on disk only")
        for _ in range(plan.disk_after):
            warm_up = await self._sample(0, "recompute", self._new_prefix())
            if warm_up.rejected is not None:
                raise AppError(f"a new prefix: {warm_up.rejected}")
        taken: list[Sample] = []
        for number in range(1, _MOST_ROUNDS * samples + 1):
            prefix = self._new_prefix()
            taken.append(await self._sample(number, "recompute", prefix))
            taken.append(await self._sample(number, "device hit", prefix))
            taken.append(await self._sample(number, "DRAM hit", self._prefixes[-1 - plan.dram_after]))
            taken.append(await self._sample(number, "disk hit", self._prefixes[-1 - plan.disk_after]))
            report_progress(f"round {number}: " + ", ".join(map(_in_words, taken[-len(STATES) :])))
            if all(len(good(taken, state)) >= samples for state in STATES):
                break
        return taken

    async def _sample(self, round_number: int, state: HitState, prefix: tuple[int, ...]) -> Sample:
        prompt = (*prefix, *self._draw(self._tail_tokens))
        body = self._client.encode(PlannedRequest(prompt, len(prompt), _OUTPUT_TOKENS))
        before = await self._counters.when_quiet()
        if state == "disk hit":
            await asyncio.to_thread(drop_pages, sorted(self._disk_folder.rglob("*.kv")))
        record = await self._client.send(body, wanted_output_tokens=_OUTPUT_TOKENS, scheduled_s=0.0)
        after = await self._counters.when_quiet()
        cached = record.cached_prompt_tokens
        if not record.succeeded or not record.chunk_s:
            return Sample(round_number, state, None, cached, record.error or "no output")
        block_tokens = self._counters.sizes.block_tokens
        rejected = why_not(state, len(prefix), block_tokens, cached, before, after)
        return Sample(round_number, state, record.chunk_s[0] - record.sent_s, cached, rejected)

    def _new_prefix(self) -> tuple[int, ...]:
        self._prefixes.append(self._draw(self._prefix_tokens))
        return self._prefixes[-1]

    def _draw(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(self._token_ids, k=count))


def good(samples: Sequence[Sample], state: HitState) -> dict[int, float]:
    """TTFT in seconds of the samples of a state that count, by round."""
    return {
        sample.round_number: sample.ttft_s
        for sample in samples
        if sample.state == state and sample.rejected is None and sample.ttft_s is not None
    }


def summary(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """One record for each state, with its ratio to recompute in the same round."""
    recompute = good(samples, "recompute")
    records: list[dict[str, Any]] = []
    for state in STATES:
        ttft_s = good(samples, state)
        ratio = paired_ratio([(recompute[number], ttft_s[number]) for number in sorted(recompute.keys() & ttft_s)])
        records.append(
            {
                "state": state,
                "samples": len(ttft_s),
                "thrown_away": sum(sample.state == state for sample in samples) - len(ttft_s),
                "ttft_ms": None if not ttft_s else _spread([1e3 * value for value in ttft_s.values()]),
                "ratio": None if ratio is None else asdict(ratio),
            }
        )
    return records


def main(argv: Sequence[str] | None = None) -> int:
    arguments_given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m load_tests.hit_ttft", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base_url", help="server address without /v1, e.g. http://127.0.0.1:8000")
    parser.add_argument("--disk-folder", type=Path, required=True, help="store.disk.folder of the application")
    parser.add_argument("--app", default=APP_NAME, help="the application's name (default %(default)s)")
    parser.add_argument("--prefix-tokens", type=int, default=2000, help="default %(default)s")
    parser.add_argument("--tail-tokens", type=int, default=32, help="after the prefix, new each time (default 32)")
    parser.add_argument("--samples", type=int, default=10, help="of each state (default 10)")
    parser.add_argument("--quick", action="store_true", help="two samples of a prefix of 320 tokens")
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, which is reported")
    add_token_ids_option(parser)
    add_save_options(parser)
    arguments = parser.parse_args(arguments_given)
    if arguments.quick:
        vars(arguments).update({"samples": 2, "prefix_tokens": 320})
    if min(arguments.samples, arguments.prefix_tokens, arguments.tail_tokens) < 1:
        parser.error("--samples, --prefix-tokens and --tail-tokens must be at least 1")
    folder = arguments.disk_folder.expanduser()
    if not folder.is_dir():
        parser.error(f"--disk-folder {folder} is no folder: give that of the application's store")
    seed = seed_from(arguments)
    report_progress(f"seed {seed}")

    async def run(counters: AppCounters) -> list[Sample]:
        model = await first_model(arguments.base_url)
        async with CompletionClient(arguments.base_url, model) as client:
            probe = HitProbe(
                client,
                counters,
                folder,
                prefix_tokens=arguments.prefix_tokens,
                tail_tokens=arguments.tail_tokens,
                seed=seed,
                token_ids=range(*arguments.token_ids),
            )
            return await probe.run(arguments.samples)

    try:
        samples = asyncio.run(run(counters := AppCounters(arguments.app)))
    except (AppError, PagesKeptError, ConnectionError, OSError) as error:
        report_progress(f"not measured: {error}")
        return 1
    records = summary(samples)
    table = _table(records)
    figures = {
        "seed": seed,
        "sizes": asdict(counters.sizes),
        "states": records,
        "samples": [asdict(sample) for sample in samples],
    }
    if arguments.save:
        save(arguments, "load_tests.hit_ttft", arguments_given, [("Time to first token", table)], figures)
    print(table)
    print(json.dumps(figures))
    return 0 if all(record["samples"] >= arguments.samples for record in records) else 1


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 2),
        "min": round(min(values), 2),
        "max": round(max(values), 2),
    }


def _in_words(sample: Sample) -> str:
    if sample.rejected is not None or sample.ttft_s is None:
        return f"{sample.state} thrown away ({sample.rejected})"
    return f"{sample.state} {1e3 * sample.ttft_s:.0f} ms"


def _table(records: Sequence[dict[str, Any]]) -> str:
    rows = []
    for record in records:
        ttft_ms, ratio = record["ttft_ms"], record["ratio"]
        rows.append(
            (
                record["state"],
                str(record["samples"]),
                str(record["thrown_away"]),
                "-" if ttft_ms is None else f"{ttft_ms['median']:.1f} ({ttft_ms['min']:.1f}-{ttft_ms['max']:.1f})",
                "-" if ratio is None else f"{ratio['median']:.3f}",
                "-" if ratio is None else f"{ratio['low']:.3f}-{ratio['high']:.3f}",
                "-" if ratio is None else f"{100 * ratio['coverage']:.0f} %",
            )
        )
    columns = ("prefix", "samples", "thrown away", "TTFT, ms", "ratio to recompute", "interval", "coverage")
    return markdown_table(columns, rows)


if __name__ == "__main__":
    sys.exit(status_of(main))
