"""The function `compute_ema` and the algorithm `EMA`. Smoothing: the weight of the old average in an update."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from composer.algorithms.utils.stored_weights import Pairs, StoredWeights, is_averaged_buffer
from composer.algorithms.utils.weight_swaps import (
    CHECKPOINT_EVENTS,
    RESTORE_EVENTS,
    SwapTimes,
    has_passed,
    parse_time,
    run_length,
    warn_of_changes,
    warn_of_late_start,
)
from composer.algorithms.warnings import NotIntendedUseWarning
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
from composer.utils import check_finite, check_flags, plain_number, unwrapped_model

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

_SPAN = 10  # during the warmup, the mean age of the averaged weights is the training so far divided by this
_MOST_OF_FIRST = 0.1
# Checkpoints without a number of updates were written without warmup, and continue without it.
_MANY_UPDATES = 10**12


@torch.no_grad()
def compute_ema(model: torch.nn.Module, ema_model: torch.nn.Module | EMAParameters, smoothing: float = 0.99) -> None:
    """Move the averages of a model's parameters and buffers towards the model, in place.

    For every parameter and running statistic of `model` that `ema_model` has under the same name:
    `average <- smoothing * average + (1 - smoothing) * value`. Other buffers, such as counters, masks and the vectors
    of a spectral norm, are copied.

    Args:
        model: The model in training; not modified.
        ema_model: The averages: a module of the same structure, or `EMAParameters`, which is faster because it matches
            averages and parameters only once. Their dtype may differ from the model's.
        smoothing: The weight of the average, in [0, 1].

    Raises:
        ValueError: `smoothing` is outside [0, 1], `ema_model` has another type, shapes differ, or no name is in
            both models.
        RuntimeError: The averages are swapped into the model, or the shape of a parameter has changed.

    Example:
        >>> model, average = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        >>> _, _ = torch.nn.init.ones_(model.weight), torch.nn.init.zeros_(average.weight)
        >>> compute_ema(model, average, smoothing=0.75)
        >>> average.weight.item()
        0.25

    Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992, here with exponential
        weights.
    Differs: buffers other than running statistics are copied.
    """
    _check_smoothing(smoothing)
    if isinstance(ema_model, EMAParameters):
        ema_model.update(model, smoothing)
        return
    if not isinstance(ema_model, torch.nn.Module):
        raise ValueError(
            f"`ema_model` must be a `torch.nn.Module` or `EMAParameters`, got {type(ema_model).__name__}. "
            f"Start with `EMAParameters(model)`."
        )
    _pairs_of(unwrapped_model(model), unwrapped_model(ema_model)).update(smoothing)


def _pairs_of(model: torch.nn.Module, average: torch.nn.Module) -> Pairs:
    """Pair the parameters and buffers of a model with those of the same name in another one."""
    pairs, averages = Pairs(), average.state_dict()
    copied = {name for name, _ in model.named_buffers() if not is_averaged_buffer(name)}
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if averages.keys().isdisjoint(named):
        raise ValueError(
            f"`ema_model` must have the parameters of `model` under the same names, got a {type(average).__name__} "
            f"that has none of those of {type(model).__name__}. Start with a copy: `copy.deepcopy(model)`."
        )
    for name, tensor in named.items():
        if name not in averages:
            continue
        if averages[name].shape != tensor.shape:
            raise ValueError(
                f"{name!r} must have one shape in `model` and `ema_model`, got {tuple(tensor.shape)} and "
                f"{tuple(averages[name].shape)}. Average models of the same structure."
            )
        pairs.add(averages[name], tensor, copied=name in copied)
    return pairs


class EMAParameters(StoredWeights):
    """The averages of a model's trainable parameters and of its buffers; see `StoredWeights`.

    Args:
        model: The model that has the initial values. None: nothing is stored yet.
        blend: The shares of the averages in what is swapped in, by regular expressions; see `StoredWeights`.
    """

    def swap_params(self, model: torch.nn.Module) -> None:
        """Exchange the stored tensors with the model's, in place. A second call undoes the first, bit for bit.

        Args:
            model: The model; its tensors stay the same objects at the same addresses.
        """
        self.swap(model)

    def transfer_ema_params(self, model: torch.nn.Module) -> None:
        """Copy the stored tensors into a model.

        Args:
            model: The model.
        """
        self.copy_to(model)

    def move_params_to_device(self, destination_model: torch.nn.Module) -> None:
        """Move the stored tensors to the devices of a model's tensors.

        Args:
            destination_model: The model.
        """
        self.move_to(destination_model)


class EMA(Algorithm):
    """Exponential moving average of the weights, which is evaluated and saved in place of the training weights.

    After every `update_interval` the averages move towards the weights:
    `average <- smoothing * average + (1 - smoothing) * weights`. After k updates the smoothing is at most
    `k / (k + 9)`, so the first update copies the weights, and the mean age of the averaged weights is at most a tenth
    of the training so far: averages are useful in a run of any length. They are swapped into the model for each
    evaluation and each checkpoint, and out again before training continues, so training itself is unchanged, bit for
    bit. When `fit` ends, the averages stay in the model: `fit(); torch.save(model.state_dict())` saves them. Another
    `fit` continues from the training weights. Parameters that were changed in between, for example by
    `load_state_dict`, are used as they are, as training weights and as averages, with a warning in the log. Parameters
    stay the same objects at the same addresses.

    **Events** INIT, AFTER_LOAD, FIT_START, PREDICT_START (storage); BATCH_END or EPOCH_END (update); EVAL_START,
    BATCH_CHECKPOINT, EPOCH_CHECKPOINT, ITERATION_CHECKPOINT, FIT_END (averages in); EVAL_END after an evaluation that
    swapped them in, and the first of FIT_START, ITERATION_START, EPOCH_START, BEFORE_DATALOADER, BATCH_START,
    EPOCH_END, ITERATION_END (training weights back). **Reads** the model, the timestamp, and the
    `save_interval(state, event)` of callbacks. **Writes** the model's weights, between the swaps and at the end.
    **Cost** memory for another set of trainable weights and buffers; one pass over them per update, and one at the
    beginning and end of `fit`, to detect changes in between. **Compilation** static: the weights are exchanged, not the
    model. **When not to use it** together with another method that averages weights.

    Args:
        half_life: The time after which the weight of old values has halved, in batches or epochs ("1000ba"); this and
            the other times may also be `Time` objects. None if `smoothing` is given. It is shorter during the warmup.
        smoothing: The weight of the old average in an update, in [0, 1]. None if `half_life` is given.
        ema_start: When averaging starts, in any unit.
        update_interval: The time between updates, in the unit of `half_life`. None: 1 of that unit, or "1ba".
        warmup: Limit the smoothing to `k / (k + 9)` after k updates, which ends after about 13 half-lives. False: the
            half-life holds from the beginning, and the weights of the first update have the weight
            `smoothing ** (updates - 1)` at the end.
        blend: The share of the averages in what is evaluated and saved, in [0, 1]: `(1 - blend) * weight + blend *
            average`. Or shares by regular expressions on the names of parameters and running statistics, of which the
            first that is found in a name counts; the share of the others is 1. What has the share 0 is not averaged.

    Attributes:
        smoothing: As given, or 2 ** (-update_interval / half_life); the limit after the warmup.
        ema_model: The `EMAParameters`; None before INIT.
        ema_started: True if averaging has started.
        num_updates: The number of updates so far.

    Raises:
        ValueError: Not exactly one of `half_life` and `smoothing` is given, a time has another unit or is out of range,
            `smoothing` or a share of `blend` is outside [0, 1], or a regular expression is invalid. At INIT, a regular
            expression of `blend` is found in no name.
        TypeError: A time is neither a string nor a `Time`, `warmup` is not a bool, or a share is not a number.

    Warns:
        NotIntendedUseWarning: Without `warmup`, the first weights weigh more than a tenth at the end of the run.

    Example:
        >>> EMA(half_life="100ba", update_interval="20ba").smoothing == 2**-0.2
        True

    Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992, here with exponential
        weights.
    Differs: the warmup; without it, averages start from the weights at the first update, without bias correction.
        Averages of bfloat16 and float16 weights are float32. Buffers other than running statistics are copied, not
        averaged. `smoothing` alone updates every batch; `state_dict` works before INIT. The model holds the averages
        after `fit` has ended, and otherwise only while it is evaluated and saved. Names do not depend on wrappers such
        as `DistributedDataParallel`.
    """

    placement = Placement(
        provides={AVERAGES_WEIGHTS, SWAPS_WEIGHTS},
        after={REPLACES_MODEL, CHANGES_LAYERS, CHANGES_MEMORY_FORMAT},
        excludes={SWAPS_WEIGHTS},
        discourages={AVERAGES_WEIGHTS},
    )

    def __init__(
        self,
        half_life: str | Time[Any] | None = "1000ba",
        smoothing: float | None = None,
        ema_start: str | Time[Any] = "0.0dur",
        update_interval: str | Time[Any] | None = None,
        warmup: bool = True,
        blend: float | Mapping[str, float] = 1.0,
    ) -> None:
        given = (half_life, smoothing, ema_start, update_interval)
        self.smoothing, self.update_interval, self.ema_start = _parse_arguments(*given)
        check_flags(warmup=warmup)
        self.warmup, self._shares = warmup, _parse_blend(blend)
        self.blend = self._shares if isinstance(blend, Mapping) else plain_number(blend)
        self._given = tuple(str(value) if isinstance(value, Time) else plain_number(value) for value in given)
        self.update_event = Event.BATCH_END if self.update_interval.unit is TimeUnit.BATCH else Event.EPOCH_END
        self.ema_model: EMAParameters | None = None
        self.ema_started = False
        self.num_updates = 0
        self.serialized_attributes = ["ema_model", "ema_weights_active", "ema_started", "num_updates"]
        self.checkpoint_events = [*CHECKPOINT_EVENTS]
        self.move_device_events = [Event.FIT_START, Event.EVAL_START, Event.PREDICT_START]
        self.move_param_events = [Event.EVAL_START, Event.EVAL_END, Event.FIT_END, *RESTORE_EVENTS]
        self._swaps = SwapTimes(predictions=False)
        self.events = self._swaps.events | {Event.INIT, self.update_event, *self.move_device_events}

    @property
    def swapped(self) -> bool:
        """True if the averages are in the model of the run, as `ema_weights_active`."""
        return self.ema_weights_active

    @property
    def ema_weights_active(self) -> bool:
        """True if the model of the run holds the averages now."""
        return self.ema_model is not None and self.ema_model.swapped

    def __repr__(self) -> str:
        half_life, smoothing, ema_start, update_interval = self._given
        return (
            f"EMA({half_life=!r},{smoothing=!r},{ema_start=!r},{update_interval=!r},warmup={self.warmup!r},"
            f"blend={self.blend!r})"
        )

    def match(self, event: Event, state: State) -> bool:
        """Return True if there is something to do; start averaging at the first update event from `ema_start` on."""
        if event is Event.INIT:
            return True
        if event is self.update_event:
            starts = not self.ema_started and has_passed(self.ema_start, state)
            if starts:  # `apply` makes the averages, after algorithms that change the weights at this event
                self.ema_model, self.ema_started, self.num_updates = None, True, 0
            if starts or (self.ema_started and _is_due(self.update_interval, state)):
                return True
        if event is Event.FIT_START:
            return self.ema_model is not None
        if event in self.move_device_events:
            return self.ema_started
        return self._swaps.match(event, state, ready=self.ema_started, swapped=self.ema_weights_active)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Store, update or swap the averages."""
        if event is Event.INIT:
            _check_patterns(self._shares, state.model)
            self.ema_model, self.ema_started, self.num_updates = EMAParameters(state.model, self._shares), False, 0
            return
        if event is self.update_event and self.ema_model is None:
            self.ema_model = EMAParameters(state.model, self._shares)
        assert self.ema_model is not None, "INIT comes first"
        if event is Event.FIT_START:
            warn_of_late_start("EMA", "ema_start", self.ema_start, state)
            if not self.warmup:
                self._warn_of_first_weights(state)
        if event in RESTORE_EVENTS and self.ema_weights_active:
            warn_of_changes(self.ema_model.adopt_changes(state.model))
        if event in self.move_device_events:
            self.ema_model.move_to(state.model)
        if self._swaps.is_due(event, swapped=self.ema_weights_active):
            self.ema_model.swap(state.model)
        if event is self.update_event and _is_due(self.update_interval, state):
            most = self.num_updates / (self.num_updates + _SPAN - 1) if self.warmup else 1.0
            compute_ema(state.model, self.ema_model, min(self.smoothing, most))
            self.num_updates += 1
        if event in (Event.FIT_END, Event.AFTER_LOAD) and self.ema_weights_active:
            self.ema_model.record_checksums(state.model)

    def _warn_of_first_weights(self, state: State) -> None:
        length = run_length(state, self.update_interval.unit)
        share = 0.0 if length is None else self.smoothing ** max(length / self.update_interval.value - 1, 0)
        if share > _MOST_OF_FIRST:
            warnings.warn(
                f"`EMA` evaluates and saves averages in which the first weights weigh {share:.0%} at the end of the "
                f"run, which is '{state.max_duration}'. Use a `half_life` of at most a tenth of the run, or "
                f"`warmup=True`.",
                NotIntendedUseWarning,
                stacklevel=2,
            )

    def get_ema_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Write the averages into a model, for example to predict with them, and return it.

        Args:
            model: A model of the run's structure, or the run's own, whose training weights are then lost. With a
                `blend` below 1 it must hold the training weights, as a copy of the run's model does.

        Raises:
            ValueError: The model of the run holds the averages already.
            RuntimeError: Averaging has not started.
        """
        if self.ema_weights_active:
            raise ValueError("The EMA weights are in the model of the run already. Use that model as it is.")
        return self._write_into(model)

    def get_training_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Write the training weights into a model, while the model of the run holds the averages, and return it.

        Args:
            model: A model of the run's structure.

        Raises:
            ValueError: The model of the run holds its training weights.
        """
        if not self.ema_weights_active:
            raise ValueError("The model of the run holds its training weights already. Use that model as it is.")
        return self._write_into(model)

    def _write_into(self, model: torch.nn.Module) -> torch.nn.Module:
        if self.ema_model is None or not self.ema_started:
            raise RuntimeError(f"There are no averages yet. Train beyond `ema_start`, which is '{self.ema_start}'.")
        self.ema_model.copy_to(model)
        return model

    def state_dict(self) -> dict[str, Any]:
        """Return the stored tensors, the number of updates, and whether the averages are in the model."""
        return {
            **super().state_dict(),
            "ema_model": None if self.ema_model is None else self.ema_model.state_dict(),
            "ema_weights_active": self.ema_weights_active,
            "ema_started": self.ema_started,
            "num_updates": self.num_updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, or both sets of weights from MosaicML's Composer before 0.13."""
        self.ema_started = state["ema_started"]
        self.num_updates = state.get("num_updates", _MANY_UPDATES if self.ema_started else 0)
        saved, active = state["ema_model"], state["ema_weights_active"]
        if "training_model" in state and active:
            saved = state["training_model"]  # the weights that the model does not hold
        if saved is None:
            self.ema_model = None
            return
        if self.ema_model is None:
            self.ema_model = EMAParameters(None, self._shares)
        self.ema_model.load_state_dict(saved)
        self.ema_model.swapped = active


def _parse_arguments(
    half_life: Any, smoothing: Any, ema_start: Any, update_interval: Any
) -> tuple[float, Time[Any], Time[Any]]:
    """Check and combine the arguments of `EMA`; see its docstring.

    Returns:
        The smoothing, the time between updates, and the start.
    """
    if (half_life is None) == (smoothing is None):
        raise ValueError(
            f"Exactly one of `half_life` and `smoothing` must be given, got {half_life!r} and {smoothing!r}. "
            f"Pass `half_life=None` with a `smoothing`."
        )
    if update_interval is not None and not isinstance(update_interval, (str, Time)):
        raise ValueError(
            f"`update_interval` must be a time string, a `Time` or None, got {update_interval!r}. Use '1ba'."
        )
    decay = None if half_life is None else parse_time("half_life", half_life, least=1)
    unit = TimeUnit.BATCH if decay is None else decay.unit
    interval = Time(1, unit) if update_interval is None else parse_time("update_interval", update_interval, least=1)
    if interval.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH):
        raise ValueError(
            f"`half_life` and `update_interval` must be in 'ba' or 'ep', got '{interval}'. The average is updated "
            f"after batches or after epochs."
        )
    if decay is not None:
        if decay.unit is not interval.unit:
            raise ValueError(
                f"`half_life` and `update_interval` must have the same unit, got '{decay}' and '{interval}'. Give both "
                f"in 'ba' or both in 'ep'."
            )
        smoothing = 2 ** (-interval.value / decay.value) if decay.value else 0.0
    _check_smoothing(smoothing)
    return float(smoothing), interval, parse_time("ema_start", ema_start, least=0)


