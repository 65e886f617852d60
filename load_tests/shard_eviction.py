"""What a store finds of its traffic when room is made by a directory in shards, beside one that is whole.

A whole directory with LRU lets go of what was used longest ago; with shards that is known of each shard only. Two rules
say which shard gives room: "oldest", the one that the store follows (`kv.room_order`, told anew once a second and by
every answer), and "drawn", where shards are drawn by the bytes that they have. Simulated with the app's own directory:
no clock, no Ray, the same figures on every machine.

tenants      300 tenants with a system prompt and documents of their own, both asked for by Zipf's law
hot root     half of all prompts continue one system prompt, by Zipf's law; the others come once
chats        conversations that come back with a longer prompt, each with a beginning of its own

Progress goes to stderr; stdout gets a Markdown table and, as its last line, one JSON object.

    python -m load_tests.shard_eviction --save shard-eviction
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, islice

from kv.directory import Directory
from kv.exit_status import status_of
from kv.extents import ExtentInfo
from kv.part_range import LaneRange
from kv.room_order import RoomOrder
from kv.shards import new_extent_id, shard_of_chain
from load_tests.command_line import add_save_options, save
from load_tests.measured_run import report_progress
from load_tests.run_tables import markdown_table

_STORE = "s"
_LANES = (LaneRange(0, 1, 0, 1),)
_EXTENT_BLOCKS = 4
_TOLD_EVERY_S = 1.0
_HOLD_S = 1.0
_SHARES = (0.1, 0.3)
"""Room, as shares of all blocks that are ever asked for."""
_Keys = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One simulated run."""

    workload: str
    room_share: float
    rule: str
    shards: int
    hit_share: float
    """Blocks found by blocks asked for, in the second half."""


class ShardedStore:
    """A store of `room_blocks` blocks and its directory, one tier, a byte a block."""

    def __init__(self, num_shards: int, rule: str, room_blocks: int) -> None:
        self._shards = [Directory() for _ in range(num_shards)]
        self._rule = rule
        self._left = room_blocks
        self._order = RoomOrder(num_shards)
        self._rng = random.Random(f"drawn/{num_shards}")
        self._told_s = 0.0

    def ask(self, keys: _Keys, now_s: float) -> int:
        """Blocks found. What is not is computed and stored."""
        if now_s >= self._told_s + _TOLD_EVERY_S:
            self._told_s = now_s
            for number, shard in enumerate(self._shards):
                self._order.note(number, "dram", shard.idle_s(_STORE, "dram", now_s), now_s)
        shard = self._shards[shard_of_chain(keys, len(self._shards))]
        found = shard.lookup(keys, now_s, _HOLD_S)
        if found.lease_id is not None:
            shard.release(found.lease_id)
        ticket = shard.begin_put(keys, now_s, _HOLD_S)
        if ticket.put_id is not None:
            extents = [
                ExtentInfo(
                    new_extent_id(_STORE, keys[0]),
                    _STORE,
                    keys[first : min(first + _EXTENT_BLOCKS, stop)],
                    first,
                    _LANES,
                    min(first + _EXTENT_BLOCKS, stop) - first,
                    keys[first - 1] if first else None,
                )
                for start, stop in ticket.missing
                for first in range(start, stop, _EXTENT_BLOCKS)
            ]
            for extent in extents:
                self._make_room(extent.num_bytes, now_s)
            if not shard.commit_put(ticket.put_id, extents, now_s):
                raise RuntimeError("the directory refused a put")
        return found.num_blocks

    def _make_room(self, num_blocks: int, now_s: float) -> None:
        if self._left < num_blocks:
            for number in self._shards_to_ask():
                room = self._shards[number].evict(_STORE, "dram", num_blocks - self._left, now_s)
                self._order.note(number, "dram", room.idle_s, now_s)
                if room.extent_ids:
                    self._left += room.num_bytes
                    break
            else:
                raise RuntimeError(f"no shard has {num_blocks} blocks to give: take fewer shards or more room")
        self._left -= num_blocks

    def _shards_to_ask(self) -> list[int]:
        if self._rule == "oldest":
            return self._order.shards("dram")
        weights = [shard.bytes_by_store().get(_STORE, {}).get("dram", 0) for shard in self._shards]
        return sorted(range(len(weights)), key=lambda number: -(self._rng.random() ** (1 / max(weights[number], 1e-9))))


