"""Resume a run exactly: the progress of a run beyond its state.

That is the position in the data, the calls of `fit`, the arguments and the last values. The Trainer attaches a
`RunProgress` to its state; every checkpoint then contains its `state_dict` under the key `resumption`. One call of
`fit` is resumed exactly; of several, those that had ended are skipped, so that nothing is trained twice. A launch does
this:

1. `composer.checkpoint.autoresume` finds the newest checkpoint of the run.
2. `composer.checkpoint.run.load_checkpoint` reads it: `before_load` sets the states of schedulers aside, the state is
   loaded, and `after_load` stores the entry `resumption`.
3. Each `fit` is counted by `begin_fit`. A call that had ended in the run that saved is skipped once its arguments are
   set; `restore_if_complete` restores the end of the last one.
4. In the call that is resumed, `apply` restores schedulers, gradient scaler and evaluation metrics, once the run's
   schedulers and data are known. Arguments that the user has changed take precedence.
5. The loop restores generators and the position in the data.
6. `complete` saves the end of a call in its last checkpoint.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from composer.callbacks.checkpoint_saver import CheckpointSaver, savers_of
from composer.core import State, Time, Timestamp, TimeUnit
from composer.loggers import Logger
from composer.utils import dist, plain_number, reproducibility

_PROGRESS = {"last_epoch", "_last_lr", "_step_count", "base_lrs", "_is_initial", "_get_lr_called_within_step"}
_VALUES = ("train_metric_values", "eval_metric_values", "total_loss_dict")


@dataclass
class _Loaded:
    """The part of a checkpoint that `RunProgress` restores.

    Attributes:
        schedulers: The states of schedulers.
        groups: The parameter groups as they were before loading: a group that is another object afterwards was loaded.
        has_time: The checkpoint has a timestamp.
        options: The settings of each parameter group as loaded; None: the group was not loaded.
        progress: What `RunProgress.state_dict` returned, without the parts that are restored already.
        is_applied: There is nothing left for `RunProgress.apply`.
        fits: The start of each call of `fit`.
        scaler: The state of the gradient scaler; None: there is none, or it is restored.
    """

    schedulers: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    has_time: bool = True
    options: list[dict[str, Any] | None] = field(default_factory=list)
    progress: dict[str, Any] = field(default_factory=dict)
    is_applied: bool = True
    fits: list[Timestamp] = field(default_factory=list)
    scaler: dict[str, Any] | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """`describe_arguments` of the saved run; empty: unknown."""
        arguments: dict[str, Any] = self.progress.get("arguments", {})
        return arguments


class RunProgress:
    """Saves and restores what a run needs to continue exactly where it was.

    Args:
        state: The run.
        settings: The schedulers of the run: `given_schedulers`, those that the user gave; `step_every_batch`, False if
            they are stepped after every epoch; and `is_complete`, True if the training data is given and all are built.
        loader: The position in the training data: `state_dict()` of this rank, `load_state_dict(saved, rng)` with those
            of all ranks and the states of their generators, for the next epoch, and `loaded_generators`.
        evaluation: The evaluators of the run: `evaluated_at`, the batch at which each last ran, by label, and
            `restored_at`, that of the loaded checkpoint, at which an evaluator does not run again.
        announce: Shows a message to the user.
        branch_duration: How long the run trains from the checkpoint that it branches off; None: it is not a branch.

    Attributes:
        length: The `max_duration` of the resumed call of `fit` when its checkpoint was saved. It is not the requested
            one if a callback changed it, or stopped the run. None: as requested.
    """

    def __init__(
        self,
        state: State,
        settings: Any,
        loader: Any,
        evaluation: Any,
        announce: Callable[[str], None],
        branch_duration: Any = None,
    ) -> None:
        self.state, self.settings, self.loader, self.announce = state, settings, loader, announce
        self.evaluation = evaluation
        # The arguments are described here, before a checkpoint or training changes any of them.
        self._descriptions: list[tuple[Any, str]] = []  # the user's schedulers, described before their first step
        self._arguments = describe_arguments(state, self._describe_schedulers())
        self._first_rates = rates_by_scheduler(state)
        if branch_duration is not None:
            self._arguments["branch_duration"] = str(branch_duration)
        self._loaded = _Loaded()
        self._fits: list[Timestamp] = []
        self._calls = 0
        self._limit: str | None = None  # `max_duration` of the current call of `fit`, before anything stopped the run
        self._ended: dict[str, Any] | None = None  # set while the last checkpoint of a call of `fit` is saved
        self.length: str | None = None

    @property
    def loaded_generators(self) -> list[dict[str, Any]] | None:
        """The loaded states of the global generators, by rank, until `fit` restores them; None: there are none."""
        generators: list[dict[str, Any]] | None = self.loader.loaded_generators
        return generators

    def state_dict(self, gather: bool = True) -> dict[str, Any]:
        """Return the progress; a collective operation with the same result on every rank.

        Args:
            gather: False: use this rank's position in the data for all, without communication.
        """
        state, previous = self.state, self.state.previous_timestamp
        length = None if state.max_duration is None else str(state.max_duration)
        own = self.loader.state_dict(), length, state.is_over()
        ranks = dist.all_gather_object(own) if gather else [own] * dist.get_world_size()
        return {
            "loader": [position for position, _, _ in ranks],
            "limit": self._limit,
            # If one rank is stopped, the run ends on all of them.
            "max_duration": next((limit for _, limit, is_over in ranks if is_over), ranks[0][1]),
            "fits": [start.state_dict() for start in self._fits],
            "arguments": self._arguments,
            "values": {name: dict(getattr(state, name)) for name in _VALUES},
            "computed": {label: _computed(metrics) for label, metrics in state.eval_metrics.items()},
            "evaluated": dict(self.evaluation.evaluated_at),
            "previous_timestamp": None if previous is None else previous.state_dict(),
            **({} if self._ended is None else {"complete": self._ended}),
        }

    def _describe_schedulers(self) -> list[str]:
        known = {id(scheduler): text for scheduler, text in self._descriptions}
        given = self.settings.given_schedulers
        self._descriptions = [(each, known.get(id(each)) or describe_scheduler(each)) for each in given]
        return [text for _, text in self._descriptions]

    # ---- loading ----

    def before_load(self, content: dict[str, Any]) -> None:
        """Set aside the schedulers' states until the run's schedulers are known."""
        saved = content["state"]
        self._loaded = _Loaded(
            schedulers=saved.pop("schedulers", {}),
            groups=param_groups_of(self.state),
            has_time="timestamp" in saved,
            scaler=saved.get("scaler"),
        )

    def after_load(self, content: dict[str, Any]) -> None:
        """Restore the last values, and store the rest for `apply` and `begin_fit`."""
        loaded = self._loaded
        progress = loaded.progress = dict(content.get("resumption") or {})
        groups = param_groups_of(self.state)
        unchanged = {id(group) for group in loaded.groups}
        loaded.options = [None if id(group) in unchanged else options_of(group) for group in groups]
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
        """Restore what waits for the arguments of `fit`; changed arguments take precedence over the checkpoint."""
        self._apply_arguments()
        scaler, self._loaded.scaler = self._loaded.scaler, None
        if scaler and self.state.scaler is not None:  # `fit` may have made it for another precision
            self.state.load_state_dict({"scaler": scaler})
        # `compute` of metrics whose states were not saved returns the saved value until they are reset.
        for label, values in self._loaded.progress.pop("computed", {}).items():
            metrics = self.state.eval_metrics.get(label, {})
            for name in metrics.keys() & values.keys():
                if not metrics[name].update_called:
                    metrics[name]._computed, metrics[name]._update_count = values[name], 1
        evaluated = self._loaded.progress.pop("evaluated", {})
        self.evaluation.evaluated_at.update(evaluated)
        self.evaluation.restored_at.update(evaluated)

    def _apply_arguments(self) -> None:
        """Restore the schedulers, or restart changed ones, and apply the other changed arguments."""
        state, loaded, saved, schedulers = self.state, self._loaded, self._loaded.arguments, self._describe_schedulers()
        # The resumed call of `fit` may bring schedulers in place of those of the constructor.
        is_replaced = schedulers != self._arguments["schedulers"] and self._calls == len(loaded.fits)
        self._arguments["schedulers"] = schedulers
        self._arguments["batch_size"] = getattr(state.train_dataloader, "batch_size", None)
        if loaded.is_applied and not is_replaced:
            return
        loaded.is_applied = True
        same = not saved or saved["schedulers"] == schedulers
        if same and state.schedulers:
            self._restore_schedulers(loaded.schedulers)
        changes = apply_changes(state, self._arguments, saved) if saved else []
        if not same:
            steps = (state.timestamp.batch if self.settings.step_every_batch else state.timestamp.epoch).value
            restart_schedulers(state, steps, self._first_rates)
        if "branch_duration" in self._arguments and not loaded.fits:
            self._begin_branch()
        if changes:
            self.announce(f"These arguments differ from the checkpoint and replace it: {'; '.join(changes)}.")

    def _restore_schedulers(self, states: dict[str, Any]) -> None:
        state, groups, options = self.state, param_groups_of(self.state), self._loaded.options
        state.load_state_dict({"schedulers": states})
        if len(groups) != len(options):
            options = [None] * len(groups)
        # Building a scheduler has changed rates, momenta and more. A group that was not loaded gets the current rate.
        not_loaded = {id(group) for group, saved in zip(groups, options, strict=True) if saved is None}
        for group, saved in zip(groups, options, strict=True):
            for key, value in (saved or {}).items():
                set_option(group, key, value)
        for scheduler in state.schedulers:
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=False):
                if id(group) in not_loaded:
                    set_option(group, "lr", rate)
        if not self._loaded.has_time:
            update_schedules(state)

    def _begin_branch(self) -> None:
        """Set the learning rates to those of the branch, with a warning if they differ from the restored ones.

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
        state, groups, trunk = self.state, param_groups_of(self.state), self._loaded.progress.get("limit")
        restored = [plain(group["lr"]) for group in groups]
        rates = []
        for length in (trunk or state.max_duration, state.max_duration):
            state.max_duration = length
            update_schedules(state)
            rates.append([plain(group["lr"]) for group in groups])
        if rates[0] == rates[1]:  # the length of the run does not matter yet, so the restored rates stay exactly
            for group, rate in zip(groups, restored, strict=True):
                set_option(group, "lr", rate)
        for group, saved in zip(groups, self._loaded.options, strict=False):
            before, now = (plain((each or {}).get("lr")) for each in (saved, group))
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
            ValueError: Both runs have the same `run_name` and `save_folder`.
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

    def begin_fit(self, reset_time: bool) -> tuple[Timestamp | None, bool]:
        """Count a call of `fit`.

        Args:
            reset_time: Time starts from zero with this call.

        Returns:
            The start of this call in the run that saved the checkpoint (None: it begins now), and True if the call had
            ended there.
        """
        number, restored = self._calls, self._loaded.fits
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
        self._ended = {
            "max_duration": str(state.max_duration),
            "timestamp": state.timestamp.state_dict(),
            "loader": dist.all_gather_object(self.loader.state_dict()),
            "rng": reproducibility.get_rng_state(),
        }
        try:
            saver.finalize(state, logger)
        finally:
            self._ended = None

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


