"""Convert constructor arguments to values that can be logged."""

from __future__ import annotations

from enum import Enum
from typing import Any

from composer.utils.file_helpers import without_password
from composer.utils.numbers import plain_number


def extract_hparams(locals_dict: dict[str, Any]) -> dict[str, Any]:
    """Convert the local variables of a constructor to loggable values.

    Strings and None are unchanged, but a password or token in a URI is hidden (`without_password`), and numbers of any
    library become plain numbers. An enum member becomes its value,
    an object with `local_hparams` becomes `{class name: local_hparams}`, any other object its class name. Elements of
    lists, tuples and dicts are converted one level deep. Names that start with "_", `self`, and classes are left out.

    Args:
        locals_dict: `locals()`, taken at the start of the constructor.

    Example:
        >>> extract_hparams({"self": 0, "lr": 0.1, "sizes": (1, 2), "model": object()})
        {'lr': 0.1, 'sizes': (1, 2), 'model': 'object'}
    """
    return {
        name: _loggable(value)
        for name, value in locals_dict.items()
        if not (name.startswith("_") or name == "self" or isinstance(value, type))
    }


def _loggable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _loggable_element(element) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        elements = [_loggable_element(element) for element in value]
        return elements if isinstance(value, list) else tuple(elements)
    return _loggable_element(value)


def _loggable_element(value: Any) -> Any:
    value = plain_number(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return without_password(value)
    if value is None or isinstance(value, (int, float, bool)):
        return value
    if hasattr(value, "local_hparams"):
        return {type(value).__name__: value.local_hparams}
    return type(value).__name__


def convert_nested_dict_to_flat_dict(nested_dict: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts; nested keys are joined by "/".

    Example:
        >>> convert_nested_dict_to_flat_dict({"a": {"b": 1, "c": 2}, "d": 3})
        {'a/b': 1, 'a/c': 2, 'd': 3}
    """
    flat: dict[str, Any] = {}
    for key, value in nested_dict.items():
        path = f"{prefix}/{key}" if prefix else str(key)
        if isinstance(value, dict) and value:
            flat.update(convert_nested_dict_to_flat_dict(value, path))
        else:
            flat[path] = value
    return flat


def convert_flat_dict_to_nested_dict(flat_dict: dict[str, Any]) -> dict[str, Any]:
    """Split the keys of a flat dict at "/" into nested dicts; the inverse of `convert_nested_dict_to_flat_dict`.

    Raises:
        ValueError: A key has a value and is also the prefix of another key.

    Example:
        >>> convert_flat_dict_to_nested_dict({"a/b": 1, "a/c": 2, "d": 3})
        {'a': {'b': 1, 'c': 2}, 'd': 3}
    """
    nested: dict[str, Any] = {}
    for path, value in flat_dict.items():
        *parents, last = path.split("/")
        level = nested
        for depth, parent in enumerate(parents, start=1):
            shorter = "/".join(parents[:depth])
            if shorter in flat_dict:
                raise ValueError(f"`flat_dict` must not contain both a value for {shorter!r} and one for {path!r}.")
            level = level.setdefault(parent, {})
        level[last] = value
    return nested
