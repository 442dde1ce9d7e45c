"""The random generators of a run: the global ones, and those inside the training and evaluation loaders.

`FirstAccesses` repeats, with the same generators, what a dataset draws when it is first accessed.
"""

from __future__ import annotations

import functools
import random
import types
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from composer.core import State
from composer.trainer.ranks import set_epoch
from composer.trainer.resume.skip import has_state

__all__ = [
    "FirstAccesses",
    "generators_of",
    "global_states",
    "keep_global_states",
    "set_global_states",
    "set_states",
    "states_of",
]

_MAX_ITEMS = 256  # a longer container holds data, not transforms
_MAX_DEPTH = 12
_MAX_OBJECTS = 20_000

_KINDS: dict[str, type] = {
    "torch": torch.Generator,
    "python": random.Random,
    "numpy": np.random.Generator,
    "numpy_legacy": np.random.RandomState,
}
_LEAVES = (str, bytes, int, float, complex, type, types.ModuleType, torch.Tensor, np.ndarray, random.SystemRandom)


def global_states() -> dict[str, Any]:
    """Return the states of the global generators: Python, NumPy, torch and, once in use, the CUDA device.

    The state of a CUDA generator is on the host, so this does not wait for the device.
    """
    states = {
        "python": _packed(random.getstate()),
        "numpy": tuple(_plain(part) for part in np.random.get_state()),  # noqa: NPY002
        "torch": torch.get_rng_state(),
    }
    if _uses_cuda():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_global_states(states: Mapping[str, Any]) -> None:
    """Set the global generators to the result of `global_states`; CUDA's only if it is in use."""
    random.setstate(_unpacked(states["python"]))
    np.random.set_state(states["numpy"])  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if "cuda" in states and _uses_cuda():
        torch.cuda.set_rng_state(states["cuda"])


@contextmanager
def keep_global_states() -> Iterator[None]:
    """Restore the states of the global generators when the body, or the function that this decorates, ends."""
    states = global_states()
    try:
        yield
    finally:
        set_global_states(states)


def generators_of(loader: Any) -> dict[str, Any]:
    """Return every generator inside a loader, its samplers, its dataset and their parts, by the path to it.

    Attributes, closures, bound methods and `functools.partial` objects are followed, as are containers of up to 256
    items. Each generator appears once, under its shortest path.

    Args:
        loader: An iterable of batches.
    """
    generators: dict[str, Any] = {}
    seen = {id(loader)}
    queue: deque[tuple[str, Any, int]] = deque([("", loader, 0)])
    while queue and len(seen) < _MAX_OBJECTS:
        path, value, depth = queue.popleft()
        if isinstance(value, tuple(_KINDS.values())):
            generators[path] = value
            continue
        if depth == _MAX_DEPTH:
            continue
        for name, part in _parts(value):
            if part is None or isinstance(part, _LEAVES) or id(part) in seen:
                continue
            if not path and name == "_iterator":  # the running iteration
                continue
            seen.add(id(part))
            queue.append((f"{path}.{name}" if path else name, part, depth + 1))
    return generators


def states_of(generators: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of generators by path, as types that load safely: tensors, numbers and plain containers."""
    return {path: _state_of(generator) for path, generator in generators.items()}


def set_states(generators: Mapping[str, Any], states: Mapping[str, Any], warn: bool = True) -> None:
    """Set generators to saved states.

    Args:
        generators: The result of `generators_of`.
        states: The result of `states_of`.
        warn: Warn about generators without a saved state and about states without a generator.
    """
    unmatched = sorted(generators.keys() ^ states.keys())
    for path in generators.keys() & states.keys():
        saved, current = states[path], _state_of(generators[path])
        if (saved["kind"], saved.get("of")) == (current["kind"], current.get("of")):
            _set_state(generators[path], saved["state"])
        else:
            unmatched.append(path)
    if unmatched and warn:
        warnings.warn(
            f"These random generators of the training loader do not match the checkpoint, so they are not restored "
            f"and their random numbers will differ from an uninterrupted run: {', '.join(unmatched)}. Build the loader "
            f"in the same way as the run that saved the checkpoint.",
            stacklevel=2,
        )


class FirstAccesses:
    """The states of the random generators before the first iteration of each loader, by the loader's label.

    A dataset may draw random numbers when it is first accessed, and store the result. A resumed run accesses it at
    another moment, so it first repeats the access, with the generators as they were then.
    """

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
    """Return True if iterating a loader once more in this process changes nothing but the dataset's stored values."""
    if isinstance(loader, DataLoader):
        return loader.num_workers == 0  # each iteration has new worker processes with their own copy of the dataset
    return not (isinstance(loader, (list, tuple)) or hasattr(loader, "__next__") or has_state(loader))


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the objects that an object refers to, by name."""
    if isinstance(value, (list, tuple, dict)):
        if len(value) <= _MAX_ITEMS:
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((str(name), part) for name, part in pairs)
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield from (("self", value.__self__), ("func", value.__func__))
    elif isinstance(value, types.BuiltinMethodType):
        yield "self", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from (("defaults", value.__defaults__), ("kwdefaults", value.__kwdefaults__))
        yield from _closure(value)
    else:
        yield from list(getattr(value, "__dict__", {}).items())
        for cls in type(value).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else tuple(slots):
                if name not in ("__dict__", "__weakref__"):
                    yield name, getattr(value, name, None)


def _closure(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _state_of(generator: Any) -> dict[str, Any]:
    kind = next(kind for kind, cls in _KINDS.items() if isinstance(generator, cls))
    if kind == "torch":
        return {"kind": kind, "state": generator.get_state()}
    if kind == "python":
        return {"kind": kind, "state": _packed(generator.getstate())}
    if kind == "numpy":  # a state fits only the same algorithm
        algorithm = type(generator.bit_generator).__name__
        return {"kind": kind, "of": algorithm, "state": _plain(generator.bit_generator.state)}
    return {"kind": kind, "state": _plain(generator.get_state(legacy=False))}


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(_unpacked(state))
    else:
        generator.set_state(state)


def _packed(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert a state of Python's generator: its 625 numbers become one tensor, which pickles faster."""
    version, numbers, gauss = state
    return version, torch.tensor(numbers), gauss


def _unpacked(state: tuple[Any, ...]) -> tuple[Any, ...]:
    version, numbers, gauss = state
    return version, tuple(numbers.tolist()), gauss


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, (np.ndarray, np.generic)) else state
