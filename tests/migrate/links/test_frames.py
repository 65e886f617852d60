from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from migrate.links.frames import FRAME_BYTES, MAX_TEXT_BYTES, Arrival, heartbeat_frame, message_frame, text_frame
from migrate.links.header import FrameType
from migrate.links.interface import DTYPES, Message
from tests.link_ends import assert_same, random_tensor


def _carried(message: Message) -> tuple[Message, torch.Tensor, list[torch.Tensor]]:
    """What arrives of `message`, its frame, and what went apart."""
    frame, apart = message_frame(message, 4)
    arrival = Arrival(frame, 4, 1 << 30)
    frame.fill_(255)  # as the next frame would
    assert [len(piece) for piece in arrival.apart] == [len(piece) for piece in apart]
    for target, source in zip(arrival.apart, apart, strict=True):
        target.copy_(source)
    assert arrival.type is FrameType.MESSAGE
    return arrival.message(), frame, apart


sizes = st.integers(0, 200) | st.integers(FRAME_BYTES - 300, FRAME_BYTES + 10) | st.just(3 * FRAME_BYTES)


@settings(deadline=None, max_examples=50)
@given(sizes, st.lists(st.tuples(sizes, st.sampled_from(DTYPES)), max_size=6))
def test_a_message_comes_back_from_its_frame_and_the_rest(
    meta_bytes: int, tensors: list[tuple[int, torch.dtype]]
) -> None:
    made = tuple(random_tensor((size // dtype.itemsize,), dtype, index) for index, (size, dtype) in enumerate(tensors))
    message = Message(1, 2, 3, b"m" * meta_bytes, made)
    got, frame, apart = _carried(message)
    assert_same(got, message)
    assert len(frame) <= FRAME_BYTES
    # Header and parts are all there is, and what would have fitted by itself is not apart.
    assert len(frame) + sum(map(len, apart)) == 64 + 10 * len(made) + message.payload_bytes
    assert all(len(frame) + len(piece) > FRAME_BYTES for piece in apart)
    assert all(len(piece) > 0 for piece in apart)


def test_what_goes_apart_is_the_tensors_own_memory() -> None:
    tensor = torch.zeros(100_000, dtype=torch.int64)
    _, _, apart = _carried(Message(0, 0, 0, b"", (tensor,)))
    assert [piece.data_ptr() for piece in apart] == [tensor.data_ptr()]


def test_a_small_message_is_a_frame_just_as_long() -> None:
    _, frame, apart = _carried(Message(0, 0, 0, b"abc", (torch.zeros(4),)))
    assert (len(frame), apart) == (64 + 2 + 8 + 3 + 16, [])


def test_a_heartbeat_is_a_header() -> None:
    arrival = Arrival(heartbeat_frame(4), 4, 0)
    assert (arrival.type, arrival.apart) == (FrameType.HEARTBEAT, [])


def test_a_goodbye_brings_its_reason() -> None:
    arrival = Arrival(text_frame(FrameType.GOODBYE, 4, "Gerät fehlt"), 4, 100)
    assert (arrival.type, arrival.text()) == (FrameType.GOODBYE, "Gerät fehlt")
    long = Arrival(text_frame(FrameType.GOODBYE, 4, "ü" * 5000), 4, 10_000)
    assert long.text() == "ü" * (MAX_TEXT_BYTES // 2)
    assert long.apart == []
