from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from migrate.roster import Member, Roster, RosterError, StaleEpochError

P0 = Member("p0", 1, "prefill", "node-a", b"\x01\x02", 16, 100, 2048, handle="handle of p0")
P1 = replace(P0, worker_id="p1", node_id="node-b")
D0 = replace(P0, worker_id="d0", role="decode")


def roster(*members: Member) -> Roster:
    result = Roster()
    for member in members:
        result.join(member)
    return result


def ids(members: tuple[Member, ...]) -> list[str]:
    return [member.worker_id for member in members]


def test_members_are_listed_by_role_and_id() -> None:
    found = roster(P1, D0, P0)
    assert ids(found.members()) == ["d0", "p0", "p1"]
    assert ids(found.members("prefill")) == ["p0", "p1"]
    assert ids(found.members("decode")) == ["d0"]
    assert found.members("monolithic") == ()
    assert found.members("prefill")[0].handle == "handle of p0"


def test_every_change_raises_the_version_by_one_and_nothing_else_does() -> None:
    found = Roster()
    assert found.version == 0
    assert found.join(P0) == 1
    assert found.join(D0) == 2
    assert found.join(D0) == 2
    found.suspect("p0", 1)
    assert found.version == 3
    found.suspect("p0", 1)
    assert found.version == 3
    found.clear("p0", 1)
    assert found.version == 4
    found.clear("p0", 1)
    found.leave("p0", 0)
    found.leave("unknown", 5)
    found.suspect("unknown", 5)
    with pytest.raises(RosterError):
        found.join(replace(P1, block_tokens=32))
    assert found.version == 4
    found.leave("p0", 1)
    assert found.version == 5


def test_a_restart_replaces_the_old_life() -> None:
    found = roster(P0, D0)
    found.suspect("p0", 1)
    found.join(replace(P0, epoch=2, handle="new"))
    assert ids(found.members("prefill")) == ["p0"]
    member = found.get("p0")
    assert member is not None
    assert (member.epoch, member.handle) == (2, "new")
    assert found.is_current("p0", 2)
    assert not found.is_current("p0", 1)


def test_word_of_an_old_life_does_not_touch_the_new_one() -> None:
    found = roster(replace(P0, epoch=2), D0)
    assert not found.leave("p0", 1)
    assert not found.suspect("p0", 1)
    assert ids(found.members("prefill")) == ["p0"]
    with pytest.raises(StaleEpochError, match="'p0' joined with epoch 1; epoch 2 is known"):
        found.join(P0)
    assert found.is_current("p0", 2)


def test_a_dead_worker_does_not_come_back_by_a_late_join() -> None:
    found = roster(P0, D0)
    assert found.leave("p0", 1)
    with pytest.raises(StaleEpochError, match="take a new epoch"):
        found.join(P0)
    # Nor does one whose death was heard of before its birth.
    assert not found.leave("p1", 3)
    with pytest.raises(StaleEpochError):
        found.join(replace(P1, epoch=3))
    found.join(replace(P0, epoch=2))
    found.join(replace(P1, epoch=4))
    assert ids(found.members("prefill")) == ["p0", "p1"]


def test_leaving_with_a_later_epoch_takes_the_earlier_life_along() -> None:
    found = roster(P0)
    assert found.leave("p0", 2)
    assert len(found) == 0
    assert not found.leave("p0", 2)


def test_a_suspect_is_not_listed_until_it_is_cleared() -> None:
    found = roster(P0, P1)
    assert found.suspect("p0", 1)
    assert ids(found.members("prefill")) == ["p1"]
    assert ids(found.members("prefill", suspects=True)) == ["p0", "p1"]
    assert found.get("p0") == P0
    assert found.clear("p0", 1)
    assert ids(found.members("prefill")) == ["p0", "p1"]


def test_a_suspicion_ends_with_the_life_it_was_about() -> None:
    found = roster(P0)
    found.suspect("p0", 1)
    found.leave("p0", 1)
    found.join(replace(P0, epoch=2))
    assert ids(found.members()) == ["p0"]


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (replace(P1, model_fingerprint=b"\xff"), "'p1' has model fingerprint ff; the members .* have 0102: start it"),
        (replace(P1, block_tokens=32), "'p1' has blocks of 32 tokens; the members .* have 16: give all"),
        (replace(P0, total_blocks=99), "'p0' joined again in epoch 1 with other facts"),
    ],
)
def test_a_member_unlike_the_others_is_refused(member: Member, message: str) -> None:
    found = roster(P0, D0)
    with pytest.raises(RosterError, match=message):
        found.join(member)
    assert found.members() == (D0, P0)


def test_another_model_may_move_in_once_all_have_left() -> None:
    found = roster(P0)
    found.join(replace(P0, epoch=2, model_fingerprint=b"new"))  # compared with the others only, and there are none
    found.leave("p0", 2)
    found.join(replace(P1, model_fingerprint=b"newer"))
    assert ids(found.members()) == ["p1"]


def test_pools_of_other_sizes_may_join() -> None:
    found = roster(P0, replace(P1, total_blocks=7, max_context_tokens=99))
    assert len(found) == 2


def test_a_hundred_restarts_leave_one_member() -> None:
    found = roster(P0, D0)
    sizes = []
    for epoch in range(2, 102):
        if epoch % 2:
            found.leave("p0", epoch - 1)
        found.join(replace(P0, epoch=epoch))
        sizes.append(len(pickle.dumps(found)))
        assert len(found) == 2
    assert found.version == 2 + 100 + 50
    assert max(sizes) - min(sizes) < 100


def test_restarts_under_new_ids_are_bounded_too() -> None:
    found = roster(D0)
    sizes = []
    for i in range(4000):
        found.join(replace(P0, worker_id=f"worker-{i:06d}"))
        found.suspect(f"worker-{i:06d}", 1)
        found.leave(f"worker-{i:06d}", 1)
        if i % 1000 == 999:
            sizes.append(len(pickle.dumps(found)))
    assert ids(found.members()) == ["d0"]
    assert max(sizes[2:]) - min(sizes[2:]) < 100


@pytest.mark.parametrize(
    ("field", "value"),
    [("role", "decoder"), ("epoch", -1), ("block_tokens", 0), ("total_blocks", 0), ("max_context_tokens", -3)],
)
def test_impossible_members_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        replace(P0, **{field: value})
