"""The position of a run in its training data, and how a resumed run returns to it.

A loader that saves its own state (`state_dict` and `load_state_dict`, as torchdata's `StatefulDataLoader`) gets it
back. The order of any other loader comes from random generators: the global ones and those of `generators_of`. So its
position is their states when its iteration began, and how much has been drawn since (`Position`). To return to it,
these states are set, the loader is iterated up to the position, and the generators get the states that they had there.

This is exact if nothing else draws from these generators while the loader determines its order; torch's samplers draw
it at the start of an epoch. What a dataset keeps to itself (a generator, values drawn when it was first accessed) is
not known here: it starts anew.

`LoaderPosition` does this for a loop. `begin`, at the start of a fit, sets the generators. In an epoch that is in
progress, `resume` returns to the position, or continues with the iterator of the previous fit if it is still there.
Any other epoch begins with `start`. `pause`, `put_back` and `finish` leave the iteration. A host that iterates the
loader itself calls `mark` and `leave_to_host` instead. Nothing is done per batch.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from composer.core.state import State
from composer.core.time import Timestamp
from composer.loop.generators import (
    global_states,
    keep_global_states,
    set_global_states,
    set_states,
    states_of,
)
from composer.utils import dist, reproducibility

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Position:
    """The start of a loader's iteration, and how far it has advanced at batch `at` of the epoch.

    Checkpoints hold these fields; a position with other fields is not used.

    Attributes:
        epoch: The epoch of the iteration.
        at: The batch of the epoch.
        batches: Batches drawn from the loader.
        samples: Samples drawn by this rank; None: unknown.
        batch_size: The loader's batch size; None: unknown, or it varies.
        num_untrained: The number of batches that remain in the loader when the epoch ends: those before the batch at
            which the iteration began, if that was in the middle of the epoch.
        rng: The states of the global generators at the start of the iteration.
        generators: The states of the loader's generators at the start of the iteration.
        world_size: The number of ranks that share the data.
    """

    epoch: int
    at: int
    batches: int
    samples: int | None
    batch_size: int | None
    num_untrained: int
    rng: dict[str, Any]
    generators: dict[str, Any]
    world_size: int

    def moved_to(self, at: int, accumulate: int) -> Position:
        """Return the position at a later batch of the epoch, each of which is `accumulate` batches of the loader."""
        more, samples = (at - self.at) * accumulate, self.samples
        if samples is not None and more:
            samples = None if self.batch_size is None else samples + more * self.batch_size
        return dataclasses.replace(self, at=at, batches=self.batches + more, samples=samples)

    def converted(self, loader: Any, world_size: int) -> Position:
        """Return the position in batches of `loader` on `world_size` ranks, either of which may have changed."""
        size = batch_size_of(loader)
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
                if not (_can_advance_sampler(loader) and _by_samples(loader)):
                    rest = -samples % size
                    effect = f"{rest} samples are left out"
                    if getattr(loader, "num_workers", 0) > 1 and isinstance(loader.dataset, IterableDataset):
                        effect = "samples may be left out or trained twice, because each worker makes its own batches"
                    _log_uneven(rest, effect, f"batches of {size}")
                    samples = batches * size
        _log.info("The epoch continues after %s samples of this rank, in batches of %s.", samples, size)
        return dataclasses.replace(self, batches=batches, samples=samples, batch_size=size, world_size=world_size)

    def end_of_epoch(self, loader: Any, length: int | None, accumulate: int) -> int | None:
        """Return the number of batches that the epoch will have; None if it is unknown. A collective operation.

        Args:
            loader: The loader.
            length: The number of batches that the loader yields, or the part of them that is used.
            accumulate: The number of batches of the loader that make a batch of the epoch.
        """
        if length is None:
            return None
        left = length - self.batches
        if self.samples is not None and self.batch_size is not None:
            in_sampler = _left_in_sampler(loader, self.samples)
            if in_sampler is not None:
                left = min(in_sampler, length - self.samples // self.batch_size)
        if dist.get_world_size() > 1:  # the parts of ranks may differ, but all must end the epoch together
            left = min(dist.all_gather_object(left))
        return self.at + -(-max(left - self.num_untrained, 0) // accumulate)


class LastMetrics(Protocol):
    """Holds the metrics of the last batch, which an epoch that ends there logs again."""

    def last_values(self) -> dict[str, Any]:
        """Return the metrics by name, on the host."""

    def restore(self, values: dict[str, Any]) -> None:
        """Restore the result of `last_values`."""


class LoaderPosition:
    """Iterates the training loader for a loop, and returns to the position of a checkpoint.

    Args:
        state: The run's state; `state.dataloader` is iterated.
        metrics: The training metrics; None: none are saved.
        accumulate: Batches of the loader per batch of `state.timestamp`.
        spin: Advance loaders without a `state_dict` to the position; otherwise they start from the beginning, for as
            many batches as the epoch has left.

    Attributes:
        accumulate: See above; may be changed between fits, like `spin`.
        ends_at: The number of batches of the epoch, an estimate if the loader's length is an estimate; None if it is
            unknown.
    """

    def __init__(
        self, state: State, metrics: LastMetrics | None = None, accumulate: int = 1, spin: bool = True
    ) -> None:
        self.accumulate, self.spin = accumulate, spin
        self.ends_at: int | None = None
        self._state, self._metrics = state, metrics
        self._saved: tuple[dict[str, Any] | None, list[dict[str, Any]] | None] | None = None  # not yet restored
        self._reset()

    def _reset(self) -> None:
        self._position: Position | None = None
        self._loader: Any = None  # the loader that `_position` belongs to
        self._iterator: Iterator[Any] | None = None
        self._paused_at: tuple[int, int] | None = None  # epoch and batch at which `_iterator` was left
        # The states of the loader and of its generators at the position, until the loader is iterated.
        self._loader_state: Any = None
        self._generators: dict[str, Any] | None = None
        self._is_replaced = False
        self._host_iterates = False  # the loader, whose state the host saves, too

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position, to be saved with `reproducibility.get_rng_state()`. Call it between batches."""
        if self._saved is not None and self._saved[0] is not None:
            return self._saved[0]  # nothing was trained since it was loaded
        # During an evaluation, `state.dataloader` is another loader.
        now, loader = self._state.timestamp, self._state.dataloader if self._loader is None else self._loader
        at, position, loader_state = now.batches_in_epoch, None, self._loader_state
        if at > 0 and self._position is not None and self._position.epoch == now.epochs:
            position = dataclasses.asdict(self._position.moved_to(at, self.accumulate))
        if loader_state is None and self._loader is not None and not self._host_iterates and has_state(loader):
            loader_state = loader.state_dict()
        evaluators = {each.label: states_of(each.dataloader.dataloader) for each in self._state.evaluators}
        return {
            "epoch": now.epochs,
            "batch_in_epoch": at,
            "world_size": num_data_shards(self._state),
            "position": position,
            "generators": states_of(loader) if self._generators is None else self._generators,
            "loader": loader_state,
            "train_metrics": self._metrics.last_values() if self._metrics is not None and at > 0 else {},
            "evaluators": {label: states for label, states in evaluators.items() if states},
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
            if self._metrics is not None:
                self._metrics.restore(local.get("train_metrics", {}))
        self._saved = (local, rng)

    @property
    def loaded_generators(self) -> list[dict[str, Any]] | None:
        """The loaded states of the global generators, by rank, until `begin` restores them; None: there are none."""
        return None if self._saved is None else self._saved[1]

    # ---- the start of `fit` ----

    def replace_loader(self) -> None:
        """Start the loader from its beginning at the next `resume`: `fit` was given another one."""
        self._is_replaced = True

    def begin(self) -> bool:
        """Restore the loaded position and the generators; called once per `fit`, before anything else draws.

        Returns:
            True if a checkpoint was loaded since the last fit.
        """
        if self._saved is None:
            return False
        (saved, rng), self._saved = self._saved, None
        loader, now = self._state.dataloader, self._state.timestamp
        if not self._is_replaced:
            if saved is not None and _matches(saved, now):
                self._restore(saved)
            elif self.spin and not self._dataset_resumes_itself():
                self._start_finished_epochs()
        for evaluator in self._state.evaluators:
            set_states(evaluator.dataloader.dataloader, (saved or {}).get("evaluators", {}).get(evaluator.label, {}))
        if rng is not None:
            reproducibility.load_rng_state(rng)
        if now.batches and not self._is_replaced and getattr(loader, "persistent_workers", False):
            warnings.warn(
                "The training loader has `persistent_workers=True`: the random numbers of its workers depend on the "
                "epochs that they have run, so random transforms will differ from an uninterrupted run. Use "
                "`persistent_workers=False` for runs that resume exactly.",
                stacklevel=3,
            )
        return True

    def _restore(self, saved: dict[str, Any]) -> None:
        """Restore the position of a checkpoint; the loader returns to it when it is iterated."""
        loader = self._loader = self._state.dataloader
        if saved["position"] is not None:
            self._position = Position(**saved["position"])
        if has_state(loader) and saved["world_size"] == num_data_shards(self._state):
            self._loader_state = saved["loader"]
        self._generators = saved["generators"]
        unknown = set_states(loader, saved["generators"])
        if unknown:
            warnings.warn(
                f"The checkpoint has no state for these random generators of the training loader, so they start anew, "
                f"and the order of the data will differ from an uninterrupted run: {', '.join(unknown)}. Build the "
                f"loader in the same way as the run that saved the checkpoint.",
                stacklevel=4,
            )

    def _start_finished_epochs(self) -> None:
        """Start the loader once per finished epoch, as the run did, for a checkpoint without a position."""
        loader, now = self._state.dataloader, self._state.timestamp
        with keep_global_states():
            reproducibility.seed_all(self._state.seed)
            if now.epochs:
                _log.warning(
                    "The checkpoint has no position in the training data; starting the loader %d times to bring its "
                    "generators there. `spin_dataloaders=False` avoids this.",
                    now.epochs,
                )
            for epoch in range(now.epochs):
                set_epoch(loader, epoch)
                next(iter(loader), None)
            set_epoch(loader, now.epochs)
            if now.batches_in_epoch:
                self._begin_position(loader, drawn=now.batches_in_epoch)

    # ---- an epoch whose loader a host iterates ----

    def mark(self) -> None:
        """Note that the host begins to iterate the loader now, or return to where it began in this epoch.

        The generators stay as they are if no batch of the epoch is left, or if the loader has a state, which the host
        restores.
        """
        now, position = self._state.timestamp, self._position
        self._host_iterates = True
        if not now.batches_in_epoch:
            self._begin_position(self._state.dataloader, drawn=0)
            return
        is_known = position is not None and position.epoch == now.epochs and self._loader is self._state.dataloader
        is_done = self._length is not None and now.batches_in_epoch >= self._length
        if is_known and not is_done and not has_state(self._loader):
            assert position is not None
            set_states(self._loader, position.generators)

    def is_at_end(self) -> bool:
        """Return True if the epoch has had all of its batches, where the loader has a length."""
        limit = self._state.dataloader_limit
        if limit is None:
            return False
        end, at = self.ends_at, self._state.timestamp.batches_in_epoch
        return at >= (limit if end is None or at == 0 else end)

    def leave_to_host(self) -> None:
        """Drop the loaded state of the loader, because the host restores the loader itself."""
        self._loader_state = self._generators = None

    # ---- the batches of an epoch ----

    def resume(self) -> Iterator[Any] | None:
        """Return the rest of an epoch that is in progress, or None if `start` is to be called.

        The global generators are left as they are.
        """
        now, loader, length = self._state.timestamp, self._state.dataloader, self._length
        at, drawn = now.batches_in_epoch, now.batches_in_epoch * self.accumulate
        paused_at, self._paused_at, self._host_iterates = self._paused_at, None, False
        if self._is_replaced:
            self._reset()
            self.ends_at = None if length is None else at + length
            return None
        if at == 0:
            return None
        if self._loader is not loader or self._position is None or self._position.epoch != now.epochs:
            self._iterator = None
            self._begin_position(loader, drawn=drawn)
        assert self._position is not None
        position = self._position.moved_to(at, self.accumulate)
        self._position = position = position.converted(loader, num_data_shards(self._state))
        batches = None if length is None else length * self.accumulate
        self.ends_at = position.end_of_epoch(loader, batches, self.accumulate)
        if self._iterator is None or paused_at != (now.epochs, at):
            self._iterator = None
            loader_state, generators = self._loader_state, self._generators
            self._loader_state = self._generators = None
            with keep_global_states():
                if loader_state is not None or self.spin or self._dataset_resumes_itself():
                    self._iterator = self._advance(position, loader_state)
                if generators is not None:
                    set_states(loader, generators)
        return None if self._iterator is None else self._limited(self._iterator)

    def _advance(self, position: Position, loader_state: Any) -> Iterator[Any]:
        """Iterate the loader up to the position, in the way that is exact and cheapest for this loader."""
        loader, iterator = self._loader, iter(())
        at_end = self._state.dataloader_limit is not None and self.ends_at == position.at
        set_global_states(position.rng)
        set_states(loader, position.generators)
        if loader_state is not None:
            loader.load_state_dict(loader_state)
            iterator = iter(loader)
            if at_end:
                next(iterator, None)  # uses up the state, so that the next iteration begins a new epoch
        elif self._dataset_resumes_itself():
            iterator = iter(loader)
            del self._state.dataset_resumption["train"]
        elif not at_end:
            iterator = _skip(loader, position.batches, position.samples)
        return iterator

    def start(self) -> Iterator[Any]:
        """Begin to iterate the loader; called when nothing else draws until its first batch."""
        loader, at = self._state.dataloader, self._state.timestamp.batches_in_epoch
        length, num_untrained = self._length, 0
        if at == 0:
            self.ends_at = length
        elif length is not None and self.ends_at is not None:  # from the beginning, in the middle of the epoch
            num_untrained = (length - (self.ends_at - at)) * self.accumulate
        loader_state, generators = self._loader_state, self._generators
        self._loader_state = self._generators = None
        if loader_state is not None:  # saved at the end of the previous epoch, or where an iteration ended inside it
            with keep_global_states():
                loader.load_state_dict(loader_state)
                # Uses up the state, so that the next iteration begins a new epoch.
                if self._position is not None:
                    next(iter(loader), None)
                elif isinstance(loader, DataLoader):
                    iter(loader)
                set_states(loader, generators or {})
        self._begin_position(loader, drawn=0, num_untrained=num_untrained)
        self._iterator = iter(loader)
        self._state.dataset_resumption.pop("train", None)
        if loader_state is not None and not isinstance(loader, DataLoader):
            first = list(itertools.islice(self._iterator, 1))
            # An iterator without a batch was the rest of the epoch that had ended; the next one begins an epoch.
            self._iterator = itertools.chain(first, self._iterator) if first else iter(loader)
        return self._limited(self._iterator)

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
            set_states(self._loader, self._position.generators)
            self._iterator = None

    def finish(self, epoch_ended: bool = False) -> None:
        """Drop the iterator if its epoch has ended, or if it would keep worker processes alive."""
        loader, paused = self._loader, self._paused_at is not None and self._iterator is not None
        if paused and not epoch_ended:
            if not getattr(loader, "num_workers", 0) or getattr(loader, "persistent_workers", False):
                return
            self._loader_state = loader.state_dict() if has_state(loader) else None
            self._generators = states_of(loader)
        self._iterator = self._paused_at = None

    # ---- positions ----

    def _begin_position(self, loader: Any, drawn: int, num_untrained: int = 0) -> None:
        now, size = self._state.timestamp, batch_size_of(loader)
        self._loader = loader
        self._position = Position(
            epoch=now.epochs,
            at=now.batches_in_epoch,
            batches=drawn,
            samples=None if size is None else drawn * size,
            batch_size=size,
            num_untrained=num_untrained,
            rng=global_states(),
            generators=states_of(loader),
            world_size=num_data_shards(self._state),
        )

    @property
    def _length(self) -> int | None:
        """The number of batches per epoch, as the timestamp counts them; None: unknown."""
        length = self._state.dataloader_len
        return None if length is None else length.value

    def _limited(self, iterator: Iterator[Any]) -> Iterator[Any]:
        if self.ends_at is None or self._state.dataloader_limit is None:
            return iterator
        return itertools.islice(iterator, (self.ends_at - self._state.timestamp.batches_in_epoch) * self.accumulate)

    def _dataset_resumes_itself(self) -> bool:
        """Return True if the dataset has restored its own position, as streaming datasets do."""
        return self._state.dataset_resumption.get("train", False)


def _matches(saved: dict[str, Any], now: Timestamp) -> bool:
    """Return True if a saved position is complete and belongs to the timestamp."""
    if not {"world_size", "position", "generators", "loader"} <= saved.keys():
        return False
    position = saved["position"]
    if position is not None and position.keys() != {field.name for field in dataclasses.fields(Position)}:
        return False
    return (saved.get("epoch"), saved.get("batch_in_epoch")) == (now.epochs, now.batches_in_epoch)


def _log_uneven(rest: int, effect: str, unit: str) -> None:
    if rest and dist.get_global_rank() == 0:
        _log.warning("The position in the epoch does not divide evenly into %s: %s.", unit, effect)


# ---- loaders ----


def num_data_shards(state: State) -> int:
    """Return the number of parts that the data is split into: one per rank, or per group of tensor-parallel ranks."""
    return dist.get_world_size() // (1 if state.tp_config is None else int(state.tp_config.tensor_parallel_degree))


def set_epoch(dataloader: Any, epoch: int) -> None:
    """Tell a loader, or else its samplers, the number of the epoch that begins: their order may depend on it."""
    samplers: list[Any] = [getattr(dataloader, name, None) for name in ("batch_sampler", "sampler")]
    for each in [dataloader] if hasattr(dataloader, "set_epoch") else samplers:
        if hasattr(each, "set_epoch"):
            each.set_epoch(epoch)


def has_state(loader: Any) -> bool:
    """Return True if a loader saves its own position, as torchdata's `StatefulDataLoader` does."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def batch_size_of(loader: Any) -> int | None:
    """Return the samples per batch of a loader; None if they are unknown or vary."""
    if getattr(loader, "batch_sizes", None) is not None:  # a loader of `composer.datasets`
        return None
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) if sampler is None else getattr(sampler, "batch_size", None)
    return size if isinstance(size, int) and size > 0 else None


def _left_in_sampler(loader: Any, samples: int) -> int | None:
    """Return the batches left after a number of samples; None if they are unknown."""
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, BatchSampler):
        return None
    try:
        left = max(len(sampler.sampler) - samples, 0)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
    return left // sampler.batch_size if sampler.drop_last else -(-left // sampler.batch_size)


def _can_advance_sampler(loader: Any) -> bool:
    """Return True for torch's own loader, in this process, over a map-style dataset: samples need not be loaded."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and loader.num_workers == 0
        and not isinstance(loader.dataset, IterableDataset)
    )


