from __future__ import annotations

import pickle
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray import cloudpickle

from actors.engine.request import TokenEvent, TokenLogprobs
from actors.messages import HandOver, WorkerMessage
from migrate.load import WorkerLoad

logprobs = st.builds(TokenLogprobs, st.integers(0, 9), st.floats(-9, 0), st.just(((3, -0.5),)))
events = st.builds(
    TokenEvent,
    request_id=st.text(),
    token_id=st.none() | st.integers(0, 2**31),
    finish_reason=st.none() | st.just("stop"),
    owner=st.text(),
    logprobs=st.none() | logprobs,
    prompt_logprobs=st.none() | st.tuples(st.none(), logprobs),
    cached_tokens=st.none() | st.integers(0, 9),
    error=st.none() | st.text(),
    awaits_export=st.booleans(),
)
loads = st.just(WorkerLoad("w", 2, "decode", 100, 10, 3, 4, 512, 800.0, 77, 5, 6))
messages = st.builds(
    WorkerMessage,
    events=st.lists(events, max_size=20),
    hand_overs=st.lists(st.builds(HandOver, st.text(), st.integers(0, 9), st.just(("receipt", b"1")))),
    load=st.none() | loads,
    session=st.integers(0, 9),
)


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
@settings(max_examples=50, deadline=None)
@given(message=messages)
def test_a_message_arrives_as_it_was_sent(pickler: ModuleType, message: WorkerMessage) -> None:
    """By whichever pickler it travels, Ray's own included."""
    assert pickle.loads(pickler.dumps(message)) == message


def test_what_arrives_can_be_added_to() -> None:
    """As an outbox does with a message that it has begun."""
    sent = WorkerMessage([TokenEvent("r", 1)])
    arrived: WorkerMessage = pickle.loads(pickle.dumps(sent))
    arrived.events.append(TokenEvent("r", 2))
    assert [event.token_id for event in arrived.events] == [1, 2]
    assert len(sent.events) == 1
