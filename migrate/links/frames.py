"""A message as a frame and what is sent apart from it.

A frame is a header and as much of the payload as fits behind it; a frame by itself is a whole small message. Through
gloo a second buffer costs a small message more than all the rest of its way, because its size must be known before its
read is posted; so one that has some kilobytes, as those of a step have, should need none. What does not fit is sent
apart, from where it is to where it stays.

Which parts are in the frame follows from the sizes in the header: in order (`meta`, then each tensor), each that still
fits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from migrate.links.header import FrameType, Header, TensorShape, unpack
from migrate.links.interface import Message

FRAME_BYTES = 64 * 1024
"""Most that a frame takes, and what the read of one is posted with."""
MAX_TEXT_BYTES = 2048
"""Of a goodbye or hello; a longer one is cut."""


def message_frame(message: Message, epoch: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The frame of `message`, and what is sent after it; uint8, one dimension each.

    What is sent apart is the memory of the message's own tensors.
    """
    shapes = tuple(TensorShape(tensor.dtype, tuple(tensor.shape)) for tensor in message.tensors)
    header = Header(FrameType.MESSAGE, epoch, message.kind, message.work_id, message.version, len(message.meta), shapes)
    places, length = _places(header)
    frame = torch.empty(length, dtype=torch.uint8)
    _write(frame, 0, header.pack())
    apart: list[torch.Tensor] = []
    if places[0] is not None:
        _write(frame, places[0], message.meta)
    else:
        apart.append(torch.frombuffer(bytearray(message.meta), dtype=torch.uint8))
    for tensor, place in zip(message.tensors, places[1:], strict=True):
        data = _bytes_of(tensor)
        if place is None:
            apart.append(data)
        else:
            frame[place : place + len(data)] = data
    return frame, apart


def heartbeat_frame(epoch: int) -> torch.Tensor:
    """uint8, one dimension."""
    return _whole_frame(Header(FrameType.HEARTBEAT, epoch), b"")


def text_frame(frame_type: FrameType, epoch: int, text: str) -> torch.Tensor:
    """A goodbye or hello; uint8, one dimension."""
    meta = text.encode()[:MAX_TEXT_BYTES]
    return _whole_frame(Header(frame_type, epoch, meta_bytes=len(meta)), meta)


class Arrival:
    """A frame that has arrived, and room for what comes after it.

    The frame's memory may be used again as soon as this has been made.

    Raises:
        LinkError: see `header.unpack`.
    """

    def __init__(self, frame: torch.Tensor, epoch: int, max_payload_bytes: int) -> None:
        memory = _memory(frame)
        self._header = unpack(memory, epoch, max_payload_bytes)
        places, _ = _places(self._header)
        self._meta = bytearray(self._header.meta_bytes)
        self._tensors = tuple(torch.empty(each.shape, dtype=each.dtype) for each in self._header.tensors)
        self.apart: list[torch.Tensor] = []
        """What is yet to be received into, in order: uint8, one dimension, none empty."""
        if places[0] is not None:
            self._meta[:] = memory[places[0] : places[0] + len(self._meta)]
        else:
            self.apart.append(torch.frombuffer(self._meta, dtype=torch.uint8))
        for tensor, place in zip(self._tensors, places[1:], strict=True):
            data = _bytes_of(tensor)
            if place is None:
                self.apart.append(data)
            else:
                data.copy_(frame[place : place + len(data)])

    @property
    def type(self) -> FrameType:
        return self._header.type

    def text(self) -> str:
        """Of a goodbye or hello."""
        return self._meta.decode(errors="replace")

    def message(self) -> Message:
        """The message, once everything in `apart` has been received."""
        header = self._header
        return Message(header.kind, header.work_id, header.version, bytes(self._meta), self._tensors)


def _places(header: Header) -> tuple[Sequence[int | None], int]:
    """Where in the frame `meta` and each tensor are, None for what is apart; and the length of the frame."""
    end = header.num_bytes
    places: list[int | None] = []
    for size in (header.meta_bytes, *(tensor.num_bytes for tensor in header.tensors)):
        fits = end + size <= FRAME_BYTES
        places.append(end if fits else None)
        end += size if fits else 0
    return places, end


def _whole_frame(header: Header, meta: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(header.pack() + meta), dtype=torch.uint8)


def _write(frame: torch.Tensor, start: int, data: bytes) -> None:
    _memory(frame)[start : start + len(data)] = data


def _memory(frame: torch.Tensor) -> memoryview:
    return frame.numpy().data


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's own memory as uint8, one dimension."""
    return tensor.detach().reshape(-1).view(torch.uint8)
