"""What chat completions and completions have in common: the fields that say how tokens are chosen.

Unknown fields are refused, with the nearest known name, if one is near. Known fields that would change the answer and
are not implemented are refused, unless they hold the value that means "off" (`_harmless`). Fields that concern OpenAI's
own bookkeeping are accepted and have no effect (`NO_EFFECT`). Types are strict: `true` is no number and "5" is not 5.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from actors.engine.request import SamplingParams
from app.default_sampling import DefaultSampling
from app.key_limits import MAX_PRIORITY
from app.openai_errors import invalid_request, shortened, unsupported
from app.request_parsing import must_be
from app.structured_output import (
    RESPONSE_FORMAT_SCHEMA,
    STRUCTURED_OUTPUTS_SCHEMA,
    response_format_grammar,
    structured_outputs_grammar,
)

MAX_CHOICES = 64
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_COUNT = 2**31 - 1
"""Of any count of tokens, so that it fits an int32 wherever it goes."""
PRIORITY_ALLOWED = f"a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}; the smaller one goes first"
GREEDY_BELOW_TEMPERATURE = 1e-5
"""A temperature below this is treated as 0, as vLLM does: logits divided by it would overflow."""

NO_EFFECT = frozenset(
    {
        "metadata",
        "prediction",  # a hint for speed
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Accepted whatever they hold, and ignored: they do not change the answer."""


# What the API's description says of fields that functions check.
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_StopsInput = _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)] | None
_TokenIdsInput = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_STOP_TOKEN_IDS)] | None
_TokenIdInput = Annotated[str, Field(pattern="^[0-9]{1,10}$")]
_BiasInput = Annotated[float, Field(ge=-100, le=100)]
_LogitBiasInput = Annotated[dict[_TokenIdInput, _BiasInput], Field(max_length=MAX_LOGIT_BIAS)] | None
_ResponseFormatInput = Annotated[dict[str, Any], WithJsonSchema(RESPONSE_FORMAT_SCHEMA)] | None
_StructuredOutputsInput = Annotated[dict[str, Any], WithJsonSchema(STRUCTURED_OUTPUTS_SCHEMA)] | None


def _stops(value: Any) -> tuple[str, ...]:
    allowed = f"a string or a list of at most {MAX_STOPS} strings, each of 1 to {MAX_STOP_CHARS} characters"
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise must_be(allowed)
    for position, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise must_be(f"{allowed} (item {position} is no string)")
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise must_be(f"{allowed} (item {position} has {len(stop)})")
    return tuple(stops)


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_STOP_TOKEN_IDS or any(type(item) is not int for item in value):
        raise must_be(f"a list of at most {MAX_STOP_TOKEN_IDS} token ids")
    return tuple(value)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    allowed = f"an object of at most {MAX_LOGIT_BIAS} token ids, each with a number from -100 to 100"
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise must_be(allowed)
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not isinstance(key, str) or not re.fullmatch(r"[0-9]{1,10}", key):
            raise must_be(f"{allowed} (the key {shortened(key)} is no token id)")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:  # NaN fails the comparison
            raise must_be(f"{allowed} (the bias of {key} is {shortened(bias)})")
        biases[int(key)] = float(bias)
    return tuple(sorted(biases.items()))


