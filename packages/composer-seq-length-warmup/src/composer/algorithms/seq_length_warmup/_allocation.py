"""A pass at full length before training on short sequences, so that memory is reserved in pieces that fit."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from composer.core import State, get_precision_context
from composer.utils import dist

__all__ = ["allocate"]


def allocate(state: State, batch: Mapping[str, Any]) -> None:
    """Run a microbatch of a batch forward and backward, and leave no trace but reserved memory.

    If the run searches its microbatch size, the size is halved on all ranks until the pass fits.

    Args:
        state: The state of the run; gradients are dropped.
        batch: The batch, at full length.

    Raises:
        RuntimeError: Not even one example fits.
    """
    while True:
        fits = _fits(state, batch)
        if dist.get_world_size() > 1:
            verdict = state.device.tensor_to_device(torch.tensor(int(fits)))
            dist.all_reduce(verdict, "MIN")
            fits = bool(verdict)
        if fits:
            return
        size = state.device_train_microbatch_size or _num_rows(batch)
        if size <= 1:
            raise RuntimeError(
                "Not even one example of full length fits the memory. Use a smaller `max_seq_length` or model."
            )
        state.device_train_microbatch_size = max(int(size / 2), 1)


def _fits(state: State, batch: Mapping[str, Any]) -> bool:
    try:
        _pass(state, batch)
    except torch.OutOfMemoryError:
        if not state.auto_microbatching:
            raise
        return False
    finally:
        state.model.zero_grad(set_to_none=True)
    return True


def _pass(state: State, batch: Mapping[str, Any]) -> None:
    model: Any = state.model
    if isinstance(model, DistributedDataParallel):  # gradients that are dropped need not be exchanged
        model = model.module
    size = state.device_train_microbatch_size
    if size is not None:
        rows: Any = copy.copy(batch)
        for key, value in batch.items():
            rows[key] = value[: max(int(size), 1)] if isinstance(value, torch.Tensor) and value.dim() else value
        batch = rows
    batch = state.device.batch_to_device(batch)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    device = "cuda" if state.device.name == "gpu" else state.device.name
    devices = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(devices):
        with get_precision_context(state.precision, state.precision_config, device_type=device):
            loss = _total(model.loss(model(batch), batch))
        loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


def _num_rows(batch: Mapping[str, Any]) -> int:
    return next((len(v) for v in batch.values() if isinstance(v, torch.Tensor) and v.dim()), 1)


def _total(loss: Any) -> torch.Tensor:
    if isinstance(loss, torch.Tensor):
        return loss.mean()
    if isinstance(loss, Mapping):
        loss = [loss["total"]] if "total" in loss else list(loss.values())
    assert isinstance(loss, Sequence), "losses are tensors, dicts or sequences"
    return sum((_total(part) for part in loss[1:]), start=_total(loss[0]))