def _parse_blend(blend: Any) -> dict[str, float]:
    """Check `blend`; return its shares by regular expressions. The one of a number is found in every name."""
    shares = dict(blend) if isinstance(blend, Mapping) else {"": blend}
    for pattern, share in shares.items():
        check_finite("It is the share of the average.", blend=share, least=0, most=1)
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(f"The keys of `blend` must be regular expressions, got {pattern!r}: {error}.") from None
    return {pattern: float(share) for pattern, share in shares.items()}


def _check_patterns(patterns: Mapping[str, float], model: torch.nn.Module) -> None:
    """Raise ValueError if a regular expression is found in no name of a parameter or buffer."""
    tensors = unwrapped_model(model)
    names = [name for named in (tensors.named_parameters(), tensors.named_buffers()) for name, _ in named]
    for pattern in patterns:
        if pattern and not any(re.search(pattern, name) for name in names):
            raise ValueError(
                f"The keys of `blend` must be found in names of parameters, but {pattern!r} is in none of "
                f"{', '.join(names[:3])}, ... Correct or remove it."
            )


def _check_smoothing(smoothing: float) -> None:
    """Raise ValueError unless `smoothing` is in [0, 1]."""
    check_finite("It is the weight of the old average.", smoothing=smoothing, least=0, most=1)


def _is_due(interval: Time[Any], state: State) -> bool:
    """Return True if a whole number of intervals has passed."""
    count, every = state.timestamp.get(interval.unit).value, int(interval)
    return count % every == 0
