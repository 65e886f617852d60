"""What every attention backend must do, whatever its kernels: for a test class of each to inherit."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.engine.attention.interface import AttentionBackend, LayerKv
from tests.engine.paged_layout import PagedCase, Piece, Shape, make_case


def check(backend: AttentionBackend, case: PagedCase) -> None:
    """The rows' outputs are those of dense attention, their K and V are in their places, and nothing else changed."""
    with torch.inference_mode():
        backend.begin(case.batch)
        out = backend.attend(case.q, case.k, case.v, case.kv)
    assert out.shape == case.expected.shape
    assert out.dtype == case.q.dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[case.q.dtype]
    torch.testing.assert_close(out.double(), case.expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(case.kv.pages, case.pages_after)


class AttentionContract:
    block_tokens: ClassVar[int]
    """Of the random layouts; contexts reach over several blocks."""
    max_examples: ClassVar[int] = 40

    def make_backend(self) -> AttentionBackend:
        raise NotImplementedError

    @pytest.fixture
    def backend(self) -> AttentionBackend:
        return self.make_backend()

    def test_random_batches(self) -> None:
        @settings(max_examples=self.max_examples, deadline=None, suppress_health_check=list(HealthCheck))
        @given(data=st.data())
        def run(data: st.DataObject) -> None:
            bt = self.block_tokens
            shape = Shape(
                kv_heads=data.draw(st.integers(1, 3)),
                group=data.draw(st.sampled_from([1, 2, 3, 4])),
                head_dim=data.draw(st.sampled_from([8, 16])),
                block_tokens=bt,
                window=data.draw(st.sampled_from([None, 1, 2, bt - 1, bt, bt + 1, 2 * bt])),
            )
            lengths = st.one_of(st.integers(0, 2 * bt + 3), st.sampled_from([bt - 1, bt, bt + 1, 2 * bt]))
            decodes = data.draw(st.lists(lengths, max_size=4))
            prefills = data.draw(st.lists(st.tuples(lengths, st.integers(1, bt + 3)), min_size=not decodes, max_size=3))
            pieces = [Piece(context, 1, True) for context in decodes]
            pieces += [Piece(context, new, False) for context, new in prefills]
            check(self.make_backend(), make_case(shape, pieces, data.draw(st.integers(0, 1000))))

        run()

    @pytest.mark.parametrize("window", [None, 5])
    def test_prefills_of_different_lengths_beside_decodes(self, window: int | None, backend: AttentionBackend) -> None:
        bt = self.block_tokens
        pieces = [
            Piece(0, 3, False), Piece(bt + 1, bt, False), Piece(2 * bt, 1, False), Piece(0, 2 * bt + 1, False),
            Piece(0, 1, True), Piece(bt - 1, 1, True), Piece(bt, 1, True), Piece(3 * bt - 2, 1, True),
        ]  # fmt: skip
        check(backend, make_case(Shape(2, 3, 16, bt, window), pieces, seed=1))

    def test_one_backend_serves_layers_of_different_windows_and_steps_of_different_batches(
        self, backend: AttentionBackend
    ) -> None:
        bt = self.block_tokens
        for seed, window in enumerate((None, 4, None, bt + 2)):
            case = make_case(Shape(2, 2, 8, bt, window), [Piece(bt + seed, 1, True), Piece(3, 4, False)], seed)
            check(backend, case)
        # Within one step, layers alternate between windows.
        pieces = [Piece(bt + 5, 1, True), Piece(2, 1, True), Piece(7, 6, False)]
        full, windowed = (make_case(Shape(2, 2, 8, bt, window), pieces, 9) for window in (None, 3))
        with torch.inference_mode():
            backend.begin(full.batch)
            for case in (full, windowed, full, windowed):
                out = backend.attend(case.q, case.k, case.v, case.kv)
                torch.testing.assert_close(out.double(), case.expected, rtol=1e-5, atol=1e-5)

    def test_heads_may_be_taken_apart(self, backend: AttentionBackend) -> None:
        """A call over some of a layer's lanes gives those heads' outputs: heads may lie on different workers."""
        bt = self.block_tokens
        case = make_case(Shape(3, 2, 8, bt), [Piece(bt + 2, 1, True), Piece(1, 1, True), Piece(4, 5, False)], 3)
        with torch.inference_mode():
            backend.begin(case.batch)
            outs = []
            for heads in ([0], [1, 2]):
                queries = [head * 2 + member for head in heads for member in range(2)]
                kv = LayerKv(case.kv.pages, case.kv.page_of[heads], case.kv.window, case.kv.scale)
                outs.append(backend.attend(case.q[:, queries], case.k[:, heads], case.v[:, heads], kv))
        torch.testing.assert_close(torch.cat(outs, 1).double(), case.expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(case.kv.pages, case.pages_after)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision(self, dtype: torch.dtype, backend: AttentionBackend) -> None:
        bt = self.block_tokens
        pieces = [Piece(2 * bt, 1, True), Piece(3, 1, True), Piece(bt, 7, False)]
        check(backend, make_case(Shape(2, 4, 16, bt, bt + 1), pieces, 5, dtype))

    def test_attend_wants_begin(self, backend: AttentionBackend) -> None:
        case = make_case(Shape(1, 1, 8, self.block_tokens), [Piece(1, 1, True)], 0)
        with pytest.raises(RuntimeError, match="before begin"):
            backend.attend(case.q, case.k, case.v, case.kv)
