"""Whose stored blocks are whose: counted in the directory, beside what answers say of themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import ray

from actors.addresses import address_of
from app.api_keys import ApiKeys, derive_salt
from kv.keys import block_keys
from kv.wire import pack_keys
from tests.app_insides import directory, store_stats
from tests.engine_driver import make_prompt
from tests.keyed_app import BLOCK_TOKENS, KeyedApp
from tests.openai_app import OpenAIApp, cached_tokens
from tests.running_app import RunningApp, wait_until

pytestmark = pytest.mark.cluster

BLOCKS = 10


@dataclass(frozen=True)
class Tenants:
    app: RunningApp
    clients: dict[str, OpenAIApp]
    secrets: dict[str, str]
    keys: ApiKeys

    def ask(self, name: str, prompt: tuple[int, ...], **more: Any) -> tuple[int, int]:
        """(cached tokens of the answer, blocks that are stored since)"""
        before = store_stats()["directory"]["num_blocks"]
        answer = self.clients[name].complete(list(prompt), max_tokens=4, ignore_eos=True, **more)
        self.wait_stored()
        return cached_tokens(answer), store_stats()["directory"]["num_blocks"] - before

    def wait_stored(self) -> None:
        wait_until(lambda: self.app.total("tracked_requests") == 0, 30.0, "something is still being stored")

    def visible(self, name: str, prompt: tuple[int, ...]) -> int:
        """Blocks of a prompt that are stored for a tenant."""
        principal = self.keys.authenticate(f"Bearer {self.secrets[name]}")
        assert principal is not None
        fingerprint = address_of(self.app.members()[0]).facts.fingerprint
        keys = block_keys(prompt, BLOCK_TOKENS, fingerprint, derive_salt(principal.salt, None))
        num_blocks: int = ray.get(directory().match_blocks.remote(pack_keys(keys)), timeout=30)
        return num_blocks


@pytest.fixture
def tenants(keyed_app: KeyedApp) -> Tenants:
    tenants = Tenants(
        keyed_app.app,
        {"alice": keyed_app.alice, "bob": keyed_app.bob},
        {"alice": keyed_app.keys.alice, "bob": keyed_app.keys.bob},
        ApiKeys.load(keyed_app.keys.file),
    )
    tenants.wait_stored()
    return tenants


def prompt(seed: int) -> tuple[int, ...]:
    return make_prompt(BLOCKS * BLOCK_TOKENS + 3, seed, vocab=250)


HIT = (BLOCKS * BLOCK_TOKENS, 0)
NEW = (0, BLOCKS)
"""Nothing was cached, and all blocks were stored anew."""


def test_two_keys_share_no_block_and_one_key_all(tenants: Tenants) -> None:
    asked = prompt(1)
    assert tenants.ask("alice", asked) == NEW
    assert [tenants.visible(name, asked) for name in ("alice", "bob")] == [BLOCKS, 0]
    assert tenants.ask("alice", asked) == HIT
    assert tenants.ask("bob", asked) == NEW
    assert [tenants.visible(name, asked) for name in ("alice", "bob")] == [BLOCKS, BLOCKS]
    assert tenants.ask("bob", asked) == HIT
    assert tenants.ask("alice", asked) == HIT


def test_a_salt_of_the_request_parts_one_keys_blocks_further(tenants: Tenants) -> None:
    asked = prompt(2)
    assert tenants.ask("alice", asked, cache_salt="one") == NEW
    assert tenants.visible("alice", asked) == 0
    assert tenants.ask("alice", asked, cache_salt="one") == HIT
    assert tenants.ask("alice", asked, cache_salt="two") == NEW
    assert tenants.ask("alice", asked) == NEW
    assert tenants.visible("alice", asked) == BLOCKS
    # The same salt under another key is another one.
    assert tenants.ask("bob", asked, cache_salt="one") == NEW
    assert [tenants.ask("alice", asked, cache_salt=salt) for salt in ("one", "two")] == [HIT, HIT]
