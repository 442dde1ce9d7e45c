"""The random generators of a run: the global ones, and those of its loaders."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def global_states() -> dict[str, Any]:
    """Return the states of the global generators: Python, NumPy, torch and, once in use, the CUDA device.

    The state of a CUDA generator is on the host, so this does not wait for the device.
    """
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    states = {
        "python": (version, torch.tensor(numbers), gauss),  # 625 numbers, which pickle faster as one tensor
        "numpy": (name, np.asarray(keys).tolist(), *rest),  # checkpoints hold no arrays
        "torch": torch.get_rng_state(),
    }
    if _uses_cuda():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_global_states(states: Mapping[str, Any]) -> None:
    """Set the global generators to the result of `global_states`; CUDA's only if it is in use."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    np.random.set_state(states["numpy"])  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if "cuda" in states and _uses_cuda():
        torch.cuda.set_rng_state(states["cuda"])


@contextmanager
def keep_global_states() -> Iterator[None]:
    """Restore the states of the global generators when the body ends."""
    states = global_states()
    try:
        yield
    finally:
        set_global_states(states)


def generators_of(loader: Any) -> dict[str, torch.Generator]:
    """Return the attributes `generator` of a loader and its samplers, by name; a shared generator appears once.

    Only these places are known: a generator inside a dataset or a collate function is not found.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    places = {
        "generator": loader,
        "sampler.generator": getattr(loader, "sampler", None),
        "batch_sampler.generator": batch_sampler,
        "batch_sampler.sampler.generator": getattr(batch_sampler, "sampler", None),
    }
    generators: dict[str, torch.Generator] = {}
    for name, place in places.items():
        generator = getattr(place, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is other for other in generators.values()):
            generators[name] = generator
    return generators


def states_of(loader: Any) -> dict[str, Any]:
    """Return the states of a loader's generators, by name."""
    return {
        name: {"kind": "torch", "state": generator.get_state()} for name, generator in generators_of(loader).items()
    }


def set_states(loader: Any, states: Mapping[str, Any]) -> list[str]:
    """Set a loader's generators to the result of `states_of`; return the names of generators without a saved state."""
    generators = generators_of(loader)
    for name in generators.keys() & states.keys():
        generators[name].set_state(states[name]["state"])
    return sorted(generators.keys() - states.keys())


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
