from __future__ import annotations

from pathlib import Path

import pytest

from kv.disk.settings import folder_at
from kv.errors import DiskTierError


def test_a_home_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert folder_at("~/kv") == Path("/home/someone/kv")
    assert folder_at("/mnt/kv~") == Path("/mnt/kv~")


@pytest.mark.parametrize("given", ["~nobody-has-this-name/kv", "/mnt/a\0b", "\0"])
def test_what_can_be_no_folder_is_refused_by_its_name(given: str) -> None:
    with pytest.raises(DiskTierError) as refused:
        folder_at(given)
    assert repr(given) in str(refused.value)
    assert "\0" not in str(refused.value)
