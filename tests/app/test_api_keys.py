from __future__ import annotations

import hashlib
import hmac
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api_keys import PUBLIC, ApiKeys, ApiKeysError, derive_salt, main, new_key
from app.key_limits import KeyLimits


def line(name: str, key: str) -> str:
    return f"{name} {hashlib.sha256(key.encode()).hexdigest()}"


def write(folder: Path, *lines: str) -> Path:
    path = folder / "keys"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    return ApiKeys.load(
        write(
            tmp_path,
            "# who may come in",
            "",
            line("alice", "key-a"),
            "  ",
            line("bob", "key-b").upper().replace("BOB", "bob"),
        )
    )


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("Bearer key-a", "alice"),
        ("bearer key-b", "bob"),
        ("Bearer   key-b ", "bob"),
    ],
)
def test_a_known_key_is_let_in(keys: ApiKeys, header: str, name: str) -> None:
    principal = keys.authenticate(header)
    assert principal is not None
    assert principal.name == name


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "key-a",
        "Basic key-a",
        "Bearer key-c",
        "Bearer key-a key-b",
        "Bearer alice",
        "Bearer KEY-A",
        "Bearer " + hashlib.sha256(b"key-a").hexdigest(),
        "Bearer ключ",
        "Bearer \udcff",
    ],
)
def test_anything_else_is_not(keys: ApiKeys, header: str | None) -> None:
    assert keys.authenticate(header) is None


def test_the_salt_is_the_keys_own_and_comes_from_the_server(keys: ApiKeys) -> None:
    alice, bob = keys.authenticate("Bearer key-a"), keys.authenticate("Bearer key-b")
    assert alice is not None
    assert bob is not None
    assert len({alice.salt, bob.salt, PUBLIC.salt}) == 3
    digest = hashlib.sha256(b"key-a").digest()
    assert alice.salt == hmac.new(digest, b"equipoise/cache-salt/1", hashlib.sha256).digest()
    assert alice.salt != digest


def test_two_loads_give_the_same_salt(tmp_path: Path) -> None:
    path = write(tmp_path, line("alice", "key-a"))
    first, second = (ApiKeys.load(path).authenticate("Bearer key-a") for _ in range(2))
    assert first == second


GOOD = line("alice", "key-a")


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("alice", "it must be a name"),
        ("alice abc", "it must be a name"),
        ("carol " + "0" * 64 + " extra", "'extra' is no limit"),
        ("al/ice " + "0" * 64, "it must be a name"),
        ("a" * 65 + " " + "0" * 64, "it must be a name"),
        ("bob " + "g" * 64, "it must be a name"),
        ("bob " + "0" * 63, "it must be a name"),
        (line("alice", "another"), "'alice' is given twice"),
        (line("bob", "key-a"), "the key of 'bob' is given twice"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(tmp_path: Path, bad: str, said: str) -> None:
    with pytest.raises(ApiKeysError, match=rf"line 3: .*{said}"):
        ApiKeys.load(write(tmp_path, "# keys", GOOD, bad))


def test_the_hash_of_a_key_is_not_quoted_in_errors(tmp_path: Path) -> None:
    with pytest.raises(ApiKeysError) as error:
        ApiKeys.load(write(tmp_path, f"{GOOD} extra"))
    assert GOOD.split()[1] not in str(error.value)


def test_a_file_without_keys_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ApiKeysError, match="has no keys"):
        ApiKeys.load(write(tmp_path, "# nobody"))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ApiKeysError, match="not a text file in UTF-8"):
        ApiKeys.load(path)


def test_the_form_of_the_narrowed_salt() -> None:
    """Pinned: stored KV blocks are found again only under the same salt."""

    def field(value: bytes) -> bytes:
        return len(value).to_bytes(8, "big") + value

    want = hashlib.sha256(b"equipoise/cache-salt/1/narrowed" + field(b"s" * 32) + field("für mich".encode())).digest()
    assert derive_salt(b"s" * 32, "für mich") == want
    assert derive_salt(PUBLIC.salt, None).hex() == "fd5e61382f913943a07fe000546e06fb5ed9ef2a3441594fff1c57006261ddec"


salts = st.tuples(st.binary(max_size=4), st.none() | st.text(max_size=4))


