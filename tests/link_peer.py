"""A process at the other end of links, for tests: `python -m tests.link_peer echo|flood ...`."""

from __future__ import annotations

import json
import sys
import threading

import torch

from migrate.links.gloo_link import GlooConnector
from migrate.links.interface import LinkSettings, Message
from migrate.links.rendezvous import RendezvousAddress
from migrate.links.switchboard import Switchboard
from tests.link_ends import WAIT_S

EXIT = 99
"""Kind of a message upon which an echo ends its process, without closing anything."""
FLOOD_MESSAGES = 3
FLOOD_BYTES = 8 << 20


def echo(connector: GlooConnector, peer: str, epoch: int) -> None:
    """Send everything back."""
    told_to_exit = threading.Event()

    def answer(sender: str, message: Message) -> None:
        if message.kind == EXIT:
            told_to_exit.set()
        else:
            board.link(sender).send(message)

    board = Switchboard(connector.worker, connector, answer, lambda *_: told_to_exit.set())
    board.connect(peer, epoch).result(WAIT_S)
    told_to_exit.wait()


def flood(connector: GlooConnector, peers: list[str]) -> None:
    """Send large messages to all peers at once, print the sums of what comes back, and stay until stdin ends."""
    sums: dict[str, list[int]] = {peer: [] for peer in peers}
    changed = threading.Condition()

    def add(sender: str, message: Message) -> None:
        with changed:
            sums[sender].append(int(message.tensors[0].sum(dtype=torch.int64)))
            changed.notify()

    board = Switchboard(connector.worker, connector, add, lambda *_: None)
    links = [future.result(WAIT_S) for future in [board.connect(peer, 1) for peer in peers]]
    for index in range(FLOOD_MESSAGES):
        for link in links:
            link.send(Message(0, index, 0, b"", (torch.full((FLOOD_BYTES,), index + 1, dtype=torch.uint8),)))
    with changed:
        changed.wait_for(lambda: all(len(each) == FLOOD_MESSAGES for each in sums.values()), WAIT_S)
    print(json.dumps(sums), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    what, port, timeout_s, worker, *arguments = sys.argv[1:]
    made = GlooConnector(
        worker,
        "127.0.0.1",
        RendezvousAddress("127.0.0.1", int(port)),
        LinkSettings(timeout_s=float(timeout_s), connect_timeout_s=WAIT_S),
    )
    if what == "echo":
        echo(made, arguments[0], int(arguments[1]))
    else:
        flood(made, arguments)
