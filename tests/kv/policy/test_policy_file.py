"""The policy file: what is read, what is written, and what is refused with which words."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv.policy.lru import LruPolicy
from kv.policy.policy_file import GroupTtl, PolicyFileError, PolicySpec, dump, load, make_groups, make_policy

ROOT_A = "0a" * 32
ROOT_B = "b0" * 32
EXAMPLE = f"""
{{
  "version": 1,
  "eviction": "lfu",
  "ttl": {{
    "default_s": 600,
    "groups": [
      {{"name": "support-bot", "root": "{ROOT_A.upper()}", "ttl_s": 7200.5}},
      {{"name": "archive", "root": "{ROOT_B}", "ttl_s": null}}
    ]
  }}
}}
"""


def test_a_file_is_read() -> None:
    assert load(EXAMPLE) == PolicySpec(
        "lfu", 600.0, (GroupTtl("support-bot", b"\x0a" * 32, 7200.5), GroupTtl("archive", b"\xb0" * 32, None))
    )


def test_a_spec_becomes_policy_and_groups() -> None:
    policy, table = make_policy(load(EXAMPLE)), make_groups(load(EXAMPLE))
    assert table.names == ("rest", "support-bot", "archive")
    chain = [b"first", b"\x0a" * 32, b"third"]
    policy.insert(1, table.group_of(0, chain[:1]), 0.0)
    policy.insert(2, table.group_of(0, chain), 0.0)
    policy.insert(3, table.group_of(0, [b"\xb0" * 32]), 0.0)
    policy.use(1, 0.0)
    policy.use(1, 0.0)
    policy.use(2, 0.0)
    assert list(policy.victims(0.0)) == [3, 2, 1]  # by uses
    assert policy.expired(601.0, 10) == [1]
    assert list(policy.victims(1e6)) == [1, 2, 3]


def test_each_call_makes_a_policy_of_its_own() -> None:
    spec = load(EXAMPLE)
    first, second = make_policy(spec), make_policy(spec)
    first.insert(1, 0, 0.0)
    assert len(second) == 0


def test_without_arguments_a_spec_is_plain_lru() -> None:
    policy = make_policy(PolicySpec())
    assert isinstance(policy, LruPolicy)  # times-to-live would cost memory for each entry
    assert make_groups(PolicySpec()).names == ("rest",)
    for handle in (1, 2, 3):
        policy.insert(handle, 0, 0.0)
    policy.use(1, 1.0)
    policy.use(1, 1.0)
    policy.use(2, 1.0)
    policy.use(3, 1.0)
    assert list(policy.victims(1e9)) == [1, 2, 3]
    assert policy.expired(1e9, 10) == []


seconds = st.none() | st.floats(min_value=0, exclude_min=True, allow_infinity=False)
names = st.text(min_size=1).filter(lambda text: text.isprintable() and text == text.strip() and text != "rest")
specs = st.builds(
    PolicySpec,
    st.sampled_from(["lru", "lfu"]),
    seconds,
    st.lists(
        st.builds(GroupTtl, names, st.binary(min_size=32, max_size=32), seconds),
        max_size=5,
        unique_by=(lambda group: group.name, lambda group: group.root),
    ).map(tuple),
)


@given(specs)
def test_what_is_written_is_read_back_the_same(spec: PolicySpec) -> None:
    text = dump(spec)
    assert load(text) == spec
    assert load(text.encode("ascii").decode("utf-8")) == spec
    assert json.loads(text)["version"] == 1


def edited(edit: Callable[[dict[str, Any]], object]) -> str:
    document = json.loads(EXAMPLE)
    edit(document)
    return json.dumps(document)


def with_default(literal: str) -> str:
    return EXAMPLE.replace("600", literal)


A_GROUP = {"name": "third", "root": "cc" * 32, "ttl_s": 1}
SECONDS = "allowed: a finite number of seconds above 0, or null for no limit"
NAME = 'allowed: printable text that begins and ends with no space and is not "rest"'
KEY = "allowed: the key of a block, 64 hexadecimal digits"
REFUSED = {
    "empty": ("", "this is not JSON that can be read: Expecting value: line 1 column 1"),
    "cut short": (EXAMPLE[:60], "this is not JSON that can be read: .*line"),
    "byte order mark": ("\ufeff" + EXAMPLE, "this is not JSON that can be read: .*BOM"),
    "two documents": (EXAMPLE + "{}", "this is not JSON that can be read: Extra data"),
    "nested very deep": ("[" * 100_000, "this is not JSON that can be read: .*recursion"),
    "number of 5000 digits": (with_default("9" * 5000), "this is not JSON that can be read: .*digits"),
    "a list": ("[]", 'the whole file: given a list; allowed: an object with the keys "version", "eviction", "ttl"'),
    "null": ("null", "the whole file: given null; allowed: an object"),
    "no version": (edited(lambda d: d.pop("version")), 'the whole file: key "version" is missing'),
    "later version": ('{"version": 2, "what": "is this"}', "version: given 2; allowed: 1, the version"),
    "version true": (edited(lambda d: d.update(version=True)), "version: given true; allowed: 1"),
    "version 1.0": (edited(lambda d: d.update(version=1.0)), "version: given 1.0; allowed: 1"),
    "version as text": (edited(lambda d: d.update(version="1")), 'version: given "1"; allowed: 1'),
    "unknown key": (edited(lambda d: d.update(evict="lru")), 'the whole file: unknown key "evict"; allowed: "version"'),
    "unknown ttl key": (
        edited(lambda d: d["ttl"].update(default=1)),
        'ttl: unknown key "default"; allowed: "default_s"',
    ),
    "unknown group key": (
        edited(lambda d: d["ttl"]["groups"][1].update(ttl=1)),
        r'ttl\.groups\[1\]: unknown key "ttl"; allowed: "name", "root", "ttl_s"',
    ),
    "missing group key": (
        edited(lambda d: d["ttl"]["groups"][1].pop("ttl_s")),
        r'ttl\.groups\[1\]: key "ttl_s" is missing; required: "name", "root", "ttl_s"',
    ),
    "no groups": (edited(lambda d: d["ttl"].pop("groups")), 'ttl: key "groups" is missing'),
    "key twice": (
        EXAMPLE.replace('"eviction": "lfu"', '"eviction": "lfu", "eviction": "lfu"'),
        'the whole file: key "eviction" is given twice',
    ),
    "group key twice": (
        EXAMPLE.replace('"ttl_s": null', '"ttl_s": null, "ttl_s": null'),
        r'ttl\.groups\[1\]: key "ttl_s" is given twice',
    ),
    "version twice": (EXAMPLE.replace('"version": 1', '"version": 1, "version": 1'), 'key "version" is given twice'),
    "eviction": (edited(lambda d: d.update(eviction="LRU")), 'eviction: given "LRU"; allowed: "lru" or "lfu"'),
    "eviction null": (edited(lambda d: d.update(eviction=None)), "eviction: given null; allowed"),
    "eviction list": (edited(lambda d: d.update(eviction=["lru"])), "eviction: given a list; allowed"),
    "ttl a number": (edited(lambda d: d.update(ttl=5)), 'ttl: given 5; allowed: an object with the keys "default_s"'),
    "groups an object": (
        edited(lambda d: d["ttl"].update(groups={})),
        r"ttl\.groups: given an object; allowed: a list",
    ),
    "group a text": (
        edited(lambda d: d["ttl"]["groups"].append("x")),
        r'ttl\.groups\[2\]: given "x"; allowed: an object',
    ),
    "zero": (with_default("0"), rf"ttl\.default_s: given 0; {SECONDS}"),
    "negative": (with_default("-600"), rf"ttl\.default_s: given -600; {SECONDS}"),
    "NaN": (with_default("NaN"), rf"ttl\.default_s: given NaN; {SECONDS}"),
    "Infinity": (with_default("Infinity"), rf"ttl\.default_s: given Infinity; {SECONDS}"),
    "beyond a float": (with_default("1e999"), rf"ttl\.default_s: given Infinity; {SECONDS}"),
    "int beyond a float": (with_default("9" * 400), rf"ttl\.default_s: given 9{{77}}\.\.\.; {SECONDS}"),
    "below a float": (with_default("1e-999"), rf"ttl\.default_s: given 0.0; {SECONDS}"),
    "true": (with_default("true"), rf"ttl\.default_s: given true; {SECONDS}"),
    "seconds as text": (with_default('"600"'), rf'ttl\.default_s: given "600"; {SECONDS}'),
    "group's seconds": (
        edited(lambda d: d["ttl"]["groups"][1].update(ttl_s=-3)),
        rf"ttl\.groups\[1\]\.ttl_s: given -3; {SECONDS}",
    ),
    "root too short": (
        edited(lambda d: d["ttl"]["groups"][0].update(root="0a" * 31)),
        rf'ttl\.groups\[0\]\.root: given "(0a)+"; {KEY}',
    ),
    "root too long": (edited(lambda d: d["ttl"]["groups"][0].update(root="0a" * 33)), KEY),
    "root no hex": (edited(lambda d: d["ttl"]["groups"][0].update(root="0g" * 32)), KEY),
    "root with spaces": (edited(lambda d: d["ttl"]["groups"][0].update(root="0a 0a " + "0a" * 29)), KEY),
    "root with a line end": (edited(lambda d: d["ttl"]["groups"][0].update(root=ROOT_A + "\n")), KEY),
    "root a number": (edited(lambda d: d["ttl"]["groups"][0].update(root=7)), rf"\.root: given 7; {KEY}"),
    "root twice": (
        edited(lambda d: d["ttl"]["groups"].append({**A_GROUP, "root": ROOT_A})),
        r"ttl\.groups\[2\]\.root: given .*; allowed: one that no other group has \(ttl\.groups\[0\] has this one\)",
    ),
    "name twice": (
        edited(lambda d: d["ttl"]["groups"].append({**A_GROUP, "name": "archive"})),
        r'ttl\.groups\[2\]\.name: given "archive"; allowed: one that no other group has \(ttl\.groups\[1\]',
    ),
    "name empty": (edited(lambda d: d["ttl"]["groups"][0].update(name="")), rf'groups\[0\]\.name: given ""; {NAME}'),
    "name rest": (edited(lambda d: d["ttl"]["groups"][0].update(name="rest")), rf'\.name: given "rest"; {NAME}'),
    "name padded": (edited(lambda d: d["ttl"]["groups"][0].update(name=" a")), NAME),
    "name with a line end": (edited(lambda d: d["ttl"]["groups"][0].update(name="a\nb")), NAME),
    "name half a character": (edited(lambda d: d["ttl"]["groups"][0].update(name="\ud800")), NAME),
    "name null": (edited(lambda d: d["ttl"]["groups"][0].update(name=None)), rf"\.name: given null; {NAME}"),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(text: str, message: str) -> None:
    with pytest.raises(PolicyFileError, match="^policy file: .*" + message):
        load(text)


@given(st.text() | st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists).map(json.dumps))
def test_any_other_text_is_refused_and_nothing_else_is_raised(text: str) -> None:
    with pytest.raises(PolicyFileError, match=re.escape("policy file: ")):
        load(text)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (PolicySpec(default_ttl_s=math.nan), "ttl.default_s: given NaN"),
        (PolicySpec(default_ttl_s=0.0), "ttl.default_s: given 0.0"),
        (PolicySpec(eviction="fifo"), 'eviction: given "fifo"'),  # type: ignore[arg-type]
        (PolicySpec(groups=(GroupTtl("a", b"short", 1.0),)), "ttl.groups[0].root"),
        (PolicySpec(groups=(GroupTtl("a", b"1" * 32, 1.0), GroupTtl("a", b"2" * 32, 1.0))), "ttl.groups[1].name"),
    ],
)
def test_nothing_is_written_that_would_be_refused(spec: PolicySpec, message: str) -> None:
    with pytest.raises(PolicyFileError, match=re.escape(message)):
        dump(spec)


@pytest.mark.parametrize(
    "spec",
    [
        PolicySpec(default_ttl_s=-1.0),
        PolicySpec(eviction="fifo"),  # type: ignore[arg-type]
        PolicySpec(groups=(GroupTtl("a", b"1" * 32, 0.0),)),
    ],
)
def test_no_policy_is_made_of_what_would_be_refused(spec: PolicySpec) -> None:
    with pytest.raises(ValueError, match="is not allowed"):
        make_policy(spec)


def test_no_groups_are_made_of_what_would_be_refused() -> None:
    with pytest.raises(ValueError, match="is that of"):
        make_groups(PolicySpec(groups=(GroupTtl("a", b"1" * 32, 1.0), GroupTtl("b", b"1" * 32, 1.0))))
