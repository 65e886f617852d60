"""What `load_tests.format_cost` compares is what the application answers with."""

from __future__ import annotations

import asyncio

import pytest

from load_tests.answer_forms import check_forms
from tests.openai_app import OpenAIApp

pytestmark = [pytest.mark.cluster, pytest.mark.model]


def test_the_app_gives_answers_of_every_kind(openai_app: OpenAIApp) -> None:
    asyncio.run(check_forms(openai_app.app.base_url, openai_app.model))
