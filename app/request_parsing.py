"""From the bytes of a request's body to a validated request, or a 400 that says what is wrong with it."""

from __future__ import annotations

from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from app.openai_errors import ApiError, invalid_request, shortened

LONG_BODY_BYTES = 32 * 1024
"""A longer body, which takes tens of milliseconds or more until it is tokens, is read in a thread."""

RequestT = TypeVar("RequestT", bound=BaseModel)

_PRIVATE_FIELDS = frozenset(
    {"messages", "prompt", "input", "instructions", "stop", "cache_salt", "chat_template_kwargs", "tools"}
)
"""Fields that hold text of the user's: an error tells their size, never their content."""
_SHOWN_ANYWAY = frozenset({"role", "type"})


def parse_request(body: bytes, request_type: type[RequestT]) -> RequestT:
    """The request in `body` (UTF-8 JSON). Raises ApiError 400 for anything else.

    NaN, Infinity, lone surrogates, more than 200 levels and integers of more than 4,300 digits do not pass as JSON.
    """
    try:
        document = from_json(body, allow_inf_nan=False)
    except ValueError as error:  # its text names the place and what was expected, never the content
        hint = " NaN and Infinity are not JSON." if _is_json_but_for_numbers(body) else ""
        raise invalid_request(f"The request body is not valid JSON: {error}.{hint}", code="invalid_json") from None
    return validate_request(document, request_type)


def _is_json_but_for_numbers(body: bytes) -> bool:
    """Whether it is the numbers NaN and Infinity alone that keep a body from being JSON."""
    try:
        from_json(body, allow_inf_nan=True)
    except ValueError:
        return False
    return True


def validate_request(document: object, request_type: type[RequestT]) -> RequestT:
    """The same from parsed JSON."""
    if not isinstance(document, dict):
        raise invalid_request(f"The request body must be a JSON object, not {_kind(document)}.", code="invalid_type")
    try:
        return request_type.model_validate(document)
    except ValidationError as error:
        raise from_validation_error(error, request_type) from None


def must_be(allowed: str) -> PydanticCustomError:
    """What a validator raises: the message becomes "Invalid value for 'field': <given>. It must be <allowed>."."""
    return PydanticCustomError("must_be", "must be {allowed}", {"allowed": allowed})


def from_validation_error(error: ValidationError, request_type: type[BaseModel]) -> ApiError:
    """An ApiError 400 for the first thing that pydantic found wrong. What is allowed is the field's description."""
    first = error.errors(include_url=False)[0]
    param = _param(first["loc"])
    if first["type"] == "extra_forbidden":
        return invalid_request(
            f"Unrecognized request argument supplied: {param}", param=param, code="unknown_parameter"
        )
    allowed = _allowed(first, request_type)
    if first["type"] == "missing":
        message = f"Missing required parameter: '{param}'. It must be {allowed}."
        return invalid_request(message, param=param, code="missing_required_parameter")
    code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    message = f"Invalid value for '{param}': {_given(first)}. It must be {allowed}."
    return invalid_request(message, param=param, code=code)


def _param(location: tuple[int | str, ...]) -> str:
    param = ""
    for part in location:
        if isinstance(part, int):
            param += f"[{part}]"
        else:
            name = part if len(part) <= 64 else part[:64] + "..."
            param += f".{name}" if param else name
    return param


def _allowed(detail: ErrorDetails, request_type: type[BaseModel]) -> str:
    if detail["type"] == "must_be":
        return str(detail["ctx"]["allowed"])
    if isinstance(detail["loc"][-1], int):  # an item of a list of objects; the description is the list's
        return "an object"
    model: type[BaseModel] | None = request_type
    description: str | None = None
    for part in detail["loc"]:
        if isinstance(part, str) and model is not None and part in model.model_fields:
            field = model.model_fields[part]
            description, model = field.description, _model_in(field.annotation)
    return description or f"valid ({detail['msg']})"


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model within `list[Model]`, `Model | None` and the like."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for argument in get_args(annotation) if (model := _model_in(argument))), None)


def _given(detail: ErrorDetails) -> str:
    value, location = detail["input"], detail["loc"]
    if isinstance(value, str) and location[0] in _PRIVATE_FIELDS and location[-1] not in _SHOWN_ANYWAY:
        return f"a string of {len(value)} characters"
    return shortened(value)


def _kind(value: object) -> str:
    return {str: "a string", list: "a list", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
