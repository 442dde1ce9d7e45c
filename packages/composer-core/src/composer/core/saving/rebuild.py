"""Rebuild an algorithm from its saved `repr`, which is parsed and never evaluated."""

from __future__ import annotations

import ast
import math
from typing import TYPE_CHECKING, Any

from composer.core.event import Event
from composer.core.precision import Precision
from composer.core.time import Time, TimeUnit

if TYPE_CHECKING:
    from composer.core.algorithm import Algorithm

_ENUMS: dict[str, Any] = {"Event": Event, "Precision": Precision, "TimeUnit": TimeUnit}
_NUMBERS = {"inf": math.inf, "nan": math.nan}
_SEQUENCES = {ast.List: list, ast.Tuple: tuple, ast.Set: set}
_MAX_LENGTH = 10_000  # far longer than the `repr` of any algorithm; bounds the work for an untrusted file


def rebuild(cls: type[Algorithm], text: Any) -> Algorithm:
    """Construct an algorithm from the text of its constructor call.

    Args:
        cls: The class of the algorithm.
        text: A call such as `BlurPool(min_channels=16)`. Arguments are numbers, strings, None, booleans, containers of
            these, members of `Event`, `TimeUnit` or `Precision`, and `Time(value, unit)`.

    Raises:
        ValueError: `text` is anything else.
        Exception: Any error of the constructor.
    """
    if not isinstance(text, str) or len(text) > _MAX_LENGTH:
        raise ValueError(f"its `repr` must be a string of at most {_MAX_LENGTH} characters.")
    try:
        call = ast.parse(text, mode="eval").body
        args, kwargs = _arguments(call, cls.__name__)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"`{text[:200]}` is not a constructor call.") from error
    return cls(*args, **kwargs)


def _arguments(call: ast.expr, name: str) -> tuple[list[Any], dict[str, Any]]:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != name:
        raise ValueError(f"`{ast.unparse(call)[:200]}` is not a call of `{name}`.")
    kwargs = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise _refusal(keyword.value)
        kwargs[keyword.arg] = _value(keyword.value)
    return [_value(argument) for argument in call.args], kwargs


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, (str, int, float))):
        return node.value
    if isinstance(node, ast.Name) and node.id in _NUMBERS:
        return _NUMBERS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        number = _value(node.operand)
        if isinstance(number, (int, float)):
            return -number if isinstance(node.op, ast.USub) else number
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return _SEQUENCES[type(node)](_value(element) for element in node.elts)
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {_value(key): _value(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        member = getattr(_ENUMS.get(node.value.id), "__members__", {}).get(node.attr)
        if member is not None:
            return member
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Time":
        args, kwargs = _arguments(node, "Time")
        return Time(*args, **kwargs)
    raise _refusal(node)


def _refusal(node: ast.expr) -> ValueError:
    return ValueError(f"`{ast.unparse(node)[:200]}` is not a plain value.")
