"""Profiles a few batches of a recipe."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["PROFILED", "profile_run"]

_WARMUP, _ACTIVE = 2, 4
PROFILED = f"{_ACTIVE} batches after {_WARMUP} to warm up, and the evaluation"


def profile_run(make_trainer: Callable[[Any], Any], folder: Path) -> Path:
    """Train with the profiler.

    Args:
        make_trainer: Makes the Trainer, given a profiler.
        folder: The folder to write to; profiles in it are replaced.

    Returns:
        The merged trace.
    """
    from composer.profiler import JSONTraceHandler, Profiler, cyclic_schedule

    handler = JSONTraceHandler(
        folder=str(folder), remote_file_name=None, merged_trace_remote_file_name=None, overwrite=True
    )
    profiler = Profiler(
        schedule=cyclic_schedule(warmup=_WARMUP, active=_ACTIVE),
        trace_handlers=handler,
        torch_prof_folder=str(folder / "torch"),
        torch_prof_remote_file_name=None,
        torch_prof_overwrite=True,
        torch_prof_record_shapes=True,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The profiler is enabled")  # it was asked for, and nothing is compared here
        trainer = make_trainer(profiler)
    trainer.fit()
    trainer.close()
    return folder / "merged_trace.json"
