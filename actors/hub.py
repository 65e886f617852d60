"""A model's files from the Hugging Face Hub, or a quick and whole answer why not."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError

PROBE_TIMEOUT_S = 4.0
"""How long the Hub may take to answer at all before it counts as unreachable."""

_FILES = [
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
]
_PICKLES = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
# Folders hold the same model for other runtimes; consolidated.* are the same weights under their first names.
_NOT_NEEDED = ["*/*", "consolidated*"]


class HubError(RuntimeError):
    """The Hub can't give the model; the message says what was asked and what came of it."""


def cached_snapshot(repo_id: str) -> Path | None:
    """The folder of an earlier, finished download of the repository's main branch; None if there is none.

    Another program may have left only some of the files that we need: the caller checks.
    """
    try:
        return Path(
            snapshot_download(repo_id, local_files_only=True, allow_patterns=_FILES, ignore_patterns=_NOT_NEEDED)
        )
    except (LocalEntryNotFoundError, IncompleteSnapshotError):
        return None


def download_snapshot(repo_id: str) -> Path:
    """Fetches the files that serving needs and returns their folder in the Hub's own cache.

    Weights are taken as safetensors; only a repository that has none is asked for its PyTorch files.

    Raises: HubError.
    """
    if constants.is_offline_mode():
        raise HubError("not asked: HF_HUB_OFFLINE is set")
    _probe(constants.ENDPOINT)
    try:
        folder = Path(snapshot_download(repo_id, allow_patterns=_FILES, ignore_patterns=_NOT_NEEDED))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(repo_id, allow_patterns=_FILES + _PICKLES, ignore_patterns=_NOT_NEEDED))
    except (
        Exception
    ) as error:  # the library's, its HTTP client's or the system's: for us each means "no model from here"
        raise HubError(f"{constants.ENDPOINT} answered, but not with {repo_id}: {_first_line(error)}") from error
    return folder


def _probe(endpoint: str) -> None:
    """Returns if the endpoint answers HTTP at all, with whatever status.

    In a thread of its own, because looking a name up can hang far longer than any timeout that the client takes.

    Raises: HubError: no answer within PROBE_TIMEOUT_S.
    """
    outcome: list[str] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=PROBE_TIMEOUT_S):
                outcome.append("")
        except urllib.error.HTTPError:
            outcome.append("")
        except (OSError, ValueError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            outcome.append("no answer in time" if isinstance(reason, socket.timeout) else _first_line(reason))

    thread = threading.Thread(target=ask, daemon=True, name="hub-probe")
    thread.start()
    thread.join(PROBE_TIMEOUT_S + 1)
    failure = outcome[0] if outcome else "no answer in time"
    if failure:
        raise HubError(f"{endpoint} can't be reached ({failure})")


def _first_line(error: object) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
