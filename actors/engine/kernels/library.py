"""The C++ kernels as functions over torch tensors on the CPU.

Arguments are checked by those who call: tensors of bfloat16 or float32 whose last two dimensions are contiguous unless
it says otherwise. What a call allocates belongs to its caller. Calls run without the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from enum import IntEnum
from typing import Any

import torch

from actors.engine.attention.interface import LayerKv
from actors.engine.batch import StepBatch
from actors.engine.kernels.build import BuildError, built_library

logger = logging.getLogger("equipoise.engine")

DTYPES = (torch.bfloat16, torch.float32)
"""What the kernels are for."""

_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "product": (_INT, *[_POINTER] * 4, *[_SIZE] * 3),
    "write": (_INT, *[_POINTER] * 2, *[_SIZE] * 2, *[_POINTER] * 4, *[_SIZE] * 5),
    "attend": (_INT, _INT, _POINTER, _SIZE, *[_POINTER] * 5, *[_SIZE] * 8, _FLOAT),
    "attend_chunks": (_INT, _INT, _POINTER, _SIZE, *[_POINTER] * 6, *[_SIZE] * 8, _FLOAT),
    "add_norm": (_INT, _INT, *[_POINTER] * 6, *[_SIZE] * 2, _FLOAT, _INT),
    "rotate": (_INT, _INT, _POINTER, _SIZE, *[_POINTER] * 3, *[_SIZE] * 3),
    "activate": (_INT, _INT, *[_POINTER] * 2, *[_SIZE] * 2, _INT, _INT),
    "layers": (_INT, *[_POINTER] * 2, _SIZE, _POINTER),
}
"""Of the functions in entry.cpp."""


class InstructionSet(IntEnum):
    """As entry.cpp numbers them; a processor with one has all lower ones."""

    NONE = 0
    AVX2 = 1
    AVX512 = 2
    """With AVX512-BF16."""
    AMX = 3


class Activation(IntEnum):
    """As in rows.h."""

    SILU = 0
    RELU = 1


class Kernels:
    """The functions of one library, for one instruction set."""

    def __init__(self, library: ctypes.CDLL, instructions: InstructionSet) -> None:
        self.instructions = instructions
        self._library = library
        for name, types in _SIGNATURES.items():
            function = getattr(library, f"equipoise_{name}")
            function.argtypes, function.restype = types, None

    def limited_to(self, instructions: InstructionSet) -> Kernels:
        """The same with another instruction set that the processor has."""
        return Kernels(self._library, instructions)

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [rows, in] times weight [out, in] transposed, plus bias [out]; all bfloat16."""
        rows, width = x.shape
        y = x.new_empty(rows, weight.shape[0])
        self._library.equipoise_product(
            self.instructions, x.data_ptr(), weight.data_ptr(), _address(bias), y.data_ptr(), rows, width, y.shape[1]
        )
        return y

    def write_rows(self, batch: StepBatch, k: torch.Tensor, v: torch.Tensor, kv: LayerKv) -> None:
        """Stores the rows' K and V, each [T, H, head_dim], of any row stride, in their pages."""
        heads, capacity = kv.page_of.shape
        self._library.equipoise_write(
            _is_half(k), k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0), kv.pages.data_ptr(),
            kv.page_of.data_ptr(), batch.write_blocks.data_ptr(), batch.write_offsets.data_ptr(), k.shape[0], heads,
            capacity, kv.pages.shape[2], kv.pages.shape[3],
        )  # fmt: skip

    def attend(self, batch: StepBatch, q: torch.Tensor, kv: LayerKv) -> torch.Tensor:
        """Attention of the step's decodes and prompt chunks: q [T, H * group, head_dim], of any row stride."""
        heads, capacity = kv.page_of.shape
        out = q.new_empty(q.shape)
        sizes = heads, q.shape[1] // heads, capacity, kv.pages.shape[2], kv.pages.shape[3], kv.window or 0, kv.scale
        if batch.num_decodes:
            self._library.equipoise_attend(
                self.instructions, _is_half(q), q.data_ptr(), q.stride(0), kv.pages.data_ptr(), out.data_ptr(),
                kv.page_of.data_ptr(), batch.decode_blocks.data_ptr(), batch.decode_context.data_ptr(),
                *batch.decode_blocks.shape, *sizes,
            )  # fmt: skip
        if batch.prefills:
            first = batch.num_decodes
            self._library.equipoise_attend_chunks(
                self.instructions, _is_half(q), q[first:].data_ptr(), q.stride(0), kv.pages.data_ptr(),
                out[first:].data_ptr(), kv.page_of.data_ptr(), batch.prefill_blocks.data_ptr(),
                batch.prefill_rows.data_ptr(), batch.prefill_context.data_ptr(), *batch.prefill_blocks.shape, *sizes,
            )  # fmt: skip
        return out

    def add_norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        *,
        eps: float,
        rms: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x + delta (x itself without a delta), and its RMS or layer norm; x and delta [..., width]."""
        total = x if delta is None else torch.empty_like(x)
        y = torch.empty_like(x)
        self._library.equipoise_add_norm(
            self.instructions, _is_half(x), x.data_ptr(), _address(delta), _address(weight), _address(bias),
            total.data_ptr(), y.data_ptr(), x.shape[:-1].numel(), x.shape[-1], eps, rms,
        )  # fmt: skip
        return total, y

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of x [T, heads, head_dim], of any row stride; cos and sin [T, 1, head_dim]."""
        rows, heads, head_dim = x.shape
        y = x.new_empty(x.shape)
        self._library.equipoise_rotate(
            self.instructions, _is_half(x), x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), y.data_ptr(),
            rows, heads, head_dim,
        )  # fmt: skip
        return y

    def activate(self, up: torch.Tensor, function: Activation, *, gated: bool) -> torch.Tensor:
        """f(up), or f(gate) * up with the gate in the first half of `up` [T, 2 * inner]."""
        rows, width = up.shape
        inner = width // 2 if gated else width
        y = up.new_empty(rows, inner)
        self._library.equipoise_activate(
            self.instructions, _is_half(up), up.data_ptr(), y.data_ptr(), rows, inner, function, gated
        )
        return y

    def run_layers(
        self, shape: ctypes.Structure, layers: ctypes.Array[Any], first: int, count: int, step: ctypes.Structure
    ) -> None:
        """See fused_layers.py, whose structs they are."""
        begin = ctypes.addressof(layers) + first * ctypes.sizeof(layers._type_)
        self._library.equipoise_layers(self.instructions, ctypes.byref(shape), begin, count, ctypes.byref(step))


@functools.cache
def load_kernels() -> Kernels | None:
    """The kernels with the best instruction set of this processor, built if need be; None where they cannot be had,
    which is logged: once a process."""
    try:
        library = ctypes.CDLL(str(built_library()))
    except (BuildError, OSError) as error:
        logger.warning("torch's own operators are used on the CPU, which are slower than our kernels: %s", error)
        return None
    instructions = InstructionSet(library.equipoise_instruction_set())
    if instructions is InstructionSet.NONE:
        logger.warning("torch's own operators are used on the CPU: our kernels need a processor with AVX2 and FMA")
        return None
    return Kernels(library, instructions)


def _is_half(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.bfloat16


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
