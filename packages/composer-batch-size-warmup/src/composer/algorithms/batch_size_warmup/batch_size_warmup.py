"""The functions, the batch sampler, then the class. Sizes and numbers of samples are those of one rank."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sized
from types import NoneType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from composer.algorithms.warnings import warn_no_effect
from composer.core import CHANGES_BATCH_SIZE, Algorithm, Event, Placement, Time, TimeUnit
from composer.utils import check_integers, dist, plain_number

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

_SHAPES = ("linear", "doubling")


def compute_batch_size(
    samples: int, duration: int, initial: int, final: int, shape: str = "linear", multiple_of: int = 1
) -> int:
    """Compute the size of a batch from the number of samples that were drawn before it.

    With n samples drawn and a warmup of D samples, the size is b for n = 0 and B for n >= D. Between them it is

    - "linear": `b + (B - b) * n / D`, rounded down to a multiple of `multiple_of`;
    - "doubling": `b * 2**floor(K * n / D)`, with `K = ceil(log2(B / b))`: K doublings, evenly spread over the samples.

    Args:
        samples: The number n of samples drawn before the batch.
        duration: The number D of samples in the warmup. 0: the size is always B.
        initial: The size b at the start.
        final: The size B after the warmup.
        shape: How the size grows: "linear" or "doubling".
        multiple_of: Sizes between b and B are multiples of this, but not less than b.

    Returns:
        The size of the batch, at least b and at most B.

    Example:
        >>> [compute_batch_size(n, 400, 8, 64) for n in (0, 100, 200, 300, 400)]
        [8, 22, 36, 50, 64]
        >>> [compute_batch_size(n, 400, 8, 64, "doubling") for n in (0, 100, 200, 300, 400)]
        [8, 8, 16, 32, 64]
    """
    if samples >= duration:
        return final
    if shape == "linear":
        size = initial + (final - initial) * samples // duration
    else:
        doublings = (-(-final // initial) - 1).bit_length()
        size = initial * 2 ** (doublings * samples // duration)
    return min(max(size - size % multiple_of, initial), final)


def estimate_noise_scale(
    small: torch.Tensor, large: torch.Tensor, small_batch_size: int, large_batch_size: int
) -> torch.Tensor:
    """Estimate the simple noise scale from the norms of gradients of small and large batches.

    The noise scale `tr(S) / |G|^2`, with the covariance S of the gradients of single examples and their mean G, is
    about the batch size up to which doubling it saves nearly half of the steps. With the squared norms of the mean
    gradients of b and of B examples,

        tr(S) = (|g_b|^2 - |g_B|^2) / (1/b - 1/B)        |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b)

    are estimated without bias. Both are noisy, so they are averaged over all measurements before they are divided.

    Args:
        small: Squared norms of gradients of small batches, of any shape; for example, of each microbatch.
        large: Squared norms of gradients of large batches, of any shape.
        small_batch_size: The number b of examples in a small batch.
        large_batch_size: The number B of examples in a large batch.

    Returns:
        The noise scale in examples, a scalar on the device of `small`. It is negative or infinite if the measurements
        are too few to tell `|G|^2` from 0.

    Raises:
        ValueError: The sizes are not positive, or `large_batch_size` is not larger than `small_batch_size`.

    Example:
        >>> estimate_noise_scale(torch.tensor([5.0, 3.0]), torch.tensor([1.5]), 4, 32)
        tensor(10.)

    Source: McCandlish, Kaplan, Amodei and the OpenAI Dota Team, "An Empirical Model of Large-Batch Training",
        arXiv:1812.06162, appendix A.1.
    Differs: none.
    """
    check_integers(small_batch_size=small_batch_size, large_batch_size=large_batch_size, least=1)
    if large_batch_size <= small_batch_size:
        raise ValueError(
            f"`large_batch_size` must be larger than `small_batch_size`, got {large_batch_size} and {small_batch_size}."
        )
    b, B = small_batch_size, large_batch_size
    norm_b, norm_B = small.double().mean(), large.double().mean()
    trace = (norm_b - norm_B) / (1 / b - 1 / B)
    squared_norm = (B * norm_B - b * norm_b) / (B - b)
    return (trace / squared_norm).to(small.dtype)


class WarmupBatchSampler(Sampler[list[int]]):
    """Makes batches of a growing size from the indices of another sampler; see `compute_batch_size`.

    The sizes depend only on the number of samples drawn, so the order of the samples is that of batches of fixed size,
    and workers may load batches in advance.

    Args:
        sampler: Draws the indices of an epoch, in their order.
        duration: The number of samples in the warmup.
        initial: The batch size at the start.
        final: The batch size after the warmup.
        shape: How the size grows: "linear" or "doubling".
        multiple_of: Sizes during the warmup are multiples of this.
        drop_last: Leave out the last batch of an epoch if the samples left do not fill it.

    Attributes:
        samples_before: The samples drawn in all epochs before the next one to be iterated. Set it before each epoch.

    Example:
        >>> list(WarmupBatchSampler(range(9), duration=4, initial=1, final=4, shape="doubling"))
        [[0], [1], [2, 3], [4, 5, 6, 7], [8]]
    """

    def __init__(
        self,
        sampler: Iterable[int],
        duration: int,
        initial: int,
        final: int,
        shape: str = "linear",
        multiple_of: int = 1,
        drop_last: bool = False,
    ) -> None:
        self.sampler, self.drop_last = sampler, drop_last
        self.plan: dict[str, Any] = {
            "duration": duration,
            "initial": initial,
            "final": final,
            "shape": shape,
            "multiple_of": multiple_of,
        }
        self.samples_before = 0

    def __iter__(self) -> Iterator[list[int]]:
        indices, drawn = iter(self.sampler), self.samples_before
        while batch := list(itertools.islice(indices, size := compute_batch_size(drawn, **self.plan))):
            if self.drop_last and len(batch) < size:
                return
            yield batch
            drawn += len(batch)

    def __len__(self) -> int:
        """Return the number of batches of the next epoch."""
        left, drawn, batches = len(cast("Sized", self.sampler)), self.samples_before, 0
        while left > 0:
            size = compute_batch_size(drawn, **self.plan)
            if self.drop_last and left < size:
                break
            left, drawn, batches = left - size, drawn + size, batches + 1
        return batches


class _Sizes:
    """The batch sizes of a loader that makes batches of any size; attributes as in `WarmupBatchSampler`."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan, self.samples_before = plan, 0

    def __call__(self, drawn: int) -> int:
        return compute_batch_size(self.samples_before + drawn, **self.plan)


