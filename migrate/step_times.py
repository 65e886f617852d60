"""How long an engine's steps take, by what is in them: counted by the engine, fitted for the cost model (ours)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from migrate.cost_model import MeasuredTimes
from migrate.regression import Regression

LEAST_STEPS: Final = 32
"""Fewer say nothing."""
LEAST_PROMPT_STEPS: Final = 8
"""The same of steps with prompt tokens, which take longer and are fewer."""
MOST_DECODE_PAIR: Final = 8.0
"""A pair of a decode, in pairs of a prompt, at most: a row reads all KV for itself, where a prompt's rows share it."""

_CONSTANT, _TOKENS, _ROWS, _PREFILL_PAIRS, _DECODE_PAIRS = range(5)


@dataclass(slots=True)
class StepTimes:
    """Of steps that were run by one worker, all their layers. Sums only: see `Regression`.

    A step takes `w0 + w1 * prompt tokens + w2 * decode rows + w3 * prefill pairs + w4 * decode pairs` in the layers,
    and `h0 + h1 * sampled rows` for final norm, output head and sampling. A pair is a token and one that it attends to:
    it is what attention costs, so these two weights tell attention from the rest.
    """

    layers: Regression = field(default_factory=lambda: Regression(4))
    head: Regression = field(default_factory=lambda: Regression(1))

    def count(
        self,
        *,
        prefill_tokens: int,
        decode_rows: int,
        prefill_pairs: int,
        decode_pairs: int,
        layers_s: float,
    ) -> None:
        """One step's layers."""
        self.layers.add(prefill_tokens, decode_rows, prefill_pairs, decode_pairs, output=layers_s)

    def count_head(self, sampled_rows: int, head_s: float) -> None:
        """What followed its layers."""
        self.head.add(sampled_rows, output=head_s)

    def plus(self, other: StepTimes, factor: float = 1.0) -> StepTimes:
        """See `Regression.plus`."""
        return StepTimes(self.layers.plus(other.layers, factor), self.head.plus(other.head, factor))

    def scaled(self, factor: float) -> StepTimes:
        """See `Regression.scaled`."""
        return StepTimes(self.layers.scaled(factor), self.head.scaled(factor))

    @property
    def knows_prompts(self) -> bool:
        """Whether enough steps had prompt tokens to say what these cost."""
        return self._steps_with(_TOKENS) >= LEAST_PROMPT_STEPS

    @property
    def knows_decodes(self) -> bool:
        """The same of decode rows."""
        return self._steps_with(_ROWS) >= LEAST_STEPS

    def _steps_with(self, term: int) -> float:
        """How many steps had it, if each of these had as much; fewer, if some had more than others: what one long
        prompt took beside a hundred short ones is one step's word."""
        return _each(self.layers.count * self.layers.mean(term) ** 2, self.layers.mean_product(term, term))

    def measured(self, num_layers: int, full_batch: int) -> MeasuredTimes | None:
        """By layer, at the contexts that the steps had; None as long as there are fewer than `LEAST_STEPS`."""
        if self.layers.count < LEAST_STEPS:
            return None
        weights = self._plausible(self.layers.fit())
        tokens, rows = self.layers.mean(_TOKENS), self.layers.mean(_ROWS)
        prefill_attention_s = _each(weights[_PREFILL_PAIRS] * self.layers.mean(_PREFILL_PAIRS), tokens)
        prefill_token_s = weights[_TOKENS] + prefill_attention_s
        decode_attention_s = _each(weights[_DECODE_PAIRS] * self.layers.mean(_DECODE_PAIRS), rows)
        row_s = weights[_ROWS] + decode_attention_s
        head_step_s, head_row_s = self.head.fit()
        return MeasuredTimes(
            prefill_token_s=prefill_token_s / num_layers,
            step_s=weights[_CONSTANT] / num_layers,
            row_s=row_s / num_layers,
            full_batch=full_batch,
            known_rows=_each(self.layers.mean_product(_ROWS, _ROWS), rows),
            head_step_s=head_step_s,
            head_row_s=head_row_s,
            prefill_attention_share=_each(prefill_attention_s, prefill_token_s),
            # In the steps that there were, prompt tokens apart.
            decode_attention_share=_each(decode_attention_s * rows, weights[_CONSTANT] + row_s * rows),
        )

    def _plausible(self, weights: Sequence[float]) -> list[float]:
        """Where all steps had one or two rows, nothing tells the step from its rows, and a loop of one request would
        pass for a loaded worker. But a row goes through the same products as a prompt token and costs no more there,
        and no more than so much in attention: the rest belongs to the step. As far as prompts have been measured."""
        bounded = list(weights)
        for rows, prompts, most in ((_ROWS, _TOKENS, 1.0), (_DECODE_PAIRS, _PREFILL_PAIRS, MOST_DECODE_PAIR)):
            if weights[prompts] > 0:
                bounded[rows] = min(weights[rows], most * weights[prompts])
                bounded[_CONSTANT] += (weights[rows] - bounded[rows]) * self.layers.mean(rows)
        return bounded


def _each(amount: float, count: float) -> float:
    return amount / count if count else 0.0
