"""Prediction: the model's outputs over a loader."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import torch

from composer.core import DataSpec, Engine, Event, State, Timestamp
from composer.devices import DeviceCPU
from composer.trainer._clock import StepTimer
from composer.trainer._context import OptimizerModes, active_dataloader
from composer.trainer._parallel import SingleProcess
from composer.trainer._turns import Turns
from composer.utils import model_eval_mode

__all__ = ["predict"]


def _unwrapped(state: State) -> Any:
    # DDP exchanges buffers in every forward pass, and ranks may have different numbers of batches.
    return state.model.module if state.is_model_ddp else state.model


def predict(
    state: State,
    engine: Engine,
    spec: DataSpec,
    subset_num_batches: int,
    return_outputs: bool,
    parallel: SingleProcess,
    modes: OptimizerModes,
) -> list[Any]:
    """Run the model over a loader, in eval mode and without gradients.

    Args:
        state: The run's state; its active loader, batch and outputs are restored afterwards.
        engine: Announces the events.
        spec: The data.
        subset_num_batches: Batches to use; -1: until the loader ends.
        return_outputs: Whether outputs are kept.
        parallel: What other processes do.
        modes: Those of the optimizers.

    Returns:
        The outputs of each batch, on the CPU; an empty list without `return_outputs`.
    """
    parallel.check_loader(spec.dataloader, "dataloader")
    outputs: list[Any] = []
    cpu, timer, turns = DeviceCPU(), StepTimer(), Turns(_unwrapped(state), state, parallel)
    with (
        # Ranks with a whole model may predict alone.
        parallel.watched() if parallel.collective_forward else nullcontext(),
        torch.no_grad(),
        model_eval_mode(state.model),
        modes.evaluating(),
        active_dataloader(state, spec.dataloader, "predict", subset_num_batches),
    ):
        length = state.dataloader_len
        state.predict_timestamp = Timestamp()
        engine.run_event(Event.PREDICT_START)
        with turns:
            for batch in itertools.islice(iter(spec.dataloader), None if length is None else length.value):
                batch = spec.batch_transforms(batch)
                samples, tokens = spec.get_num_samples_in_batch(batch), spec.get_num_tokens_in_batch(batch)
                state.batch = spec.microbatch_transforms(state.device.batch_to_device(batch))
                engine.run_event(Event.PREDICT_BATCH_START)
                engine.run_event(Event.PREDICT_BEFORE_FORWARD)
                state.outputs = turns.of(state.batch)
                engine.run_event(Event.PREDICT_AFTER_FORWARD)
                if return_outputs:
                    outputs.append(cpu.batch_to_device(state.outputs))
                state.predict_timestamp = state.predict_timestamp.to_next_batch(samples, tokens, timer.lap())
                engine.run_event(Event.PREDICT_BATCH_END)
        engine.run_event(Event.PREDICT_END)
    return outputs
