"""API keys: who a request comes from, and the cache salt that keeps one key's KV blocks from another's.

The server knows keys by their SHA-256 only, from a file of lines `name sha256-hex`, with limits behind it if there are
to be any: `requests_per_min=60 max_inflight=4 priority=10`. Keys are long random strings (this
module makes them), so a plain hash is enough; a password would need a slow one.

    python -m app.api_keys new alice --max-inflight 4 >> keys
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import math
import os
import re
import secrets
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from app.key_limits import MAX_PRIORITY, NO_LIMITS, KeyLimits
from kv.exit_status import status_of

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH = re.compile(r"[0-9a-fA-F]{64}")
_NUMBER = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?")
"""Not all that Python reads as one: 1_0 is rather a slip than 10."""
_KEY_PREFIX = "eq-"
_ALLOWED = {
    "requests_per_min": (1e-6, 1e9),
    "max_inflight": (1, 1e9),
    "priority": (-MAX_PRIORITY, MAX_PRIORITY),
}
"""The limits of a key, with the smallest and the largest number for each."""
_MEANINGS = {
    "requests_per_min": "how many requests it may begin in a minute, at each ingress replica; without: any number",
    "max_inflight": "how many it may have at a time, at each ingress replica; without: any number",
    "priority": "the smallest priority of its requests, and what they have when they ask for none; without: 0",
}
"""What `new --help` says of them."""
_MAX_FILE_BYTES = 4 * 1024 * 1024
"""Of a key file; some 50,000 keys, read in a fraction of a second."""
_SALT_DOMAIN = b"equipoise/cache-salt/1"


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a request comes from. `salt` (32 bytes) is secret: whoever knows it can tell what the key's cache holds."""

    name: str
    salt: bytes
    limits: KeyLimits = NO_LIMITS


PUBLIC = Principal("public", hashlib.sha256(_SALT_DOMAIN + b"/public").digest())
"""Everybody, when no keys are configured: all share one cache."""


class ApiKeysError(ValueError):
    """A key file that can't be used; says the line and what is wrong with it."""