class BatchSizeWarmup(Algorithm):
    """Trains with small batches first, which grow to the batch size of the loader.

    At FIT_START the batch sampler of the training loader is replaced by a `WarmupBatchSampler`, or the `batch_sizes` of
    a loader of `composer.datasets` are set. The size of a batch follows from the number of samples drawn before it; see
    `compute_batch_size`. The order of the samples is unchanged, and batches after the warmup differ only in where they
    begin. An epoch has more batches than without the warmup.

    Batches are split into microbatches as always: `device_train_microbatch_size` limits the memory, and a larger batch
    is accumulated from more of them. Several microbatches equal one batch.

    Schedules in epochs, samples or tokens ("ep", "sp", "tok", and "dur" of a `max_duration` in these) mean the same as
    without the warmup: epochs are counted in samples. Those in batches end after fewer samples.

    The loader must be a `torch.utils.data.DataLoader` over a dataset with indices, with `batch_size`, or a
    `DeviceLoader` or `ResumableDataLoader` of `composer.datasets`. Resumption is exact on the same number of ranks. The
    plan, of b, B and D, is saved: another `max_duration` does not change it.

    **Events** INIT; AFTER_LOAD, where the loader is checked; FIT_START; EPOCH_START; BATCH_START, where the size is
    logged; FIT_END, after which the loader makes batches of full size. **Reads** the timestamp, the length of the run.
    **Writes** the batch sampler or the `batch_sizes` of `state.dataloader`; `state.dataloader_len` and
    `state.samples_per_epoch`. **Cost** none. **Compilation** each size may recompile a compiled model: choose
    "doubling", so that few sizes occur, or microbatches.

    **Logs** `batch_size_warmup/batch_size`, of one rank.

    After an exception, the loader keeps making small batches, so that another `fit` can continue. Create a new loader
    for other runs.

    **When not to use it** steps per second are limited by something that does not depend on the batch, such as
    communication; the loader's batch size is below the noise scale from the start.

    Args:
        initial_batch_size: The size b at the start, per rank like the loader's `batch_size`, the size B at the end.
        duration: The length of the warmup: samples of all ranks ("100000sp"), epochs ("2ep"), or a fraction of a run
            that is measured in one of these ("0.3dur").
        shape: How the size grows: "linear", or "doubling" at equal intervals.
        multiple_of: Sizes between b and B are multiples of this. None: of `device_train_microbatch_size`, so that all
            microbatches are full.

    Raises:
        ValueError: An argument is out of range. At AFTER_LOAD, or FIT_START for a loader that `fit` gets: the loader is
            of another kind, or its batches are smaller than `initial_batch_size`. At FIT_START: the warmup cannot be
            counted in samples.
        TypeError: `duration` is not a time.

    Example:
        >>> BatchSizeWarmup(initial_batch_size=32, duration="0.25dur").shape
        'doubling'

    Source: Smith, Kindermans, Ying and Le, "Don't Decay the Learning Rate, Increase the Batch Size", arXiv:1711.00489;
        Merrill et al., "Critical Batch Size Revisited", arXiv:2505.23971.
    Differs: the learning rate is left to its schedule.
    """

    events = frozenset(
        {Event.INIT, Event.AFTER_LOAD, Event.FIT_START, Event.EPOCH_START, Event.BATCH_START, Event.FIT_END}
    )
    placement = Placement(provides={CHANGES_BATCH_SIZE}, excludes={CHANGES_BATCH_SIZE})

    def __init__(
        self,
        initial_batch_size: int,
        duration: str | Time[Any] = "0.3dur",
        shape: str = "doubling",
        multiple_of: int | None = None,
    ) -> None:
        check_integers(initial_batch_size=initial_batch_size, least=1)
        if multiple_of is not None:
            check_integers(multiple_of=multiple_of, least=1)
        if shape not in _SHAPES:
            raise ValueError(f"`shape` must be one of {', '.join(map(repr, _SHAPES))}, got {shape!r}.")
        self.initial_batch_size = plain_number(initial_batch_size)
        self.duration, self.shape = _parse_duration(duration), shape
        self.multiple_of = None if multiple_of is None else plain_number(multiple_of)
        self._plan: dict[str, Any] | None = None  # the arguments of `compute_batch_size`, for one rank
        self._uses_all = True  # an epoch has all batches of the loader, not only the first

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the batch sampler, set the number of samples before the epoch, or log the size."""
        if event is Event.INIT:
            self._plan = None  # that of another run
            return
        if event is Event.AFTER_LOAD:
            if state.dataloader is not None and self._plan is None:
                self._check_size(_check_loader(state.dataloader))
            return
        if event is Event.BATCH_START:
            if logger.destinations and self._plan is not None:
                size = compute_batch_size(state.timestamp.samples // _num_shards(state), **self._plan)
                logger.log_metrics({"batch_size_warmup/batch_size": size})
            return
        if event is Event.FIT_START:
            self._install(state)
        sampler, now = _sampler_of(state.dataloader), state.timestamp
        if event is Event.FIT_END:
            sampler.samples_before = sampler.plan["duration"]  # whoever uses the loader next gets batches of full size
        else:
            sampler.samples_before = (now.samples - now.samples_in_epoch) // _num_shards(state)
        if self._uses_all:
            state.dataloader_len = -1  # the number of batches has changed

    def state_dict(self) -> dict[str, Any]:
        """Return the plan of the warmup; None before FIT_START."""
        return {**super().state_dict(), "plan": self._plan}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, before FIT_START."""
        self._plan = state.get("plan")

    def _install(self, state: State) -> None:
        """Give the training loader a batch sampler that follows the plan."""
        loader: Any = state.dataloader
        _check_loader(loader)
        if self._plan is None:
            self._plan = self._make_plan(state)
        self._warn_of_changes(loader)
        self._uses_all = state.dataloader_len is None or state.dataloader_len.value == len(loader)
        takes_sizes = hasattr(loader, "batch_sizes")
        source = loader if takes_sizes else loader.batch_sampler
        if self._uses_all:  # otherwise an epoch has a fixed number of batches
            samples = len(source.sampler)
            samples -= samples % self._plan["final"] if source.drop_last else 0
            state.samples_per_epoch = samples * _num_shards(state)
        installed = _sampler_of(loader)
        if isinstance(installed, (WarmupBatchSampler, _Sizes)):
            installed.plan = self._plan
        elif takes_sizes:
            loader.batch_sizes = _Sizes(self._plan)
        else:
            sampler = WarmupBatchSampler(source.sampler, **self._plan, drop_last=source.drop_last)
            # The loader refuses assignment, since a running iterator keeps the old one; `_check_loader` excludes that.
            object.__setattr__(loader, "batch_sampler", sampler)

    def _warn_of_changes(self, loader: Any) -> None:
        """Warn about arguments that differ from the plan, which may be that of a checkpoint."""
        plan = self._plan or {}
        given = {"initial": self.initial_batch_size, "final": _check_loader(loader), "shape": self.shape}
        changed = [f"{name} {value!r}, not {plan[name]!r}" for name, value in given.items() if plan[name] != value]
        if changed:
            warnings.warn(
                f"`BatchSizeWarmup` continues with the schedule of the resumed run: "
                f"{'; '.join(changed)} is ignored. Start a run without `load_path` and `autoresume` to change it.",
                stacklevel=2,
            )

    def _make_plan(self, state: State) -> dict[str, Any]:
        loader = state.dataloader
        final, initial = _check_loader(loader), self.initial_batch_size
        self._check_size(final)
        if initial == final:
            warn_no_effect(f"`BatchSizeWarmup` changed nothing: the batch size of the loader is {final}, too.")
        microbatch = state.device_train_microbatch_size
        multiple_of = self.multiple_of
        if multiple_of is None:
            multiple_of = int(microbatch) if microbatch is not None and microbatch < final else 1
        return {
            "duration": self._num_samples(state),
            "initial": initial,
            "final": final,
            "shape": self.shape,
            "multiple_of": multiple_of,
        }

    def _check_size(self, final: int) -> None:
        if self.initial_batch_size > final:
            raise ValueError(
                f"`initial_batch_size` must not be larger than the batch size of the loader, {final}, got "
                f"{self.initial_batch_size}."
            )

    def _num_samples(self, state: State) -> int:
        """Return the length of the warmup in samples of one rank."""
        value, unit, limit = self.duration.value, self.duration.unit, state.max_duration
        if unit is TimeUnit.DURATION:
            if limit is None or limit.unit not in (TimeUnit.SAMPLE, TimeUnit.EPOCH):
                raise ValueError(
                    f"`duration` must be in 'sp' or 'ep' for a run of {'unknown length' if limit is None else limit}, "
                    f"got '{self.duration}': how many samples that is depends on the batch sizes."
                )
            value, unit = value * limit.value, limit.unit
        if unit is TimeUnit.EPOCH:
            return int(value * len(cast("DataLoader[Any]", state.dataloader).sampler))  # type: ignore[arg-type]
        return int(value / _num_shards(state))


