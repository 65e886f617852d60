"""The app that the tests of API keys share, with the official client of two of its five keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from app.api_keys import new_key
from tests.openai_app import OpenAIApp, RawAnswer, send
from tests.running_app import Deploy, RunningApp, small_roles

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Keys:
    """Carol may have one request at a time; erin goes before others, and dave after them."""

    file: Path
    alice: str
    bob: str
    carol: str
    erin: str
    dave: str

    @classmethod
    def made_in(cls, folder: Path) -> Keys:
        """Writes the key file."""
        file = folder / "keys.txt"
        limits = {"alice": "", "bob": "", "carol": " max_inflight=1", "erin": " priority=-5", "dave": " priority=5"}
        keys, lines = zip(*(new_key(name) for name in limits), strict=True)
        text = "\n".join(line + limit for line, limit in zip(lines, limits.values(), strict=True))
        file.write_text(f"# who may come in\n{text}\n", encoding="utf-8")
        return cls(file, *keys)


@dataclass(frozen=True)
class KeyedApp:
    app: RunningApp
    keys: Keys
    alice: OpenAIApp
    bob: OpenAIApp

    def send(self, method: str, path: str, authorization: str | None = None) -> RawAnswer:
        headers = {} if authorization is None else {"Authorization": authorization}
        return send(self.app.base_url, method, path, b"{}" if method != "GET" else b"", headers)


@contextmanager
def deployed_with_keys(deploy: Deploy, keys: Keys) -> Iterator[KeyedApp]:
    """Two requests run at a time."""
    roles = small_roles()
    app = deploy(
        {
            "model": "random/llama-2x4",
            "engine": {"dtype": "float32", "block_tokens": BLOCK_TOKENS},
            "store": {"fetch_timeout_s": 30.0, "pull_timeout_s": 30.0},  # what comes late is no miss here
            **roles,
            "ingress": {**roles["ingress"], "api_keys_file": str(keys.file), "max_inflight_requests": 2},
        }
    )
    keyed = KeyedApp(app, keys, OpenAIApp.of(app, keys.alice), OpenAIApp.of(app, keys.bob))
    with keyed.alice.client, keyed.bob.client:
        yield keyed