# ---- changed arguments take precedence over those of the checkpoint ----


def param_groups_of(state: State) -> list[dict[str, Any]]:
    """Return the parameter groups of all optimizers."""
    return [group for optimizer in state.optimizers for group in optimizer.param_groups]


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a parameter group without its parameters."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def set_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Set a value of a parameter group; one in a tensor, such as the rate of a compiled step, stays in it."""
    if isinstance(group.get(key), torch.Tensor):
        group[key].copy_(torch.as_tensor(value))
    else:
        group[key] = value


def describe_arguments(state: State, schedulers: list[str]) -> dict[str, Any]:
    """Return the arguments of a run as plain values.

    Args:
        state: The run, before a checkpoint is loaded into it.
        schedulers: The descriptions of the user's schedulers.
    """
    param_groups = []
    for group in param_groups_of(state):
        options = {key: plain(value) for key, value in group.items() if key not in ("params", "initial_lr")}
        options["lr"] = plain(group.get("initial_lr", group.get("lr")))  # a schedule has changed "lr" already
        param_groups.append(options)
    return {
        "param_groups": param_groups,
        "schedulers": schedulers,
        "max_duration": None if state.max_duration is None else str(state.max_duration),
        "batch_size": getattr(state.train_dataloader, "batch_size", None),
    }