class ApiKeys:
    """The keys that are let in. `hashes` maps a name to the SHA-256 of its key, `limits` some names to what they may
    ask for."""

    def __init__(self, hashes: dict[str, bytes], limits: Mapping[str, KeyLimits] = MappingProxyType({})) -> None:
        self._secret = secrets.token_bytes(32)
        self._entries = {
            self._place(digest): (
                digest,
                Principal(name, hmac.digest(digest, _SALT_DOMAIN, "sha256"), limits.get(name, NO_LIMITS)),
            )
            for name, digest in hashes.items()
        }

    @classmethod
    def load(cls, path: str | Path) -> ApiKeys:
        """Reads a key file: UTF-8, one `name sha256-hex`, with any limits, a line; blank lines and lines that begin
        with # are skipped.

        Raises ApiKeysError for a bad line, limits included, a name or a key given twice, and a file without any key
        (which would lock everybody out, and is rather a mistake), and for what is no regular file or too large; OSError
        when the file can't be read.
        """
        try:
            lines = _content(path).decode("utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ApiKeysError(f"{path} is not a text file in UTF-8: {error.reason} at byte {error.start}.") from None
        hashes: dict[str, bytes] = {}
        digests: set[bytes] = set()
        limits: dict[str, KeyLimits] = {}
        for number, line in enumerate(lines, start=1):
            fields = line.split()
            if not fields or fields[0].startswith("#"):
                continue
            if len(fields) < 2 or not _NAME.fullmatch(fields[0]) or not _HASH.fullmatch(fields[1]):
                raise ApiKeysError(
                    f"{path}, line {number}: it must be a name (letters, digits, '.', '_', '-'; at most 64), a space "
                    "and the SHA-256 of the key in 64 hex digits. `python -m app.api_keys new NAME` prints such a line."
                )
            name, digest = fields[0], bytes.fromhex(fields[1])
            if name in hashes:
                raise ApiKeysError(f"{path}, line {number}: the name '{name}' is given twice. Choose another name.")
            if digest in digests:
                raise ApiKeysError(f"{path}, line {number}: the key of '{name}' is given twice. Make a new one for it.")
            hashes[name] = digest
            digests.add(digest)
            limits[name] = _limits(fields[2:], f"{path}, line {number}")
        if not hashes:
            raise ApiKeysError(f"{path} has no keys. Add a line with `python -m app.api_keys new NAME`.")
        return cls(hashes, limits)

    def authenticate(self, header: str | None) -> Principal | None:
        """Whose key an `Authorization` header ("Bearer KEY") carries; None when it is nobody's.

        Its time tells nothing about the keys: an entry is looked up at a place that nobody outside can work out, and
        compared in constant time.
        """
        scheme, _, key = (header or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogatepass")).digest()
        entry = self._entries.get(self._place(digest))
        if scheme.lower() != "bearer" or entry is None or not hmac.compare_digest(digest, entry[0]):
            return None
        return entry[1]

    def _place(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def derive_salt(salt: bytes, cache_salt: str | None) -> bytes:
    """The salt of a request's KV blocks (32 bytes): the key's `salt`, narrowed by the client's `cache_salt`, if any.

    Two different pairs never give the same salt: the fields are length-prefixed before they are hashed, so a client can
    part its own cache further, but never reach into another key's.
    """
    fields = [salt] if cache_salt is None else [salt, cache_salt.encode("utf-8", "surrogatepass")]
    digest = hashlib.sha256(_SALT_DOMAIN + b"/narrowed")
    for field in fields:
        digest.update(len(field).to_bytes(8, "big") + field)
    return digest.digest()


def _content(path: str | Path) -> bytes:
    # O_NONBLOCK: to open a pipe would wait for who writes to it.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ApiKeysError(f"{path} is no regular file. Write the keys to one, and name that.")
        content = file.read(_MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        raise ApiKeysError(f"{path} is longer than {_MAX_FILE_BYTES} bytes. Take out the keys that nobody uses.")
    return content


def _limits(fields: Sequence[str], place: str) -> KeyLimits:
    """From `requests_per_min=60 max_inflight=4 priority=10`, in any order. Raises ApiKeysError, which says what is
    allowed."""
    given: dict[str, float] = {}
    for field in fields:
        name, _, value = field.partition("=")
        number = float(value) if _NUMBER.fullmatch(value) else math.nan
        if name in given or not _is_allowed(name, number):
            raise ApiKeysError(
                f"{place}: {field[:40]!r} is no limit, or given twice. Allowed are requests_per_min= with a number "
                "above 0, max_inflight= with a whole number of at least 1, and priority= with a whole number from "
                f"{-MAX_PRIORITY} to {MAX_PRIORITY}."
            )
        given[name] = number
    inflight = given.get("max_inflight")
    return KeyLimits(
        given.get("requests_per_min"), None if inflight is None else int(inflight), int(given.get("priority", 0))
    )


def _is_allowed(name: str, number: float) -> bool:
    least, most = _ALLOWED.get(name, (math.inf, -math.inf))
    return least <= number <= most and (name == "requests_per_min" or number.is_integer())


def new_key(name: str, limits: Sequence[str] = ()) -> tuple[str, str]:
    """(a fresh key of 256 random bits, its line for the key file). `limits` as they stand there, `priority=10`. Raises
    ApiKeysError for a name or a limit that can't be one."""
    if not _NAME.fullmatch(name):
        raise ApiKeysError(f"{name[:80]!r} is no name for a key: use 1 to 64 letters, digits, '.', '_' and '-'.")
    _limits(limits, f"key of {name}")
    key = _KEY_PREFIX + secrets.token_urlsafe(32)
    return key, " ".join([name, hashlib.sha256(key.encode()).hexdigest(), *limits])


def main(arguments: Sequence[str] | None = None) -> None:
    if sys.stderr is None:  # closed: the key, or what is wrong, would be printed to the output, and so to the key file
        sys.exit(2)
    parser = argparse.ArgumentParser(
        prog="python -m app.api_keys",
        description="Make API keys. The server keeps a file with their names and hashes; the keys go to the clients.",
        epilog="example:\n  python -m app.api_keys new alice >> keys\n\n"
        "shows alice's key, once, on the error output, and adds its line to the server's key file, here `keys`.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser(
        "new",
        help="show a fresh key, once, on the error output, and print its line for the key file",
        description="Show a fresh key, once, on the error output, and print its line for the key file.",
        epilog="examples:\n  python -m app.api_keys new alice >> keys\n"
        "  python -m app.api_keys new bob --requests-per-min 60 --priority 5 >> keys",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    new.add_argument("name", metavar="NAME", help="who the key is for: letters, digits, '.', '_' and '-'")
    for limit, meaning in _MEANINGS.items():
        new.add_argument(f"--{limit.replace('_', '-')}", metavar="NUMBER", help=meaning)
    given = parser.parse_args(arguments)
    try:
        limits = [f"{limit}={value}" for limit in _MEANINGS if (value := getattr(given, limit)) is not None]
        key, line = new_key(given.name, limits)
    except ApiKeysError as error:
        parser.error(str(error))
    if sys.stdout is None:
        parser.error("the line for the key file has nowhere to go, so no key was made. Give it an output: >> keys")
    print(line, flush=True)  # first: a key whose line is lost lets nobody in
    print(f"key of {given.name}, shown only now: {key}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(status_of(main))
