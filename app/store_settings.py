"""Settings of the global KV store."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from app.settings_block import MAX_GIB, SettingsBlock
from kv.policy.policy_file import PolicyFileError, PolicySpec, load


class DiskSettings(SettingsBlock):
    """The store's disk tier. Every node has one of its own."""

    limit_gib: float = Field(
        default=0.0,
        ge=0,
        le=MAX_GIB,
        description="Everything in the folder takes at most so many GiB, on each node. 0: no disk tier.",
    )
    folder: str = Field(
        default="~/.cache/equipoise/kv",
        min_length=1,
        description="Folder for KV on each node's own disk, of one application alone; made when it is not there. It "
        "holds what users' prompts were turned into: protect it like the prompts.",
    )
    admission: Literal["always", "on_reuse"] = Field(
        default="always",
        description="What is written. always: all that is stored. on_reuse: what is used again, which spares the disk "
        "writes but loses the rest at a restart.",
    )
    remove_leftovers: bool = Field(
        default=True,
        description="Whether broken and unfinished files in the folder are removed when it is opened. false: they stay "
        "and count.",
    )


class StoreSettings(SettingsBlock):
    """The global KV store."""

    dram_gib: float = Field(
        default=1.0,
        ge=0,
        le=MAX_GIB,
        description="KV kept in each node's object store at most, in GiB; keep it well below the object store's size. "
        "0: none, so that decode workers compute prompts again.",
    )
    share_prefixes: bool = Field(
        default=True,
        description="Whether workers look in the store for what others computed. false: each finds only what its own "
        "pool still holds, and dispatch counts on nothing stored. Hand-overs to decode workers go through the store "
        "all the same; answers are not stored, and in mode monolithic there is no store.",
    )
    disk: DiskSettings = Field(default_factory=DiskSettings, description="The disk tier.")
    eviction: Literal["lru", "lfu"] = Field(
        default="lru",
        description="What makes room for others first, in each tier: the least recently or the least frequently used.",
    )
    ttl_s: float | None = Field(
        default=None,
        gt=0,
        description="What was not used for so many seconds goes, even where there is room. A preference: under "
        "pressure others go before their time. null: no limit.",
    )
    policy_file: str | None = Field(
        default=None,
        min_length=1,
        description="File with eviction and times-to-live of groups of prefixes, read when the application is built. "
        "Takes the place of eviction and ttl_s.",
    )
    max_publishing_answers: int = Field(
        default=8,
        ge=0,
        description="Ended answers whose KV the store takes over from one worker at a time, so that the next "
        "turn of a chat finds it; an answer that ends meanwhile is not stored. 0: no answers are stored.",
    )
    lease_s: float = Field(
        default=30.0, gt=0, description="Seconds that a hold on stored KV lasts unless it is renewed."
    )
    fetch_timeout_s: float = Field(
        default=5.0, gt=0, description="Seconds until a fetch that has not arrived counts as a miss."
    )
    pull_timeout_s: float = Field(
        default=5.0, gt=0, description="Seconds until taking a worker's parts over is given up."
    )
    layer_groups: int = Field(
        default=1,
        ge=1,
        description="Groups of layers, at least, that stored KV is cut into; fewer where parts would be too small. "
        "1: cut by size alone.",
    )
    directory_shards: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Actors that the directory of stored blocks is divided over, by the first blocks of prompts. More "
        "than 1 only where one answers too slowly; see design-decisions.md.",
    )

    @model_validator(mode="after")
    def _policy_is_given_once(self) -> StoreSettings:
        given = sorted({"eviction", "ttl_s"} & self.model_fields_set)
        if self.policy_file is not None and given:
            raise ValueError(f"policy_file says what {' and '.join(given)} would: give the file or these, not both")
        return self

    def policy(self) -> PolicySpec:
        """Eviction and times-to-live. Reads `policy_file`, if one is given.

        Raises:
            PolicyFileError: it cannot be read, or is not a policy file.
        """
        if self.policy_file is None:
            return PolicySpec(self.eviction, self.ttl_s)
        path = Path(self.policy_file)
        try:
            path = path.expanduser()
            text = path.read_text("utf-8")
        # RuntimeError: nobody has that home folder. ValueError: no text, or no name that a file can have.
        except (OSError, RuntimeError, ValueError) as error:
            raise PolicyFileError(f"store.policy_file {path} cannot be read ({error}): give a readable file") from error
        try:
            return load(text)
        except PolicyFileError as error:
            raise PolicyFileError(f"store.policy_file {path}: {error}") from error
