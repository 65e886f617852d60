"""How fast a link between two processes is, beside copying memory and a plain socket on the same machine.

Starts a second process that answers. In every repeat, over a link and over a plain TCP socket on the same address, in
turns,

- messages of --small-bytes go there and come back, --round-trips of them, one after the other;
- messages of each of --mib MiB go there, 128 MiB in all, and a short answer comes back when the last has arrived.

Beside that, as many bytes are copied from array to array. Arrays are written before, so that no page is new to anybody
but the receiver of a message, which always gets fresh memory; the socket reads into memory that stays. The first repeat
warms up and does not count. Progress goes to stderr; stdout gets two Markdown tables and, as its last line, one JSON
object.

    python -m load_tests.link_speed --repeats 10 --save link-speed
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kv.exit_status import status_of
from load_tests.command_line import add_save_options, save
from load_tests.measured_run import report_progress
from load_tests.paired_ratio import paired_ratio
from load_tests.run_tables import markdown_table
from migrate.links.gloo_link import GlooConnector
from migrate.links.interface import Link, LinkError, LinkHandlers, LinkSettings, Message
from migrate.links.rendezvous import RendezvousAddress, make_rendezvous

_MIB = 1024 * 1024
_HOST = "127.0.0.1"
_BULK_BYTES = 128 * _MIB
_SETTINGS = LinkSettings(timeout_s=60.0, connect_timeout_s=60.0)
_ECHO, _TAKE, _ANSWER_TO_LAST, _EXIT = range(4)
"""What is asked of the second process; kinds of messages, and the first byte of a request over the socket."""


class Wire(Protocol):
    """A way to the second process."""

    def echo(self, data: torch.Tensor) -> None:
        """Send `data` and wait until it is back."""

    def give(self, data: torch.Tensor, count: int) -> None:
        """Send `data` so many times and wait until the last has arrived."""


class LinkWire:
    """Messages of one tensor over a link."""

    def __init__(self, rendezvous: RendezvousAddress) -> None:
        self._answers = threading.Semaphore(0)
        handlers = LinkHandlers(lambda _: self._answers.release(), lambda _: self._answers.release())
        self.link = _connect("asker", "answerer", rendezvous, handlers)

    def echo(self, data: torch.Tensor) -> None:
        """See `Wire`."""
        self.link.send(Message(_ECHO, 0, 0, b"", (data,)))
        self._answers.acquire()

    def give(self, data: torch.Tensor, count: int) -> None:
        """See `Wire`."""
        for left in reversed(range(count)):
            self.link.send(Message(_TAKE if left else _ANSWER_TO_LAST, 0, 0, b"", (data,)))
        self._answers.acquire()


class SocketWire:
    """The same bytes over a plain TCP socket. A request is a byte for what to do and eight for its size."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((_HOST, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(_MIB)

    def echo(self, data: torch.Tensor) -> None:
        """See `Wire`."""
        self._request(_ECHO, data)
        _read_into(self._socket, memoryview(self._buffer)[: len(data)])

    def give(self, data: torch.Tensor, count: int) -> None:
        """See `Wire`."""
        for left in reversed(range(count)):
            self._request(_TAKE if left else _ANSWER_TO_LAST, data)
        _read_into(self._socket, memoryview(self._buffer)[:1])

    def close(self) -> None:
        self._request(_EXIT, torch.zeros(1, dtype=torch.uint8))
        self._socket.close()

    def _request(self, what: int, data: torch.Tensor) -> None:
        # Header and data in one call, as one would write it who cares for a small message.
        sent = self._socket.sendmsg([bytes([what]) + len(data).to_bytes(8, "little"), data.numpy().data])
        self._socket.sendall(data.numpy().data[max(0, sent - 9) :])


def answer(rendezvous_port: int) -> None:
    """What the second process does until it is told to exit: prints a port, answers at it and over a link."""
    with socket.create_server((_HOST, 0)) as server:
        print(server.getsockname()[1], flush=True)
        answerer = threading.Thread(target=_answer_socket, args=(server,))
        answerer.start()
        link: Link
        linked = threading.Event()

        def react(message: Message) -> None:
            linked.wait()
            if message.kind == _ECHO:
                link.send(message)
            elif message.kind == _ANSWER_TO_LAST:
                link.send(Message(_ANSWER_TO_LAST, 0, 0))

        address = RendezvousAddress(_HOST, rendezvous_port)
        link = _connect("answerer", "asker", address, LinkHandlers(react, lambda _: None))
        linked.set()
        answerer.join()
        link.close()
        link.join(_SETTINGS.timeout_s)


def _answer_socket(server: socket.socket) -> None:
    connection, _ = server.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = memoryview(bytearray(_BULK_BYTES))
    with connection:
        while True:
            _read_into(connection, buffer[:9])
            what, size = buffer[0], int.from_bytes(buffer[1:9], "little")
            _read_into(connection, buffer[:size])
            if what == _EXIT:
                return
            if what != _TAKE:
                connection.sendall(buffer[: size if what == _ECHO else 1])


