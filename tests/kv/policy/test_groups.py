"""Groups as subtrees of chains of keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv.keys import block_keys
from kv.policy.groups import GroupTable

# A block of a chain is named by the path to it in a binary tree.
paths = st.text("01", min_size=1, max_size=7)


def chain(path: str) -> list[bytes]:
    return [path[: end + 1].encode() for end in range(len(path))]


@given(st.lists(paths, unique=True, max_size=6), paths, st.data())
def test_the_deepest_root_on_the_chain_wins_however_the_chain_is_cut(
    roots: list[str], path: str, data: st.DataObject
) -> None:
    table = GroupTable((f"below {root}", root.encode()) for root in roots)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(path)))) | {len(path)})
    group, start = 0, 0
    for stop in cuts:
        group = table.group_of(group, chain(path)[start:stop])
        start = stop
        above = [root for root in roots if path[:stop].startswith(root)]
        assert table.names[group] == (f"below {max(above, key=len)}" if above else "rest")


def test_real_keys() -> None:
    def keys(tokens: list[int]) -> list[bytes]:
        return block_keys(tokens, 4, b"model", b"salt")

    system_prompt = list(range(8))
    table = GroupTable([("bot", keys(system_prompt)[-1])])
    assert table.group_of(0, keys([*system_prompt, *[90] * 8])) == 1
    assert table.group_of(0, keys([*system_prompt, *[91] * 8])) == 1
    assert table.group_of(0, keys([*system_prompt[:7], 99, *[90] * 8])) == 0
    assert table.group_of(0, block_keys(system_prompt, 4, b"model", b"another tenant")) == 0


def test_without_roots_all_is_the_rest() -> None:
    assert GroupTable().names == ("rest",)
    assert GroupTable().group_of(0, [b"a", b"b"]) == 0


def test_no_keys_leave_the_parents_group() -> None:
    assert GroupTable([("a", b"a"), ("b", b"b")]).group_of(2, []) == 2


@pytest.mark.parametrize(
    ("roots", "message"),
    [
        ([("a", b"1"), ("a", b"2")], "name 'a' is taken"),
        ([("rest", b"1")], "name 'rest' is taken"),
        ([("a", b"1"), ("b", b"1")], "root 31 of group 'b' is that of 'a'"),
    ],
)
def test_ambiguous_roots_are_refused(roots: list[tuple[str, bytes]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupTable(roots)


@pytest.mark.parametrize("parent_group", [-1, 2])
def test_numbers_of_another_table_are_refused(parent_group: int) -> None:
    with pytest.raises(ValueError, match=f"parent_group={parent_group} is not allowed: give 0 to 1"):
        GroupTable([("a", b"a")]).group_of(parent_group, [b"a"])
