"""The progress of a run beyond its state: position in the data, calls of `fit`, arguments and last values.

The Trainer attaches a `RunProgress` to its state. Every checkpoint then contains its `state_dict` under the key
`resumption`. Loading happens in three steps:

1. `before_load` sets aside what the state must not load yet; `after_load` stores the rest of the entry (`_Loaded`).
2. `apply` restores schedulers, with precedence for changed arguments, once the run's schedulers and data are known:
   after loading if the constructor was given them, otherwise in `fit`.
3. `begin_fit` counts the calls of `fit`. A relaunched program repeats the calls of the run that saved, so those that
   had ended are skipped, and the one that was interrupted continues.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from composer.callbacks.checkpoint_saver import CheckpointSaver, savers_of
from composer.core import State, Time, Timestamp, TimeUnit
from composer.loggers import Logger, LoggerDestination
from composer.trainer.evaluation import Evaluation
from composer.trainer.resume.loader import LoaderPosition
from composer.trainer.settings import RunSettings, with_members
from composer.utils import dist, plain_number, reproducibility

__all__ = ["RunProgress"]

_PROGRESS = {"last_epoch", "_last_lr", "_step_count", "base_lrs", "_is_initial", "_get_lr_called_within_step"}
_VALUES = ("train_metric_values", "eval_metric_values", "total_loss_dict")


@dataclass
class _Loaded:
    """The part of a checkpoint that `RunProgress` restores.

    Attributes:
        schedulers: The states of schedulers; None: the checkpoint was saved without them.
        groups: The parameter groups before loading, which replaces those that the checkpoint has.
        has_time: The checkpoint has a timestamp.
        options: The settings of each parameter group as loaded; None: the group was not loaded.
        progress: What `RunProgress.state_dict` returned, without the parts that are restored already.
        is_applied: There is nothing left for `RunProgress.apply`.
        fits: The start of each call of `fit`.
        scaler: The state of the gradient scaler; None: there is none, or it is restored.
    """

    schedulers: dict[str, Any] | None = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    has_time: bool = True
    options: list[dict[str, Any] | None] = field(default_factory=list)
    progress: dict[str, Any] = field(default_factory=dict)
    is_applied: bool = True
    fits: list[Timestamp] = field(default_factory=list)
    scaler: dict[str, Any] | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """`_describe_arguments` of the saved run; empty: unknown."""
        arguments: dict[str, Any] = self.progress.get("arguments", {})
        return arguments


class RunProgress:
    """Saves and restores what a run needs to continue exactly where it was.

    Args:
        state: The run.
        settings: The data, evaluators and schedules of the run.
        loader: The position in the training data.
        evaluation: Runs the evaluators of the run.
        announce: Shows a message to the user.
        branch_duration: How long the run trains from the checkpoint that it branches off; None: it is not a branch.

    Attributes:
        length: The `max_duration` of the resumed call of `fit` when its checkpoint was saved. It is not the requested
            one if a callback changed it, or stopped the run. None: as requested.
    """

    def __init__(
        self,
        state: State,
        settings: RunSettings,
        loader: LoaderPosition,
        evaluation: Evaluation,
        announce: Callable[[str], None],
        branch_duration: Any = None,
    ) -> None:
        self.state, self.settings, self.loader, self.announce = state, settings, loader, announce
        self.evaluation = evaluation
        # Taken here, before a checkpoint or training changes any of it.
        self._descriptions: list[tuple[Any, str]] = []  # of the user's schedulers, before their first step
        self._arguments = _describe_arguments(state, self._describe_schedulers())
        self._first_rates = _FirstRates(state)
        if branch_duration is not None:
            self._arguments["branch_duration"] = str(branch_duration)
        self._loaded = _Loaded()
        self._fits: list[Timestamp] = []
        self._calls = 0
        self._limit: str | None = None  # `max_duration` of the current call of `fit`, before anything stopped the run
        self._ended: dict[str, Any] | None = None  # set while the last checkpoint of a call of `fit` is saved
        self.length: str | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the progress; a collective operation with the same result on every rank."""
        state, previous = self.state, self.state.previous_timestamp
        length = None if state.max_duration is None else str(state.max_duration)
        ranks = dist.all_gather_object((self.loader.state_dict(), length, state.is_over()))
        return {
            "loader": [position for position, _, _ in ranks],
            "limit": self._limit,
            # If one rank is stopped, the run ends on all of them.
            "max_duration": next((limit for _, limit, is_over in ranks if is_over), ranks[0][1]),
            "fits": [start.state_dict() for start in self._fits],
            "arguments": self._arguments,
            **self._values(),
            "previous_timestamp": None if previous is None else previous.state_dict(),
            **({} if self._ended is None else {"complete": self._ended}),
        }

    def _values(self) -> dict[str, dict[str, Any]]:
        """Return the last losses and metrics, and the computed values of evaluation metrics."""
        return {
            "values": {name: dict(getattr(self.state, name)) for name in _VALUES},
            "computed": {label: _computed(metrics) for label, metrics in self.state.eval_metrics.items()},
            "evaluated": dict(self.evaluation.evaluated_at),
        }

    def _describe_schedulers(self) -> list[str]:
        known = {id(scheduler): text for scheduler, text in self._descriptions}
        given = self.settings.given_schedulers
        self._descriptions = [(each, known.get(id(each)) or _describe(each)) for each in given]
        return [text for _, text in self._descriptions]

    # ---- loading ----

    def before_load(self, content: dict[str, Any]) -> None:
        """Set aside the schedulers' states until the run's schedulers are known."""
        saved = content["state"]
        left_out = "state/schedulers" in content.get("left_out", ())
        self._loaded = _Loaded(
            schedulers=saved.pop("schedulers", None if left_out else {}),
            groups=_param_groups(self.state),
            has_time="timestamp" in saved,
            scaler=saved.get("scaler"),
        )

    def after_load(self, content: dict[str, Any]) -> None:
        """Restore the last values, and store the rest for `apply` and `begin_fit`."""
        loaded = self._loaded
        progress = loaded.progress = dict(content.get("resumption") or {})
        groups = _param_groups(self.state)
        if any(
            path.startswith("state/optimizers/") and "/param_groups" in path for path in content.get("left_out", ())
        ):
            loaded.groups = groups
        unchanged = {id(group) for group in loaded.groups}
        loaded.options = [None if id(group) in unchanged else _options(group) for group in groups]
        loaded.groups = []
        self.loader.load_state_dict(progress.pop("loader", None), content.get("rng"))
        previous = progress.get("previous_timestamp")
        self.state.previous_timestamp = None if previous is None else _timestamp(previous)
        values = progress.pop("values", {})
        for name in _VALUES:  # the file does not choose what it sets
            if name in values:
                setattr(self.state, name, values[name])
        # A checkpoint without this entry is taken to be of the program's first call.
        loaded.fits = [_timestamp(saved) for saved in progress.pop("fits", [])] or [Timestamp()]
        loaded.is_applied = False
        had_schedulers = loaded.arguments.get("schedulers")
        if self.settings.is_complete and (self.settings.given_schedulers or not had_schedulers):
            self._apply_arguments()  # otherwise `fit` may bring schedulers

    def apply(self) -> None:
        """Restore schedulers and evaluation metrics; changed arguments take precedence over the checkpoint."""
        self._apply_arguments()
        scaler, self._loaded.scaler = self._loaded.scaler, None
        if scaler and self.state.scaler is not None:  # `fit` may have made it for another precision
            self.state.load_state_dict({"scaler": scaler})
        for label, values in self._loaded.progress.pop("computed", {}).items():
            _restore_computed(self.state.eval_metrics.get(label, {}), values)
        evaluated = self._loaded.progress.pop("evaluated", {})
        self.evaluation.evaluated_at.update(evaluated)
        self.evaluation.restored_at.update(evaluated)

    def _apply_arguments(self) -> None:
        saved, schedulers = self._loaded.arguments, self._describe_schedulers()
        # The call of `fit` that resumes may bring the saved schedulers in place of those of the constructor.
        are_back = self._arguments["schedulers"] != schedulers == saved.get("schedulers")
        is_applied = self._loaded.is_applied and not (are_back and self._calls == len(self._loaded.fits))
        self._arguments["schedulers"] = schedulers
        self._arguments["batch_size"] = getattr(self.state.train_dataloader, "batch_size", None)
        if is_applied:
            return
        self._loaded.is_applied = True
        same = not saved or saved["schedulers"] == schedulers
        if same:
            self._restore_schedulers()
        changes = _apply_changes(self.state, self._arguments, saved) if saved else []
        if not same:
            now = self.state.timestamp
            steps = (now.batch if self.settings.step_every_batch else now.epoch).value
            _restart_schedulers(self.state, steps, self._first_rates)
        if "branch_duration" in self._arguments and not self._loaded.fits:
            self._begin_branch(bool(saved) and saved["schedulers"] == self._arguments["schedulers"])
        if changes:
            self.announce(f"These arguments differ from the checkpoint and replace it: {'; '.join(changes)}.")

    def _restore_schedulers(self) -> None:
        loaded = self._loaded
        if not self.state.schedulers or loaded.schedulers is None:
            return
        self.state.load_state_dict({"schedulers": loaded.schedulers})
        groups, options = _param_groups(self.state), loaded.options
        if len(groups) != len(options):
            options = [None] * len(groups)
        not_loaded = {id(group) for group, saved in zip(groups, options, strict=True) if saved is None}
        for scheduler in self.state.schedulers:
            _apply_scheduler(scheduler, not_loaded)
        for group, saved in zip(groups, options, strict=True):
            for key, value in (saved or {}).items():  # building a scheduler has changed rates, momenta and more
                _set_option(group, key, value)
        if not loaded.has_time:
            self._update_schedules()

    def _update_schedules(self) -> None:
        """Evaluate the schedules of composer.optim for the time and the length of the run."""
        for scheduler in self.state.schedulers:
            rescale = getattr(scheduler, "scale_schedule", None)
            if rescale is not None:
                rescale(1.0)

    def _begin_branch(self, same_schedules: bool) -> None:
        """Replace the restored learning rates where the schedule of the branch has others now, with a warning.

        Raises:
            ValueError: A decay is a fraction of the whole run.
        """
        for scheduler in self.state.schedulers:
            decay = getattr(getattr(scheduler, "schedule", None), "t_decay", None)
            if isinstance(decay, Time) and decay.unit is TimeUnit.DURATION:
                raise ValueError(
                    f"`t_decay` must be an absolute time in a branch, got {str(decay)!r}, which is a fraction of the "
                    f"whole run with its trunk. Write {self._arguments['branch_duration']!r} to decay over the whole "
                    f"branch."
                )
        state, branch, trunk = self.state, self.state.max_duration, self._loaded.progress.get("limit")
        groups = _param_groups(state)
        current = [_plain(group["lr"]) for group in groups]
        if same_schedules and trunk is not None:
            # The restored rates are those of the last step. They stay if the length of the run does not matter yet.
            state.max_duration = trunk
            self._update_schedules()
            expected = [_plain(group["lr"]) for group in groups]
            state.max_duration = branch
            self._update_schedules()
            if expected == [_plain(group["lr"]) for group in groups]:
                for group, rate in zip(groups, current, strict=True):
                    _set_option(group, "lr", rate)
        for group, saved in zip(groups, self._loaded.options, strict=False):
            before, now = (_plain((each or {}).get("lr")) for each in (saved, group))
            if before is not None and abs(now - before) > 1e-6 * max(abs(now), abs(before)):
                warnings.warn(
                    f"The learning rate of the branch begins at {now:g}, but it was {before:g} when its checkpoint was "
                    f"saved. Branch off a checkpoint from before the decay of its run, with the same peak and a "
                    f"decay, such as `t_decay`, that is an absolute time of at most `branch_duration`.",
                    stacklevel=4,
                )
                return

    def check_start(self, duration: Time[Any]) -> None:
        """Check that a branch of this length has a defined end.

        Raises:
            ValueError: The length is in epochs, but the branch begins inside one.
        """
        start = self._loaded.fits[0] if self._loaded.fits else self.state.timestamp
        if duration.unit is TimeUnit.EPOCH and start.batches_in_epoch:
            raise ValueError(
                f"`branch_duration` must be in batches, samples or tokens, got {str(duration)!r}: the checkpoint is "
                f"from batch {start.batches_in_epoch} of epoch {start.epochs}, before its end. Use for example '500ba'."
            )

    def check_branch(self) -> None:
        """Check that the run's newest checkpoint was not saved by the run that it branches off, or by a branch of it.

        Raises:
            ValueError: It was: both have the same `run_name` and `save_folder`.
        """
        saved = self._loaded.arguments
        was_branch = "branch_duration" in saved
        if saved and was_branch != ("branch_duration" in self._arguments):
            other = "a branch of this run" if was_branch else "the run that this one branches off"
            raise ValueError(
                f"`run_name` must not be that of {other}, got {self.state.run_name!r}: `autoresume` would continue "
                f"from its checkpoints in `save_folder`. Give the branch a name of its own."
            )

    # ---- the calls of `fit` ----

    @property
    def is_first_fit(self) -> bool:
        """True until the first call of `fit` is counted."""
        return self._calls == 0

    @contextmanager
    def repeat_evaluation(self) -> Iterator[None]:
        """Undo what a standalone evaluation changes if the resumed call of `fit` has not begun.

        A relaunched program repeats its evaluations before that call, which were at another time: their results must
        not, for example, stop the run early.
        """
        state = self.state
        if self._calls >= len(self._loaded.fits):
            yield
            return
        length, values = state.max_duration, dict(state.eval_metric_values)
        callbacks = [each for each in state.callbacks if not isinstance(each, (LoggerDestination, CheckpointSaver))]
        states = [(each, copy.deepcopy(each.state_dict())) for each in callbacks]
        yield
        state.eval_metric_values = values
        if length is not None:
            state.max_duration = length
        for callback, saved in states:
            if saved:
                callback.load_state_dict(saved)

    def begin_fit(self, reset_time: bool) -> tuple[Timestamp | None, bool]:
        """Count a call of `fit`.

        Args:
            reset_time: Time starts from zero with this call.

        Returns:
            The start of this call in the run that saved the checkpoint (None: it begins now), and True if the call had
            ended there.

        Raises:
            FileExistsError: This call would save checkpoints under names that this Trainer has used.
        """
        number, restored = self._calls, self._loaded.fits
        if reset_time and number >= len(restored):
            for saver in savers_of(self.state):
                saver.check_reset(self.state)
        self._calls += 1
        if number < len(restored):
            self._fits = restored[: number + 1]
            return restored[number], number + 1 < len(restored)
        if reset_time:
            self.state.timestamp = Timestamp()
        self._fits = [*self._fits, self.state.timestamp]
        return None, False

    def restore_if_complete(self) -> bool:
        """Return True if the current call of `fit` had ended in the run that saved the checkpoint.

        The last checkpoint may be from before the end of the epoch. If the run is longer now, it continues there. The
        requested length is compared, because `state.stop_training` shortens `max_duration`. Call this once per call of
        `fit`, when that length is set.
        """
        state, saved = self.state, self._loaded.progress
        self._limit, self.length = str(state.max_duration), None
        if self._calls != len(self._loaded.fits) or self._limit != saved.get("limit"):
            return False
        end = saved.get("complete")
        if end is None:
            self.length = saved.get("max_duration")
            return False
        state.max_duration, state.timestamp = end["max_duration"], _timestamp(end["timestamp"])
        self.loader.load_state_dict(end["loader"], end["rng"])
        return True

    def complete(self, saver: CheckpointSaver | None, logger: Logger) -> None:
        """Save the end of this call of `fit` in its last checkpoint, so that a relaunch does not repeat it."""
        state = self.state
        for other in savers_of(state):
            if other is not saver:
                other.finalize(state, logger)
        if saver is None:
            return
        end = self._ended = {
            "max_duration": str(state.max_duration),
            "timestamp": state.timestamp.state_dict(),
            "loader": dist.all_gather_object(self.loader.state_dict()),
            "rng": reproducibility.get_rng_state(),
        }
        # In one write: a run killed between two would repeat an end that the first already contains.
        saved = saver.finalize(state, logger)
        self._ended, values = None, self._values()
        if saved or not saver.continues:
            return

        def change(resumption: dict[str, Any]) -> None:
            resumption.update(values, complete=end)

        saver.amend(state, logger, change)

    def reset_fit_count(self) -> None:
        """Count all calls of `fit` as new: the user loaded a checkpoint, but did not relaunch its program."""
        self._loaded.fits = []


