"""Field types the sections share: counts written as floats, finite numbers, dtype names, lists."""

from __future__ import annotations

import math
import numbers
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

DTYPE_NAMES = {
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "torch.float32": "fp32",
    "torch.float": "fp32",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "torch.float16": "fp16",
    "torch.half": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "torch.bfloat16": "bf16",
}


def whole(value: Any) -> Any:
    """An int for every whole number, so that 5e7 in JSON may stand for a count.

    Raises a validation error for a fraction, infinity, NaN and a boolean; other types fail at the int itself.
    """
    if isinstance(value, bool):
        raise PydanticCustomError("whole_number", "must be a whole number")
    if isinstance(value, numbers.Integral):
        return int(value)
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        raise PydanticCustomError("whole_number", "must be a finite whole number")
    if value != int(value):
        raise PydanticCustomError(
            "whole_number",
            "must be a whole number; write {near}, or int(...) around the expression that made it",
            {"near": max(1, round(value))},
        )
    return int(value)


def dtype_name(value: Any) -> Any:
    """One of fp32, fp16 and bf16 for every spelling of them; a `torch.dtype` is read by its text."""
    known = DTYPE_NAMES.get(str(value).lower())
    if known is not None:
        return known
    raise PydanticCustomError("dtype_name", "choose 'fp32', 'fp16' or 'bf16'")


def as_tuple(value: Any) -> Any:
    """A list as a tuple, which a frozen section can hold."""
    return tuple(value) if isinstance(value, list) else value


def texts(value: Any) -> Any:
    """One text or a list of texts as a tuple of them, without repetitions."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(dict.fromkeys(value))
    return as_tuple(value)


def lower(value: Any) -> Any:
    """Text in lower case, for choices whose case does not matter."""
    return value.lower() if isinstance(value, str) else value


def steps_or_never(value: Any) -> Any:
    """Positive infinity as None (never); everything else as `whole` reads it."""
    return None if isinstance(value, float) and value == math.inf else whole(value)


def rounded_down(value: Any) -> Any:
    """The whole part of a finite positive fraction, for a size that other libraries compute as 0.9 times a square."""
    is_fraction = isinstance(value, float) and math.isfinite(value) and value > 0
    return int(value) if is_fraction else whole(value)


_WHOLE = BeforeValidator(whole)
Count = Annotated[int, _WHOLE]
Positive = Annotated[int, Field(gt=0), _WHOLE]
NonNegative = Annotated[int, Field(ge=0), _WHOLE]
RoundedDown = Annotated[int, Field(ge=0), BeforeValidator(rounded_down)]
Steps = Annotated[Annotated[int, Field(gt=0)] | None, BeforeValidator(steps_or_never)]
Number = Annotated[float, Field(allow_inf_nan=False)]
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeNumber = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
DType = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(dtype_name)]
Texts = Annotated[tuple[str, ...], BeforeValidator(texts)]
Counts = Annotated[tuple[Count, ...], BeforeValidator(as_tuple)]
Numbers = Annotated[tuple[Number, ...], BeforeValidator(as_tuple)]
