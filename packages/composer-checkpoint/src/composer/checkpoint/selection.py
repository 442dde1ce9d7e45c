"""Selecting parts of a checkpoint: names and precisions of tensors, and paths that are not saved or loaded."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from composer.checkpoint.storage import without_password
from composer.core.saving import upgrade_state_dict
from composer.utils import STR_TO_DTYPE, dist, ensure_tuple

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


LEFT_OUT = "left_out"
_SHOWN = 5


def filter_and_record(ignore_keys: IgnoreKeys, content: dict[str, Any]) -> None:
    """Remove the parts that `ignore_keys` selects from a checkpoint to save, and record their paths in it.

    The list, `left_out`, is short: if a part is removed completely, it holds only the path of the part.
    """
    before = list(_paths(content))
    apply_filter(ignore_keys, content)
    after, removed = {*_paths(content)}, list[str]()
    for path in before:
        if path not in after and not (removed and path.startswith(f"{removed[-1]}/")):
            removed.append(path)
    if removed:
        content[LEFT_OUT] = removed


def check_complete(path: str, content: dict[str, Any], left_out: Iterable[str], state: State, weights: bool) -> None:
    """Check that a checkpoint holds all parts of a run that were not left out on purpose.

    Args:
        path: Its path, for the message.
        content: The checkpoint.
        left_out: The paths that it was saved without.
        state: The run, with the attributes it saves.
        weights: True if only the weights are loaded.

    Raises:
        ValueError: A part is missing.
    """
    saved = upgrade_state_dict(content.get("state") or {})
    left_out_paths = {*left_out}
    if "state" in left_out_paths:
        return
    written_by_us = bool(content.get("has_checksum"))  # files of other programs have no `left_out`
    required = ("model",) if weights else ("model", "timestamp", "optimizers") if written_by_us else ("timestamp",)
    missing = [
        part
        for part in required
        if part in state.serialized_attributes and part not in saved and f"state/{part}" not in left_out_paths
    ]
    shown = without_password(path)
    if "timestamp" in missing and "model" not in missing:
        raise ValueError(
            f"The checkpoint {shown!r} holds the weights only, so a run cannot be resumed from it. Load it with "
            f"`load_weights_only=True`, which starts training at the beginning with these weights."
        )
    if missing:
        raise ValueError(
            f"The checkpoint {shown!r} must hold {', '.join(f'`state/{part}`' for part in missing)}, but does not, and "
            f"they were not left out on purpose. Load another one."
        )


def warn_left_out(path: str, left_out: list[str]) -> None:
    """Warn, on rank 0, that the run keeps its own values of all that a checkpoint was saved without."""
    if dist.get_global_rank() != 0:
        return
    more = f" and {len(left_out) - _SHOWN} more" if len(left_out) > _SHOWN else ""
    warnings.warn(
        f"The checkpoint {without_password(path)!r} was saved without {', '.join(map(repr, left_out[:_SHOWN]))}{more}, "
        f"because of its run's `save_ignore_keys`. This run keeps its own.",
        stacklevel=5,
    )


def drop_dependents(content: dict[str, Any], left_out: Iterable[str]) -> None:
    """Remove the rest of parts that are useless without what was left out of them."""
    for path in left_out:
        part, _, rest = path.partition("/")
        if part == "rng":  # one entry per rank: removing one would shift the others
            content.pop("rng", None)
        elif part == "resumption":
            (content.get("resumption") or {}).pop(rest.partition("/")[0], None)
        elif path == "state/timestamp":  # `resumption` depends on it
            content.pop("resumption", None)
        parent, key = _place(content, path)
        if key in parent and isinstance(parent[key], (dict, list)) and not parent[key]:
            del parent[key]


def fill_left_out(state: State, saved: dict[str, Any], left_out: Iterable[str]) -> None:
    """Insert the run's own values for what was left out of parts of its state.

    Args:
        state: The run.
        saved: The entry `state` of a checkpoint.
        left_out: The paths that it was saved without. Complete parts, such as `state/optimizers`, are not inserted.
    """
    paths = [path.removeprefix("state/") for path in left_out if path.count("/") > 1 and path.startswith("state/")]
    own = state.state_dict() if paths else {}
    for path in paths:
        (there, key), (here, _) = _place(saved, path), _place(own, path)
        if key in here:
            there.setdefault(key, here[key])


def _paths(tree: Any, start: str = "") -> Iterator[str]:
    """Yield the paths of all values in nested dicts and lists; an empty container has none."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if not isinstance(value, (dict, list)):
            yield f"{start}{key}"
        elif inside := [*_paths(value, f"{start}{key}/")]:
            yield from (f"{start}{key}", *inside)


def _place(tree: Any, path: str) -> tuple[dict[Any, Any], str]:
    """Return the dict that holds the value at a path, empty if there is none, and the value's key in it."""
    *outer, key = path.split("/")
    for each in outer:
        tree = tree.get(each) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else {}, key
