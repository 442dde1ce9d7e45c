"""The place in the training data, and how to get back there: across fits, processes and numbers of processes.

An epoch's order comes from generators, so a place is their states at the moment the loader began to be iterated, and
how much has been drawn since. To return, the states are set, the loader is iterated up to the place, and all
generators get the states they had there. Nothing is done per batch.

What a data set draws when it is first accessed, and keeps, is drawn again from the same states; see `_first_access`.

Exact for loaders that draw the order of the data from generators nobody else draws from in mid-epoch; torch's samplers
do. A data set that shuffles through the global generators while the model draws from the same ones is not.
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
from composer.trainer import _skip
from composer.trainer._context import num_shares, set_epoch
from composer.trainer._first_access import FirstAccesses
from composer.trainer._generators import generators_of, global_states, set_global_states, set_states, states_of
from composer.trainer._train_metrics import TrainMetrics
from composer.utils import dist, reproducibility

__all__ = ["LoaderPosition"]

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Place:
    """Where the iteration of a loader began, and where it was at the batch `at` of the epoch."""

    epoch: int
    at: int
    batches: int  # drawn from the loader until then
    samples: int | None  # drawn by this rank until then; None: unknown
    batch_size: int | None
    left_out: int  # batches at the loader's end that the epoch does not train, because it began in its middle
    rng: dict[str, Any]  # the states when the iteration began
    generators: dict[str, Any]
    world_size: int

    def moved_to(self, at: int) -> _Place:
        """The place after the epoch has gone on to a batch."""
        more = at - self.at
        samples = self.samples
        if samples is not None and more:
            samples = None if self.batch_size is None else samples + more * self.batch_size
        return dataclasses.replace(self, at=at, batches=self.batches + more, samples=samples)


class LoaderPosition:
    """Iterates the training loader for the loop, and can return to where it was.

    Args:
        state: The run's state; `state.dataloader` is iterated.
        metrics: The training metrics, whose last values an epoch logs once more at its end.
        spin: Whether a loader without a state of its own is iterated up to its place; otherwise it starts from the
            beginning, for as many batches as the epoch has left.
        accesses: Takes when the loaders of the run were first iterated. None: makes one.

    Attributes:
        spin: As above; may be changed between fits.
        ends_at: The epoch's number of batches; None if only the loader knows.
    """

    def __init__(
        self, state: State, metrics: TrainMetrics, spin: bool = True, accesses: FirstAccesses | None = None
    ) -> None:
        self.spin = spin
        self.ends_at: int | None = None
        # How often `fit` began with another loader, until now and when the place was noted. A program that is
        # relaunched counts alike, so this tells which loader a checkpoint's place is in.
        self._number = self._number_of_place = 0
        self._accesses = FirstAccesses() if accesses is None else accesses
        self._state, self._metrics = state, metrics
        self._loaded: tuple[dict[str, Any] | None, list[dict[str, Any]] | None] | None = None
        self._forget()

    def _forget(self) -> None:
        self._place: _Place | None = None
        self._loader: Any = None  # what the place is in
        self._iterator: Iterator[Any] | None = None
        self._paused_at: tuple[int, int] | None = None
        # Of a checkpoint, until the loader is back at its place:
        self._loader_state: Any = None
        self._generators: dict[str, Any] | None = None
        self._at_end = False  # the loader's state is of the end of an epoch
        self._was_over = False  # the epoch, all of whose batches had been trained
        self._guessed = False  # the checkpoint does not say, so the generators are left where iterating brings them

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """This rank's place; to be saved together with `reproducibility.get_rng_state()`. Between batches only."""
        if self._loaded is not None and self._loaded[0] is not None:
            return self._loaded[0]  # nothing happened since
        # While an evaluation runs, another loader is the active one.
        now, loader = self._state.timestamp, self._state.dataloader if self._loader is None else self._loader
        at, place, own = now._batch_in_epoch, None, self._loader_state
        if at > 0 and self._place is not None and self._place.epoch == now._epoch:
            place = dataclasses.asdict(self._place.moved_to(at))
        if own is None and self._loader is not None and _skip.has_state(loader):
            own = loader.state_dict()
        generators = self._generators
        return {
            "epoch": now._epoch,
            "batch_in_epoch": at,
            "sample_in_epoch": now._sample_in_epoch,
            "world_size": num_shares(self._state),
            "number": self._number_of_place,
            "ends_at": self.ends_at,
            "place": place,
            "generators": states_of(generators_of(loader)) if generators is None else generators,
            "loader": own,
            "train_metrics": self._metrics.last_values() if at > 0 else {},
            **self._accesses.state_dict(self._state),
        }

    def load_state_dict(self, saved: list[dict[str, Any]] | None, rng: list[dict[str, Any]] | None) -> None:
        """Keep what the next `fit` goes on from.

        Args:
            saved: What `state_dict` returned, by rank; None: the checkpoint has none.
            rng: What `reproducibility.get_rng_state` returned; None: the global generators stay as they are.

        Raises:
            TypeError: `saved` is not a list of such dicts.
        """
        self._forget()
        own = None
        if saved is not None:
            given: Any = saved
            if not isinstance(given, list) or not given or not all(isinstance(each, dict) for each in given):
                raise TypeError(
                    f"The checkpoint's 'resumption' must be a list of one dict per rank, got {saved!r:.100}. Ignore "
                    f"it with `load_ignore_keys=['resumption']`."
                )
            rank = dist.get_global_rank()
            own = saved[rank if rank < len(saved) else 0]
            self._metrics.restore(own.get("train_metrics", {}))
            self._accesses.load_state_dict(own)
        self._loaded = (own, rng)

    # ---- the loop ----

    def replace(self) -> None:
        """Let the next `resume` begin the loader at its beginning: the place is in another one."""
        self._number += 1

    def begin(self) -> bool:
        """Set the generators to where the run goes on; once per `fit`, when nothing more draws before it.

        Returns:
            Whether a checkpoint was loaded since the last fit.
        """
        if self._loaded is None:
            return False
        saved: Any
        (saved, rng), self._loaded = self._loaded, None
        loader, now = self._state.dataloader, self._state.timestamp
        before = global_states()
        self._number_of_place = self._number if saved is None else min(saved.get("number", 0), self._number)
        in_other_loader = self._number_of_place < self._number
        if in_other_loader:
            if self.spin:
                self._accesses.repeat_evaluators(self._state, saved.get("evaluators", {}))
        else:
            self._repeat_first_accesses(saved)
            if _is_of(saved, now):
                self._adopt(saved)
                self._was_over = saved.get("ends_at") == now._batch_in_epoch
            else:
                self._begin_without_place()
        set_global_states(before)
        if rng is not None:
            reproducibility.load_rng_state(rng)
        if now._epoch and not in_other_loader and getattr(loader, "persistent_workers", False):
            warnings.warn(
                "The training loader has `persistent_workers=True`: what its workers draw depends on the epochs they "
                "have lived through, so random transforms will differ from an uninterrupted run. Use "
                "`persistent_workers=False` for runs that resume exactly.",
                stacklevel=3,
            )
        return True

    def _repeat_first_accesses(self, saved: dict[str, Any] | None) -> None:
        if saved is None or not self.spin:
            return
        loader, now = self._state.dataloader, self._state.timestamp
        # An epoch that is loaded again from its beginning makes the first access by itself; some can do so only once.
        at, length = now._batch_in_epoch, self._state.dataloader_len
        drawn = (saved.get("place") or {}).get("batches", at)
        loaded_again = (
            at > 0 and (length is None or drawn < length.value) and now._epoch == self._accesses.epoch_of("train")
        )
        if not self._resumes_itself() and not (loaded_again and not _skip.can_advance_sampler(loader)):
            self._accesses.repeat("train", loader)
            set_epoch(loader, now._epoch)
        self._accesses.repeat_evaluators(self._state, saved.get("evaluators", {}))

    def _adopt(self, saved: dict[str, Any]) -> None:
        """Take over the place of a checkpoint."""
        loader = self._loader = self._state.dataloader
        same_world = saved["world_size"] == num_shares(self._state)
        own = saved["loader"] if same_world and _skip.has_state(loader) else None
        if saved["batch_in_epoch"]:
            self._loader_state, self._generators = own, saved["generators"]
            if saved["place"] is not None:
                self._place = _Place(**saved["place"])
            return
        if own is not None:
            loader.load_state_dict(own)
            if isinstance(loader, DataLoader):
                iter(loader)  # takes the state of the epoch that is over; the next call begins a new one
            self._at_end = not isinstance(loader, DataLoader)
        set_states(generators_of(loader), saved["generators"])

    def _begin_without_place(self) -> None:
        """For a checkpoint that does not say: start the loader once per finished epoch, as the run did."""
        loader, now = self._state.dataloader, self._state.timestamp
        if not self.spin or self._resumes_itself():
            return
        reproducibility.seed_all(self._state.seed)
        if now._epoch:
            _log.warning(
                "The checkpoint does not say where the training data was; starting the loader %d times to bring its "
                "generators there. `spin_dataloaders=False` avoids this.",
                now._epoch,
            )
        for epoch in _skip.progress(range(now._epoch), "Starting epochs", now._epoch):
            set_epoch(loader, epoch)
            next(iter(loader), None)
        set_epoch(loader, now._epoch)
        if now._batch_in_epoch:
            self._begin_place(loader, drawn=now._batch_in_epoch)
            self._guessed = True

    def resume(self, count: Callable[[Any], float] | None = None) -> Iterator[Any] | None:
        """The rest of an epoch that has begun, or None: the loader begins with the next `start`.

        The global generators are left as they are found.

        Args:
            count: `batch -> number of samples`, for loaders that do not tell the size of their batches.
        """
        now, loader = self._state.timestamp, self._state.dataloader
        at = now._batch_in_epoch
        paused, self._paused_at = self._paused_at, None
        if self._number_of_place < self._number:
            self._forget()
            self._number_of_place, length = self._number, self._state.dataloader_len
            self.ends_at = None if length is None else at + length.value
            return None
        if at == 0:
            return None
        if self._loader is not loader or self._place is None or self._place.epoch != now._epoch:
            self._iterator = None
            self._begin_place(loader, drawn=at)
            self._guessed = True
        assert self._place is not None
        self._place = self._in_todays_units(self._place.moved_to(at), loader)
        self.ends_at = self._end(self._place, loader)
        if self._iterator is None or paused != (now._epoch, at):
            self._iterator = self._return(loader, count)
        return None if self._iterator is None else self._limited(self._iterator)

    def _return(self, loader: Any, count: Callable[[Any], float] | None) -> Iterator[Any] | None:
        """Go back to the place, or return None to start the loader anew; then the generators go on where they were."""
        rng = global_states()
        generators = states_of(generators_of(loader)) if self._generators is None else self._generators
        own, guessed = self._loader_state, self._guessed
        self._loader_state, self._generators, self._guessed = None, None, False
        iterator = None
        if own is not None or self.spin or self._resumes_itself():
            iterator = self._iterate_to_place(loader, own, None if guessed else count)
        if not guessed:
            set_states(generators_of(loader), generators)
        set_global_states(rng)
        return iterator

    def start(self) -> Iterator[Any]:
        """Begin to iterate the loader; when nothing draws any more before its first batch."""
        loader, at = self._state.dataloader, self._state.timestamp._batch_in_epoch
        length, left_out = self._state.dataloader_len, 0
        if at == 0:
            self.ends_at = None if length is None else length.value
        elif length is not None and self.ends_at is not None:  # anew, in the middle of the epoch
            left_out = length.value - (self.ends_at - at)
        if self._generators is not None:  # the epoch of the checkpoint ended with an iteration
            self._leave_epoch(loader, self._generators)
        self._begin_place(loader, drawn=0, left_out=left_out)
        self._iterator = iter(loader)
        self._state.dataset_resumption.pop("train", None)
        if self._at_end:
            self._at_end = False
            first = list(itertools.islice(self._iterator, 1))
            # Nothing: it went on with the epoch that was over, and begins a new one only now.
            self._iterator = itertools.chain(first, self._iterator) if first else iter(loader)
        return self._limited(self._iterator)

    def _leave_epoch(self, loader: Any, generators: dict[str, Any]) -> None:
        rng, own = global_states(), self._loader_state
        self._loader_state, self._generators = None, None
        if own is not None:
            loader.load_state_dict(own)
            next(iter(loader), None)
        set_states(generators_of(loader), generators)
        set_global_states(rng)

    def pause(self) -> None:
        """Note that the loop leaves the epoch between two batches, so that the iterator can go on from here."""
        now = self._state.timestamp
        self._paused_at = (now._epoch, now._batch_in_epoch)

    def put_back(self, batches: Iterable[Any]) -> None:
        """Leave the epoch like `pause`, with what was drawn last and is not trained now; the epoch goes on with it."""
        if self._state.timestamp._batch_in_epoch:
            assert self._iterator is not None
            self._iterator = itertools.chain(batches, self._iterator)
            self.pause()
        else:  # as if it had not begun
            assert self._place is not None
            set_global_states(self._place.rng)
            set_states(generators_of(self._loader), self._place.generators)
            self._iterator = None

    def rest(self, ended: bool = False) -> None:
        """Let go of the iterator of an epoch that is over, or one that would keep worker processes alive.

        Args:
            ended: Whether the epoch is over.
        """
        loader, paused = self._loader, self._paused_at is not None and self._iterator is not None
        if paused and not ended:
            if not getattr(loader, "num_workers", 0) or getattr(loader, "persistent_workers", False):
                return
            self._loader_state = loader.state_dict() if _skip.has_state(loader) else None
        self._iterator = self._paused_at = None

    # ---- places ----

    def _begin_place(self, loader: Any, drawn: int, left_out: int = 0) -> None:
        now, size = self._state.timestamp, _skip.batch_size_of(loader)
        if drawn == 0:
            self._accesses.note("train", loader, now._epoch)
        self._loader = loader
        self._place = _Place(
            epoch=now._epoch,
            at=now._batch_in_epoch,
            batches=drawn,
            samples=None if size is None else drawn * size,
            batch_size=size,
            left_out=left_out,
            rng=global_states(),
            generators=states_of(generators_of(loader)),
            world_size=num_shares(self._state),
        )

    def _in_todays_units(self, place: _Place, loader: Any) -> _Place:
        """The place in batches of this loader and ranks of this run."""
        size, world = _skip.batch_size_of(loader), num_shares(self._state)
        changed_size = place.batch_size is not None and size is not None and place.batch_size != size
        if not changed_size and place.world_size == world:
            return dataclasses.replace(place, batch_size=size)
        samples, batches = place.samples, place.batches
        if samples is None:
            batches, rest = divmod(batches * place.world_size, world)
            _warn_uneven(rest, f"{rest} batches are trained twice", f"{world} ranks")
        else:
            samples, rest = divmod(samples * place.world_size, world)
            _warn_uneven(rest, f"{rest} samples are trained twice", f"{world} ranks")
            if size is not None:
                exact = _skip.can_advance_sampler(loader) and _skip.by_samples(loader)
                batches = -(-samples // size)
                if not exact:
                    rest = -samples % size
                    effect = f"{rest} samples are left out"
                    if getattr(loader, "num_workers", 0) > 1 and isinstance(loader.dataset, IterableDataset):
                        effect = "samples may be left out or trained twice, because each worker makes its own batches"
                    _warn_uneven(rest, effect, f"batches of {size}")
                    samples = batches * size
        _log.info("The epoch goes on after %s samples of this rank, in batches of %s.", samples, size)
        return dataclasses.replace(place, batches=batches, samples=samples, batch_size=size, world_size=world)

    def _end(self, place: _Place, loader: Any) -> int | None:
        """The number of batches the epoch will have had."""
        length = self._state.dataloader_len
        if length is None:
            return None
        left = length.value - place.batches
        if place.samples is not None and place.batch_size is not None:
            in_sampler = _skip.left_in_sampler(loader, place.samples)
            if in_sampler is not None:
                left = min(in_sampler, length.value - place.samples // place.batch_size)
        if dist.get_world_size() > 1:  # shares may differ, but all ranks must leave the epoch together
            left = min(dist.all_gather_object(left))
        return place.at + max(left - place.left_out, 0)

    def _iterate_to_place(self, loader: Any, own: Any, count: Callable[[Any], float] | None) -> Iterator[Any]:
        place = self._place
        assert place is not None
        samples = self._samples_of(place)
        iterator: Iterator[Any]
        set_global_states(place.rng)
        set_states(generators_of(loader), place.generators, warn=False)
        if own is not None:
            loader.load_state_dict(own)
            iterator = iter(loader)
            if self.ends_at == place.at:
                next(iterator, None)  # so that it takes the state, and its next iteration begins anew
        elif self._resumes_itself():
            iterator = iter(loader)
            del self._state.dataset_resumption["train"]
        elif self.ends_at == place.at and (samples is None or self._was_over):
            return iter(())
        elif _skip.can_advance_sampler(loader):
            iterator = _skip.advance_sampler(loader, place.batches, place.samples)
        else:
            if samples is None or count is None:
                return _skip.draw(loader, place.batches)[0]
            iterator, drawn, seen = _skip.draw(loader, place.batches, samples, _without_draws(count))
            if (drawn, seen) != (place.batches, samples):  # its batches have another size now
                rest = seen - samples
                _warn_uneven(max(rest, 0), f"{rest:g} samples are left out", "the loader's batches, which have changed")
                self._place = dataclasses.replace(place, batches=drawn)
                self.ends_at = self._end(self._place, loader)
        return iterator

    def _samples_of(self, place: _Place) -> float | None:
        """Samples up to a place in a loader that does not tell its batch size; None if they are not known."""
        alone = dist.get_world_size() == 1 and place.world_size == num_shares(self._state) == 1
        whole = place.batches == place.at  # the epoch has had no other loader
        return (self._state.timestamp._sample_in_epoch or None) if alone and whole and place.samples is None else None

    def _limited(self, iterator: Iterator[Any]) -> Iterator[Any]:
        if self.ends_at is None:
            return iterator
        return itertools.islice(iterator, self.ends_at - self._state.timestamp._batch_in_epoch)

    def _resumes_itself(self) -> bool:
        """Whether the data set has been told where to go on, as streaming ones are."""
        return self._state.dataset_resumption.get("train", False)


def _is_of(saved: Any, now: Timestamp) -> bool:
    """Whether a checkpoint's place can be read, and is that of its timestamp."""
    if saved is None or not {"world_size", "place", "generators", "loader"} <= saved.keys():
        return False
    place = saved["place"]
    if place is not None and place.keys() != {field.name for field in dataclasses.fields(_Place)}:
        return False
    return (saved.get("epoch"), saved.get("batch_in_epoch")) == (now._epoch, now._batch_in_epoch)


def _without_draws(count: Callable[[Any], float]) -> Callable[[Any], float]:
    """The function, which then leaves the global generators as it finds them: transforms of batches may draw."""

    def counted(batch: Any) -> float:
        before = global_states()
        try:
            return count(batch)
        finally:
            set_global_states(before)

    return counted


def _warn_uneven(rest: float, effect: str, over: str) -> None:
    if rest and dist.get_global_rank() == 0:
        _log.warning("The place in the epoch does not divide evenly over %s: %s.", over, effect)
