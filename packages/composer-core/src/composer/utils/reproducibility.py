"""Seeds, deterministic mode and the states of random number generators.

All functions handle the global generators of Python, NumPy and torch, because user code, such as datasets, uses them.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, SupportsIndex

import numpy as np
import torch

from composer.utils import dist
from composer.utils.numbers import plain_int

_log = logging.getLogger(__name__)

MAX_SEED = 2**32 - 1
"""The largest seed: NumPy takes 32 bits."""


def configure_deterministic_mode() -> None:
    """Make torch use deterministic kernels, and raise for operations that have none. This is slower.

    Call this before the first CUDA operation, because cuBLAS reads its setting when it starts.
    """
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    # https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    _log.info("Deterministic mode is on; training is slower.")


def get_random_seed() -> int:
    """Return a random seed in [0, `MAX_SEED`] from the operating system; no generator is advanced."""
    return secrets.randbelow(MAX_SEED + 1)


def seed_all(seed: SupportsIndex) -> None:
    """Seed the global generators of Python, NumPy and torch, on all devices.

    Args:
        seed: The seed, in [0, `MAX_SEED`].

    Raises:
        ValueError: `seed` is out of range.
        TypeError: `seed` is not an integer.
    """
    number = _checked_seed(seed)
    _log.info("Seeding the random number generators with %d.", number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002
    torch.manual_seed(number)  # all devices


def _checked_seed(seed: SupportsIndex) -> int:
    number = plain_int(seed)  # `random.seed` does not accept NumPy integers
    if number is None:
        raise TypeError(f"`seed` must be an integer, got {seed!r}.")
    if not 0 <= number <= MAX_SEED:
        raise ValueError(f"`seed` must be from 0 to 2**32 - 1, got {seed!r}.")
    return number


def get_rng_state() -> list[dict[str, Any]]:
    """Return the states of the global generators of all processes. This is a collective.

    Returns:
        One dict per rank, with "python", "numpy", "torch" and, if CUDA is initialized, "cuda" (of the current device).
    """
    state = _host_state()
    name, numbers, *rest = state["numpy"]
    state["numpy"] = (name, numbers.tolist(), *rest)  # safe loading (`weights_only`) refuses NumPy arrays
    if _uses_cuda():
        state["cuda"] = torch.cuda.get_rng_state()
    return dist.all_gather_object(state)


def load_rng_state(rng_state_dicts: list[dict[str, Any]]) -> None:
    """Restore the global generators of this process from a result of `get_rng_state`.

    A generator whose state was not saved (another number of processes, or CUDA on one side only) is unchanged, with a
    warning.

    Args:
        rng_state_dicts: One dict per rank.
    """
    rank, world_size = dist.get_global_rank(), dist.get_world_size()
    if world_size != len(rng_state_dicts):
        warnings.warn(
            f"The random state was saved by {len(rng_state_dicts)} processes, but {world_size} are running. Each rank "
            f"gets the state of the same rank if there is one; random numbers will differ from an uninterrupted run.",
            stacklevel=2,
        )
    if rank >= len(rng_state_dicts):
        return
    state = rng_state_dicts[rank]
    _load_host_state(state)
    if "cuda" not in state:
        if _uses_cuda():
            warnings.warn("The random state of CUDA was not saved, so it is not restored.", stacklevel=2)
    elif not torch.cuda.is_available():
        warnings.warn("A random state of CUDA was saved, but there is no CUDA device.", stacklevel=2)
    else:
        try:
            torch.cuda.set_rng_state(state["cuda"])
        except RuntimeError as error:  # other torch versions have states of another size
            warnings.warn(f"The random state of CUDA could not be restored: {error}", stacklevel=2)


@contextmanager
def seed_context(seed: SupportsIndex) -> Iterator[None]:
    """Seed the global generators for the body, then restore their states.

    Those of CUDA only if CUDA is in use already: otherwise they have no states to restore.

    Args:
        seed: The seed, in [0, `MAX_SEED`].

    Raises:
        ValueError: `seed` is out of range.
        TypeError: `seed` is not an integer.
    """
    number = _checked_seed(seed)
    host = _host_state()
    cuda = torch.cuda.get_rng_state_all() if _uses_cuda() else []
    try:
        random.seed(number)
        np.random.seed(number)  # noqa: NPY002
        # Not `torch.manual_seed`: before CUDA is in use, its generators would get this seed later, when it is.
        torch.default_generator.manual_seed(number)
        if cuda:
            torch.cuda.manual_seed_all(number)
        yield
    finally:
        _load_host_state(host)
        for device, state in enumerate(cuda):
            torch.cuda.set_rng_state(state, device)


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _host_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002
        "torch": torch.random.get_rng_state(),
    }


def _load_host_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
