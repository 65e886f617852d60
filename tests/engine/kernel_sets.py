"""Our kernels with each instruction set that this processor has."""

from __future__ import annotations

import pytest

from actors.engine.kernels.library import InstructionSet, Kernels, load_kernels


def kernels_of(instructions: InstructionSet) -> Kernels:
    """Skips the test where they cannot be had."""
    best = load_kernels()
    if best is None:
        pytest.skip("the kernels cannot be built here; the log says why")
    if best.instructions < instructions:
        pytest.skip(f"the processor has no {instructions.name}")
    return best.limited_to(instructions)


SETS = [InstructionSet.AVX2, InstructionSet.AVX512, InstructionSet.AMX]
