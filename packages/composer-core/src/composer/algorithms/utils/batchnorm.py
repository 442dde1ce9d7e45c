"""Recalibrate batch norm statistics for weights that the model was not trained with, such as averages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, IterableDataset

from composer.algorithms.utils.stored_weights import reshard
from composer.algorithms.warnings import warn_no_effect
from composer.core._registry import load
from composer.core.precision import precision_context_of
from composer.models.base import ComposerModel
from composer.utils import dist
from composer.utils.misc import model_eval_mode, unwrapped_model
from composer.utils.numbers import check_integers
from composer.utils.reproducibility import seed_context

if TYPE_CHECKING:
    from composer.core.state import State

_STATISTICS = ("running_mean", "running_var")


def recalibrate_batchnorm(model: nn.Module, batches: Iterable[Any], num_batches: int = 50) -> None:
    """Set the running statistics of batch norm layers to the mean over batches, in place.

    Needed before a model is evaluated with weights that it was not trained with, such as averages: the statistics
    belong to the weights with which they were collected. Batch norm layers run in training mode, all others in
    evaluation mode, without gradients. Modes, momenta and batch counters do not change. With several ranks, the mean is
    over the batches of all ranks, and all must call this function.

    Args:
        model: The model, which holds the weights to evaluate.
        batches: The inputs of the model, for example `(inputs for inputs, _ in loader)`, on its device.
        num_batches: How many of them to use; at least 1.

    Raises:
        ValueError: A rank has no batches.

    Warns:
        NoEffectWarning: The model has no batch norm layer with running statistics.

    Example:
        >>> model = nn.BatchNorm1d(1)
        >>> recalibrate_batchnorm(model, [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [7.0]])])
        >>> model.running_mean
        tensor([4.])

    Source: Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", arXiv:1803.05407,
        section 3.2.
    Differs: dropout and other layers run as they will be evaluated.
    """
    check_integers("Use 50.", num_batches=num_batches, least=1)
    layers = _layers_of(model)
    if not layers:
        warn_no_effect("`recalibrate_batchnorm` changed nothing: the model has no batch norm with running statistics.")
        return
    if not _measure(model, list(layers.values()), islice(batches, int(num_batches))):
        raise ValueError("`batches` must have at least one batch on every rank, got none. Pass training batches.")


class BatchNormRecalibration:
    """Batch norm statistics for the weights that an algorithm swaps into the model of a run.

    `enter`, called when these weights are in the model, replaces the statistics; the caller restores the training
    statistics. The batches are drawn from the training data without changing its position or any random generator, and
    are the same each time.

    Args:
        algorithm: The name of the algorithm, for messages.
        num_batches: Number of batches; 0 switches recalibration off.
        data: A loader to draw from, like `train_dataloader` of the Trainer. None: the training data of the run.

    Raises:
        TypeError: `num_batches` is not an integer.
        ValueError: `num_batches` is negative.
    """

    def __init__(self, algorithm: str, num_batches: int, data: Any = None) -> None:
        check_integers("0 switches recalibration off.", recalibration_batches=num_batches, least=0)
        self._algorithm, self._num_batches, self._data = algorithm, int(num_batches), data
        self._frozen: frozenset[str] | None = None
        self._measured: tuple[int, dict[str, torch.Tensor]] | None = None

    def check(self, state: State) -> None:
        """Check at FIT_START that the training data can be iterated a second time during training.

        Raises:
            ValueError: The model has batch norm layers, but the data can be iterated only once.
        """
        self._frozen = None
        data = state.train_dataloader if self._data is None else self._data
        if self._num_batches and self._data is None and _layers_of(state.model) and not _is_repeatable(data):
            raise ValueError(
                f"`{self._algorithm}` must recalibrate the batch norm layers of the model, but the training data, a "
                f"{type(data).__name__}, cannot be iterated a second time beside training. Pass batches or a loader as "
                f"`recalibration_data`, or `recalibration_batches=0` to evaluate with statistics of other weights."
            )

    def observe(self, state: State) -> None:
        """Record, during training, which layers are in evaluation mode: these keep their statistics."""
        if self._frozen is None:
            layers = _layers_of(state.model) if self._num_batches else {}
            self._frozen = frozenset(name for name, layer in layers.items() if not layer.training)

    @torch.no_grad()
    def enter(self, state: State, version: int) -> None:
        """Replace the statistics in the model.

        Args:
            state: The state of the run, whose model holds the weights to evaluate.
            version: Identifies these weights: statistics are computed once per version.
        """
        layers = self._layers(state.model)
        if not layers:
            return
        if self._measured is not None and self._measured[0] == version:
            for name, value in self._statistics(layers):
                if name in self._measured[1]:
                    value.copy_(self._measured[1][name])
            return
        data = state.train_dataloader if self._data is None else self._data
        if data is None or (self._data is None and not _is_repeatable(data)):
            warn_no_effect(
                f"`{self._algorithm}` cannot recalibrate batch norm layers without training data: their statistics "
                f"belong to other weights."
            )
            return
        with seed_context(state.seed), _keep_generators(data):
            batches = _forward_batches(state, data, self._num_batches)
            count = _measure(state.model, list(layers.values()), batches, state)
        if not count:
            raise ValueError(
                f"`{self._algorithm}` must have batches to recalibrate batch norm layers, but the loader yielded none "
                f"on some rank. Pass another one as `recalibration_data`."
            )
        self._measured = version, {name: value.clone() for name, value in self._statistics(layers)}

    def training_statistics(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return copies of the statistics that `enter` replaces, for `restore`."""
        return {name: value.detach().clone() for name, value in self._statistics(self._layers(model))}

    @torch.no_grad()
    def restore(self, model: nn.Module, statistics: dict[str, torch.Tensor]) -> None:
        """Restore the result of `training_statistics`.

        Args:
            model: The model.
            statistics: The statistics by name.
        """
        for name, value in self._statistics(_layers_of(model)):
            if name in statistics:
                value.copy_(statistics[name])

    def state_dict(self) -> dict[str, Any]:
        """Return the last statistics: after a restart, they might be computed from other batches."""
        if self._measured is None:
            return {}
        return {"version": self._measured[0], "statistics": dict(self._measured[1])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._measured = None
        if state:
            copies = {name: value.detach().clone() for name, value in state["statistics"].items()}
            self._measured = state["version"], copies

    def _layers(self, model: nn.Module) -> dict[str, _BatchNorm]:
        if not self._num_batches:
            return {}
        frozen = self._frozen or frozenset()
        return {name: layer for name, layer in _layers_of(model).items() if name not in frozen}

    def _statistics(self, layers: dict[str, _BatchNorm]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, layer in layers.items():
            for key in _STATISTICS:
                yield f"{name}.{key}", getattr(layer, key)


def _layers_of(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch norm layers with running statistics, by name."""
    named = unwrapped_model(model).named_modules()
    return {name: m for name, m in named if isinstance(m, _BatchNorm) and m.running_mean is not None}


@torch.no_grad()
def _measure(model: nn.Module, layers: Sequence[_BatchNorm], batches: Iterable[Any], state: State | None = None) -> int:
    """Set the statistics of layers to their mean over batches; return the number of batches of this rank.

    Args:
        model: The model.
        layers: The layers to measure.
        batches: The inputs of the model.
        state: The state of the run, for its precision; None: outside of a run.
    """
    model = unwrapped_model(model)
    modes, momenta = [layer.training for layer in layers], [layer.momentum for layer in layers]
    counters = [None if (n := layer.num_batches_tracked) is None else n.clone() for layer in layers]
    hooks = [layer.register_forward_pre_hook(_EqualWeights()) for layer in layers]
    count = 0
    try:
        # A compiled graph would be compiled again for each momentum.
        with model_eval_mode(model), torch.compiler.set_stance("force_eager"):
            for layer in layers:
                layer.train()
            for batch in _in_step(batches):
                with nullcontext() if state is None else precision_context_of(state, fp8_autocast_enabled=False):
                    model(batch)
                count += 1
    finally:
        for hook, layer, mode, momentum, counter in zip(hooks, layers, modes, momenta, counters, strict=True):
            hook.remove()
            layer.training, layer.momentum = mode, momentum
            if counter is not None and layer.num_batches_tracked is not None:
                layer.num_batches_tracked.copy_(counter)
        reshard(model)
    if count and dist.get_world_size() > 1:
        for value in [getattr(layer, key) for layer in layers for key in _STATISTICS]:
            mean = value.to(torch.promote_types(value.dtype, torch.float32))
            dist.all_reduce(mean)
            value.copy_(mean / dist.get_world_size())
    return count


class _EqualWeights:
    """Forward pre-hook that sets the momentum with which the statistics become the mean over all calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, layer: _BatchNorm, inputs: Any) -> None:
        self.calls += 1
        layer.momentum = 1 / self.calls


def _in_step(batches: Iterable[Any]) -> Iterator[Any]:
    """Iterate until some rank has no more batches: forward passes of sharded models need all ranks."""
    if dist.get_world_size() == 1:
        yield from batches
        return
    iterator, end = iter(batches), object()
    while all(dist.all_gather_object((batch := next(iterator, end)) is not end)):
        yield batch


# ---- a second iteration over the training data ----


def _is_repeatable(data: Any) -> bool:
    """Return True if iterating over training data has no effect on an iteration that is in progress."""
    data = getattr(data, "dataloader", data)
    return _is_indexed(data) or (isinstance(data, Sequence) and not isinstance(data, str))


def _is_indexed(data: Any) -> TypeGuard[DataLoader[Any]]:
    return isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset)


def _forward_batches(state: State, data: Any, number: int) -> Iterator[Any]:
    """Iterate over the inputs of the model: the first batches of a loader, in microbatches, on the device."""
    loader, own = getattr(data, "dataloader", data), state.train_data_spec
    spec = data if loader is not data else own if own is not None and own.dataloader is data else None
    takes_batches = isinstance(unwrapped_model(state.model), ComposerModel)
    size = state.device_train_microbatch_size
    if spec is None and size is not None:
        spec = load("composer.core", "DataSpec")([])  # splits as by default
    for batch in islice(_separate(loader, number) if _is_indexed(loader) else loader, number):
        parts = [batch] if spec is None else [spec.batch_transforms(batch)]
        if spec is not None and size is not None and spec.get_num_samples_in_batch(parts[0]) > size:
            parts = spec.split_batch(parts[0], size)
        for part in parts:
            part = state.device.batch_to_device(part)
            part = part if spec is None else spec.microbatch_transforms(part)
            yield part[0] if isinstance(part, (tuple, list)) and not takes_batches else part


def _separate(loader: DataLoader[Any], number: int) -> DataLoader[Any]:
    """Return a loader of the first batches of another one, with an iterator and workers of its own."""
    options: dict[str, Any] = {
        "collate_fn": loader.collate_fn,
        "num_workers": min(loader.num_workers, number),
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context if loader.num_workers else None,
        "timeout": loader.timeout,
        "generator": torch.Generator().manual_seed(0),
    }
    if loader.batch_sampler is None:  # each item of the dataset is a batch
        return DataLoader(loader.dataset, batch_size=None, sampler=[*islice(loader.sampler, number)], **options)
    return DataLoader(loader.dataset, batch_sampler=[*islice(loader.batch_sampler, number)], **options)


@contextmanager
def _keep_generators(data: Any) -> Iterator[None]:
    """Restore, after the body, the generators from which a loader draws its order, except the global ones."""
    loader = getattr(data, "dataloader", data)
    holders = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    holders.append(getattr(holders[-1], "sampler", None))
    found = [g for holder in holders if isinstance(g := getattr(holder, "generator", None), torch.Generator)]
    states = [generator.get_state() for generator in found]
    try:
        yield
    finally:
        for generator, saved in zip(found, states, strict=True):
            generator.set_state(saved)
