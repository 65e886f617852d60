"""A worker's dealings with the global store: find a request's prefix, bring it into pages, give KV away.

Every failure is a shorter prefix, never an error: what cannot be fetched is computed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.addresses import StoreAddress
from actors.early_start import EarlyStart
from actors.engine.device_event import DeviceEvent
from actors.engine.exports import Export
from actors.engine.layer_arrival import LayerArrival
from actors.engine.loading import LoadedModel
from actors.engine.request import EngineRequest
from actors.exchange_counts import ExchangeCounts
from actors.fetch_rates import FetchRates
from actors.found_prefix import FoundPrefix, tail_of, without_leading
from actors.kv_pages import KvPages, LocalPages, PagesUnavailableError
from actors.messages import HandOver
from actors.page_writer import PageWriter
from kv.directory_client import DirectoryClient
from kv.extents import Lookup, PullReceipt, TailReceipt
from kv.fetch import fetch_parts, fetch_tail
from kv.fetch_choice import FetchRun, runs_of, tokens_that_may_pay, tokens_to_fetch
from kv.keys import block_keys
from kv.part_range import PartRange
from kv.parts import PartHeader, draft_part
from kv.ray_failures import STORE_FAILURES, failure_label

_TIMEOUT = failure_label(TimeoutError())


@dataclass(frozen=True, slots=True)
class _StoreLink:
    """A `StoreAddress` in use."""

    directory: DirectoryClient
    stores: dict[str, Any]
    local_store_id: str


class KvExchange:
    """One worker's. Used from the worker's event loop; copies run in other threads."""

    def __init__(
        self,
        loaded: LoadedModel,
        rates: FetchRates,
        *,
        lease_s: float,
        fetch_timeout_s: float,
        publish_timeout_s: float,
        shares_prefixes: bool = True,
        pages: KvPages | None = None,
    ) -> None:
        """`publish_timeout_s`: above what a pull takes whose own time limits all run out, since it is for a store that
        answers nothing at all. `shares_prefixes` False: nothing is looked up but what was handed over. `pages`: where
        the KV is; None stands for the worker's own, which never move."""
        self.misses: Counter[str] = Counter()
        """By metric label: why something was not fetched, or the store not reached."""
        self.refusals: Counter[str] = Counter()
        """By metric label: why the store did not take something."""
        self.counts = ExchangeCounts()
        self.rates = rates
        """Fed by every fetch."""
        self._loaded = loaded
        self._pages = LocalPages(loaded) if pages is None else pages
        self._lease_s = lease_s
        self._fetch_timeout_s = fetch_timeout_s
        self._publish_timeout_s = publish_timeout_s
        self._shares_prefixes = shares_prefixes
        self._store: _StoreLink | None = None
        self._leases: set[int] = set()

    @property
    def has_store(self) -> bool:
        """Whether there is a store to deal with."""
        return self._store is not None

    def use_store(self, store: StoreAddress) -> None:
        """The store to deal with from now on (it may have been restarted)."""
        directory = None if self._store is None else self._store.directory
        if directory is None or directory.shards != store.directory:
            directory = DirectoryClient(store.directory)
        self._store = _StoreLink(directory, store.stores, store.local_store_id)

    def tokens_in(self, num_blocks: int) -> int:
        """Tokens of so many full blocks."""
        return num_blocks * self._loaded.layout.block_tokens

    async def find(self, request: EngineRequest, hand_over: HandOver | None) -> FoundPrefix | None:
        """Looks up and leases the longest prefix of the request's tokens that is worth its fetch, and its tail when it
        is handed over. A tail that is of no use, since what comes before it is not there, is freed."""
        found, tail = None, tail_of(hand_over)
        try:
            found = await self._find(request, hand_over, tail)
        finally:
            if found is None or found.tail is None:
                self.discard_tail(tail)
        return found

    async def _find(
        self, request: EngineRequest, hand_over: HandOver | None, tail: TailReceipt | None
    ) -> FoundPrefix | None:
        tokens = (*request.prompt_token_ids, *request.output_token_ids)
        layout = self._loaded.layout
        if self._store is None or request.sampling.prompt_logprobs is not None:
            return None
        if hand_over is None and not self._shares_prefixes:
            return None
        # The last token always runs through the model: its logits choose the next one.
        keys = tuple(block_keys(tokens[:-1], layout.block_tokens, self._loaded.fingerprint, request.salt))
        lookup, runs = Lookup(lease_id=None, slices=(), num_blocks=0), list[FetchRun]()
        if keys:
            answer = await self._lookup(self._store.directory, keys)
            if answer is None:
                return None
            lookup = answer
            runs = runs_of(lookup, layout)
            self.counts.looked_up(self.tokens_in(len(keys)), runs)
        is_handed_over, is_begun = hand_over is not None, bool(request.output_token_ids)
        if hand_over is not None and tail is not None and lookup.num_blocks == len(keys):
            found = FoundPrefix(keys, lookup, tail, hand_over.num_tokens, is_handed_over, is_begun)
        else:
            if not is_handed_over:
                # What the worker has itself is not known yet; `fetch` will choose among the rest.
                lookup = self._shortened(lookup, 0, runs, tokens_that_may_pay(runs, self.rates.costs()))
            num_tokens = self.tokens_in(lookup.num_blocks)
            found = FoundPrefix(keys, lookup, None, num_tokens, is_handed_over, is_begun)
        if found.num_tokens == 0:
            self.give_up(found)
            return None
        self._prefetch(found.lookup)
        return found

    def _prefetch(self, lookup: Lookup) -> None:
        """Has what lies on disks brought to DRAM while the request waits its turn. Does not wait."""
        on_disk: dict[str, list[str]] = {}
        for piece in lookup.slices:
            if piece.tier == "disk":
                on_disk.setdefault(piece.store_id, []).extend(part.part_id for part in piece.parts)
        for store_id, part_ids in on_disk.items():
            if self._store is not None and store_id in self._store.stores:
                self._store.stores[store_id].prefetch.remote(part_ids)

    async def _lookup(self, directory: DirectoryClient, keys: Sequence[bytes]) -> Lookup | None:
        """None when the directory cannot be asked. A lease that it grants too late, to a caller that has given up or
        was cancelled, is ended when it comes."""
        answer: asyncio.Task[Lookup] = asyncio.create_task(directory.lookup(keys, self._lease_s))

        def release(late: asyncio.Task[Lookup]) -> None:
            lease_id = None if late.cancelled() or late.exception() is not None else late.result().lease_id
            if lease_id is not None:
                directory.release(lease_id)

        try:
            async with asyncio.timeout(self._fetch_timeout_s):
                lookup = await asyncio.shield(answer)
        except STORE_FAILURES as error:
            self._miss(failure_label(error))
            answer.add_done_callback(release)
            return None
        except asyncio.CancelledError:
            answer.add_done_callback(release)
            raise
        if lookup.lease_id is not None:
            self._leases.add(lookup.lease_id)
        return lookup

    async def fetch(
        self,
        found: FoundPrefix,
        block_ids: Sequence[int],
        first_token: int,
        early: EarlyStart | None = None,
        after: DeviceEvent | None = None,
    ) -> int:
        """Brings the KV of a request's tokens into its blocks, from `first_token` on, and ends the lease.

        Args:
            block_ids: all the request's blocks; nobody else touches their pages until this returns.
            first_token: a multiple of the block size. The KV of the tokens before it is in the blocks already.
            early: told of what arrives and what does not, where the request may be computed meanwhile.
            after: how far the device must have come before the blocks may be written.

        Where computing is faster than fetching, from some place on, the rest is left to be computed.

        Returns:
            The KV of so many tokens, counted from the request's first, is in place: at least `first_token`, and fewer
            than were found when something could not be had.

        When cancelled it ends between two copies: no copy runs on after the call ended.
        """
        store, layout, fingerprint = self._store, self._loaded.layout, self._loaded.fingerprint
        first_block = first_token // layout.block_tokens
        lookup = without_leading(found.lookup, first_block)
        runs = runs_of(lookup, layout, first_block)
        if not found.is_handed_over:
            lookup = self._shortened(lookup, first_block, runs, tokens_to_fetch(runs, self.rates.costs()))
            runs = runs[: len(lookup.slices)]
        end_block, tail_tokens = lookup.num_blocks, 0
        tail, lease_id = found.tail, found.lookup.lease_id
        writer = PageWriter(self._pages, after)
        failures: list[str] = []

        def lose(label: str, num_blocks: int) -> None:
            nonlocal end_block
            failures.append(label)
            end_block = num_blocks
            if early is not None:
                early.fail()

        try:
            if store is None:
                return first_token
            if tail is not None and lookup.num_blocks == layout.full_blocks(found.num_tokens):
                tail_tokens = await self._fetch_tail(store, tail, found.num_tokens, block_ids, writer)
            parts = fetch_parts(
                store.directory, store.stores, lookup, found.keys, layout, fingerprint,
                timeout_s=self._fetch_timeout_s, on_miss=lose,
            )  # fmt: skip
            started_s = asyncio.get_running_loop().time()
            lease_id = None  # from here on it is ended by the iteration
            async with aclosing(parts) as arriving:
                async for got in arriving:
                    skipped = max(0, first_block - got.first_block)
                    wanted = replace(got.part.header.range, num_blocks=got.num_blocks - skipped)
                    payload = got.part.payload[got.first + skipped : got.first + got.num_blocks]
                    stop = got.first_block + got.num_blocks
                    copied = await writer.write(wanted, block_ids[got.first_block + skipped : stop], payload)
                    if early is not None:
                        elapsed_s = asyncio.get_running_loop().time() - started_s
                        num_tokens = self.tokens_in(lookup.num_blocks) + tail_tokens
                        early.arrived(got.num_layers, elapsed_s, num_tokens, copied)
            await writer.finish()
            if set(failures) <= {_TIMEOUT}:  # whatever else goes wrong says nothing of how fast a tier is
                self.rates.fetched(runs, asyncio.get_running_loop().time() - started_s)
            if not found.is_begun:
                self.counts.fetched(runs, self.tokens_in(max(0, end_block - first_block)))
            is_whole = end_block == lookup.num_blocks
            return max(first_block, end_block) * layout.block_tokens + (tail_tokens if is_whole else 0)
        except PagesUnavailableError:
            lose("pages_away", first_block)
            return first_token
        except STORE_FAILURES as error:
            lose(failure_label(error), first_block)
            return first_token
        except BaseException:
            lose("cancelled", first_block)
            raise
        finally:
            self.misses.update(failures)
            self._leases.discard(found.lookup.lease_id or 0)
            if lease_id is not None and store is not None:
                store.directory.release(lease_id)
            self.discard_tail(tail)
            await writer.finish()

    def early_start(self, num_to_compute: int, begin: Callable[[int, LayerArrival], None]) -> EarlyStart:
        """For a fetch whose request may be computed meanwhile; `num_to_compute` tokens are to be computed after it."""
        compute_s = self.rates.compute_s(num_to_compute)
        return EarlyStart(self._loaded.layout.num_layers, compute_s, self._fetch_timeout_s, begin)

    def give_up(self, found: FoundPrefix) -> None:
        """Ends the lease of a prefix that is not fetched after all, and frees its tail. Does not wait."""
        store, lease_id = self._store, found.lookup.lease_id
        if lease_id is not None:
            self._leases.discard(lease_id)
            if store is not None:
                store.directory.release(lease_id)
        self.discard_tail(found.tail)

    def discard_tail(self, tail: TailReceipt | None) -> None:
        """Frees a tail that nobody will claim; one that is claimed or gone is no error. Does not wait."""
        if self._store is not None and tail is not None and tail.tail_id is not None:
            owner = self._store.stores.get(tail.store_id)
            if owner is not None:
                owner.discard_tail.remote(tail.tail_id)

    async def renew_leases(self) -> None:
        """Keeps what queued requests found; to be called every third of the lease."""
        if self._store is not None and self._leases:
            try:
                async with asyncio.timeout(self._fetch_timeout_s):
                    renewed = await self._store.directory.renew(list(self._leases), self._lease_s)
            except STORE_FAILURES as error:
                self._miss(failure_label(error))
                return
            self._leases.intersection_update(renewed)

    async def publish(self, worker: Any, export_id: str, keys: Sequence[bytes], num_tokens: int) -> PullReceipt | None:
        """Lets the node's store pull a finished request's KV. None when there is no store or it cannot be reached."""
        if self._store is None:
            return None
        store = self._store.stores[self._store.local_store_id]
        pull = store.pull.remote(worker, export_id, keys, num_tokens, self._loaded.layout, self._loaded.fingerprint)
        try:
            async with asyncio.timeout(self._publish_timeout_s):
                receipt: PullReceipt = await pull
        except STORE_FAILURES as error:
            self._miss(failure_label(error))
            return None
        self.refusals.update(receipt.refusals)
        return receipt

    def export(self, ranges: Sequence[PartRange], held: Export) -> list[NDArray[np.uint8]]:
        """The encoded parts of what an export holds, one for each range; blocks until they are copied. Raises
        PagesUnavailableError when some of it is on another worker and cannot be had."""
        layout, parts = self._loaded.layout, []
        for part in ranges:
            stop = part.first_block + part.num_blocks
            last = min(held.num_tokens - (stop - 1) * layout.block_tokens, layout.block_tokens)
            header = PartHeader(layout, self._loaded.fingerprint, part, held.keys[part.first_block : stop], last)
            draft = draft_part(header)
            self._pages.read(part, held.block_ids, draft.payload, held.mark)
            parts.append(draft.seal())
        return parts

    def _shortened(self, lookup: Lookup, first_block: int, runs: Sequence[FetchRun], num_tokens: int) -> Lookup:
        """The lookup, whose slices give `runs` from `first_block` on, without what follows their first `num_tokens`
        tokens; that is declined. The lease stays on all of it."""
        declined = list(runs)
        slices = list(lookup.slices)
        while num_tokens:
            num_tokens -= declined.pop(0).num_tokens
        del slices[len(runs) - len(declined) :]
        num_declined = sum(run.num_tokens for run in declined)
        self.counts.declined_tokens += num_declined
        self.rates.declined(declined)
        return replace(
            lookup,
            slices=tuple(slices),
            num_blocks=lookup.num_blocks - num_declined // self._loaded.layout.block_tokens,
        )

    async def _fetch_tail(
        self, store: _StoreLink, tail: TailReceipt, num_tokens: int, block_ids: Sequence[int], writer: PageWriter
    ) -> int:
        """How many tokens of the last block it brought in."""
        layout = self._loaded.layout
        parts = await fetch_tail(
            store.stores, tail, num_tokens, layout, self._loaded.fingerprint,
            timeout_s=self._fetch_timeout_s, on_miss=self._miss,
        )  # fmt: skip
        if parts is None:
            return 0
        block = layout.full_blocks(num_tokens)
        for part in parts:
            await writer.write(part.header.range, block_ids[block : block + 1], part.payload)
        return tail.num_tokens

    def _miss(self, label: str) -> None:
        self.misses[label] += 1
