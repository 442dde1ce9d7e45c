"""How far a run is, beyond its state: the data, the calls of `fit`, and what the user had asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from composer.callbacks.checkpoint_saver import CheckpointSaver
from composer.core import State, Timestamp
from composer.loggers import Logger
from composer.trainer._clock import is_over
from composer.trainer._requested import apply_changes, describe_schedulers, requested_of, restart_schedulers
from composer.trainer._resumption import LoaderPosition
from composer.trainer._settings import RunSettings
from composer.utils import dist, reproducibility

__all__ = ["RunPosition"]

_VALUES = ("train_metric_values", "eval_metric_values", "total_loss_dict")


class RunPosition:
    """Saves and restores what lets a run go on exactly where it was.

    Args:
        state: The run.
        settings: What the user gave.
        loader: The position in the training data.
        announce: Tells the user.

    Attributes:
        over_at: The `max_duration` at which the call of `fit` that is being repeated was over when the checkpoint was
            saved, which is shorter than what was asked for if the run was stopped; None: it was not over.
    """

    def __init__(
        self, state: State, settings: RunSettings, loader: LoaderPosition, announce: Callable[[str], None]
    ) -> None:
        self.state, self.settings, self.loader, self.announce = state, settings, loader, announce
        # Before a checkpoint, or training, changes any of it.
        self._asked = requested_of(state, settings.given_schedulers)
        self._saved: dict[str, Any] | None = None
        self._schedulers: dict[str, Any] = {}
        self._groups: list[dict[str, Any]] = []  # the parameter groups before loading, which replaces loaded ones
        self._options: list[dict[str, Any] | None] = []  # by group, as loaded; None: the group was not
        self._time_is_loaded = True
        self._fits: list[Timestamp] = []
        self._restored_fits: list[Timestamp] = []
        self._computed: dict[str, dict[str, Any]] = {}  # by evaluation metrics, in the loaded checkpoint
        self._complete: dict[str, Any] | None = None  # what the loaded checkpoint says of its end
        self._ended: dict[str, Any] | None = None  # set while the last checkpoint of a fit is saved
        self._calls = 0
        # The `max_duration` that the current call of `fit` began with, before anything stopped the run.
        self._limit: str | None = None
        self._restored_limit: str | None = None
        self._restored_over_at: str | None = None
        self.over_at: str | None = None

    def state_dict(self) -> dict[str, Any]:
        """Every rank's position in the data, the starts of the calls of `fit`, the arguments and the last values."""
        state, previous = self.state, self.state.previous_timestamp
        over_at = str(state.max_duration) if is_over(state) else None
        ranks = dist.all_gather_object((self.loader.state_dict(), over_at))
        return {
            "loader": [place for place, _ in ranks],
            "limit": self._limit,
            # One rank that was stopped ends the run on all of them.
            "over_at": next((limit for _, limit in ranks if limit is not None), None),
            "fits": [start.state_dict() for start in self._fits],
            "asked": self._asked,
            **self._values(),
            "previous_timestamp": None if previous is None else previous.state_dict(),
            **({} if self._ended is None else {"complete": self._ended}),
        }

    def _values(self) -> dict[str, dict[str, Any]]:
        """Return the last losses and metrics, and what `compute` of each evaluation metric returned."""
        return {
            "values": {name: dict(getattr(self.state, name)) for name in _VALUES},
            "computed": {label: _computed(metrics) for label, metrics in self.state.eval_metrics.items()},
        }

    # ---- loading ----

    def before_load(self, content: dict[str, Any]) -> None:
        """Keep the schedulers' state for when it is known which schedulers there are."""
        saved = content["state"]
        left_out = "state/schedulers" in content.get("left_out", ())
        self._schedulers = saved.pop("schedulers", None if left_out else {})
        self._groups, self._time_is_loaded = _param_groups(self.state), "timestamp" in saved

    def after_load(self, content: dict[str, Any]) -> None:
        """Restore the position, and let changed arguments win."""
        resumption = content.get("resumption") or {}
        before, self._groups = {id(group) for group in self._groups}, []
        if any(
            path.startswith("state/optimizers/") and "/param_groups" in path for path in content.get("left_out", ())
        ):
            before = {id(group) for group in _param_groups(self.state)}
        self._options = [None if id(group) in before else _options(group) for group in _param_groups(self.state)]
        self.loader.load_state_dict(resumption.get("loader"), content.get("rng"))
        previous = resumption.get("previous_timestamp")
        self.state.previous_timestamp = None if previous is None else _timestamp(previous)
        for name, values in resumption.get("values", {}).items():
            setattr(self.state, name, values)
        self._computed = resumption.get("computed", {})
        # A checkpoint that does not tell is taken to be of the program's first call.
        self._restored_fits = [_timestamp(saved) for saved in resumption.get("fits", [])] or [Timestamp()]
        self._complete = resumption.get("complete")
        self._restored_limit, self._restored_over_at = resumption.get("limit"), resumption.get("over_at")
        self._saved = resumption.get("asked", {})
        given, had = self.settings.given_schedulers, self._saved.get("schedulers")
        if self.settings.is_complete and (given or not had):  # otherwise `fit` may bring them
            self.settle()

    def settle(self) -> None:
        """Bring schedulers and changed arguments in place: after loading, or when `fit` has completed the settings."""
        self._asked["schedulers"] = describe_schedulers(self.settings.given_schedulers)
        self._asked["batch_size"] = getattr(self.state.train_dataloader, "batch_size", None)
        saved, self._saved = self._saved, None
        if saved is None:
            return
        if not saved or saved["schedulers"] == self._asked["schedulers"]:
            self._restore_schedulers()
        else:
            now = self.state.timestamp
            restart_schedulers(self.state, (now.batch if self.settings.step_every_batch else now.epoch).value)
        changes = apply_changes(self.state, self._asked, saved) if saved else []
        if changes:
            self.announce(f"Arguments that differ from the checkpoint's win over it: {'; '.join(changes)}.")

    def _restore_schedulers(self) -> None:
        if not self.state.schedulers or self._schedulers is None:
            return
        self.state.load_state_dict({"schedulers": self._schedulers})
        groups, saved = _param_groups(self.state), self._options
        if len(groups) != len(saved):
            saved = [None] * len(groups)
        of_schedule = {id(group) for group, options in zip(groups, saved, strict=True) if options is None}
        for scheduler in self.state.schedulers:
            _apply_position(scheduler, of_schedule)
        for group, options in zip(groups, saved, strict=True):
            for key, value in (options or {}).items():  # building a scheduler sets rates, momenta and more anew
                _set_option(group, key, value)
        if not self._time_is_loaded:
            for scheduler in self.state.schedulers:
                follow = getattr(scheduler, "scale_schedule", None)
                if follow is not None:  # a schedule of this library follows the time, which is not the checkpoint's
                    follow(1.0)

    # ---- the calls of `fit` ----

    def begin_fit(self, reset_time: bool) -> tuple[Timestamp | None, bool]:
        """Count a call of `fit`, for which all evaluators are known now.

        Args:
            reset_time: Whether time starts again with this call.

        Returns:
            When this call began, if the run that saved the checkpoint had begun it (None: it begins now); and whether
            that run had ended it.

        Raises:
            FileExistsError: The names of checkpoints that this Trainer saved would be given again.
        """
        number, restored = self._calls, self._restored_fits
        if reset_time and number >= len(restored):
            for callback in self.state.callbacks:
                if isinstance(callback, CheckpointSaver):
                    callback.check_reset(self.state)
        self._calls += 1
        computed, self._computed = self._computed, {}
        for label, values in computed.items():
            _restore_computed(self.state.eval_metrics.get(label, {}), values)
        if number < len(restored):
            self._fits = restored[: number + 1]
            return restored[number], number + 1 < len(restored)
        if reset_time:
            self.state.timestamp = Timestamp()
        self._fits = [*self._fits, self.state.timestamp]
        return None, False

    def is_complete(self) -> bool:
        """Whether the run that saved the checkpoint had ended the call of `fit` that is being repeated.

        Its last checkpoint may be of a moment before the epoch was closed. If the run is longer now, it goes on there.
        What counts is the length that was asked for, since `state.stop_training` shortens `max_duration`. To be called
        once per call of `fit`, when it has set that length.
        """
        state, done = self.state, self._complete
        self._limit, self.over_at = str(state.max_duration), None
        if self._calls != len(self._restored_fits) or self._limit != self._restored_limit:
            return False
        if done is None:
            self.over_at = self._restored_over_at
            return False
        state.max_duration = done["max_duration"]
        state.timestamp = _timestamp(done["timestamp"])
        self.loader.load_state_dict(done["loader"], done["rng"])
        reproducibility.load_rng_state(done["rng"])
        return True

    def complete(self, saver: CheckpointSaver | None, logger: Logger) -> None:
        """Let the last checkpoint hold what this call of `fit` ends with.

        In a run that is relaunched it also says that the call has ended, so that a relaunch need not repeat its end.
        """
        if saver is None:
            return
        state = self.state
        done = self._ended = {
            "max_duration": str(state.max_duration),
            "timestamp": state.timestamp.state_dict(),
            "loader": dist.all_gather_object(self.loader.state_dict()),
            "rng": reproducibility.get_rng_state(),
        }
        # In one write, because a run killed between two would repeat an end that the first already holds.
        saved = saver.finalize(state, logger)
        self._ended, values = None, self._values()
        if saved or not saver.is_relaunched:
            return

        def change(resumption: dict[str, Any]) -> None:
            resumption.update(values, complete=done)

        saver.amend(state, logger, change)

    def forget_fits(self) -> None:
        """Let the calls of `fit` count as new ones: the user loaded a checkpoint, but did not relaunch its program."""
        self._restored_fits = []


def _timestamp(saved: dict[str, Any]) -> Timestamp:
    timestamp = Timestamp()
    timestamp.load_state_dict(saved)
    return timestamp


def _computed(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the values that metrics of torchmetrics have computed, by name."""
    return {name: m._computed for name, m in metrics.items() if getattr(m, "_computed", None) is not None}


def _restore_computed(metrics: dict[str, Any], values: dict[str, Any]) -> None:
    """Let metrics whose states were not saved answer `compute` with the saved value, until they are reset."""
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


def _apply_position(scheduler: Any, groups: set[int]) -> None:
    """Give parameter groups, told by their ids, what a scheduler makes of them at its position."""
    own = scheduler.optimizer.param_groups
    if getattr(scheduler, "cycle_momentum", False) and any(id(group) in groups for group in own):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of asking outside of `step`; only `get_lr` sets the momentum
            scheduler.get_lr()
    for group, rate in zip(own, scheduler.get_last_lr(), strict=False):
        if id(group) in groups:
            _set_option(group, "lr", rate)
