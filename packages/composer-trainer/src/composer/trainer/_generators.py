"""The random generators that a run draws from: the global ones, and those that a loader's parts hold."""

from __future__ import annotations

import functools
import random
import types
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["generators_of", "global_states", "set_global_states", "set_states", "states_of"]

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
    """The states of this process's global generators: Python, NumPy, torch and, once in use, the CUDA device's.

    The state of a CUDA generator lies on the host, so the device is not waited for.
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
    """Set the global generators to what `global_states` returned; CUDA's only if it is in use."""
    random.setstate(_unpacked(states["python"]))
    np.random.set_state(states["numpy"])  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if "cuda" in states and _uses_cuda():
        torch.cuda.set_rng_state(states["cuda"])


def generators_of(loader: Any) -> dict[str, Any]:
    """Every generator that a loader, its samplers, its data set and their parts hold, by the path to it.

    Attributes, closures, bound methods and `functools.partial` objects are followed, as are containers of up to 256
    items. Each generator appears once, under its shortest path.

    Args:
        loader: An iterable of batches.
    """
    found: dict[str, Any] = {}
    seen = {id(loader)}
    queue: deque[tuple[str, Any, int]] = deque([("", loader, 0)])
    while queue and len(seen) < _MAX_OBJECTS:
        path, value, depth = queue.popleft()
        if isinstance(value, tuple(_KINDS.values())):
            found[path] = value
            continue
        if depth == _MAX_DEPTH:
            continue
        for name, part in _parts(value):
            if part is None or isinstance(part, _LEAVES) or id(part) in seen:
                continue
            if not path and name == "_iterator":  # what a loader is just doing comes and goes
                continue
            seen.add(id(part))
            queue.append((f"{path}.{name}" if path else name, part, depth + 1))
    return found


def states_of(generators: Mapping[str, Any]) -> dict[str, Any]:
    """The states of generators by path, made of what loads safely: tensors, numbers and plain containers."""
    return {path: _state_of(generator) for path, generator in generators.items()}


def set_states(generators: Mapping[str, Any], states: Mapping[str, Any], warn: bool = True) -> None:
    """Set generators to saved states.

    Args:
        generators: From `generators_of`.
        states: From `states_of`.
        warn: Whether to warn of what is there on one side only.
    """
    strange = sorted(generators.keys() ^ states.keys())
    for path in generators.keys() & states.keys():
        saved, generator = states[path], generators[path]
        if saved["kind"] == _kind_of(generator) and saved.get("of") == _bit_generator(generator):
            _set_state(generator, saved["state"])
        else:
            strange.append(path)
    if strange and warn:
        warnings.warn(
            f"These random generators of the training loader differ from when it was saved, so they are not restored "
            f"and what they draw will differ from an uninterrupted run: {', '.join(strange)}. Build the loader as it "
            f"was built then.",
            stacklevel=2,
        )


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object refers to, by name."""
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


def _kind_of(generator: Any) -> str:
    return next(kind for kind, cls in _KINDS.items() if isinstance(generator, cls))


def _bit_generator(generator: Any) -> str | None:
    """The algorithm of a NumPy generator, which its state belongs to."""
    if isinstance(generator, np.random.Generator):
        return type(generator.bit_generator).__name__
    return None


def _state_of(generator: Any) -> dict[str, Any]:
    kind = _kind_of(generator)
    if kind == "torch":
        return {"kind": kind, "state": generator.get_state()}
    if kind == "python":
        return {"kind": kind, "state": _packed(generator.getstate())}
    if kind == "numpy":
        return {"kind": kind, "of": _bit_generator(generator), "state": _plain(generator.bit_generator.state)}
    return {"kind": kind, "state": _plain(generator.get_state(legacy=False))}


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(_unpacked(state))
    else:
        generator.set_state(state)


def _packed(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """A state of Python's generator, with one tensor for its 625 numbers: those take long to pickle one by one."""
    version, numbers, gauss = state
    return version, torch.tensor(numbers), gauss


def _unpacked(state: tuple[Any, ...]) -> tuple[Any, ...]:
    version, numbers, gauss = state
    return version, tuple(numbers.tolist()), gauss


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, (np.ndarray, np.generic)) else state
