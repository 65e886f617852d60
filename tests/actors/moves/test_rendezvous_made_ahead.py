from __future__ import annotations

import asyncio
import contextlib

from actors.moves.control_links import ControlLinks
from actors.worker_settings import MoveLimits
from migrate.roster import Roster


def test_what_links_need_is_made_once_whoever_gives_up() -> None:
    async def run() -> None:
        links = ControlLinks(Roster(), MoveLimits())
        links.prepare()
        order = asyncio.create_task(links._made_rendezvous())
        await asyncio.sleep(0)
        order.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await order
        store, address = await links._made_rendezvous()
        links.prepare()
        again, _ = await links._made_rendezvous()
        assert again is store
        assert address.port > 0

    asyncio.run(run())
