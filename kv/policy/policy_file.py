"""The policy file: eviction and times-to-live in JSON, written by a tuner, loaded by the live store and the simulator.

    {
      "version": 1,
      "eviction": "lru",
      "ttl": {
        "default_s": 600,
        "groups": [{"name": "support-bot", "root": "<64 hexadecimal digits>", "ttl_s": 7200}]
      }
    }

`eviction` is "lru" or "lfu". A group is the prefix subtree below the block whose key is `root`; `default_s` is for
whatever lies in none. A time is a number of seconds above 0, or null for no limit. All keys are required and no others
are allowed, so that a misspelt one is not passed over in silence.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast

from kv.policy.groups import REST_NAME, GroupTable
from kv.policy.interface import EvictionPolicy
from kv.policy.lfu import LfuPolicy
from kv.policy.lru import LruPolicy
from kv.policy.ttl import TtlPolicy

VERSION = 1

Eviction = Literal["lru", "lfu"]

_INNER_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LruPolicy, "lfu": LfuPolicy}
_ROOT = re.compile("[0-9a-fA-F]{64}")


class PolicyFileError(ValueError):
    """A policy file that is refused. The message says where, what was given and what is allowed."""


@dataclass(frozen=True, slots=True)
class GroupTtl:
    """A prefix subtree and its time-to-live."""

    name: str
    """Printable, not "rest", and of one group only."""
    root: bytes
    """Key (32 bytes) of the block at its root."""
    ttl_s: float | None
    """None for no limit."""


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """What a policy file says. Without arguments: LRU, and no time-to-live."""

    eviction: Eviction = "lru"
    default_ttl_s: float | None = None
    """For whatever lies in no group; None for no limit."""
    groups: tuple[GroupTtl, ...] = ()

    @property
    def ttls_s(self) -> tuple[float | None, ...]:
        """For `TtlPolicy.set_ttls`: by group number, 0 being the rest."""
        return (self.default_ttl_s, *(group.ttl_s for group in self.groups))


def make_policy(spec: PolicySpec) -> EvictionPolicy:
    """An empty eviction policy; the caller owns it. Its groups are those of `make_groups`.

    Times-to-live cost memory for each entry, and so are there only where something has one.

    Raises:
        ValueError: `spec` holds what `load` would refuse.
    """
    if spec.eviction not in _INNER_POLICIES:
        raise ValueError(f"eviction={spec.eviction!r} is not allowed: give one of {', '.join(_INNER_POLICIES)}")
    policy = _INNER_POLICIES[spec.eviction]()
    return policy if all(ttl_s is None for ttl_s in spec.ttls_s) else TtlPolicy(policy, spec.ttls_s)


def make_groups(spec: PolicySpec) -> GroupTable:
    """The groups that handles are inserted with into policies of `spec`.

    Raises:
        ValueError: `spec` holds what `load` would refuse.
    """
    return GroupTable((group.name, group.root) for group in spec.groups)


def dump(spec: PolicySpec) -> str:
    """The policy file (ASCII) that `load` makes an equal spec of.

    Raises:
        PolicyFileError: `load` would refuse it.
    """
    groups = [{"name": group.name, "root": group.root.hex(), "ttl_s": group.ttl_s} for group in spec.groups]
    ttl = {"default_s": spec.default_ttl_s, "groups": groups}
    text = json.dumps({"version": VERSION, "eviction": spec.eviction, "ttl": ttl}, indent=2) + "\n"
    load(text)
    return text


def load(text: str) -> PolicySpec:
    """Read a policy file.

    Raises:
        PolicyFileError: it is not JSON, or anything in it is not as the module describes.
    """
    try:
        document = json.loads(text, object_pairs_hook=_Object)
    except (ValueError, RecursionError) as error:
        raise PolicyFileError(f"policy file: this is not JSON that can be read: {error}") from error
    # The version first: a file of another version is not measured by the keys of this one.
    if isinstance(document, _Object):
        for version in [value for key, value in document.pairs if key == "version"]:
            if type(version) is not int or version != VERSION:
                _refuse("version", version, f"{VERSION}, the version that this program reads")
    fields = _fields(document, "the whole file", ("version", "eviction", "ttl"))
    eviction = fields["eviction"]
    if not isinstance(eviction, str) or eviction not in _INNER_POLICIES:
        _refuse("eviction", eviction, " or ".join(f'"{name}"' for name in _INNER_POLICIES))
    ttl = _fields(fields["ttl"], "ttl", ("default_s", "groups"))
    default_s = _seconds(ttl["default_s"], "ttl.default_s")
    if not isinstance(ttl["groups"], list):
        _refuse("ttl.groups", ttl["groups"], "a list")
    groups = tuple(_group(entry, f"ttl.groups[{index}]") for index, entry in enumerate(ttl["groups"]))
    _refuse_repeated([group.name for group in groups], "name")
    _refuse_repeated([group.root.hex() for group in groups], "root")
    return PolicySpec(cast(Eviction, eviction), default_s, groups)


@dataclass(frozen=True, slots=True)
class _Object:
    """A JSON object as it was written: its keys may repeat."""

    pairs: list[tuple[str, Any]]


def _group(entry: object, where: str) -> GroupTtl:
    fields = _fields(entry, where, ("name", "root", "ttl_s"))
    name, root = fields["name"], fields["root"]
    if not isinstance(name, str) or not name or name != name.strip() or not name.isprintable() or name == REST_NAME:
        _refuse(f"{where}.name", name, f'printable text that begins and ends with no space and is not "{REST_NAME}"')
    if not isinstance(root, str) or not _ROOT.fullmatch(root):
        _refuse(f"{where}.root", root, "the key of a block, 64 hexadecimal digits")
    return GroupTtl(name, bytes.fromhex(root), _seconds(fields["ttl_s"], f"{where}.ttl_s"))


def _fields(value: object, where: str, allowed: tuple[str, ...]) -> dict[str, Any]:
    keys = ", ".join(f'"{key}"' for key in allowed)
    if not isinstance(value, _Object):
        _refuse(where, value, f"an object with the keys {keys}")
    fields: dict[str, Any] = {}
    for key, field in value.pairs:
        if key not in allowed:
            raise PolicyFileError(f"policy file: {where}: unknown key {_shown(key)}; allowed: {keys}")
        if key in fields:
            raise PolicyFileError(f"policy file: {where}: key {_shown(key)} is given twice; give it once")
        fields[key] = field
    for key in allowed:
        if key not in fields:
            raise PolicyFileError(f'policy file: {where}: key "{key}" is missing; required: {keys}')
    return fields


def _seconds(value: object, where: str) -> float | None:
    if value is None:
        return None
    seconds = math.nan
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:
            seconds = math.inf
    if not 0 < seconds < math.inf:
        _refuse(where, value, "a finite number of seconds above 0, or null for no limit")
    return seconds


def _refuse_repeated(values: Sequence[str], key: str) -> None:
    first: dict[str, int] = {}
    for index, value in enumerate(values):
        if value in first:
            allowed = f"one that no other group has (ttl.groups[{first[value]}] has this one)"
            _refuse(f"ttl.groups[{index}].{key}", value, allowed)
        first[value] = index


def _refuse(where: str, given: object, allowed: str) -> NoReturn:
    raise PolicyFileError(f"policy file: {where}: given {_shown(given)}; allowed: {allowed}")


def _shown(value: object) -> str:
    """As in the file, cut to 80 characters."""
    if isinstance(value, (_Object, list)):
        return "an object" if isinstance(value, _Object) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