def _by_samples(loader: Any) -> bool:
    """Return True if the sampler can be advanced to a position inside a batch."""
    return type(getattr(loader, "batch_sampler", None)) is BatchSampler


def _skip(loader: Any, batches: int, samples: int | None) -> Iterator[Any]:
    """Return an iterator over the rest of an epoch, after a number of batches, or of samples where possible.

    Random numbers are drawn in the same order as by a plain iteration.
    """
    if _can_advance_sampler(loader):
        return _advance_sampler(loader, batches, samples)
    if batches and dist.get_global_rank() == 0:
        _log.warning(
            "Loading %d batches again to reach the position where the epoch continues. A loader with `state_dict` and "
            "`load_state_dict` (such as torchdata's `StatefulDataLoader`) does not need this. With a Trainer, "
            "`spin_dataloaders=False` avoids it, but then starts the data of the epoch from the beginning.",
            batches,
        )
    iterator: Iterator[Any] = iter(loader)
    for _ in itertools.islice(iterator, batches):
        pass
    return iterator


def _advance_sampler(loader: DataLoader[Any], batches: int, samples: int | None) -> Iterator[Any]:
    """Skip without loading: iterate a copy of the loader over the rest of its indices."""
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if samples is not None and _by_samples(loader):
        skipped, number = iter(sampler.sampler), samples
        indices: Any = iter(BatchSampler(skipped, sampler.batch_size, sampler.drop_last))
    else:
        skipped = indices = iter(sampler)
        number = batches
    source = {"sampler": indices, "batch_size": None} if loader.batch_sampler is None else {"batch_sampler": indices}
    if getattr(loader, "pin_memory_device", ""):
        source["pin_memory_device"] = loader.pin_memory_device
    copy: DataLoader[Any] = DataLoader(
        loader.dataset,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        generator=loader.generator,
        **source,
    )
    # Before the sampler advances: this draws the base seed for worker processes, even when there are none.
    iterator: Iterator[Any] = iter(copy)
    for _ in itertools.islice(skipped, number):
        pass
    return iterator
