"""Plain request types shared by the ingress, the workers and the engine. Imports nothing of ours and no torch.

A request is one sequence: several choices (`n`) of one prompt are several requests with the same prompt and seed and
different `choice_index`. Everything here is picklable and immutable, because it travels between processes.
"""

from __future__ import annotations

from dataclasses import dataclass

FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens of one sequence are chosen. Values are validated at the ingress; here they are trusted.

    The order of application is that of vLLM: repetition, presence and frequency penalty, `logit_bias`, `min_tokens`,
    grammar, temperature, `min_p`, `top_k`, `top_p`. `temperature == 0` is greedy. Reported log-probabilities are the
    model's own, before any of these.
    """

    max_tokens: int
    """Tokens to generate at most, counted over the whole answer (tokens already in `output_token_ids` included)."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 switches it off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    """64-bit. A request without one is given one at the ingress."""
    choice_index: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    """End-of-sequence and stop tokens are masked until this many tokens were generated."""
    logprobs: int | None = None
    """None: none. k >= 0: the chosen token's log-probability and the k most likely ones."""
    grammar: str | None = None
    """What the answer keeps to, as llguidance writes grammars. It ends with an end-of-sequence token, whatever
    `ignore_eos` says."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first; such a request reuses no cached prefix."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural logarithm, float32) at one position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), most likely first; ties by the lower id."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to run. `output_token_ids` are tokens that were generated before (hand-over, resume after a
    loss)."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    owner: str = ""
    """Who gets the tokens: an ingress replica's id. Loads are reported to each owner with its own part apart."""
    salt: bytes = b""
    """Cache salt: two requests share KV blocks only when their salts are equal."""
    eos_token_ids: tuple[int, ...] = ()
    external_tokens: int = 0
    """The first so many tokens' KV can be had from outside (the global store or a hand-over)."""
    hand_over: bool = False
    """Stop after one token and keep the KV until it was exported (the prefill side of a disaggregated request)."""
    priority_s: float = 0.0
    """Its priority, in seconds: wherever it waits it counts as having come so much later than it did."""
    publish_beyond_blocks: int | None = None
    """The global store has so many of the first full blocks. When prompt and answer fill more, the KV is kept after the
    last token until it was exported, or its blocks are needed. None: nothing is kept."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token of one sequence, or its end. `token_id` is None for an end without a token (abort, error)."""

    request_id: str
    token_id: int | None
    finish_reason: str | None = None
    owner: str = ""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Set on the first token of a request that asked for them; the first entry is None."""
    cached_tokens: int | None = None
    """Set on the first token of an answer: prompt tokens whose KV was found and not computed."""
    error: str | None = None
    blames_grammar: bool = False
    """The error is that of the request's own grammar."""
    awaits_export: bool = False
    """The KV is kept for its export under this request id."""
