"""The environment variables with which a launcher describes a process.

============================ ======================================================= =======
Variable                     Meaning                                                 Default
============================ ======================================================= =======
`WORLD_SIZE`                 number of processes                                     1
`RANK`                       index of this process among all                         0
`LOCAL_WORLD_SIZE`           number of processes on this node                        1
`LOCAL_RANK`                 index of this process on its node                       0
`NODE_RANK` (`GROUP_RANK`)   index of this node; the second name is torchrun's       0
============================ ======================================================= =======
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch.distributed

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULTS = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0, "NODE_RANK": 0}
_OTHER_NAMES = {"NODE_RANK": "GROUP_RANK"}


class MissingEnvironmentError(RuntimeError):
    """`torch.distributed` is initialized, but a required environment variable is not set."""


def is_available() -> bool:
    """Return True if this build of torch has `torch.distributed`."""
    return torch.distributed.is_available()


def is_initialized() -> bool:
    """Return True if the default process group exists."""
    return is_available() and torch.distributed.is_initialized()


def lookup(name: str, from_torch: Callable[[], int] | None = None) -> int:
    """Return the value of a launch variable: from torch if possible, else from the environment, else the default.

    Args:
        name: A key of `DEFAULTS`.
        from_torch: A function that reads the value from the process group; None if that is not possible.

    Raises:
        RuntimeError: The environment contradicts the process group.
        MissingEnvironmentError: The process group is initialized, but the variable is not set.
    """
    value = from_environment(name)
    if from_torch is not None:
        actual = from_torch()
        if value is not None and value != actual:
            raise RuntimeError(
                f"The environment variable `{name}` is {value}, but torch.distributed was initialized with {actual}. "
                f"Unset it, or initialize from the environment with `composer.utils.dist.initialize_dist`."
            )
        return actual
    if value is not None:
        return value
    if is_initialized():
        raise MissingEnvironmentError(
            f"torch.distributed is initialized, but the environment variable `{name}` is not set. Start the processes "
            f"with `composer` or `torchrun`, or set it first."
        )
    return DEFAULTS[name]


def from_environment(name: str) -> int | None:
    """Return the value of a launch variable from the environment; None if it is not set.

    Raises:
        ValueError: The value is not an integer.
    """
    text = os.environ.get(name, os.environ.get(_OTHER_NAMES.get(name, name)))
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"The environment variable `{name}` must be an integer, got {text!r}.") from None
