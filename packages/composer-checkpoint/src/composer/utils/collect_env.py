"""Describe the machine and the software that a run uses, for bug reports and checkpoints.

`composer_collect_env` on the command line prints the report.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.metadata import distribution
from json import loads
from types import TracebackType
from typing import IO, Any, NamedTuple

import torch

from composer.utils import dist
from composer.utils.misc import cpu_model

_DISTRIBUTION = "composer-core"


class ComposerEnv(NamedTuple):
    """The machine and software of a run. None: unknown."""

    composer_version: str
    composer_commit_hash: str | None
    cpu_model: str
    cpu_count: int | None
    num_nodes: int | None
    gpu_model: str | None
    num_gpus_per_node: int | None
    num_gpus: int | None
    cuda_device_count: int


def get_composer_env() -> ComposerEnv:
    """Return the environment of the run, from this machine and the launch variables."""
    world_size, local_world_size = _known(dist.get_world_size), _known(dist.get_local_world_size)
    has_gpu = torch.cuda.is_available()
    return ComposerEnv(
        composer_version=distribution(_DISTRIBUTION).version,
        composer_commit_hash=_commit_hash(),
        cpu_model=cpu_model(),
        cpu_count=os.cpu_count(),
        num_nodes=None if world_size is None or local_world_size is None else world_size // local_world_size,
        gpu_model=torch.cuda.get_device_name() if has_gpu else None,
        num_gpus_per_node=local_world_size if has_gpu else 0,
        num_gpus=world_size if has_gpu else 0,
        cuda_device_count=torch.cuda.device_count(),
    )


def get_composer_env_dict() -> dict[str, Any]:
    """Return the environment of the run as a dict of plain values, which is stored in checkpoints.

    Returns:
        The keys composer_version, composer_commit_hash, cpu_model, cpu_count, num_nodes, gpu_model, num_gpus_per_node,
        num_gpus and cuda_device_count. None: unknown.
    """
    return get_composer_env()._asdict()


def print_env(file: IO[str] | None = None) -> None:
    """Print the report of `torch.utils.collect_env`, followed by that of Composer.

    Args:
        file: The output file; None: standard output.
    """
    from torch.utils import collect_env

    own = "\n".join(
        f"{name.replace('_', ' ')}: {'unknown' if value is None else value}"
        for name, value in get_composer_env_dict().items()
    )
    try:
        of_torch = collect_env.get_pretty_env_info()  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001  # torch 2.6 fails without pip
        of_torch = f"not available: {error!r}"
    print(f"PyTorch\n-------\n{of_torch}\n\nComposer\n--------\n{own}", file=file)


class _ReportingHook:
    """A `sys.excepthook` that prints the report before the traceback."""

    enabled = True

    def __init__(self, previous: Callable[..., Any]) -> None:
        self.previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        try:
            if self.enabled and issubclass(kind, Exception):  # not for Ctrl-C
                print_env(sys.stderr)
        finally:
            self.previous(kind, error, traceback)


def configure_excepthook() -> None:
    """Print the report when an uncaught exception ends the program. A second call does nothing."""
    if not isinstance(sys.excepthook, _ReportingHook):
        sys.excepthook = _ReportingHook(sys.excepthook)


def enable_env_report() -> None:
    """Print the report when an uncaught exception ends the program; install the hook if necessary."""
    _ReportingHook.enabled = True
    configure_excepthook()


def disable_env_report() -> None:
    """Do not print the report when an uncaught exception ends the program."""
    _ReportingHook.enabled = False


def main() -> None:
    """Run the command `composer_collect_env`: print the report."""
    print_env()


def _known(read: Callable[[], int]) -> int | None:
    try:
        return read()
    except dist.MissingEnvironmentError:
        return None


def _commit_hash() -> str | None:
    """Return the installed commit, if the package was installed from a repository (PEP 610)."""
    origin = distribution(_DISTRIBUTION).read_text("direct_url.json")
    commit: str | None = loads(origin or "{}").get("vcs_info", {}).get("commit_id")
    return commit


if __name__ == "__main__":
    main()
