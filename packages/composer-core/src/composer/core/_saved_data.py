"""Where a data set was that keeps its own position: one with `state_dict(num_samples, from_beginning)`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer.core.state import State

__all__ = ["dataset_state", "hand_over_dataset_state"]


def dataset_state(state: State) -> dict[str, Any] | None:
    """The position of the training data set in this epoch; None if the data set does not keep one."""
    save = getattr(getattr(state.train_dataloader, "dataset", None), "state_dict", None)
    if save is None:
        return None
    try:
        inspect.signature(save).bind(0, True)
    except TypeError:  # a method of another kind: what it returns depends on where its loader is
        return None
    return {"train": save(int(state.timestamp.sample_in_epoch), True), "eval": {}}


def hand_over_dataset_state(state: State) -> None:
    """Give a loaded position to the training data set, once both are there."""
    pending = (state.dataset_state or {}).get("train")
    load = getattr(getattr(state.train_dataloader, "dataset", None), "load_state_dict", None)
    if pending is None or load is None:
        return
    load(pending)
    state.dataset_state = {**(state.dataset_state or {}), "train": None}
    state.dataset_resumption["train"] = True
