"""Parts that come one after the other, for several readers."""

from __future__ import annotations

import asyncio

from kv.extent_read import ExtentRead


def test_each_part_is_had_as_soon_as_it_is_there() -> None:
    async def run() -> None:
        reading = ExtentRead(3)
        readers = [asyncio.create_task(reading.part(index)) for index in (2, 0, 1, 0)]
        await asyncio.sleep(0)
        for number, done in enumerate(([1, 3], [1, 2, 3], [0, 1, 2, 3])):
            reading.has_read(f"ref {number}")
            await asyncio.wait(readers, timeout=0.01)
            assert [place for place, reader in enumerate(readers) if reader.done()] == done
        reading.end()
        assert [reader.result() for reader in readers] == ["ref 2", "ref 0", "ref 1", "ref 0"]
        assert await reading.part(1) == "ref 1"

    asyncio.run(run())


def test_what_was_not_read_at_the_end_cannot_be_had() -> None:
    async def run() -> None:
        reading = ExtentRead(3)
        waiting = asyncio.create_task(reading.part(1))
        reading.has_read("ref")
        reading.end()
        reading.end()
        assert await waiting is None
        assert [await reading.part(index) for index in (-1, 0, 1, 2, 3)] == [None, "ref", None, None, None]

    asyncio.run(run())


def test_a_reader_that_gives_up_takes_nothing_from_the_others() -> None:
    async def run() -> None:
        reading = ExtentRead(1)
        leaving, staying = asyncio.create_task(reading.part(0)), asyncio.create_task(reading.part(0))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait({leaving})
        reading.has_read("ref")
        assert await staying == "ref"
        assert leaving.cancelled()

    asyncio.run(run())
