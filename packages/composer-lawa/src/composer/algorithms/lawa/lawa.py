"""The algorithm `LAWA`: the mean of the latest weights, in place of the training weights where they are used."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from composer.algorithms.lawa.averaging import average_weights
from composer.algorithms.utils.batchnorm import BatchNormRecalibration
from composer.algorithms.utils.stored_weights import StoredWeights, reshard
from composer.algorithms.utils.weight_swaps import RESTORE_EVENTS, SwapTimes, parse_time, warn_of_changes
from composer.algorithms.warnings import warn_no_effect
from composer.core import (
    AVERAGES_WEIGHTS,
    CHANGES_LAYERS,
    CHANGES_MEMORY_FORMAT,
    REPLACES_MODEL,
    SWAPS_WEIGHTS,
    Algorithm,
    Event,
    Placement,
    Time,
    TimeUnit,
)
from composer.utils import check_integers, local_part, unwrapped_model

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger


class LAWA(Algorithm):
    """Latest weight averaging: evaluate and save the mean of the last weights, in place of the training weights.

    After every `interval` the trainable weights and the buffers are stored; the mean of the last `num_snapshots` of
    them is swapped into the model for each evaluation, prediction and checkpoint, and out again before training
    continues, so training itself is unchanged, bit for bit. When `fit` ends, the mean stays in the model; another `fit`
    continues from the training weights. Until twice as many have been stored, it is the mean of the later half of those
    so far: a short run does not average the weights of its beginning.

    The statistics of batch norm layers belong to the training weights, so they are measured again for the mean, with
    `recalibration_batches` training batches, once for each mean that is swapped in.

    **Events** INIT, AFTER_LOAD, FIT_START (checks); BATCH_END or EPOCH_END (storage); EVAL_START, PREDICT_START,
    BATCH_CHECKPOINT, EPOCH_CHECKPOINT, ITERATION_CHECKPOINT, FIT_END (mean in); EVAL_END and PREDICT_END after the mean
    was swapped in for them, and the first of FIT_START, ITERATION_START, EPOCH_START, BEFORE_DATALOADER, BATCH_START,
    EPOCH_END, ITERATION_END (training weights back). **Reads** the model, the timestamp, the training data, and the
    `save_interval(state, event)` of callbacks. **Writes** the model's weights, between the swaps and at the end.
    **Cost** memory for `num_snapshots` copies of the weights, on their device, and for another in float32 while the
    mean is in the model; a pass over all of them per swap. With batch norm layers, forward passes of
    `recalibration_batches` batches per mean. **Compilation** static: the weights are exchanged, not the model;
    recalibration runs uncompiled.

    **When not to use it** the learning rate is already near zero, where the last weights hardly differ; memory is short
    (use `average_checkpoints` after training, or EMA); together with another method that averages weights.

    Args:
        num_snapshots: How many of the last snapshots are averaged.
        interval: The time between them, in "ba" or "ep".
        recalibration_batches: How many training batches measure the batch norm statistics of the mean. 0: the mean of
            the statistics is used.
        recalibration_data: A loader of batches for that, or a list of them. None: the training data, which must be a
            `DataLoader` of an indexed dataset or a list, as iterating must not disturb training.

    Attributes:
        num_taken: How many times weights were stored.
        swapped: True if the mean is in the model of the run.

    Raises:
        ValueError: An argument is out of range; at FIT_START, if there are batch norm layers, but the training data
            cannot be iterated beside training.
        TypeError: An argument has another type.

    Warns:
        NoEffectWarning: The run ended before the third `interval`, so that no two sets of weights were averaged.

    Example:
        >>> LAWA(num_snapshots=3, interval="500ba").num_taken
        0

    Source: Kaddour, "Stop Wasting My Time! Saving Days of ImageNet and BERT Training with Latest Weight Averaging",
        arXiv:2209.14981, algorithm 1, with its 6 snapshots, one per epoch.
    Differs: early in training, fewer snapshots are averaged. Batch norm statistics are measured for the mean. The mean
        is float32 if weights have less precision. Buffers other than running statistics are those of the last snapshot.
    """

    placement = Placement(
        provides={AVERAGES_WEIGHTS, SWAPS_WEIGHTS},
        after={REPLACES_MODEL, CHANGES_LAYERS, CHANGES_MEMORY_FORMAT},
        excludes={SWAPS_WEIGHTS},
        discourages={AVERAGES_WEIGHTS},
    )

    def __init__(
        self,
        num_snapshots: int = 6,
        interval: str | Time[Any] = "1ep",
        recalibration_batches: int = 50,
        recalibration_data: Any = None,
    ) -> None:
        check_integers("Use 6.", num_snapshots=num_snapshots, least=1)
        every = parse_time("interval", interval, least=1)
        if every.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH):
            raise ValueError(f"`interval` must be in 'ba' or 'ep', got '{every}'. Use '1ep'.")
        self.num_snapshots, self.interval = int(num_snapshots), str(every)
        self._recalibration = BatchNormRecalibration("LAWA", recalibration_batches, recalibration_data)
        self.recalibration_batches, self.recalibration_data = int(recalibration_batches), recalibration_data
        self._every = every
        self._storage_event = Event.BATCH_END if every.unit is TimeUnit.BATCH else Event.EPOCH_END
        self._swaps = SwapTimes(predictions=True)
        self.events = self._swaps.events | {Event.INIT, Event.BATCH_END, self._storage_event}
        self._reset()

    def _reset(self) -> None:
        self.num_taken = 0
        self._snapshots: deque[dict[str, torch.Tensor]] = deque(maxlen=self.num_snapshots)
        self._buffers: frozenset[str] = frozenset()  # the names of buffers in snapshots
        self._training: StoredWeights | None = None  # while the mean is in the model

    @property
    def swapped(self) -> bool:
        """True if the mean is in the model of the run."""
        return self._training is not None

    def __repr__(self) -> str:
        data = None if self.recalibration_data is None else f"{type(self.recalibration_data).__name__}(...)"
        return (
            f"LAWA(num_snapshots={self.num_snapshots!r},interval={self.interval!r},"
            f"recalibration_batches={self.recalibration_batches!r},recalibration_data={data})"
        )

    def match(self, event: Event, state: State) -> bool:
        """Return True if there is something to check, store or swap."""
        if event in (Event.INIT, Event.FIT_START, Event.BATCH_END, self._storage_event):
            return True
        if event is Event.FIT_END:
            return True
        return self._swaps.match(event, state, ready=self.num_taken > 0, swapped=self.swapped)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Store the weights, or swap the mean in or out."""
        if event is Event.INIT:
            self._reset()
            return
        if event is Event.FIT_START:
            self._recalibration.check(state)
        elif event is Event.BATCH_END:
            self._recalibration.observe(state)
        if event is Event.FIT_END and self._num_averaged < min(self.num_snapshots, 2):
            elapsed = state.get_elapsed_duration()
            if elapsed is not None and elapsed.value >= 1:
                warn_no_effect(
                    f"`LAWA` averaged nothing: it stored weights {self.num_taken} times, once per `interval`, which is "
                    f"{self.interval}, and needs {2 * min(self.num_snapshots, 2) - 1}. Use a shorter interval."
                )
        if event in RESTORE_EVENTS and self._training is not None:
            self._adopt_changes(self._training, state.model)
        if self._swaps.is_due(event, swapped=self.swapped) and self.num_taken:
            self._swap(state)
        if event is self._storage_event and state.timestamp.get(self._every.unit).value % int(self._every) == 0:
            self._store(state.model)
        if event in (Event.FIT_END, Event.AFTER_LOAD) and self._training is not None:
            self._training.record_checksums(state.model)

    def average(self) -> dict[str, torch.Tensor]:
        """Return the mean of the stored weights and buffers by name, with the statistics that were stored.

        Raises:
            RuntimeError: Nothing is stored yet.
        """
        if not self._snapshots:
            raise RuntimeError(
                f"There are no weights to average yet. Train for at least one interval, {self.interval}."
            )
        newest, used = self._snapshots[-1], list(self._snapshots)[-self._num_averaged :]
        for snapshot in used:  # snapshots from a checkpoint are on the host
            snapshot.update({name: t.to(newest[name].device) for name, t in snapshot.items() if name in newest})
        # Parameters that became trainable later are averaged once all snapshots have them.
        names = set.intersection(*map(set, used))
        sets = ({name: each[name] for name in each if name in names} for each in used)
        return average_weights(sets, buffers=self._buffers)

    @property
    def _num_averaged(self) -> int:
        return min(len(self._snapshots), (self.num_taken + 1) // 2)

    @torch.no_grad()
    def _store(self, model: torch.nn.Module) -> None:
        model = unwrapped_model(model)
        reshard(model)
        oldest = self._snapshots.popleft() if len(self._snapshots) == self.num_snapshots else {}
        buffers = dict(model.named_buffers())
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        stored: dict[str, torch.Tensor] = {**trained, **buffers}
        self._snapshots.append({name: _copied(value, oldest.get(name)) for name, value in stored.items()})
        self._buffers = frozenset(buffers)
        self.num_taken += 1

    def _swap(self, state: State) -> None:
        if self._training is not None:
            self._training.swap(state.model)
            self._training = None
            return
        stored, mean = StoredWeights(None), self._divided(self.average())
        stored.named_parameters_dict, stored.named_buffers_dict = mean.values()
        stored.swap(state.model)
        self._training = stored
        self._recalibration.enter(state, self.num_taken)

    def _divided(self, tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
        """Return tensors by name, in the layout of `StoredWeights`."""
        return {
            "named_parameters_dict": {name: t for name, t in tensors.items() if name not in self._buffers},
            "named_buffers_dict": {name: t for name, t in tensors.items() if name in self._buffers},
        }

    def _adopt_changes(self, training: StoredWeights, model: torch.nn.Module) -> None:
        changed = training.adopt_changes(model)
        warn_of_changes(changed)
        present = dict(unwrapped_model(model).named_parameters())
        for snapshot in self._snapshots:
            snapshot.update({name: _copied(present[name], snapshot[name]) for name in changed if name in snapshot})

    def state_dict(self) -> dict[str, Any]:
        """Return the stored weights and, while the mean is in the model, the training weights."""
        return {
            **super().state_dict(),
            "num_taken": self.num_taken,
            "snapshots": [self._divided(snapshot) for snapshot in self._snapshots],
            "training": None if self._training is None else self._training.state_dict(),
            "recalibration": self._recalibration.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load copies of the result of `state_dict`; if it has more than `num_snapshots`, the last ones."""
        self._reset()
        self.num_taken = state["num_taken"]
        for snapshot in state["snapshots"]:
            self._buffers = frozenset(snapshot["named_buffers_dict"])
            named = {**snapshot["named_parameters_dict"], **snapshot["named_buffers_dict"]}
            self._snapshots.append({name: value.detach().clone() for name, value in named.items()})
        if state["training"] is not None:
            self._training = StoredWeights(None)
            self._training.load_state_dict(state["training"])
            self._training.swapped = True
        self._recalibration.load_state_dict(state["recalibration"])


def _copied(value: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
    """Return a copy of a tensor, in the memory of another one if that fits."""
    value = value.detach()
    if memory is None or memory is value:
        return value.clone()
    ours, theirs = local_part(memory), local_part(value)
    if any(getattr(ours, key) != getattr(theirs, key) for key in ("shape", "dtype", "device")):
        return value.clone()
    ours.copy_(theirs)
    return memory
