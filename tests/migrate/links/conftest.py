from __future__ import annotations

from collections.abc import Iterator

import pytest

from migrate.links.rendezvous import RendezvousAddress, make_rendezvous


@pytest.fixture(scope="module")
def rendezvous() -> Iterator[RendezvousAddress]:
    store, address = make_rendezvous("127.0.0.1")
    yield address
    # What was connected, and what failed to, has left nothing in it.
    assert store.num_keys() == 0