def _timestamp(saved: dict[str, Any]) -> Timestamp:
    timestamp = Timestamp()
    timestamp.load_state_dict(saved)
    return timestamp


def _computed(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the values that metrics of torchmetrics have computed, by name."""
    return {name: m._computed for name, m in metrics.items() if getattr(m, "_computed", None) is not None}


def _restore_computed(metrics: dict[str, Any], values: dict[str, Any]) -> None:
    """Make `compute` of metrics whose states were not saved return the saved value until they are reset."""
    for name in metrics.keys() & values.keys():
        if not metrics[name].update_called:
            metrics[name]._computed, metrics[name]._update_count = values[name], 1


def _param_groups(state: State) -> list[dict[str, Any]]:
    return [group for optimizer in state.optimizers for group in optimizer.param_groups]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a parameter group without its parameters."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _set_option(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group.get(key), torch.Tensor):
        group[key].copy_(torch.as_tensor(value))
    else:
        group[key] = value


def _apply_scheduler(scheduler: Any, groups: set[int]) -> None:
    """Apply a scheduler's current values to the parameter groups with these ids."""
    scheduled = scheduler.optimizer.param_groups
    if getattr(scheduler, "cycle_momentum", False) and any(id(group) in groups for group in scheduled):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is called outside `step`; only `get_lr` sets the momentum
            scheduler.get_lr()
    for group, rate in zip(scheduled, scheduler.get_last_lr(), strict=False):
        if id(group) in groups:
            _set_option(group, "lr", rate)


# ---- the arguments of a run, compared with those of its checkpoint: changes take precedence ----


def _describe_arguments(state: State, schedulers: list[str]) -> dict[str, Any]:
    """Return the arguments of a run as plain values.

    Args:
        state: The run, before a checkpoint is loaded into it.
        schedulers: The descriptions of the user's schedulers.
    """
    return {
        "param_groups": [_plain_options(group) for group in _param_groups(state)],
        "schedulers": schedulers,
        "max_duration": None if state.max_duration is None else str(state.max_duration),
        "batch_size": getattr(state.train_dataloader, "batch_size", None),
    }


def _plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: _plain(value) for key, value in group.items() if key not in ("params", "initial_lr")}
    options["lr"] = _plain(group.get("initial_lr", group.get("lr")))  # a schedule has changed "lr" already
    return options


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    value = plain_number(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)


