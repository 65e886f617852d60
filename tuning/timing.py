"""How long the steps of a model take on a device, in closed form."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tuning.hardware_profile import HardwareProfile
from tuning.model_shape import ModelShape


class Timing:
    """Seconds of one model's steps on one device.

    A step computes chunks of prompts, `(new tokens, tokens cached before them)` each, and one token for each of `batch`
    sequences, which together attend to `context_tokens` tokens of KV, those of this step among them:

        base + max(weights_read_s, new * prefill_token_s + batch * decode_row_s)
             + sum over chunks of max(square_s * new * (2 * cached + new), kv_read_s * (cached + new))
             + context_token_s * context_tokens

    A roofline for each part of a step (ours): the products with weights take as long as they compute or as long as the
    weights are read, whatever is more, and so does attention with its KV. It is linear in the context, and therefore
    summed over steps without a loop. With peak figures a decode step takes, for each token of context, the longer of
    reading its KV and computing with it.

    Where the profile has measured times of the model, these give the coefficients instead, and `weights_read_s` and
    `kv_read_s` are 0, as the fit knows no floors. `base` of a step that has both kinds is the larger one (ours).

    The coefficients are plain attributes, for loops that can't afford a call; they are not to be changed.
    """

    __slots__ = (
        "context_token_s",
        "decode_base_s",
        "decode_row_s",
        "hardware",
        "kv_read_s",
        "model",
        "prefill_base_s",
        "prefill_token_s",
        "square_s",
        "weights_read_s",
    )

    def __init__(self, model: ModelShape, hardware: HardwareProfile) -> None:
        self.model = model
        self.hardware = hardware
        measured = hardware.measured_for(model)
        if measured is not None:
            self.prefill_base_s = measured.prefill.base_s
            self.prefill_token_s = measured.prefill.token_s
            self.square_s = measured.prefill.square_s
            self.decode_base_s = measured.decode.base_s
            self.decode_row_s = measured.decode.row_s
            self.context_token_s = measured.decode.context_token_s
            self.weights_read_s = self.kv_read_s = 0.0
            return
        flops_per_s = hardware.flops_per_s * hardware.prefill_efficiency
        bytes_per_s = hardware.memory_bytes_per_s * hardware.decode_efficiency
        self.prefill_base_s = self.decode_base_s = float(hardware.step_overhead_s)
        self.weights_read_s = model.step_weight_bytes / bytes_per_s
        self.kv_read_s = model.kv_bytes_per_token / bytes_per_s
        # The head is left out: a prompt needs it for one of its tokens only.
        self.prefill_token_s = model.flops_per_token / flops_per_s
        self.square_s = model.attention_flops_per_pair / 2 / flops_per_s
        self.decode_row_s = (model.flops_per_token + model.head_flops) / flops_per_s
        self.context_token_s = max(self.kv_read_s, model.attention_flops_per_pair / flops_per_s)

    def step_s(self, chunks: Iterable[tuple[int, int]], batch: int, context_tokens: int) -> float:
        """A step of prompt chunks `(new tokens, cached tokens)` and `batch` decodes; 0 where there is nothing to do."""
        new_tokens = 0
        attention_s = 0.0
        for new, cached in chunks:
            new_tokens += new
            attention_s += max(self.square_s * new * (2 * cached + new), self.kv_read_s * (cached + new))
        base_s = max(self.prefill_base_s if new_tokens else 0.0, self.decode_base_s if batch else 0.0)
        if not new_tokens and not batch:
            return 0.0
        products_s = max(self.weights_read_s, new_tokens * self.prefill_token_s + batch * self.decode_row_s)
        return base_s + products_s + attention_s + context_tokens * self.context_token_s

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """The whole prefill of one request in a step of its own."""
        return self.step_s(((new_tokens, cached_tokens),), 0, 0)

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """A step of `batch` (at least 1) sequences that together attend to `context_tokens` tokens."""
        products_s = max(self.weights_read_s, batch * self.decode_row_s)
        return self.decode_base_s + products_s + context_tokens * self.context_token_s

    def decode_steps_s(self, batch: int, context_tokens: int, steps: int) -> float:
        """`steps` decode steps, the first with `context_tokens`, each further one with `batch` tokens more."""
        growth_s = batch * self.context_token_s
        return steps * self.decode_step_s(batch, context_tokens) + growth_s * (steps * (steps - 1) / 2)

    def steps_within(self, batch: int, context_tokens: int, seconds: float) -> int:
        """The most steps for which `decode_steps_s` is at most `seconds` (finite)."""
        first_s = self.decode_step_s(batch, context_tokens)
        if seconds < first_s:
            return 0
        # The positive root of growth / 2 * n^2 + (first - growth / 2) * n = seconds, in the form that loses no digits
        # where growth is small.
        half_s = batch * self.context_token_s / 2
        linear_s = first_s - half_s
        steps = int(2 * seconds / (linear_s + math.sqrt(linear_s * linear_s + 4 * half_s * seconds)))
        # Rounding may put the root on the wrong side of a whole number.
        while self.decode_steps_s(batch, context_tokens, steps + 1) <= seconds:
            steps += 1
        while self.decode_steps_s(batch, context_tokens, steps) > seconds:
            steps -= 1
        return steps

    def kv_pool_tokens(self) -> int:
        """Tokens of KV that fit beside the weights.

        Raises:
            ValueError: the weights leave no room.
        """
        usable_bytes = int(self.hardware.memory_bytes * self.hardware.memory_share)
        left_bytes = usable_bytes - self.model.weight_bytes
        if left_bytes < self.model.kv_bytes_per_token:
            raise ValueError(
                f"the weights of {self.model.name} take {self.model.weight_bytes / 2**30:.1f} GiB, and "
                f"{self.hardware.name} has {usable_bytes / 2**30:.1f} GiB for weights and KV: "
                "take a smaller model or dtype, or a profile of several devices together"
            )
        return left_bytes // self.model.kv_bytes_per_token