def tenants(rng: random.Random) -> Iterator[_Keys]:
    """See the module."""
    tenant, document = _zipf(rng, 300), _zipf(rng, 20)
    while True:
        name = tenant()
        yield _chain([f"t{name}"] * 8 + [f"d{document()}"] * 8)


def hot_root(rng: random.Random) -> Iterator[_Keys]:
    """See the module."""
    continuation = _zipf(rng, 400)
    while True:
        yield _chain(["root"] * 8 + [f"c{continuation()}"] * 8)
        yield _chain([f"once{rng.random()}"] * 16)


def chats(rng: random.Random) -> Iterator[_Keys]:
    """See the module."""
    turns: dict[int, int] = {}
    newest = 0
    while True:
        if rng.random() < 0.2:
            newest += 1
        chat = max(0, newest - int(rng.expovariate(1 / 60)))
        turns[chat] = turns.get(chat, 0) + 1
        yield _chain([f"chat{chat}"] * (4 * min(turns[chat], 10)))


WORKLOADS: dict[str, Callable[[random.Random], Iterator[_Keys]]] = {
    "tenants": tenants,
    "hot root": hot_root,
    "chats": chats,
}


def simulate(
    workload: str,
    num_requests: int,
    room_share: float,
    rule: str,
    num_shards: int,
    seed: int,
    *,
    requests_per_s: float = 1000.0,
) -> Outcome:
    """One run."""
    requests = list(islice(WORKLOADS[workload](random.Random(f"{workload}/{seed}")), num_requests))
    all_blocks = len({key for keys in requests for key in keys})
    store = ShardedStore(num_shards, rule, max(64, int(room_share * all_blocks)))
    found = asked = 0
    for number, keys in enumerate(requests):
        hits = store.ask(keys, number / requests_per_s)
        if number >= num_requests // 2:
            found += hits
            asked += len(keys)
    return Outcome(workload, room_share, rule, num_shards, found / asked)


def main(argv: Sequence[str] | None = None) -> int:
    arguments_given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m load_tests.shard_eviction",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=10_000, help="of each run (default %(default)s)")
    parser.add_argument(
        "--shards", type=int, nargs="+", default=[3, 8], help="numbers of shards, 2 or more (default 3 8)"
    )
    parser.add_argument(
        "--rate", type=float, default=1000.0, help="requests a second: so many between news (default %(default)g)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the traffic (default %(default)s)")
    add_save_options(parser)
    arguments = parser.parse_args(arguments_given)
    if arguments.requests < 2 or min(arguments.shards) < 2 or arguments.rate <= 0:
        parser.error("--requests and --shards must be at least 2, --rate above 0")

    outcomes: list[Outcome] = []
    for workload in WORKLOADS:
        for share in _SHARES:
            runs = [("whole", 1), *((rule, shards) for rule in ("oldest", "drawn") for shards in arguments.shards)]
            for rule, shards in runs:
                size = (arguments.requests, share, rule, shards, arguments.seed)
                outcomes.append(simulate(workload, *size, requests_per_s=arguments.rate))
                report_progress(str(outcomes[-1]))
    table = _table(outcomes)
    figures = {"outcomes": [asdict(outcome) for outcome in outcomes]}
    if arguments.save:
        save(arguments, "load_tests.shard_eviction", arguments_given, [("Share of blocks found", table)], figures)
    print(table)
    print(json.dumps(figures))
    return 0


def _table(outcomes: Sequence[Outcome]) -> str:
    runs = list(dict.fromkeys((outcome.rule, outcome.shards) for outcome in outcomes))
    cells: dict[tuple[str, float], list[str]] = {}
    for outcome in outcomes:
        cells.setdefault((outcome.workload, outcome.room_share), []).append(f"{outcome.hit_share:.4f}")
    names = [rule if shards == 1 else f"{rule}, {shards} shards" for rule, shards in runs]
    rows = [(workload, f"{share:.0%}", *values) for (workload, share), values in cells.items()]
    return markdown_table(("traffic", "room", *names), rows)


def _zipf(rng: random.Random, count: int) -> Callable[[], int]:
    cumulative = list(accumulate(1 / rank for rank in range(1, count + 1)))
    return lambda: rng.choices(range(count), cum_weights=cumulative)[0]


def _chain(names: Sequence[str]) -> _Keys:
    """A block for each name; a key stands for all names up to its own."""
    keys: list[bytes] = []
    for name in names:
        keys.append(hashlib.sha256((keys[-1] if keys else b"") + name.encode()).digest())
    return tuple(keys)


if __name__ == "__main__":
    sys.exit(status_of(main))
