"""Keys that are given twice are found wherever they are; everything else is read as the libraries read it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kv.repeated_keys import RepeatedKeysError, load_json, load_yaml

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab{}[]":,\\\n', max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab{}":\\\n', max_size=2), inner, max_size=3),
    max_leaves=12,
)


@given(value=values, indent=st.sampled_from([None, 1]))
def test_json_without_repeated_keys_is_what_it_was(value: Any, indent: int | None) -> None:
    assert load_json(json.dumps(value, indent=indent)) == value


@given(value=values, depth=st.integers(0, 3), key=st.text('ab{}":\\\n', max_size=3))
def test_a_key_twice_is_found_at_any_depth(value: Any, depth: int, key: str) -> None:
    before = json.dumps({"other": value}, indent=1)[:-2]  # without the closing brace and its line
    text = f"{before},\n{json.dumps(key)} :\n 1, {json.dumps(key)}: 2}}"
    for _ in range(depth):
        text = f'{{"a": [{text}]}}'
    assert json.loads(text) is not None
    first = before.count("\n") + 2
    with pytest.raises(RepeatedKeysError) as raised:
        load_json(text)
    assert raised.value.problems == [f"{key}: given twice, in line {first} and in line {first + 1}; keep one of them"]


@pytest.mark.parametrize("text", ["", "{", "[1,]", '{"a": 1} {"a": 2}'])
def test_what_is_no_json_is_no_json(text: str) -> None:
    with pytest.raises(json.JSONDecodeError):
        load_json(text)


def test_keys_are_compared_as_they_are_read() -> None:
    with pytest.raises(RepeatedKeysError, match="a: given twice"):
        load_json('{"a": 1, "\\u0061": 2}')
    with pytest.raises(RepeatedKeysError, match="1: given twice, in line 1 and in line 2"):
        load_yaml("1: a\n0x1: b\n")
    assert load_yaml("'1': a\n1: b\n") == {"1": "a", 1: "b"}


@given(value=values)
def test_yaml_without_repeated_keys_is_what_it_was(value: Any) -> None:
    assert load_yaml(yaml.safe_dump(value)) == value
