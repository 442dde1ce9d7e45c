"""Numbers of any library, such as NumPy's: checks of arguments, and conversions to plain ints and floats."""

from __future__ import annotations

import math
import operator
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")


def check_finite(
    hint: str = "",
    /,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    **numbers: Any,
) -> None:
    """Check that arguments are finite numbers within bounds, or tensors of one such number.

    Args:
        hint: A sentence that ends the message about a bound.
        least: The smallest allowed value.
        above: Values must be greater than this.
        most: The largest allowed value.
        **numbers: Values by argument name.

    Raises:
        TypeError: A value is not a number. None, True and False are not numbers.
        ValueError: A number is NaN, infinite or out of bounds.

    Example:
        >>> check_finite(lr=0.1, weight_decay=0)
        >>> check_finite(lr=float("nan"))
        Traceback (most recent call last):
        ...
        ValueError: `lr` must be finite, got nan. Check how it was computed.
        >>> check_finite("It is a probability.", p=2, least=0, most=1)
        Traceback (most recent call last):
        ...
        ValueError: `p` must be in [0, 1], got 2. It is a probability.
    """
    for name, value in numbers.items():
        is_number = isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        if not is_number or isinstance(value, bool):
            raise TypeError(f"`{name}` must be a number, got {value!r}.")
        if not math.isfinite(value):
            raise ValueError(f"`{name}` must be finite, got {value!r}. Check how it was computed.")
        if not (least <= value <= most and value > above):
            raise ValueError(f"`{name}` must {_describe(least, above, most)}, got {value!r}. {hint}".rstrip())


def _describe(least: float, above: float, most: float) -> str:
    if most < math.inf:
        if least > -math.inf:
            return f"be in [{least}, {most}]"
        return f"be in ({above}, {most}]" if above > -math.inf else f"be at most {most}"
    if above > -math.inf:
        return f"be above {above}" if above else "be positive"
    return f"be at least {least}" if least else "not be negative"


def check_integers(hint: str = "", /, *, least: float = -math.inf, **numbers: Any) -> None:
    """Check that arguments are integers of any library; `operator.index(value)` then returns the int.

    Args:
        hint: A sentence that ends the message about the bound.
        least: The smallest allowed value.
        **numbers: Values by argument name.

    Raises:
        TypeError: A value is not an integer. None, True, False and 2.0 are not integers.
        ValueError: A number is NaN, infinite or too small.

    Example:
        >>> check_integers(depth=1.5)
        Traceback (most recent call last):
        ...
        TypeError: `depth` must be an integer, got 1.5.
    """
    for name, value in numbers.items():
        number = plain_int(value)
        if number is None:
            check_finite(**{name: value})
            raise TypeError(f"`{name}` must be an integer, got {value!r}.")
        check_finite(hint, least=least, **{name: number})


def int_at_least(name: str, value: object, least: int, unit: str = "", hint: str = "") -> int:
    """Return an integer of any library as a plain int.

    Args:
        name: The name of the argument, for the message.
        value: The integer.
        least: The smallest allowed value.
        unit: The unit of the number, for the message.
        hint: A sentence that ends the message.

    Raises:
        ValueError: The value is too small, or not an integer.

    Example:
        >>> int_at_least("interval", np.int64(5), 1)
        5
        >>> int_at_least("interval", 0, 1, "batch", "Use 10.")
        Traceback (most recent call last):
        ...
        ValueError: `interval` must be at least 1 batch, got 0. Use 10.
        >>> int_at_least("interval", 1.5, 1)
        Traceback (most recent call last):
        ...
        ValueError: `interval` must be an integer of at least 1, got 1.5.
    """
    number = plain_int(value)
    if number is None or number < least:
        allowed = f"{'an integer of ' if number is None else ''}at least {least} {unit}".rstrip()
        raise ValueError(f"`{name}` must be {allowed}, got {value!r}. {hint}".rstrip())
    return number


def check_flags(**flags: Any) -> None:
    """Check that arguments are True or False; a string such as "no" would count as True.

    Args:
        **flags: Values by argument name.

    Raises:
        TypeError: A value is not True, False, 0 or 1.

    Example:
        >>> check_flags(batch="no")
        Traceback (most recent call last):
        ...
        TypeError: `batch` must be True or False, got 'no'.
    """
    for name, value in flags.items():
        is_bit = isinstance(value, Integral) and value in (0, 1)
        if not (isinstance(value, (bool, np.bool_)) or is_bit):
            raise TypeError(f"`{name}` must be True or False, got {value!r}.")


def plain_int(value: object) -> int | None:
    """Return an integer of any library, such as NumPy's, as a plain int; None for anything else.

    Args:
        value: An integer is a value with `__index__`, except True, False, boolean tensors, and tensors on an
            accelerator, which would force a synchronization. 2.0 is not an integer.

    Example:
        >>> plain_int(np.int32(3)), plain_int(torch.tensor(3)), plain_int(True), plain_int(3.0)
        (3, 3, None, None)
    """
    if type(value) is int:
        return value
    if isinstance(value, (bool, np.bool_)):
        return None
    if isinstance(value, torch.Tensor) and (value.device.type != "cpu" or value.dtype is torch.bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def plain_number(value: T) -> T:
    """Return a real number of any library as a plain int or float, and any other value unchanged.

    NumPy numbers overflow, and safe loading refuses them, so they are converted before they are stored or logged.

    Args:
        value: A value. NumPy booleans become plain booleans; tensors are unchanged, except those that `plain_int`
            converts.

    Example:
        >>> plain_number(np.float64(0.5)), plain_number(np.int64(2)), plain_number("1ep")
        (0.5, 2, '1ep')
    """
    if type(value) in (int, float, str):
        return value
    number: Any = plain_int(value)
    if number is None:
        number = value
        if isinstance(value, np.bool_):
            number = bool(value)
        elif isinstance(value, Real) and not isinstance(value, bool):
            number = float(value)
    return number  # type: ignore[no-any-return]
