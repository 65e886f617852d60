from __future__ import annotations

import pytest

from tests.running_app import Deploy, small_roles

pytestmark = pytest.mark.cluster


def test_static_app_starts(deploy: Deploy) -> None:
    app = deploy({"model": "random/llama-2x4", **small_roles()})
    assert app.get("/health") == (200, {"status": "ok", "problems": []})
    assert {member.role for member in app.members()} == {"prefill", "decode"}