def _parse_duration(value: Any) -> Time[Any]:
    if not isinstance(value, (str, Time)):
        raise TypeError(f"`duration` must be a time string or a `Time`, got {value!r}. Use for example '0.3dur'.")
    try:
        duration = value if isinstance(value, Time) else Time.from_timestring(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`duration` must be a time such as '0.3dur', got {value!r}: {error}") from None
    if duration.unit not in (TimeUnit.SAMPLE, TimeUnit.EPOCH, TimeUnit.DURATION) or duration.value < 0:
        raise ValueError(
            f"`duration` must be a time in 'sp', 'ep' or 'dur', at least 0, got '{duration}': the batch size must "
            f"follow from the number of samples. Use '0.3dur' for 30 % of the run."
        )
    if duration.unit is TimeUnit.DURATION and duration.value > 1:
        raise ValueError(f"`duration` must not be longer than the run, got '{duration}'. Use at most '1dur'.")
    return duration


def _check_loader(loader: Any) -> int:
    """Return the batch size of a loader, and check that it can make batches of other sizes."""
    if hasattr(loader, "batch_sizes"):
        if not isinstance(loader.batch_sizes, (_Sizes, NoneType)):
            raise ValueError(
                f"`train_dataloader` must not have `batch_sizes` of its own for `BatchSizeWarmup`, which sets them, "
                f"got {loader.batch_sizes!r}. Leave one of them out."
            )
        return int(loader.batch_size)
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(sampler, "batch_size", None)
    if isinstance(sampler, WarmupBatchSampler):
        size = sampler.plan["final"]
    known = (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and type(sampler) in (BatchSampler, WarmupBatchSampler)
    )
    if not known or not isinstance(size, int):
        kind = type(loader).__name__ if sampler is None else f"{type(loader).__name__} with a {type(sampler).__name__}"
        raise ValueError(
            f"`train_dataloader` must be a `torch.utils.data.DataLoader` over a dataset with indices, made with "
            f"`batch_size`, or a `DeviceLoader` or `ResumableDataLoader`, for `BatchSizeWarmup`, got a {kind}, whose "
            f"batches cannot be regrouped."
        )
    if getattr(loader, "_iterator", None) is not None and not isinstance(sampler, WarmupBatchSampler):
        raise ValueError(
            "`train_dataloader` must not have been iterated before training for `BatchSizeWarmup`: its persistent "
            "workers keep the batch sampler. Make a new `DataLoader`, or use `persistent_workers=False`."
        )
    return size


def _sampler_of(loader: Any) -> Any:
    """Return the object that sets the batch sizes of a loader."""
    return loader.batch_sizes if hasattr(loader, "batch_sizes") else loader.batch_sampler


def _num_shards(state: State) -> int:
    """Return the number of parts of the samples: one per rank, or per group of tensor-parallel ranks."""
    return dist.get_world_size() // (1 if state.tp_config is None else int(state.tp_config.tensor_parallel_degree))
