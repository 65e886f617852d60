"""What goes to disk."""

from __future__ import annotations

import pytest

from kv.policy.admission import DiskAdmission


@pytest.mark.parametrize(
    ("name", "expected"), [("always", [True, True, True, True]), ("on_reuse", [False, True, True, True])]
)
def test_admission_by_uses(name: str, expected: list[bool]) -> None:
    assert [DiskAdmission(name).admits(num_uses) for num_uses in range(4)] == expected


def test_there_are_no_others() -> None:
    assert {member.value for member in DiskAdmission} == {"always", "on_reuse"}
    with pytest.raises(ValueError, match="never"):
        DiskAdmission("never")