def plain(value: Any) -> Any:
    """Return a value of a parameter group as numbers, strings and lists; of an object, its representation."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    value = plain_number(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)


def describe_scheduler(scheduler: Any) -> str:
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
    text = repr(plain(value))
    return type(value).__qualname__ if " at 0x" in text else text


def apply_changes(state: State, current: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    """Override restored values with the user's arguments, where these differ from those of the saved run.

    Args:
        state: The run, after loading.
        current: `describe_arguments` of this run.
        saved: `describe_arguments` of the saved run.

    Returns:
        A description of each change.
    """
    changes: list[str] = []
    groups = param_groups_of(state)
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
        set_option(group, key, tuple(new) if isinstance(group[key], tuple) and isinstance(new, list) else new)
        return
    # The schedule keeps its progress: it scales the new learning rate as it scaled the old one.
    rate = plain(group["lr"])
    set_option(group, "lr", new if rate == old or not old else rate * (new / old))
    if "initial_lr" in group:
        group["initial_lr"] = new
    # A scheduler has the rates of the groups of its own optimizer alone. One such as `SequentialLR` consists of others.
    schedulers = list(state.schedulers)
    for scheduler in schedulers:
        schedulers += getattr(scheduler, "_schedulers", ())
        for index, scheduled in enumerate(getattr(getattr(scheduler, "optimizer", None), "param_groups", ())):
            if scheduled is not group:
                continue
            for attribute, value in (("base_lrs", new), ("_last_lr", plain(group["lr"]))):
                if getattr(scheduler, attribute, None):
                    getattr(scheduler, attribute)[index] = value


def rates_by_scheduler(state: State) -> list[tuple[Any, list[Any]]]:
    """Return the run's schedulers with the learning rates that they have set last."""
    return [(scheduler, [plain(rate) for rate in scheduler.get_last_lr()]) for scheduler in state.schedulers]