def _describe(scheduler: Any) -> str:
    """Return the type and the arguments of a scheduler, without its progress."""
    if inspect.isroutine(scheduler):
        return f"{scheduler.__module__}.{scheduler.__qualname__}"
    is_torch = isinstance(scheduler, LRScheduler)
    values = scheduler.state_dict() if is_torch else getattr(scheduler, "__dict__", {})
    return f"{type(scheduler).__qualname__}({_text(values)})"


def _text(value: Any) -> str:
    """Return the representation of a plain value; of an object, its type."""
    if isinstance(value, Mapping):
        parts = (f"{key}={_text(item)}" for key, item in sorted(value.items(), key=str) if key not in _PROGRESS)
        return ", ".join(parts)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    text = repr(_plain(value))
    return type(value).__qualname__ if " at 0x" in text else text


def _apply_changes(state: State, current: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    """Override restored values with the user's arguments, where these differ from those of the saved run.

    Args:
        state: The run, after loading.
        current: `_describe_arguments` of this run.
        saved: `_describe_arguments` of the saved run.

    Returns:
        A description of each change.
    """
    changes: list[str] = []
    groups = _param_groups(state)
    if len(groups) == len(current["param_groups"]) == len(saved["param_groups"]):
        for index, group in enumerate(groups):
            new, old = current["param_groups"][index], saved["param_groups"][index]
            for key in sorted(new.keys() & old.keys()):
                if new[key] != old[key]:
                    _override(state, group, key, new[key], old[key])
                    place = f" of parameter group {index}" if len(groups) > 1 else ""
                    changes.append(f"{key}{place}: {old[key]} -> {new[key]}")
    for key, name in (("max_duration", "max_duration"), ("batch_size", "batch size"), ("schedulers", "schedulers")):
        if current[key] != saved[key] and not (key == "max_duration" and "branch_duration" in current):
            changes.append(f"{name}: {saved[key]} -> {current[key]}")
    return changes


def _override(state: State, group: dict[str, Any], key: str, new: Any, old: Any) -> None:
    if key != "lr":
        _set_option(group, key, tuple(new) if isinstance(group[key], tuple) else new)
        return
    # The schedule keeps its progress: it scales the new learning rate as it scaled the old one.
    rate = _plain(group["lr"])
    _set_option(group, "lr", new if rate == old or not old else rate * (new / old))
    if "initial_lr" in group:
        group["initial_lr"] = new
    for scheduler in with_members(state.schedulers):
        # A scheduler has the rates of the groups of its own optimizer alone.
        for index, scheduled in enumerate(getattr(getattr(scheduler, "optimizer", None), "param_groups", ())):
            if scheduled is not group:
                continue
            for attribute, value in (("base_lrs", new), ("_last_lr", _plain(group["lr"]))):
                if getattr(scheduler, attribute, None):
                    getattr(scheduler, attribute)[index] = value


class _FirstRates:
    """The learning rates that the schedulers of a new run have set, as factors of the initial rates.

    Args:
        state: The run, before a checkpoint is loaded into it.
    """

    def __init__(self, state: State) -> None:
        self._schedulers = list(state.schedulers)
        self._factors = [
            _plain(group["lr"]) / initial if (initial := _plain(group.get("initial_lr"))) else 1.0
            for group in _param_groups(state)
        ]

    def set(self, state: State) -> None:
        """Set the learning rates to those before the first step; the initial ones if there are other schedulers."""
        groups = _param_groups(state)
        are_known = len(groups) == len(self._factors) and [*map(id, self._schedulers)] == [*map(id, state.schedulers)]
        for group, factor in zip(groups, self._factors if are_known else [1.0] * len(groups), strict=True):
            if "initial_lr" in group:
                _set_option(group, "lr", _plain(group["initial_lr"]) * factor)


def _restart_schedulers(state: State, steps: int, first_rates: _FirstRates) -> None:
    """Advance new schedulers to the current time of the run, as if they had been used from its start.

    Args:
        state: The run, after loading.
        steps: How many times the schedulers would have been stepped.
        first_rates: The rates to begin with.
    """
    first_rates.set(state)
    for scheduler in state.schedulers:
        rescale = getattr(scheduler, "scale_schedule", None)
        if rescale is not None:  # a schedule of composer.optim reads the time from the state
            scheduler.last_epoch = steps
            now, before = state.timestamp, state.previous_timestamp
            if before is not None and before.batches == now.batches - 1:
                state.timestamp = before  # the loop steps before it counts the batch
            rescale(1.0)
            state.timestamp = now
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the optimizer was not stepped before, which it was
            for _ in range(steps):
                scheduler.step()
