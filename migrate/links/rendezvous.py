"""Where workers find each other: a small key-value store in a process that outlives them."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_distributed: Any = torch.distributed  # whose stubs do not say what it exports


@dataclass(frozen=True, slots=True)
class RendezvousAddress:
    """Where a rendezvous listens."""

    host: str
    port: int


def make_rendezvous(host: str) -> tuple[TCPStore, RendezvousAddress]:
    """Start a rendezvous on a free port of `host`, an address of this machine that all workers reach.

    It lives as long as the store that is returned. It has no authentication, so it listens on that address alone.

    Raises:
        OSError: an address that is not this machine's.
    """
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = _distributed.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )  # which owns the socket from here on
    return store, RendezvousAddress(host, port)


def forget_keys(store: TCPStore, name: str) -> None:
    """Remove what the attempt `name` has left in the store, if that still answers.

    Both ends know each other by then or never will, and workers that come and go must not fill it.
    """
    with contextlib.suppress(RuntimeError):
        for key in store.list_keys():
            if key.startswith(f"{name}/"):
                store.delete_key(key)