def measure(
    link: Wire, plain: Wire, small_bytes: int, round_trips: int, mib: Sequence[int], repeats: int
) -> dict[str, Any]:
    """`round_trip_s` by wire, all of them; `bytes_per_s` by size in MiB and way, one value a repeat."""
    wires = {"link": link, "socket": plain}
    small = torch.ones(small_bytes, dtype=torch.uint8)
    round_trip_s: dict[str, list[float]] = {name: [] for name in wires}
    bytes_per_s: dict[int, dict[str, list[float]]] = {size: {} for size in mib}
    for repeat in range(1 + repeats):
        order = list(wires) if repeat % 2 else list(reversed(wires))
        for name in order:
            times = [_timed(partial(wires[name].echo, small)) for _ in range(round_trips)]
            round_trip_s[name] += times if repeat else []
        for size in mib:
            data = torch.ones(size * _MIB, dtype=torch.uint8)
            count = max(1, _BULK_BYTES // len(data))
            seconds = {name: _timed(partial(wires[name].give, data, count)) for name in order}
            seconds["memory copy"] = _timed(partial(_copy, data.numpy(), np.ones(len(data), np.uint8), count))
            for way, taken_s in seconds.items():
                if repeat:
                    bytes_per_s[size].setdefault(way, []).append(count * len(data) / taken_s)
    return {"round_trip_s": round_trip_s, "bytes_per_s": bytes_per_s}


def main(argv: Sequence[str] | None = None) -> int:
    arguments_given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m load_tests.link_speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--small-bytes", type=int, default=4096, help="of a small message (default %(default)s)")
    parser.add_argument("--round-trips", type=int, default=500, help="in each repeat (default %(default)s)")
    parser.add_argument(
        "--mib", type=int, nargs="+", default=[1, 16, 64], help="of large messages, 128 at most (default 1 16 64)"
    )
    parser.add_argument("--repeats", type=int, default=10, help="measured repeats (default 10)")
    parser.add_argument("--quick", action="store_true", help="two repeats of 20 round trips and 1 MiB")
    parser.add_argument("--answer", type=int, help=argparse.SUPPRESS, metavar="PORT")
    add_save_options(parser)
    arguments = parser.parse_args(arguments_given)
    torch.set_num_threads(1)
    if arguments.answer is not None:
        answer(arguments.answer)
        return 0
    if (
        not 1 <= arguments.small_bytes <= _MIB
        or min(arguments.round_trips, arguments.repeats) < 1
        or not all(1 <= size * _MIB <= _BULK_BYTES for size in arguments.mib)
    ):
        parser.error(
            "--small-bytes must be 1 to 1048576, --round-trips and --repeats at least 1, --mib 1 to "
            f"{_BULK_BYTES // _MIB}"
        )
    round_trips, mib, repeats = (
        (20, [1], 2) if arguments.quick else (arguments.round_trips, arguments.mib, arguments.repeats)
    )
    store, address = make_rendezvous(_HOST)
    with subprocess.Popen(
        [sys.executable, "-m", "load_tests.link_speed", "--answer", str(address.port)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            plain = SocketWire(int(process.stdout.readline()))
            link = LinkWire(address)
            report_progress(f"{repeats} repeats of {round_trips} round trips and of {mib} MiB")
            figures = measure(link, plain, arguments.small_bytes, round_trips, mib, repeats)
            plain.close()
            link.link.join(_SETTINGS.timeout_s)
        except (LinkError, OSError, ValueError) as error:
            report_progress(f"not measured: {error}")
            return 1
        finally:
            process.kill()
            del store
    tables = [
        (f"Round trip of {arguments.small_bytes} bytes", round_trip_table(figures["round_trip_s"])),
        ("Bandwidth", bandwidth_table(figures["bytes_per_s"])),
    ]
    if arguments.save:
        save(arguments, "load_tests.link_speed", arguments_given, tables, figures)
    print("\n\n".join(table for _, table in tables))
    print(json.dumps(figures))
    return 0


def round_trip_table(round_trip_s: dict[str, list[float]]) -> str:
    """A row for each way, in milliseconds."""
    rows = []
    for way, times in round_trip_s.items():
        percentiles = statistics.quantiles(times, n=100, method="inclusive")
        rows.append((way, str(len(times)), *(f"{1e3 * percentiles[rank - 1]:.3f}" for rank in (10, 50, 99))))
    return markdown_table(("way", "round trips", "p10, ms", "p50, ms", "p99, ms"), rows)


def bandwidth_table(bytes_per_s: dict[int, dict[str, list[float]]]) -> str:
    """A row for each size of message, and what is compared with the link."""
    rows = []
    for size, ways in bytes_per_s.items():
        for other in ("socket", "memory copy"):
            ratio = paired_ratio(list(zip(ways[other], ways["link"], strict=True)))
            compared = (
                ("-", "-", "-")
                if ratio is None
                else (f"{ratio.median:.2f}", f"{ratio.low:.2f}-{ratio.high:.2f}", f"{100 * ratio.coverage:.0f} %")
            )
            rows.append((f"{size}", _spread(ways["link"]), other, _spread(ways[other]), *compared))
    return markdown_table(("MiB", "link, GB/s", "beside", "GB/s", "ratio", "interval", "coverage"), rows)


def _connect(worker: str, peer: str, rendezvous: RendezvousAddress, handlers: LinkHandlers) -> Link:
    return GlooConnector(worker, _HOST, rendezvous, _SETTINGS).connect(peer, 1, handlers)


def _read_into(connection: socket.socket, target: memoryview) -> None:
    done = 0
    while done < len(target):
        count = connection.recv_into(target[done:])
        if count == 0:
            raise OSError(f"the socket was closed after {done} bytes of {len(target)}")
        done += count


def _copy(source: NDArray[np.uint8], target: NDArray[np.uint8], count: int) -> None:
    for _ in range(count):
        np.copyto(target, source)


def _timed(work: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def _spread(rates: Sequence[float]) -> str:
    return f"{statistics.median(rates) / 1e9:.2f} ({min(rates) / 1e9:.2f}-{max(rates) / 1e9:.2f})"


if __name__ == "__main__":
    sys.exit(status_of(main))
