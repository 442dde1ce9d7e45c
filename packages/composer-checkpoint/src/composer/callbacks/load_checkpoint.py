"""Loads a checkpoint at an event, besides the one that the run resumes from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from composer.checkpoint import IgnoreKeys, load_checkpoint
from composer.core import Callback, Event, State
from composer.loggers import Logger
from composer.utils import unwrapped_model


class LoadCheckpoint(Callback):
    """Loads a checkpoint each time an event occurs: by default once, before the run's own `load_path`.

    For example, a run can load all weights from one checkpoint, and then some parts from another.

    Args:
        load_path: The checkpoint: a local path or a URI; a format string with `{run_name}`.
        load_weights_only: Load the model only, as is always done from a `.safetensors` file.
        strict_model_weights: True if the model's keys must match those of the file exactly.
        ignore_keys: The parts not to load; see `composer.checkpoint.glob_filter`.
        event: The event, or its name.

    **Events**: `event`, by default BEFORE_LOAD.

    **Writes**: the parts that are loaded; the run keeps its name.

    Raises:
        ValueError: There is no such event.
    """

    def __init__(
        self,
        load_path: str | os.PathLike[str],
        load_weights_only: bool = False,
        strict_model_weights: bool = True,
        ignore_keys: IgnoreKeys | None = None,
        event: str | Event = Event.BEFORE_LOAD,
    ) -> None:
        super().__init__()
        self.load_path = os.fspath(load_path)
        self.load_weights_only = load_weights_only
        self.strict_model_weights = strict_model_weights
        self.ignore_keys = ignore_keys
        self.event = Event(event)

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is not self.event:
            return
        name = state.run_name
        with _saving_all_weights(state.model):
            load_checkpoint(
                path=self.load_path,
                state=state,
                logger=logger,
                object_store=None,  # `path` is a path or a URI
                strict_model_weights=self.strict_model_weights,
                ignore_keys=self.ignore_keys,
                load_weights_only=self.load_weights_only or self.load_path.endswith(".safetensors"),
            )
        state.run_name = name


@contextmanager
def _saving_all_weights(model: torch.nn.Module) -> Iterator[None]:
    """Let a model that saves only its adapters load all weights."""
    target: Any = unwrapped_model(model)
    if not getattr(target, "should_save_peft_only", False):
        yield
        return
    target.should_save_peft_only = False
    try:
        yield
    finally:
        target.should_save_peft_only = True
