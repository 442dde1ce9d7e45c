"""Repeat the first access to each data set when a run resumes.

A data set may draw random numbers when it is first accessed, and store the result. A resumed run accesses it at another
moment, so it first repeats the access, with the generators as they were then.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from composer.core import State
from composer.trainer.ranks import set_epoch
from composer.trainer.resume.generators import generators_of, global_states, set_global_states, set_states, states_of
from composer.trainer.resume.skip import has_state

__all__ = ["FirstAccesses"]


class FirstAccesses:
    """The states of the random generators before the first iteration of each loader, by the loader's label."""

    def __init__(self) -> None:
        self._saved: dict[str, dict[str, Any]] = {}
        self._loaders: dict[str, Any] = {}

    def record(self, label: str, loader: Any, epoch: int) -> None:
        """Store the generators' states if this is the loader's first iteration; call it before each iteration.

        Args:
            label: The label of the loader.
            loader: An iterable of batches.
            epoch: The epoch that was set on its distributed samplers.
        """
        if self._loaders.get(label) is loader or not _is_repeatable(loader):
            return
        self._loaders[label] = loader
        self._saved[label] = {"epoch": epoch, "rng": global_states(), "generators": states_of(generators_of(loader))}

    def repeat(self, label: str, loader: Any) -> None:
        """Load the first batch again, as the saved run loaded it. This changes the state of all generators.

        Args:
            label: The label of the loader.
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
        """Return the stored states, and the current ones of the generators in evaluation loaders."""
        current = {each.label: states_of(generators_of(each.dataloader.dataloader)) for each in state.evaluators}
        return {
            "first": dict(self._saved),
            "evaluators": {label: states for label, states in current.items() if states},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the states of the run that saved."""
        self._saved, self._loaders = dict(saved.get("first", {})), {}

    def repeat_evaluators(self, state: State, generators: dict[str, Any]) -> None:
        """Repeat the first access of evaluation loaders, and set their generators.

        Args:
            state: The run.
            generators: The entry "evaluators" of a saved `state_dict`.
        """
        for evaluator in state.evaluators:
            label, loader = evaluator.label, evaluator.dataloader.dataloader
            self.repeat(label, loader)
            if label in generators:
                set_states(generators_of(loader), generators[label])


def _is_repeatable(loader: Any) -> bool:
    """Return True if iterating a loader once more in this process changes nothing but the data set's stored values."""
    if isinstance(loader, DataLoader):
        return loader.num_workers == 0  # each iteration has new worker processes with their own copy of the data set
    return not (isinstance(loader, (list, tuple)) or hasattr(loader, "__next__") or has_state(loader))
