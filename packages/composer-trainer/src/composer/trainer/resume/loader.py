"""The position of a run in its training data, and how a resumed run returns to it.

The order of an epoch comes from random generators. So a position is the states of all generators when iteration of the
loader began, and how much has been drawn since (`Position`). To return to it, the states are set, the loader is
advanced, and all generators get the states that they had at the position. Nothing is done per batch.

`LoaderPosition` does this for the loop, step by step:

1. `state_dict` saves the position; `load_state_dict` only stores a saved one.
2. `begin`, at the start of `fit`, restores it: first accesses of datasets are repeated (see `FirstAccesses`), then the
   generators are set. What can only be restored by iterating the loader waits in `_Pending`.
3. For an epoch that is in progress, `resume` advances the loader to the position, or continues with the iterator of the
   previous `fit` if it is still there. For any other epoch, `start` begins to iterate the loader.
4. `pause` and `put_back` leave an epoch between two batches; `finish` drops the iterator.

This is exact for loaders that draw the order of the data from generators that nothing else draws from during an epoch;
torch's samplers do. It is not exact for a dataset that shuffles with the global generators while the model uses them.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from composer.core import State, Timestamp
from composer.trainer.metrics import TrainMetrics
from composer.trainer.ranks import num_data_shards, set_epoch
from composer.trainer.resume import skip
from composer.trainer.resume.generators import (
    FirstAccesses,
    generators_of,
    global_states,
    keep_global_states,
    set_global_states,
    set_states,
    states_of,
)
from composer.utils import dist, reproducibility

__all__ = ["LoaderPosition", "Position"]

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Position:
    """The start of a loader's iteration, and how far it has advanced at batch `at` of the epoch."""

    epoch: int
    at: int
    batches: int  # drawn from the loader
    samples: int | None  # drawn by this rank; None: unknown
    batch_size: int | None
    num_untrained: (
        int  # batches at the loader's end that the epoch does not train, because the iteration began inside it
    )
    rng: dict[str, Any]  # states of the global generators at the start of the iteration
    generators: dict[str, Any]  # states of the loader's generators at the start of the iteration
    world_size: int

    def moved_to(self, at: int) -> Position:
        """Return the position at a later batch of the epoch."""
        more = at - self.at
        samples = self.samples
        if samples is not None and more:
            samples = None if self.batch_size is None else samples + more * self.batch_size
        return dataclasses.replace(self, at=at, batches=self.batches + more, samples=samples)

    def converted(self, loader: Any, world_size: int) -> Position:
        """Return the position in batches of `loader` on `world_size` ranks, either of which may have changed."""
        size = skip.batch_size_of(loader)
        size_changed = self.batch_size is not None and size is not None and self.batch_size != size
        if not size_changed and self.world_size == world_size:
            return dataclasses.replace(self, batch_size=size)
        samples, batches = self.samples, self.batches
        if samples is None:
            batches, rest = divmod(batches * self.world_size, world_size)
            _log_uneven(rest, f"{rest} batches are trained twice", f"{world_size} ranks")
        else:
            samples, rest = divmod(samples * self.world_size, world_size)
            _log_uneven(rest, f"{rest} samples are trained twice", f"{world_size} ranks")
            if size is not None:
                batches = -(-samples // size)
                if not (skip.can_advance_sampler(loader) and skip.by_samples(loader)):
                    rest = -samples % size
                    effect = f"{rest} samples are left out"
                    if getattr(loader, "num_workers", 0) > 1 and isinstance(loader.dataset, IterableDataset):
                        effect = "samples may be left out or trained twice, because each worker makes its own batches"
                    _log_uneven(rest, effect, f"batches of {size}")
                    samples = batches * size
        _log.info("The epoch continues after %s samples of this rank, in batches of %s.", samples, size)
        return dataclasses.replace(self, batches=batches, samples=samples, batch_size=size, world_size=world_size)

    def end_of_epoch(self, loader: Any, length: int | None) -> int | None:
        """Return the number of batches that the epoch will have; None if it is unknown. A collective operation."""
        if length is None:
            return None
        left = length - self.batches
        if self.samples is not None and self.batch_size is not None:
            in_sampler = skip.left_in_sampler(loader, self.samples)
            if in_sampler is not None:
                left = min(in_sampler, length - self.samples // self.batch_size)
        if dist.get_world_size() > 1:  # the parts of ranks may differ, but all must end the epoch together
            left = min(dist.all_gather_object(left))
        return self.at + max(left - self.num_untrained, 0)


@dataclasses.dataclass(frozen=True)
class _Pending:
    """The part of a restored position that waits until the loader is iterated.

    Attributes:
        loader_state: The result of the loader's own `state_dict`.
        generators: States of the loader's generators at the position; None: the current ones are right.
        loader_at_end: The loader has loaded its state at the end of an epoch.
        all_trained: All batches of the epoch had been trained when the checkpoint was saved.
        estimated: The checkpoint has no position, so the generators stay where iterating the loader leaves them.
    """

    loader_state: Any = None
    generators: dict[str, Any] | None = None
    loader_at_end: bool = False
    all_trained: bool = False
    estimated: bool = False


class LoaderPosition:
    """Iterates the training loader for the loop, and can return to where it was.

    Args:
        state: The run's state; `state.dataloader` is iterated.
        metrics: The training metrics, whose last values an epoch logs again at its end.
        spin: Advance loaders without a `state_dict` to the position; otherwise they start from the beginning, for as
            many batches as the epoch has left.
        accesses: Records the first accesses of the run's loaders. None: creates a recorder.

    Attributes:
        spin: See above; may be changed between fits.
        ends_at: The number of batches of the epoch, an estimate if the loader's length is an estimate; None if it is
            unknown.
    """

    def __init__(
        self, state: State, metrics: TrainMetrics, spin: bool = True, accesses: FirstAccesses | None = None
    ) -> None:
        self.spin = spin
        self.ends_at: int | None = None
        self._accesses = FirstAccesses() if accesses is None else accesses
        self._state, self._metrics = state, metrics
        # How many times `fit` was given another loader, until now and when the position was taken. A relaunched program
        # repeats these calls, so the number tells which loader a saved position belongs to.
        self._loader_number = self._position_number = 0
        self._saved: tuple[dict[str, Any] | None, list[dict[str, Any]] | None] | None = None  # not yet restored
        self._reset()

    def _reset(self) -> None:
        self._position: Position | None = None
        self._loader: Any = None  # the loader that `_position` belongs to
        self._iterator: Iterator[Any] | None = None
        self._paused_at: tuple[int, int] | None = None  # epoch and batch at which `_iterator` was left
        self._pending = _Pending()

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position, to be saved with `reproducibility.get_rng_state()`. Call it between batches."""
        if self._saved is not None and self._saved[0] is not None:
            return self._saved[0]  # nothing was trained since it was loaded
        # During an evaluation, `state.dataloader` is another loader.
        now, loader = self._state.timestamp, self._state.dataloader if self._loader is None else self._loader
        at, position = now.batches_in_epoch, None
        loader_state, generators = self._pending.loader_state, self._pending.generators
        if at > 0 and self._position is not None and self._position.epoch == now.epochs:
            position = dataclasses.asdict(self._position.moved_to(at))
        if loader_state is None and self._loader is not None and skip.has_state(loader):
            loader_state = loader.state_dict()
        return {
            "epoch": now.epochs,
            "batch_in_epoch": at,
            "sample_in_epoch": now.samples_in_epoch,
            "world_size": num_data_shards(self._state),
            "number": self._position_number,
            "ends_at": None if self._state.dataloader_limit is None else self.ends_at,
            "position": position,
            "generators": states_of(generators_of(loader)) if generators is None else generators,
            "loader": loader_state,
            "train_metrics": self._metrics.last_values() if at > 0 else {},
            **self._accesses.state_dict(self._state),
        }

    def load_state_dict(self, saved: list[dict[str, Any]] | None, rng: list[dict[str, Any]] | None) -> None:
        """Store a position for the next `begin`.

        Args:
            saved: The results of `state_dict`, by rank; None: the checkpoint has none.
            rng: The result of `reproducibility.get_rng_state`; None: the global generators are left alone.

        Raises:
            TypeError: `saved` is not a list of such dicts.
        """
        self._reset()
        local = None
        if saved is not None:
            value: Any = saved
            if not isinstance(value, list) or not value or not all(isinstance(each, dict) for each in value):
                raise TypeError(
                    f"The checkpoint's 'resumption' must be a list of one dict per rank, got {saved!r:.100}. Ignore "
                    f"it with `load_ignore_keys=['resumption']`."
                )
            rank = dist.get_global_rank()
            local = saved[rank if rank < len(saved) else 0]
            self._metrics.restore(local.get("train_metrics", {}))
            self._accesses.load_state_dict(local)
        self._saved = (local, rng)

    @property
    def loaded_generators(self) -> list[dict[str, Any]] | None:
        """The loaded states of the global generators, by rank, until `begin` restores them; None: there are none."""
        return None if self._saved is None else self._saved[1]

    # ---- the start of `fit` ----

    def replace_loader(self) -> None:
        """Start the loader from its beginning at the next `resume`: `fit` was given another one."""
        self._loader_number += 1

    def begin(self) -> bool:
        """Restore the loaded position and the generators; called once per `fit`, before anything else draws.

        Returns:
            True if a checkpoint was loaded since the last fit.
        """
        if self._saved is None:
            return False
        saved: Any
        (saved, rng), self._saved = self._saved, None
        loader, now = self._state.dataloader, self._state.timestamp
        self._position_number = (
            self._loader_number if saved is None else min(saved.get("number", 0), self._loader_number)
        )
        in_other_loader = self._position_number < self._loader_number
        with keep_global_states():
            if in_other_loader:
                if self.spin:
                    self._accesses.repeat_evaluators(self._state, saved.get("evaluators", {}))
            else:
                self._repeat_first_accesses(saved)
                if _matches(saved, now):
                    self._restore(saved)
                else:
                    self._estimate()
        if rng is not None:
            reproducibility.load_rng_state(rng)
        if now.epochs and not in_other_loader and getattr(loader, "persistent_workers", False):
            warnings.warn(
                "The training loader has `persistent_workers=True`: the random numbers of its workers depend on the "
                "epochs that they have run, so random transforms will differ from an uninterrupted run. Use "
                "`persistent_workers=False` for runs that resume exactly.",
                stacklevel=3,
            )
        return True

    def _repeat_first_accesses(self, saved: dict[str, Any] | None) -> None:
        if saved is None or not self.spin:
            return
        loader, now = self._state.dataloader, self._state.timestamp
        # If the epoch of the first access is loaded again from its start, that is the first access; some datasets
        # can be accessed only once.
        at, length = now.batches_in_epoch, self._length
        drawn = (saved.get("position") or {}).get("batches", at)
        loads_again = at > 0 and (length is None or drawn < length) and now.epochs == self._accesses.epoch_of("train")
        if not self._dataset_resumes_itself() and not (loads_again and not skip.can_advance_sampler(loader)):
            self._accesses.repeat("train", loader)
            set_epoch(loader, now.epochs)
        self._accesses.repeat_evaluators(self._state, saved.get("evaluators", {}))

    def _restore(self, saved: dict[str, Any]) -> None:
        """Restore the position of a checkpoint."""
        loader = self._loader = self._state.dataloader
        same_world_size = saved["world_size"] == num_data_shards(self._state)
        loader_state = saved["loader"] if same_world_size and skip.has_state(loader) else None
        all_trained = saved.get("ends_at") == saved["batch_in_epoch"]
        if saved["batch_in_epoch"]:
            self._pending = _Pending(loader_state, saved["generators"], all_trained=all_trained)
            if saved["position"] is not None:
                self._position = Position(**saved["position"])
            return
        if loader_state is not None:
            loader.load_state_dict(loader_state)
            if isinstance(loader, DataLoader):
                iter(loader)  # uses up the state of the finished epoch; the next iteration begins a new one
        at_end = loader_state is not None and not isinstance(loader, DataLoader)
        self._pending = _Pending(loader_at_end=at_end, all_trained=all_trained)
        set_states(generators_of(loader), saved["generators"])

    def _estimate(self) -> None:
        """Start the loader once per finished epoch, as the run did, for a checkpoint without a position."""
        loader, now = self._state.dataloader, self._state.timestamp
        if not self.spin or self._dataset_resumes_itself():
            return
        reproducibility.seed_all(self._state.seed)
        if now.epochs:
            _log.warning(
                "The checkpoint has no position in the training data; starting the loader %d times to bring its "
                "generators there. `spin_dataloaders=False` avoids this.",
                now.epochs,
            )
        for epoch in skip.progress(range(now.epochs), "Starting epochs", now.epochs):
            set_epoch(loader, epoch)
            next(iter(loader), None)
        set_epoch(loader, now.epochs)
        if now.batches_in_epoch:
            self._begin_position(loader, drawn=now.batches_in_epoch)
            self._pending = dataclasses.replace(self._pending, estimated=True)

    # ---- the batches of an epoch ----

    def resume(self, count: Callable[[Any], float] | None = None) -> Iterator[Any] | None:
        """Return the rest of an epoch that is in progress, or None if `start` is to be called.

        The global generators are left as they are.

        Args:
            count: `batch -> number of samples`, for loaders without a batch size.
        """
        now, loader = self._state.timestamp, self._state.dataloader
        at = now.batches_in_epoch
        paused_at, self._paused_at = self._paused_at, None
        if self._position_number < self._loader_number:
            self._reset()
            self._position_number, length = self._loader_number, self._length
            self.ends_at = None if length is None else at + length
            return None
        if at == 0:
            return None
        if self._loader is not loader or self._position is None or self._position.epoch != now.epochs:
            self._iterator = None
            self._begin_position(loader, drawn=at)
            self._pending = dataclasses.replace(self._pending, estimated=True)
        assert self._position is not None
        self._position = self._position.moved_to(at).converted(loader, num_data_shards(self._state))
        self.ends_at = self._position.end_of_epoch(loader, self._length)
        if self._iterator is None or paused_at != (now.epochs, at):
            self._iterator = self._return_to_position(self._position, count)
        return None if self._iterator is None else self._limited(self._iterator)

    def _return_to_position(self, position: Position, count: Callable[[Any], float] | None) -> Iterator[Any] | None:
        """Return an iterator at the position, or None to start the loader; then set the generators."""
        loader, pending = self._loader, self._pending
        self._pending = dataclasses.replace(pending, loader_state=None, generators=None, estimated=False)
        generators = states_of(generators_of(loader)) if pending.generators is None else pending.generators
        iterator = None
        with keep_global_states():
            if pending.loader_state is not None or self.spin or self._dataset_resumes_itself():
                iterator = self._advance(position, pending, None if pending.estimated else count)
            if not pending.estimated:
                set_states(generators_of(loader), generators)
        return iterator

    def _advance(self, position: Position, pending: _Pending, count: Callable[[Any], float] | None) -> Iterator[Any]:
        """Iterate the loader up to the position, in the way that is exact and cheapest for this loader."""
        loader, samples = self._loader, self._samples_at(position)
        at_end = self._state.dataloader_limit is not None and self.ends_at == position.at
        set_global_states(position.rng)
        set_states(generators_of(loader), position.generators, warn=False)
        if pending.loader_state is not None:
            loader.load_state_dict(pending.loader_state)
            iterator: Iterator[Any] = iter(loader)
            if at_end:
                next(iterator, None)  # uses up the state, so that the next iteration begins a new epoch
            return iterator
        if self._dataset_resumes_itself():
            iterator = iter(loader)
            del self._state.dataset_resumption["train"]
            return iterator
        if at_end and (samples is None or pending.all_trained):
            return iter(())
        if skip.can_advance_sampler(loader):
            return skip.advance_sampler(loader, position.batches, position.samples)
        if samples is None or count is None:
            return skip.skip_batches(loader, position.batches)[0]
        count = keep_global_states()(count)  # transforms of batches may draw
        iterator, drawn, seen = skip.skip_batches(loader, position.batches, samples, count)
        if (drawn, seen) != (position.batches, samples):  # the batch size has changed
            rest = seen - samples
            _log_uneven(max(rest, 0), f"{rest:g} samples are left out", "the loader's batches, which have changed")
            self._position = dataclasses.replace(position, batches=drawn)
            self.ends_at = self._position.end_of_epoch(loader, self._length)
        return iterator

    def start(self) -> Iterator[Any]:
        """Begin to iterate the loader; called when nothing else draws until its first batch."""
        loader, at = self._state.dataloader, self._state.timestamp.batches_in_epoch
        length, num_untrained = self._length, 0
        if at == 0:
            self.ends_at = length
        elif length is not None and self.ends_at is not None:  # from the beginning, in the middle of the epoch
            num_untrained = length - (self.ends_at - at)
        if self._pending.generators is not None:  # the checkpoint was saved between the last batch and the epoch's end
            self._leave_epoch(loader, self._pending.generators)
        self._begin_position(loader, drawn=0, num_untrained=num_untrained)
        iterator = self._iterator = iter(loader)
        self._state.dataset_resumption.pop("train", None)
        if self._pending.loader_at_end:
            self._pending = dataclasses.replace(self._pending, loader_at_end=False)
            first = list(itertools.islice(iterator, 1))
            # Without a batch, the iterator was the rest of the finished epoch.
            self._iterator = itertools.chain(first, iterator) if first else iter(loader)
        return self._limited(self._iterator)

    def _leave_epoch(self, loader: Any, generators: dict[str, Any]) -> None:
        """Bring the loader and its generators to the end of the restored epoch."""
        loader_state = self._pending.loader_state
        self._pending = dataclasses.replace(self._pending, loader_state=None, generators=None)
        with keep_global_states():
            if loader_state is not None:
                loader.load_state_dict(loader_state)
                next(iter(loader), None)
            set_states(generators_of(loader), generators)

    # ---- leaving an epoch ----

    def pause(self) -> None:
        """Leave the epoch between two batches; the next `resume` continues with the same iterator."""
        now = self._state.timestamp
        self._paused_at = (now.epochs, now.batches_in_epoch)

    def put_back(self, batches: Iterable[Any]) -> None:
        """Leave the epoch like `pause`, and put batches that were drawn but not trained on back into the iterator."""
        if self._state.timestamp.batches_in_epoch:
            assert self._iterator is not None
            self._iterator = itertools.chain(batches, self._iterator)
            self.pause()
        else:  # the epoch has not begun: undo the start
            assert self._position is not None
            set_global_states(self._position.rng)
            set_states(generators_of(self._loader), self._position.generators)
            self._iterator = None

    def finish(self, epoch_ended: bool = False) -> None:
        """Drop the iterator if its epoch has ended, or if it would keep worker processes alive."""
        loader, paused = self._loader, self._paused_at is not None and self._iterator is not None
        if paused and not epoch_ended:
            if not getattr(loader, "num_workers", 0) or getattr(loader, "persistent_workers", False):
                return
            loader_state = loader.state_dict() if skip.has_state(loader) else None
            self._pending = dataclasses.replace(self._pending, loader_state=loader_state)
        self._iterator = self._paused_at = None

    # ---- positions ----

    def _begin_position(self, loader: Any, drawn: int, num_untrained: int = 0) -> None:
        now, size = self._state.timestamp, skip.batch_size_of(loader)
        if drawn == 0:
            self._accesses.record("train", loader, now.epochs)
        self._loader = loader
        self._position = Position(
            epoch=now.epochs,
            at=now.batches_in_epoch,
            batches=drawn,
            samples=None if size is None else drawn * size,
            batch_size=size,
            num_untrained=num_untrained,
            rng=global_states(),
            generators=states_of(generators_of(loader)),
            world_size=num_data_shards(self._state),
        )

    @property
    def _length(self) -> int | None:
        """The number of batches per epoch; None: unknown."""
        length = self._state.dataloader_len
        return None if length is None else length.value

    def _samples_at(self, position: Position) -> float | None:
        """Return the samples up to a position in a loader without a batch size; None if they are unknown."""
        one_rank = dist.get_world_size() == 1 and position.world_size == num_data_shards(self._state) == 1
        one_loader = position.batches == position.at  # the epoch has had no other loader
        known = one_rank and one_loader and position.samples is None
        return (self._state.timestamp.samples_in_epoch or None) if known else None

    def _limited(self, iterator: Iterator[Any]) -> Iterator[Any]:
        if self.ends_at is None or self._state.dataloader_limit is None:
            return iterator
        return itertools.islice(iterator, self.ends_at - self._state.timestamp.batches_in_epoch)

    def _dataset_resumes_itself(self) -> bool:
        """Return True if the dataset has restored its own position, as streaming datasets do."""
        return self._state.dataset_resumption.get("train", False)


def _matches(saved: Any, now: Timestamp) -> bool:
    """Return True if a saved position is complete and belongs to the timestamp."""
    if saved is None or not {"world_size", "position", "generators", "loader"} <= saved.keys():
        return False
    position = saved["position"]
    if position is not None and position.keys() != {field.name for field in dataclasses.fields(Position)}:
        return False
    return (saved.get("epoch"), saved.get("batch_in_epoch")) == (now.epochs, now.batches_in_epoch)


def _log_uneven(rest: float, effect: str, unit: str) -> None:
    if rest and dist.get_global_rank() == 0:
        _log.warning("The position in the epoch does not divide evenly into %s: %s.", unit, effect)
