"""Read and replace parts of batches of any type."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

_BUILTIN = (dict, list, tuple)  # exactly these types have no attributes except methods
_MISS = (KeyError, IndexError, TypeError)
_NAMES = {
    "input": ("image images img pixel_values input inputs input_ids input_values input_features features x".split()),
    "target": "labels label targets target y".split(),
}


def batch_get(batch: Any, key: Any) -> Any:
    """Return one or several parts of a batch.

    A `(getter, setter)` pair calls `getter(batch)`, and a callable is called with the batch. Otherwise the first that
    exists is returned: `batch[key]`; for a sequence of keys, the tuple of `batch[k]` for each k; the attribute `key`.

    Args:
        batch: A tensor, sequence, mapping, namedtuple or any object with attributes.
        key: An index, slice, mapping key, attribute name, callable, `(getter, setter)` pair, or a sequence of keys.

    Returns:
        The part, or a tuple with one part per key.

    Raises:
        ValueError: `key` is a sequence of callables, but not a pair.
        KeyError: A mapping has no such key.
        IndexError: A sequence is too short.
        TypeError: The batch cannot be indexed by `key` and has no such attribute.
        AttributeError: An object that cannot be indexed has no such attribute.

    Example:
        >>> batch_get(("x", "y"), 1), batch_get({"a": 1, "b": 2, "c": 3}, ("a", "c"))
        ('y', (1, 3))
    """
    if type(key) in (int, str):
        if type(batch) in _BUILTIN:
            try:
                return batch[key]
            except _MISS as error:
                raise _missing(batch, key, error) from None
    elif callable(key):
        return key(batch)
    elif _is_pair(key):
        return key[0](batch)
    try:
        return batch[key]
    except _MISS as error:
        if _is_many(key):
            return tuple(batch_get(batch, part) for part in key)
        if _has_attribute(batch, key):
            return getattr(batch, key)
        if isinstance(key, str) and isinstance(error, TypeError) and type(batch) not in _BUILTIN:
            return getattr(batch, key)  # raises an AttributeError with both names
        raise _missing(batch, key, error) from None


def batch_set(batch: Any, key: Any, value: Any) -> Any:
    """Replace one or several existing parts of a batch.

    A `(getter, setter)` pair calls `setter(batch, value)`, and a callable is called with batch and value. A sequence of
    keys that `batch[keys]` supports (tensors, arrays) is assigned in one step; any other sequence of keys takes one
    element of `value` for each key. Otherwise the existing item, or else the existing attribute, is replaced.

    Args:
        batch: A tensor, sequence, mapping, namedtuple or any object with attributes. Changed in place if possible.
        key: An index, slice, mapping key, attribute name, callable, `(getter, setter)` pair, or a sequence of keys.
        value: The new part; for a sequence of keys, one part for each.

    Returns:
        The batch: the same object if it is mutable, a new one for tuples, namedtuples and frozen dataclasses, the
        return value of a setter or callable.

    Raises:
        ValueError: `key` is a sequence of callables, but not a pair; or `value` does not have one element for each key.
        KeyError: A mapping has no such key.
        IndexError: A sequence is too short.
        RuntimeError: The batch has neither such an item nor such an attribute.

    Example:
        >>> batch_set(("x", "y"), 1, "z")
        ('x', 'z')
        >>> batch_set({"a": 1, "b": 2}, ("a", "b"), (3, 4))
        {'a': 3, 'b': 4}
    """
    if type(key) in (int, str):
        return _set_one(batch, key, value)
    if callable(key):
        return key(batch, value)
    if _is_pair(key):
        return key[1](batch, value)
    if not _is_many(key) or _has_item(batch, key):
        return _set_one(batch, key, value)
    is_collection = isinstance(value, Collection) and not isinstance(value, (str, bytes))
    if not is_collection or len(key) != len(value):
        got = len(value) if is_collection else repr(value)
        raise ValueError(f"`value` must contain one element for each of the {len(key)} keys, got {got}.")
    for each in key:  # before any change, so that a missing key leaves the batch unchanged
        _check_settable(batch, each)
    for each, part in zip(key, value, strict=True):
        batch = _set_one(batch, each, part)
    return batch


def find_part(batch: Any, part: Literal["input", "target"]) -> Any:
    """Return the key of the inputs or the targets of a batch, as a model or an algorithm finds them without a key.

    Args:
        batch: A batch of any type.
        part: The part to find.

    Returns:
        For a tuple or list of two parts 0 or 1, and 0 for the only input of one part. For a mapping or an object with
        attributes the name of the inputs, if it has exactly one of "image", "images", "img", "pixel_values", "input",
        "inputs", "input_ids", "input_values", "input_features", "features" and "x"; or the first name of "labels",
        "label", "targets", "target" and "y" that it has. None if there is no such part.

    Example:
        >>> find_part({"pixel_values": 1, "label": 2}, "input"), find_part((1, 2), "target")
        ('pixel_values', 1)
    """
    index = 0 if part == "input" else 1
    if isinstance(batch, (tuple, list)):
        return index if index < len(batch) <= 2 else None
    if isinstance(batch, Mapping):
        found = [name for name in _NAMES[part] if name in batch]
    else:
        found = [name for name in _NAMES[part] if hasattr(batch, name)]
    return found[0] if found and (part == "target" or len(found) == 1) else None


def check_pair(batch: Any, owner: str) -> None:
    """Check that a batch can be unpacked into inputs and targets.

    Args:
        batch: The batch.
        owner: The class that unpacks it, for the message.

    Raises:
        TypeError: The batch is a mapping, whose keys would be unpacked, or a sequence of another length.
    """
    if type(batch) in (tuple, list) and len(batch) == 2:  # the usual case, in every forward pass
        return
    if isinstance(batch, Mapping):
        got = f"a {type(batch).__name__} with the keys {_listed(batch)}"
    elif isinstance(batch, (tuple, list)) and len(batch) != 2:
        got = f"a {type(batch).__name__} of {len(batch)} parts"
    else:
        return
    raise TypeError(
        f"`batch` must be a pair of inputs and targets for `{owner}`, got {got}. Make pairs: "
        f"`DataSpec(dataloader, batch_transforms=lambda batch: (batch[...], batch[...]))`, or override `forward` and "
        f"`loss`."
    )


class BatchKeyError(KeyError):
    """A KeyError whose message is printed without quotes."""

    def __str__(self) -> str:
        return str(self.args[0])


def _missing(batch: Any, key: Any, error: Exception) -> Exception:
    """Return an error for a missing key that lists the existing keys."""
    kind = type(error)
    if isinstance(batch, Mapping):
        kind, noun, parts, held = BatchKeyError, "keys", list(batch) or ["x", "y"], f"with the keys {_listed(batch)}"
    elif isinstance(batch, (tuple, list)):
        noun, parts, held = "parts", [0, max(len(batch) - 1, 0)], f"of {len(batch)} parts"
    elif is_batch_dataclass(batch):
        names = fields_of(batch)
        noun, parts, held = "fields", list(names) or ["x", "y"], f"with the fields {_listed(names)}"
    else:
        return error
    return kind(
        f"The batch is a {type(batch).__name__} {held}, and has no {key!r}. Pass the {noun} to use, for example "
        f"`input_key={parts[0]!r}` and `target_key={parts[-1]!r}`."
    )


def _listed(batch: Mapping[Any, Any]) -> str:
    return ", ".join(map(repr, batch)) or "(none)"


def _is_many(key: Any) -> bool:
    return isinstance(key, Sequence) and not isinstance(key, (str, bytes))


def _is_pair(key: Any) -> bool:
    """Return True for a `(getter, setter)` pair; raise for a sequence of another number of callables."""
    if not _is_many(key) or not key or not all(map(callable, key)):
        return False
    if len(key) != 2:
        raise ValueError(f"`key` must contain two functions, a getter and a setter, got {len(key)}: {key!r}.")
    return True


def _has_attribute(batch: Any, key: Any) -> bool:
    return type(batch) not in _BUILTIN and isinstance(key, str) and hasattr(batch, key)


def _has_item(batch: Any, key: Any) -> bool:
    try:
        batch[key]
    except _MISS:
        return False
    return True


def _set_one(batch: Any, key: Any, value: Any) -> Any:
    is_attribute = _check_settable(batch, key)
    if isinstance(batch, tuple):
        if is_attribute:
            return batch._replace(**{key: value})  # type: ignore[attr-defined]  # a field of a namedtuple
        parts = list(batch)
        parts[key] = value
        make: Any = getattr(type(batch), "_make", type(batch))  # a namedtuple takes its fields one by one
        return make(parts)
    if not is_attribute:
        batch[key] = value
        return batch
    try:
        setattr(batch, key, value)
    except dataclasses.FrozenInstanceError:
        return with_fields(batch, {key: value})
    return batch


def _check_settable(batch: Any, key: Any) -> bool:
    """Return True if `key` is an attribute of the batch, False if it is an item; raise if it is neither."""
    try:
        batch[key]
    except _MISS as error:
        settable = getattr(batch, "_fields", ()) if isinstance(batch, tuple) else (key,)
        if key in settable and _has_attribute(batch, key):
            return True
        if isinstance(error, TypeError):
            raise RuntimeError(
                f"`key` must name an item or an attribute of the batch, got {key!r} for a {type(batch).__name__}. "
                f"Pass a (getter, setter) pair for batches of a custom type."
            ) from error
        raise _missing(batch, key, error) from None
    return False


def is_batch_dataclass(value: Any) -> bool:
    """Return True for an object of a dataclass, but not for a class."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def fields_of(batch: Any) -> dict[str, Any]:
    """Return the fields of an object of a dataclass by name."""
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}


def with_fields(batch: Any, values: Mapping[str, Any]) -> Any:
    """Return a shallow copy of an object of a dataclass with other values, without calling its constructor."""
    changed = copy.copy(batch)
    for name, value in values.items():
        object.__setattr__(changed, name, value)  # it may be frozen
    return changed
