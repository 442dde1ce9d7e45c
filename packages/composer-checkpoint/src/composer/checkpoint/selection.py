"""Selecting parts of a checkpoint: names and precisions of tensors, and paths that are not saved or loaded."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from composer.checkpoint.storage import without_password
from composer.core.saving import upgrade_state_dict
from composer.utils import STR_TO_DTYPE, ensure_tuple

if TYPE_CHECKING:
    from composer.core import State

Keys = str | Sequence[str]
"""Glob patterns of names, as in `fnmatch`."""

Precision = str | torch.dtype
"""`"fp32"`, `"fp16"`, `"bf16"`, or a floating data type of torch."""


def check_keys(include_keys: Keys | None, ignore_keys: Keys | None) -> None:
    """Check that at most one of both selections is given.

    Raises:
        ValueError: Both are given.
    """
    if include_keys is not None and ignore_keys is not None:
        raise ValueError(
            f"`include_keys` and `ignore_keys` must not be given together, got {include_keys!r} and {ignore_keys!r}. "
            f"Use the one that is easier to write."
        )


def selected(names: Iterable[str], include_keys: Keys | None, ignore_keys: Keys | None) -> list[str]:
    """Return the selected names, in their order. Warns of a pattern that matches none.

    Args:
        names: All names.
        include_keys: Patterns of the names to include; None: all.
        ignore_keys: Patterns of the names to leave out.

    Raises:
        ValueError: Both are given.
    """
    check_keys(include_keys, ignore_keys)
    everything = list(names)
    if include_keys is None and ignore_keys is None:
        return everything
    hits: set[str] = set()
    for pattern in ensure_tuple(ignore_keys if include_keys is None else include_keys):
        matches = fnmatch.filter(everything, pattern)
        if not matches:
            warnings.warn(f"The pattern {pattern!r} matches none of the names.", stacklevel=3)
        hits.update(matches)
    return [name for name in everything if (name in hits) == (include_keys is not None)]


def check_precision(precision: Precision | None) -> torch.dtype | None:
    """Return the data type of a precision; None: each tensor keeps its own.

    Raises:
        ValueError: The precision is not a floating type.
    """
    dtype = STR_TO_DTYPE.get(precision) if isinstance(precision, str) else precision
    if precision is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(
            f"`precision` must be one of {', '.join(map(repr, STR_TO_DTYPE))}, a floating data type of torch, or None "
            f"(unchanged), got {precision!r}."
        )
    return dtype


def converted(value: Any, dtype: torch.dtype | None) -> Any:
    """Convert a floating tensor to another precision; return anything else unchanged."""
    if dtype is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.to(dtype)


IgnoreKeys = Sequence[str] | Callable[[dict[str, Any]], None]
"""Glob patterns of paths, or a function that removes keys from a checkpoint's dictionary in place."""


def glob_filter(exclude_globs: Sequence[str]) -> Callable[[dict[str, Any]], None]:
    """Return a function that removes all matches of patterns from a nested dictionary, in place.

    Args:
        exclude_globs: Patterns, as in `fnmatch`, of paths such as `state/model/layer1.weight`; items of lists are named
            by their index. Everything below a match is removed, too.

    Returns:
        The function. It warns of a pattern that matches nothing.

    Example:
        >>> tree = {"state": {"model": {"a.weight": 1, "b.weight": 2}}, "rng": []}
        >>> glob_filter(["state/model/a.*", "rng"])(tree)
        >>> tree
        {'state': {'model': {'b.weight': 2}}}

    Raises:
        TypeError: `exclude_globs` is a single string.
    """
    if isinstance(exclude_globs, str):
        raise TypeError(f"`exclude_globs` must be a list of patterns, got {exclude_globs!r}. Use [{exclude_globs!r}].")

    def remove(state_dict: dict[str, Any]) -> None:
        matched: set[str] = set()
        _remove(state_dict, "", exclude_globs, matched)
        for pattern in exclude_globs:
            if pattern not in matched:
                warnings.warn(f"The pattern {pattern!r} matches nothing in the checkpoint.", stacklevel=3)

    return remove


def apply_filter(ignore_keys: IgnoreKeys | None, state_dict: dict[str, Any]) -> None:
    """Remove the parts that `ignore_keys` selects from a checkpoint's dictionary, in place."""
    if ignore_keys is None:
        return
    if isinstance(ignore_keys, str):
        ignore_keys = [ignore_keys]
    (ignore_keys if callable(ignore_keys) else glob_filter(ignore_keys))(state_dict)


def _remove(tree: Any, prefix: str, patterns: Sequence[str], matched: set[str]) -> None:
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree))
    for key, value in reversed(items):  # from the end, so that indices stay right
        path = f"{prefix}{key}"
        hits = [pattern for pattern in patterns if fnmatch.fnmatch(path, pattern)]
        if hits:
            matched.update(hits)
            del tree[key]
        elif isinstance(value, (dict, list)):
            _remove(value, f"{path}/", patterns, matched)


def check_complete(path: str, content: dict[str, Any], state: State, weights: bool) -> None:
    """Check that a checkpoint holds what a run needs; a run keeps its own model or optimizers, with a warning.

    Args:
        path: Its path, for the message.
        content: The checkpoint; an empty part that the run keeps is removed.
        state: The run, with the attributes it saves.
        weights: True if only the weights are loaded.

    Raises:
        ValueError: It has no timestamp; or no model, and only the weights are loaded.
    """
    shown, given = without_password(path), content.get("state") or {}
    saved, attributes = upgrade_state_dict(given), state.serialized_attributes
    if not weights and "timestamp" in attributes and not saved.get("timestamp"):
        raise ValueError(
            f"The checkpoint {shown!r} holds no `state/timestamp`, like a file of weights, so a run cannot be resumed "
            f"from it. Load it with `load_weights_only=True`, which starts training at the beginning with its weights."
        )
    own = {"model": [*state.model.parameters()], "optimizers": [] if weights else state.optimizers}
    missing = [part for part, here in own.items() if part in attributes and here and not saved.get(part)]
    if weights and missing:
        raise ValueError(f"The checkpoint {shown!r} must hold `state/model`, but does not. Load another one.")
    for part in missing:
        given.pop(part, None)
    if missing:
        names = " and ".join(f"`state/{part}`" for part in missing)
        warnings.warn(f"The checkpoint {shown!r} holds no {names}. This run keeps its own.", stacklevel=4)
