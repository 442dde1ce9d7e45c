"""What loaders draw only once: the generators of before their first iteration, and going through it again.

A data set may draw random numbers when it is first accessed, and keep them. A resumed run accesses it at another
moment, so it first repeats the access, with the generators as they were then.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from composer.core import State
from composer.trainer import _skip
from composer.trainer._context import set_epoch
from composer.trainer._generators import generators_of, global_states, set_global_states, set_states, states_of

__all__ = ["FirstAccesses"]


class FirstAccesses:
    """The generators' states before the first iteration of each loader of a run, by its label."""

    def __init__(self) -> None:
        self._saved: dict[str, dict[str, Any]] = {}
        self._loaders: dict[str, Any] = {}

    def note(self, label: str, loader: Any, epoch: int) -> None:
        """Keep the states, if this is the first iteration of a loader; call it before each one.

        Args:
            label: Of the loader.
            loader: An iterable of batches.
            epoch: What its distributed samplers were told.
        """
        if self._loaders.get(label) is loader or not _is_repeatable(loader):
            return
        self._loaders[label] = loader
        self._saved[label] = {"epoch": epoch, "rng": global_states(), "generators": states_of(generators_of(loader))}

    def repeat(self, label: str, loader: Any) -> None:
        """Load the first batch once more, as it was loaded in the run that saved. Leaves all generators changed.

        Args:
            label: Of the loader.
            loader: An iterable of batches that has not been iterated in this process.
        """
        saved = self._saved.get(label)
        if saved is None or not _is_repeatable(loader):
            return
        self._loaders[label] = loader
        set_epoch(loader, saved["epoch"])
        set_global_states(saved["rng"])
        set_states(generators_of(loader), saved["generators"], warn=False)
        next(iter(loader), None)

    def epoch_of(self, label: str) -> int | None:
        """Return the epoch of a loader's first iteration, or None if there was none."""
        saved = self._saved.get(label)
        return None if saved is None else saved["epoch"]

    def state_dict(self, state: State) -> dict[str, Any]:
        """Return the states, and those of the generators that evaluation loaders hold now."""
        held = {each.label: states_of(generators_of(each.dataloader.dataloader)) for each in state.evaluators}
        return {
            "first": dict(self._saved),
            "evaluators": {label: states for label, states in held.items() if states},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the states of the run that saved."""
        self._saved, self._loaders = dict(saved.get("first", {})), {}

    def repeat_evaluators(self, state: State, held: dict[str, Any]) -> None:
        """Repeat the first access of evaluation loaders, and set the generators that they hold.

        Args:
            state: The run.
            held: The entry "evaluators" of a saved `state_dict`.
        """
        for evaluator in state.evaluators:
            label, loader = evaluator.label, evaluator.dataloader.dataloader
            self.repeat(label, loader)
            if label in held:
                set_states(generators_of(loader), held[label])


def _is_repeatable(loader: Any) -> bool:
    """Return whether iterating a loader once more in this process changes nothing but what its data set keeps."""
    if isinstance(loader, DataLoader):
        return loader.num_workers == 0  # each iteration has new worker processes, with a data set of their own
    return not (isinstance(loader, (list, tuple)) or hasattr(loader, "__next__") or _skip.has_state(loader))