class StreamOptions(BaseModel):
    """`stream_options` of a request."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool | None = Field(None, description="true or false")
    include_obfuscation: bool | None = Field(None, description="true or false")
    """No effect: chunks are never padded."""


class GenerationRequest(BaseModel):
    """The common fields. Those of OpenAI first, then extras under vLLM's names."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    _harmless: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields that are not implemented, with the values under which that makes no difference."""

    model: str = Field(min_length=1, description="the name of a served model, see GET /v1/models")
    max_tokens: int | None = Field(None, ge=0, le=MAX_COUNT, description="a whole number of at least 1")
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False, description="a number from 0 to 2")
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False, description="a number above 0 and not above 1")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description=f"a whole number from 1 to {MAX_CHOICES}")
    stream: bool | None = Field(None, description="true or false")
    stream_options: StreamOptions | None = Field(None, description='an object such as {"include_usage": true}')
    stop: Annotated[tuple[str, ...], PlainValidator(_stops, json_schema_input_type=_StopsInput)] = ()
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="a whole number of 64 bits, from -2^63 to 2^63-1")
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False, description="a number from -2 to 2")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False, description="a number from -2 to 2")
    logit_bias: Annotated[
        tuple[tuple[int, float], ...], PlainValidator(_logit_bias, json_schema_input_type=_LogitBiasInput)
    ] = ()

    top_k: int | None = Field(None, ge=-1, le=MAX_COUNT, description="a whole number; 0 or -1 switches it off")
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False, description="a number from 0 to 1")
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, allow_inf_nan=False, description="a number from 0.01 to 100; 1 switches it off"
    )
    min_tokens: int | None = Field(None, ge=0, le=MAX_COUNT, description="a whole number of at least 0")
    ignore_eos: bool | None = Field(None, description="true or false")
    stop_token_ids: Annotated[
        tuple[int, ...], PlainValidator(_stop_token_ids, json_schema_input_type=_TokenIdsInput)
    ] = ()
    include_stop_str_in_output: bool | None = Field(None, description="true or false")
    skip_special_tokens: bool | None = Field(None, description="true (the default) or false")
    response_format: Annotated[
        str | None, PlainValidator(response_format_grammar, json_schema_input_type=_ResponseFormatInput)
    ] = None
    """As the grammar that it stands for."""
    structured_outputs: Annotated[
        str | None, PlainValidator(structured_outputs_grammar, json_schema_input_type=_StructuredOutputsInput)
    ] = None
    """The same."""
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description=f"a whole number from 0 to {MAX_LOGPROBS}"
    )
    cache_salt: str | None = Field(None, min_length=1, max_length=256, description="a string of 1 to 256 characters")
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description=PRIORITY_ALLOWED)

    @model_validator(mode="before")
    @classmethod
    def _sift_fields(cls, data: Any) -> Any:
        return sifted(data, cls.model_fields.keys(), cls._harmless) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid_request("'stream_options' is only allowed with 'stream': true.", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid_request(
                "'prompt_logprobs' come with a whole answer only. Leave out 'stream'.", param="prompt_logprobs"
            )
        if self.response_format is not None and self.structured_outputs is not None:
            raise invalid_request(
                "'response_format' and 'structured_outputs' both say what the answer keeps to. Give one of them.",
                param="structured_outputs",
            )
        if self.grammar is not None and self.min_tokens:
            raise invalid_request(
                f"'min_tokens' is {self.min_tokens}, but the answer ends where its format does. Leave it out.",
                param="min_tokens",
            )
        asked = self.max_new_tokens
        if asked is not None and (self.min_tokens or 0) > asked:
            raise invalid_request(
                f"'min_tokens' is {self.min_tokens} and the answer may have {asked} tokens. Lower it.",
                param="min_tokens",
            )
        return self

    @property
    def choices(self) -> int:
        """How many answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def grammar(self) -> str | None:
        """What the answer keeps to; None: it is free."""
        return self.structured_outputs if self.response_format is None else self.response_format

    @property
    def grammar_param(self) -> str:
        """The field that says so."""
        return "structured_outputs" if self.response_format is None else "response_format"

    @property
    def max_new_tokens(self) -> int | None:
        """The answer's length as the client limits it, in tokens; None: not at all."""
        return self.max_tokens

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def skips_special_tokens(self) -> bool:
        return self.skip_special_tokens is not False

    @property
    def top_logprob_count(self) -> int | None:
        """None: no log-probabilities. k >= 0: the chosen token's and the k most likely ones'."""
        raise NotImplementedError

    @property
    def prompt_logprob_count(self) -> int | None:
        """The same for the prompt's tokens."""
        return self.prompt_logprobs


_GUIDED = frozenset({"guided_json", "guided_regex", "guided_choice", "guided_grammar"})
"""Names of older versions of vLLM."""
_NOT_HERE = frozenset(
    {"add_special_tokens", "allowed_token_ids", "chat_template", "return_token_ids", "spaces_between_special_tokens"}
)
"""vLLM's fields for what there is not here: whatever is spelled like them means something else."""


def sifted(data: dict[str, Any], fields: Collection[str], harmless: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Those of `fields` that a request has. Raises ApiError 400 for others, unless they are in `NO_EFFECT`, or hold
    what `harmless` has for them."""
    known = {*fields, *NO_EFFECT, *harmless}
    unknown = [name for name in data if name not in known]
    if unknown:
        raise invalid_request(_unrecognized(unknown, known), param=unknown[0][:64], code="unknown_parameter")
    for name, values in harmless.items():
        if name in data and data[name] not in values:
            off = " or ".join(json.dumps(value) for value in values if value is not None)
            raise unsupported(name, f"Leave it out{f' or set it to {off}' if off else ''}.")
    return {name: value for name, value in data.items() if name in fields}


def to_sampling(
    request: GenerationRequest,
    defaults: DefaultSampling,
    *,
    max_tokens: int,
    vocab_size: int,
    random_seed: int,
    choice_index: int = 0,
) -> SamplingParams:
    """How the engine is to choose tokens for one sequence of `request`.

    `defaults` are for what the request leaves out; `max_tokens` is what `app.prompt_tokens.answer_tokens` allows;
    `random_seed` (64-bit) is for a request without one. Raises ApiError 400 for token ids outside the vocabulary, and
    for `min_tokens` above `max_tokens`.
    """
    for token_id, _ in request.logit_bias:
        if token_id >= vocab_size:
            raise _outside_vocabulary("logit_bias", token_id, vocab_size)
    for token_id in request.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise _outside_vocabulary("stop_token_ids", token_id, vocab_size)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        message = (
            f"'min_tokens' is {min_tokens} and the answer may have {max_tokens} tokens. Lower it or set 'max_tokens'."
        )
        raise invalid_request(message, param="min_tokens")
    temperature = _first(request.temperature, defaults.temperature)
    seed = random_seed if request.seed is None else request.seed
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW_TEMPERATURE else temperature,
        top_p=_first(request.top_p, defaults.top_p),
        top_k=max(0, defaults.top_k if request.top_k is None else request.top_k),
        min_p=_first(request.min_p, defaults.min_p),
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=request.logit_bias,
        seed=seed % 2**64,
        choice_index=choice_index,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        min_tokens=min_tokens,
        logprobs=request.top_logprob_count,
        prompt_logprobs=request.prompt_logprob_count,
        grammar=request.grammar,
    )


def _first(asked: float | None, default: float) -> float:
    return default if asked is None else asked


def _outside_vocabulary(param: str, token_id: int, vocab_size: int) -> Exception:
    message = f"Invalid value for '{param}': token id {shortened(token_id)}. It must be from 0 to {vocab_size - 1}."
    return invalid_request(message, param=param)


def _unrecognized(unknown: list[str], known: Collection[str]) -> str:
    names = [name[:64] for name in unknown]
    plural = "s" if len(names) > 1 else ""
    message = f"Unrecognized request argument{plural} supplied: {', '.join(names[:5])}"
    kind = names[0].removeprefix("guided_")
    if names[0] in _GUIDED and "structured_outputs" in known:
        return f"{message}. Set 'structured_outputs' to an object with '{kind}' instead."
    if names[0] in _NOT_HERE:
        return message
    nearest = difflib.get_close_matches(names[0], sorted(known), n=1, cutoff=0.7)
    return f"{message}. Did you mean '{nearest[0]}'?" if nearest else message
