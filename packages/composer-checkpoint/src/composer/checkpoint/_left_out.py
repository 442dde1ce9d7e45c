"""What a checkpoint was saved without on purpose: it says so, and a run that loads it keeps its own."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from composer.checkpoint._filter import IgnoreKeys, apply_filter
from composer.core.saving import upgrade_state_dict
from composer.utils import dist

if TYPE_CHECKING:
    from composer.core import State

__all__ = ["LEFT_OUT", "check_complete", "drop", "fill", "filter_and_note", "warn_of"]

LEFT_OUT = "left_out"
_SHOWN = 5


def filter_and_note(ignore_keys: IgnoreKeys | None, content: dict[str, Any]) -> None:
    """Remove what `ignore_keys` says from a checkpoint to save, and list the paths of what was removed in it.

    The list, `left_out`, is short: of a part that is gone as a whole it holds the path of the part.
    """
    if ignore_keys is None:
        return
    before = _outline(content)
    apply_filter(ignore_keys, content)
    removed = _removed(before, content, "")
    if removed:
        content[LEFT_OUT] = removed


def check_complete(path: str, content: dict[str, Any], left_out: Iterable[str], state: State, weights: bool) -> None:
    """Refuse a checkpoint that lacks a part of the run, unless it was left out on purpose.

    Args:
        path: Where it is, for the message.
        content: The checkpoint.
        left_out: The paths of what it was saved without.
        state: Tells what a run saves.
        weights: Whether the weights alone are to be loaded.

    Raises:
        ValueError: A part is missing.
    """
    saved = upgrade_state_dict(content.get("state") or {})
    excused = {*left_out}
    if "state" in excused:
        return
    own = bool((saved.get("metadata") or {}).get("sealed"))  # files of other programs do not say what they left out
    required = ("model",) if weights else ("model", "timestamp", "optimizers") if own else ("timestamp",)
    missing = [
        part
        for part in required
        if part in state.serialized_attributes and part not in saved and f"state/{part}" not in excused
    ]
    if "timestamp" in missing and "model" not in missing:
        raise ValueError(
            f"The checkpoint {path!r} holds the weights only, so a run cannot go on from it. Load it with "
            f"`load_weights_only=True`, which starts training at the beginning with these weights."
        )
    if missing:
        raise ValueError(
            f"The checkpoint {path!r} must hold {', '.join(f'`state/{part}`' for part in missing)}, but does not, and "
            f"does not say that it was left out. Load another one."
        )


def warn_of(path: str, left_out: list[str]) -> None:
    """Say, on rank 0, that the run keeps its own of what a checkpoint was saved without."""
    if not left_out or dist.get_global_rank() != 0:
        return
    more = f" and {len(left_out) - _SHOWN} more" if len(left_out) > _SHOWN else ""
    warnings.warn(
        f"The checkpoint {path!r} was saved without {', '.join(map(repr, left_out[:_SHOWN]))}{more}, as its run's "
        f"`save_ignore_keys` said. This run keeps its own.",
        stacklevel=5,
    )


def drop(content: dict[str, Any], left_out: Iterable[str]) -> None:
    """Remove what is left of parts that make no sense without what was left out of them."""
    for path in left_out:
        part, _, rest = path.partition("/")
        if part == "rng":  # one entry per rank: the others would move up
            content.pop("rng", None)
        elif part == "resumption":
            (content.get("resumption") or {}).pop(rest.partition("/")[0], None)
        elif path == "state/timestamp":  # what the rest of `resumption` is about
            content.pop("resumption", None)
        _remove_empty(content, path)


def fill(state: State, saved: dict[str, Any], left_out: Iterable[str]) -> None:
    """Put the run's own values in the places of what was left out of parts of its state.

    Args:
        state: The run.
        saved: The entry `state` of a checkpoint.
        left_out: The paths of what it was saved without. A whole part, such as `state/optimizers`, stays away.
    """
    paths = [path.removeprefix("state/") for path in left_out if path.count("/") > 1 and path.startswith("state/")]
    own = state.state_dict() if paths else {}
    for path in paths:
        _fill(saved, own, path)


def _outline(value: Any) -> Any:
    """The containers in a value, with the items of lists, so that those that stay are known again."""
    if isinstance(value, dict):
        return {key: _outline(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [(item, _outline(item)) for item in value]
    return None


def _removed(before: Any, now: Any, path: str) -> list[str]:
    if not before or not isinstance(now, type(before)):
        return []
    if not now and path:
        return [path]
    start, found = f"{path}/" if path else "", list[str]()
    if isinstance(before, dict):
        for key, inner in before.items():
            found += _removed(inner, now[key], f"{start}{key}") if key in now else [f"{start}{key}"]
        return found
    stayed = 0
    for index, (item, inner) in enumerate(before):
        if stayed < len(now) and now[stayed] is item:
            found += _removed(inner, item, f"{start}{index}")
            stayed += 1
        else:
            found.append(f"{start}{index}")
    return found


def _remove_empty(tree: Any, path: str) -> None:
    if not isinstance(tree, dict):
        return
    for key, value in [*tree.items()]:
        if str(key) == path and isinstance(value, (dict, list)) and not value:
            del tree[key]
        elif path.startswith(f"{key}/"):
            _remove_empty(value, path.removeprefix(f"{key}/"))


def _fill(saved: Any, own: Any, path: str) -> None:
    if not isinstance(saved, dict) or not isinstance(own, dict):
        return
    for key, value in own.items():
        if str(key) == path:
            saved.setdefault(key, value)
        elif path.startswith(f"{key}/") and key in saved:
            _fill(saved[key], value, path.removeprefix(f"{key}/"))