def restart_schedulers(state: State, steps: int, first_rates: list[tuple[Any, list[Any]]]) -> None:
    """Advance new schedulers to the current time of the run, as if they had been used from its start.

    Args:
        state: The run, after loading.
        steps: How many times the schedulers would have been stepped.
        first_rates: `rates_by_scheduler` from before the checkpoint was loaded: many schedulers of torch compute a rate
            from the previous one.
    """
    for group in param_groups_of(state):
        if "initial_lr" in group:
            set_option(group, "lr", plain(group["initial_lr"]))
    for scheduler, rates in first_rates:
        if any(scheduler is other for other in state.schedulers):
            for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=False):
                set_option(group, "lr", rate)
    for scheduler in state.schedulers:
        if hasattr(scheduler, "scale_schedule"):  # a schedule of composer.optim reads the time from the state
            scheduler.last_epoch = steps
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the optimizer was not stepped before, but it was
            for _ in range(steps):
                scheduler.step()
    update_schedules(state)


def update_schedules(state: State) -> None:
    """Evaluate the schedules of composer.optim for the time and the length of the run."""
    now, before = state.timestamp, state.previous_timestamp
    if before is not None and before.batches == now.batches - 1:
        state.timestamp = before  # the loop steps schedulers before it counts the batch
    for scheduler in state.schedulers:
        if hasattr(scheduler, "scale_schedule"):
            scheduler.scale_schedule(1.0)
    state.timestamp = now