@given(salts, salts)
def test_two_different_pairs_never_share_a_salt(one: tuple[bytes, str | None], other: tuple[bytes, str | None]) -> None:
    assert (derive_salt(*one) == derive_salt(*other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((b"ab", "c"), (b"a", "bc")),
        ((b"ab", ""), (b"ab", None)),
        ((b"ab", ""), (b"", "ab")),
        ((b"", "\x00"), (b"\x00", "")),
    ],
)
def test_fields_do_not_run_into_each_other(one: tuple[bytes, str | None], other: tuple[bytes, str | None]) -> None:
    assert derive_salt(*one) != derive_salt(*other)


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ApiKeysError, match="is no regular file"):
        ApiKeys.load(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError):
        ApiKeys.load(tmp_path)


def test_a_file_is_as_long_as_the_limit_at_most(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    with path.open("ab") as file:
        file.write(b"\n" * (4 * 1024 * 1024 - file.tell()))
    assert ApiKeys.load(path).authenticate("Bearer key-a") is not None
    with path.open("ab") as file:
        file.write(b"\n")
    with pytest.raises(ApiKeysError, match="longer than 4194304 bytes"):
        ApiKeys.load(path)


def test_a_new_key_works_with_its_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "app.api_keys", "new", "carol"], capture_output=True, text=True, check=True
    )
    path = write(tmp_path, GOOD)
    with path.open("a", encoding="utf-8") as file:
        file.write(done.stdout)
    key = done.stderr.strip().rpartition(" ")[2]
    assert key not in done.stdout
    principal = ApiKeys.load(path).authenticate(f"Bearer {key}")
    assert principal is not None
    assert principal.name == "carol"


def test_a_new_key_has_its_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["new", "alice", "--priority", "-5", "--requests-per-min", "0.5", "--max-inflight", "4"])
    said = capsys.readouterr()
    file = tmp_path / "keys"
    file.write_text(said.out, encoding="utf-8")
    found = ApiKeys.load(file).authenticate("Bearer " + said.err.split()[-1])
    assert found is not None
    assert (found.name, found.limits) == ("alice", KeyLimits(0.5, 4, -5))


def test_a_new_key_with_a_wrong_limit_is_not_made(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["new", "alice", "--max-inflight", "0"])
    said = capsys.readouterr()
    assert said.out == ""
    assert "'max_inflight=0' is no limit" in said.err
    assert "eq-" not in said.err


@pytest.mark.parametrize("output", [">&-", "> /dev/full", "2>&-", ">&- 2>&-"])
def test_no_key_is_made_where_half_of_it_would_be_lost(output: str) -> None:
    command = f'"{sys.executable}" -m app.api_keys new carol {output}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "eq-" not in done.stderr


def test_keys_are_fresh_and_long() -> None:
    made = {new_key("a")[0] for _ in range(100)}
    assert len(made) == 100
    assert min(map(len, made)) >= 43


@pytest.mark.parametrize("arguments", [["--help"], ["new", "--help"]])
def test_help_shows_an_example(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    assert "python -m app.api_keys new alice >> keys" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["", "two words", "ключ", "x" * 65, "a\nb"])
def test_a_bad_name_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["new", name])
    assert end.value.code == 2
    assert "is no name for a key" in capsys.readouterr().err


def test_limits_stand_behind_the_hash(tmp_path: Path) -> None:
    made, lines = zip(*(new_key(name) for name in ("free", "slow", "both", "ahead", "last")), strict=True)
    limits = ["", " requests_per_min=0.5", " max_inflight=3  requests_per_min=60", " priority=-100", " priority=7"]
    path = tmp_path / "keys"
    path.write_text("\n".join(line + limit for line, limit in zip(lines, limits, strict=True)))
    keys = ApiKeys.load(path)
    principals = [keys.authenticate(f"Bearer {key}") for key in made]
    assert [None if principal is None else principal.limits for principal in principals] == [
        KeyLimits(), KeyLimits(requests_per_min=0.5), KeyLimits(60.0, 3), KeyLimits(priority=-100),
        KeyLimits(priority=7),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "limit",
    ["60", "priority=1_0", "priority=1e1", "priority= 7",
     "max_inflight=0", "max_inflight=1.5", "max_inflight=x", "requests_per_min=-1", "requests_per_min=0",
     "requests_per_min=nan", "requests_per_min=inf", "tokens=5", "max_inflight=1 max_inflight=2",
     "priority=101", "priority=-101", "priority=0.5", "priority=", "priority=1 priority=1"],
)  # fmt: skip
def test_bad_limits_are_refused_with_their_line(tmp_path: Path, limit: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# keys\n{new_key('a')[1]} {limit}\n")
    with pytest.raises(ApiKeysError, match=r"line 2: .*requests_per_min= with a number above 0"):
        ApiKeys.load(path)
