"""Leaving parts of a checkpoint out, by their paths."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["IgnoreKeys", "apply_filter", "glob_filter"]

IgnoreKeys = Sequence[str] | Callable[[dict[str, Any]], None]
"""Glob patterns of paths, or a function that removes keys from a checkpoint's dictionary in place."""


def glob_filter(exclude_globs: Sequence[str]) -> Callable[[dict[str, Any]], None]:
    """A function that removes what patterns match from a nested dictionary, in place.

    Args:
        exclude_globs: Patterns, as of `fnmatch`, of paths such as `state/model/layer1.weight`; items of lists go by
            their index. What is below a match goes with it.

    Returns:
        The function. It warns of a pattern that matches nothing.

    Example:
        >>> tree = {"state": {"model": {"a.weight": 1, "b.weight": 2}}, "rng": []}
        >>> glob_filter(["state/model/a.*", "rng"])(tree)
        >>> tree
        {'state': {'model': {'b.weight': 2}}}
    """

    def remove(state_dict: dict[str, Any]) -> None:
        matched: set[str] = set()
        _remove(state_dict, "", exclude_globs, matched)
        for pattern in exclude_globs:
            if pattern not in matched:
                warnings.warn(f"The pattern {pattern!r} matches nothing in the checkpoint.", stacklevel=3)

    return remove


def apply_filter(ignore_keys: IgnoreKeys | None, state_dict: dict[str, Any]) -> None:
    """Remove what `ignore_keys` says from a checkpoint's dictionary, in place."""
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
