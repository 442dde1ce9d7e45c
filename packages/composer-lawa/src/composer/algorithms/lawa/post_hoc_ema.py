"""Averages of any length, reconstructed after training from snapshots of two of them.

Symbols, as in the paper: t counts the updates; gamma is the exponent of a profile, and sigma_rel its relative width.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from composer.algorithms.lawa.averaging import average_weights
from composer.algorithms.utils.stored_weights import StoredWeights, reshard
from composer.algorithms.utils.weight_swaps import parse_time
from composer.core import (
    AVERAGES_WEIGHTS,
    CHANGES_LAYERS,
    CHANGES_MEMORY_FORMAT,
    REPLACES_MODEL,
    Algorithm,
    Event,
    Placement,
    Time,
    TimeUnit,
)
from composer.utils import (
    STR_TO_DTYPE,
    check_finite,
    create_interval_scheduler,
    dist,
    is_uri,
    plain_number,
    unwrapped_model,
)

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

_WIDEST = 12**-0.5  # where gamma is 0, so that all weights so far count the same


Layout = dict[str, dict[str, torch.Tensor]]


class Snapshot(NamedTuple):
    """Averages at one time of training.

    Attributes:
        updates: The number of updates until then, t.
        sigma_rels: The widths of the averages.
        averages: For each of them the tensors on the host, in the layout of `StoredWeights`. None: they are in a file.
    """

    updates: int
    sigma_rels: tuple[float, ...]
    averages: tuple[Layout, ...] | None = None


def solve_ema_weights(
    updates: Sequence[float], sigma_rels: Sequence[float], sigma_rel: float, at: float | None = None
) -> torch.Tensor:
    """Return the factors with which snapshots of averages sum up to the average of another width.

    A snapshot at t of width sigma_rel has the profile

        p(tau) = (gamma + 1) * tau^gamma / t^(gamma + 1)        for tau in [0, t]

    which is how much it counts the weights of the time tau. The returned factors w minimize the squared distance
    between the sum of w_i p_i and the wanted profile: A w = b, where A holds the inner products of the profiles, and b
    those with the wanted one.

    Args:
        updates: The time t of each snapshot, positive.
        sigma_rels: The width of each snapshot, in (0, 0.2887).
        sigma_rel: The wanted width.
        at: The time of the wanted average. None: the latest of the snapshots.

    Returns:
        One factor for each snapshot, float64. Their sum is nearly 1; factors may be negative.

    Raises:
        ValueError: A value is out of range, there are no snapshots, or two are the same.

    Example:
        >>> solve_ema_weights([100, 100, 200, 200], [0.05, 0.1, 0.05, 0.1], 0.1).abs().round(decimals=6)
        tensor([0., 0., 0., 1.], dtype=torch.float64)

    Source: Karras et al., "Analyzing and Improving the Training Dynamics of Diffusion Models", arXiv:2312.02696,
        appendix C, algorithm 3.
    Differs: none.
    """
    if len(updates) != len(sigma_rels) or not len(updates):
        raise ValueError(
            f"`updates` and `sigma_rels` must have one value for each snapshot, got {len(updates)} and "
            f"{len(sigma_rels)}."
        )
    for time in updates:
        check_finite(updates=time, above=0)
    if len({*zip(map(float, updates), map(float, sigma_rels), strict=True)}) < len(updates):
        raise ValueError("`updates` and `sigma_rels` must not have the same snapshot twice. Leave out one of them.")
    if at is not None:
        check_finite(at=at, above=0)
    t = torch.tensor([float(value) for value in updates], dtype=torch.float64)
    gamma = torch.tensor([_exponent(value, "sigma_rels") for value in sigma_rels], dtype=torch.float64)
    wanted_t = t.max() if at is None else torch.tensor(float(at), dtype=torch.float64)
    wanted_gamma = torch.tensor(_exponent(sigma_rel), dtype=torch.float64)
    matrix = _inner_products(t[:, None], gamma[:, None], t, gamma)
    factors: torch.Tensor = torch.linalg.solve(matrix, _inner_products(t, gamma, wanted_t, wanted_gamma))
    return factors


def reconstruct_ema(
    folder: str | os.PathLike[str], sigma_rel: float, updates: int | None = None
) -> dict[str, torch.Tensor]:
    """Return the average of any width from the snapshots that `PostHocEMA` has written.

    Load it with `model.load_state_dict(..., strict=False)`: weights that were not trained are not in it. Batch norm
    statistics are averaged too; recalibrate them with `composer.functional.recalibrate_batchnorm`.

    Args:
        folder: The folder of the snapshots.
        sigma_rel: The width, relative to the length of the training so far, in (0, 0.2887). Best between those of the
            snapshots, or somewhat above.
        updates: The time of the average, in updates. None: that of the last snapshot.

    Returns:
        The averages by name, at least in float32, on the CPU.

    Raises:
        FileNotFoundError: There are no snapshots.
        ValueError: An argument is out of range, or the snapshots are of several runs.

    Source: Karras et al., "Analyzing and Improving the Training Dynamics of Diffusion Models", arXiv:2312.02696,
        section 3.1.
    Differs: none.
    """
    path = Path(folder).expanduser()
    headers = [_read(file) for file in sorted(path.glob("snapshot-*.pt"))]
    if not headers:
        raise FileNotFoundError(f"`folder` must have snapshots of `PostHocEMA`, got {os.fspath(folder)!r} without any.")
    runs = sorted({header["run_name"] for header in headers})
    if len(runs) > 1:
        raise ValueError(f"`folder` must have the snapshots of one run, got those of {', '.join(runs)}. Separate them.")
    snapshots = [Snapshot(header["updates"], tuple(header["sigma_rels"])) for header in headers]
    return _reconstruct(snapshots, path, sigma_rel, updates)


class PostHocEMA(Algorithm):
    """Keeps two averages of the weights, and snapshots from which those of any other length follow after training.

    At every update, the t-th, both averages move towards the weights:

        average <- b * average + (1 - b) * weights        b = (1 - 1 / t) ** (gamma + 1)

    so their length grows with the training: `sigma_rel` is the standard deviation of the time of the averaged weights,
    relative to t. Both are stored after every `snapshot_interval` and at the end of `fit`. Nothing else changes: the
    training weights are evaluated and saved. `reconstruct` and `load` combine the snapshots into an average of any
    `sigma_rel`, at any time of the run; `reconstruct_ema` does so later, from the folder.

    **Events** INIT, FIT_START (checks), BATCH_END (update), FIT_END and, for intervals in their units, EPOCH_END and
    ITERATION_END (snapshots). **Reads** the model, the timestamps. **Writes** files in `folder`. **Cost** memory for
    two further sets of weights and buffers, in float32 or more; a fused pass over both per update. Snapshots take twice
    the memory of the model each, in files or on the host; while one is written, training waits. **Compilation** static:
    the averages are beside the model.

    **When not to use it** one length is known to be good (EMA needs one average and no snapshots); the averages must be
    evaluated during training.

    Args:
        sigma_rels: The widths of the averages, in (0, 0.2887), increasing. Larger ones average longer.
        update_interval: The time between updates, in "ba".
        snapshot_interval: The time between snapshots, in any unit. Between snapshots, the averages of other times and
            widths are less exact.
        folder: Where snapshots are written, by the first rank; it is made if necessary. None: in the memory of the
            host, and in checkpoints, which become as large.
        snapshot_precision: "fp32", "fp16" or "bf16", in which snapshots are stored.

    Attributes:
        num_updates: The number of updates so far, t.
        averages: The averages, one for each width; empty before the first update.
        snapshots: The snapshots so far, in order.

    Raises:
        ValueError: An argument is out of range; at FIT_START, if the folder has snapshots of another run, or the model
            is sharded and there is no folder.
        TypeError: An argument has another type.

    Example:
        >>> PostHocEMA(sigma_rels=(0.05, 0.1)).num_updates
        0

    Source: Karras et al., "Analyzing and Improving the Training Dynamics of Diffusion Models", arXiv:2312.02696,
        section 3.1 and appendix C.
    Differs: none.
    """

    placement = Placement(provides={AVERAGES_WEIGHTS}, after={REPLACES_MODEL, CHANGES_LAYERS, CHANGES_MEMORY_FORMAT})

    def __init__(
        self,
        sigma_rels: Sequence[float] = (0.05, 0.10),
        update_interval: str | Time[Any] = "1ba",
        snapshot_interval: str | Time[Any] = "0.03dur",
        folder: str | os.PathLike[str] | None = None,
        snapshot_precision: str = "fp32",
    ) -> None:
        given: Any = sigma_rels
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise TypeError(f"`sigma_rels` must be a sequence of numbers, got {given!r}. Use (0.05, 0.10).")
        self._gammas = [_exponent(width, "sigma_rels") for width in sigma_rels]
        widths = tuple(float(plain_number(width)) for width in sigma_rels)
        if len(widths) < 2 or any(one >= other for one, other in pairwise(widths)):
            raise ValueError(f"`sigma_rels` must be at least two increasing widths, got {sigma_rels!r}.")
        self.sigma_rels = widths
        self._every = parse_time("update_interval", update_interval, least=1)
        if self._every.unit is not TimeUnit.BATCH:
            raise ValueError(f"`update_interval` must be in 'ba', got '{self._every}'. Use '1ba'.")
        self.update_interval = str(self._every)
        interval = parse_time("snapshot_interval", snapshot_interval, least=0)
        if not interval.value > 0:
            raise ValueError(f"`snapshot_interval` must be positive, got {str(snapshot_interval)!r}. Use '0.03dur'.")
        self.snapshot_interval = str(interval)
        if folder is not None and is_uri(os.fspath(folder)):
            raise ValueError(f"`folder` must be a local path, got {os.fspath(folder)!r}.")
        self.folder = None if folder is None else os.fspath(folder)
        if snapshot_precision not in STR_TO_DTYPE:
            known = ", ".join(repr(name) for name in STR_TO_DTYPE)
            raise ValueError(f"`snapshot_precision` must be one of {known}, got {snapshot_precision!r}.")
        self.snapshot_precision = snapshot_precision
        # Independent of callbacks that save, hence at the events before them.
        self._snapshot_every = interval
        units = {TimeUnit.EPOCH: Event.EPOCH_END, TimeUnit.ITERATION: Event.ITERATION_END}
        self._snapshot_event = units.get(interval.unit, Event.BATCH_END)
        self.events = frozenset({Event.INIT, Event.FIT_START, Event.BATCH_END, self._snapshot_event, Event.FIT_END})
        self._reset()

    def _reset(self) -> None:
        self.num_updates = 0
        self.averages: list[StoredWeights] = []
        self.snapshots: list[Snapshot] = []

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Update the averages, or store them."""
        if event is Event.INIT:
            self._reset()
        elif event is Event.FIT_START:
            self._check(state)
            for average in self.averages:
                average.move_to(state.model)
        elif event is Event.BATCH_END and state.timestamp.batch.value % int(self._every) == 0:
            if not self.averages:
                self.averages = [StoredWeights(state.model) for _ in self.sigma_rels]
            self.num_updates += 1
            for average, gamma in zip(self.averages, self._gammas, strict=True):
                average.update(state.model, (1 - 1 / self.num_updates) ** (gamma + 1))
        due = event is Event.FIT_END
        if event is self._snapshot_event:
            # The scheduler is created for each call, because functions cannot be pickled. It has no state to keep.
            is_due = create_interval_scheduler(
                self._snapshot_every, include_end_of_training=False, checkpoint_events=False
            )
            due = is_due(state, event)
        if due and self.num_updates and (not self.snapshots or self.snapshots[-1].updates < self.num_updates):
            self._store(state)

    def _check(self, state: State) -> None:
        if self.folder is None:
            if state.fsdp_enabled:
                raise ValueError(
                    "`folder` must be given for a model that is sharded: the snapshots are of the whole model."
                )
            return
        path = Path(self.folder).expanduser()
        problem = None
        if dist.get_global_rank() == 0 and not self.num_updates:
            others = {_read(file)["run_name"] for file in path.glob("snapshot-*.pt")} - {state.run_name}
            problem = ", ".join(sorted(others))
        if any(problems := dist.all_gather_object(problem)):
            names = next(filter(None, problems))
            raise ValueError(
                f"`folder` must not have snapshots of another run, got {self.folder!r} with those of {names}. Give "
                f"each run a folder of its own."
            )

    def _store(self, state: State) -> None:
        dtype = STR_TO_DTYPE[self.snapshot_precision]
        writes = self.folder is None or dist.get_global_rank() == 0
        averages = tuple(_on_host(average, dtype, writes) for average in self.averages)
        if self.folder is None:
            self.snapshots.append(Snapshot(self.num_updates, self.sigma_rels, averages))
            return
        if writes:
            content = {"run_name": state.run_name, "updates": self.num_updates, "sigma_rels": list(self.sigma_rels)}
            _write({**content, "averages": list(averages)}, _file_of(Path(self.folder), self.num_updates))
        self.snapshots.append(Snapshot(self.num_updates, self.sigma_rels))

    def reconstruct(self, sigma_rel: float, updates: int | None = None) -> dict[str, torch.Tensor]:
        """Return the average of any width; see `reconstruct_ema`.

        Args:
            sigma_rel: The width.
            updates: The time of the average, in updates. None: that of the last snapshot.

        Raises:
            RuntimeError: There are no snapshots yet.
            ValueError: An argument is out of range.
        """
        if not self.snapshots:
            raise RuntimeError(
                f"There are no snapshots yet. Train for at least `snapshot_interval`, {self.snapshot_interval}, or to "
                f"the end of `fit`."
            )
        if dist.get_world_size() > 1:
            dist.barrier()  # the first rank may still be writing
        return _reconstruct(self.snapshots, None if self.folder is None else Path(self.folder), sigma_rel, updates)

    @torch.no_grad()
    def load(self, model: torch.nn.Module, sigma_rel: float, updates: int | None = None) -> torch.nn.Module:
        """Write the average of any width into a model, sharded or not, and return it.

        Args:
            model: A model of the run's structure, or the run's own, whose training weights are then lost.
            sigma_rel: The width.
            updates: The time of the average, in updates. None: that of the last snapshot.

        Raises:
            RuntimeError: There are no snapshots yet.
            ValueError: An argument is out of range, or the model has none of the averaged weights.
        """
        averages, inner = self.reconstruct(sigma_rel, updates), unwrapped_model(model)
        reshard(inner)
        own = {**dict(inner.named_parameters()), **dict(inner.named_buffers())}
        missing = sorted(averages.keys() - own.keys())
        if missing:
            raise ValueError(f"`model` must have the structure of the run, but lacks {', '.join(missing[:5])}.")
        for name, value in averages.items():
            target: Any = own[name]
            if hasattr(target, "device_mesh"):
                from torch.distributed.tensor import distribute_tensor

                whole = value.to(target.device, target.dtype)
                value = distribute_tensor(whole, target.device_mesh, target.placements)
            target.copy_(value)
        return model

    def state_dict(self) -> dict[str, Any]:
        """Return both averages, the number of updates and the snapshots, without those in files."""
        snapshots = [
            {"updates": u, "sigma_rels": list(widths), "averages": None if averages is None else list(averages)}
            for u, widths, averages in self.snapshots
        ]
        averages = [average.state_dict() for average in self.averages]
        state = {"num_updates": self.num_updates, "averages": averages, "snapshots": snapshots}
        return {**super().state_dict(), **state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load copies of the result of `state_dict`.

        Raises:
            ValueError: It has other widths.
        """
        widths = [tuple(each["sigma_rels"]) for each in state["snapshots"]]
        if any(width != self.sigma_rels for width in widths) or len(state["averages"]) not in (0, len(self.sigma_rels)):
            raise ValueError(f"`sigma_rels` must be those of the saved run, got {self.sigma_rels} for {widths[:1]}.")
        self._reset()
        self.num_updates = state["num_updates"]
        for saved in state["averages"]:
            self.averages.append(StoredWeights(None))
            self.averages[-1].load_state_dict(saved)
        for each in state["snapshots"]:
            averages = None if each["averages"] is None else tuple(copy.deepcopy(each["averages"]))
            self.snapshots.append(Snapshot(each["updates"], tuple(each["sigma_rels"]), averages))


# ---- the profiles ----


def _exponent(sigma_rel: Any, argument: str = "sigma_rel") -> float:
    """Return gamma: the largest root of g^3 + 7 g^2 + (16 - s^-2) g + 12 - s^-2.

    Raises:
        TypeError: `sigma_rel` is not a number.
        ValueError: It is out of range.
    """
    check_finite("Use 0.05 to 0.15.", above=0, most=_WIDEST, **{argument: sigma_rel})
    s = float(sigma_rel) ** -2
    companion = torch.tensor([[-7.0, s - 16, s - 12], [1, 0, 0], [0, 1, 0]], dtype=torch.float64)
    gamma = max(float(torch.linalg.eigvals(companion).real.max()), 0.0)
    for _ in range(3):  # Newton's method, from nearly the root
        value = ((gamma + 7) * gamma + 16 - s) * gamma + 12 - s
        gamma -= value / ((3 * gamma + 14) * gamma + 16 - s)
    return max(gamma, 0.0)


def _inner_products(t_a: torch.Tensor, gamma_a: torch.Tensor, t_b: torch.Tensor, gamma_b: torch.Tensor) -> torch.Tensor:
    """Return the integrals of products of two profiles over time."""
    ratio = t_a / t_b
    exponent = torch.where(ratio < 1, gamma_b, -gamma_a)
    return (gamma_a + 1) * (gamma_b + 1) * ratio**exponent / ((gamma_a + gamma_b + 1) * torch.maximum(t_a, t_b))


def _reconstruct(
    snapshots: Sequence[Snapshot], folder: Path | None, sigma_rel: float, updates: int | None
) -> dict[str, torch.Tensor]:
    if updates is not None:
        check_finite("Use the number of updates of a snapshot.", updates=updates, above=0, most=snapshots[-1].updates)
    # Snapshots after the time of the average contain weights that it must not.
    used = [each for each in snapshots if updates is None or each.updates <= updates]
    if not used:
        raise ValueError(
            f"`updates` must be at least {snapshots[0].updates}, the time of the first snapshot, got {updates!r}."
        )
    times = [each.updates for each in used for _ in each.sigma_rels]
    widths = [width for each in used for width in each.sigma_rels]
    factors = solve_ema_weights(times, widths, sigma_rel, used[-1].updates if updates is None else updates)
    exact: set[str] = set()
    buffers: set[str] = set()
    averages = _averages_of(used, folder, buffers, exact)
    result = average_weights(averages, factors.tolist(), buffers=buffers)
    return {n: v.float() if v.dtype is torch.float64 and n not in exact else v for n, v in result.items()}


def _averages_of(
    snapshots: Sequence[Snapshot], folder: Path | None, buffers: set[str], exact: set[str]
) -> Iterator[dict[str, torch.Tensor]]:
    """Iterate over the averages of snapshots in float64, because their sum cancels; one file is read at a time.

    The names of buffers are added to `buffers`, and the names of tensors that were saved in float64 to `exact`.
    Parameters that became trainable after the first average are left out.
    """
    first: set[str] | None = None
    for snapshot in snapshots:
        averages: Iterable[Layout] | None = snapshot.averages
        if averages is None:
            assert folder is not None, "a snapshot is in memory or in a file"
            averages = _read(_file_of(folder, snapshot.updates))["averages"]
        for average in averages:
            buffers.update(average["named_buffers_dict"])
            named = {**average["named_parameters_dict"], **average["named_buffers_dict"]}
            if first is None:
                first = set(named)
                exact |= {name for name, value in named.items() if value.dtype is torch.float64}
            yield {n: v.double() if v.is_floating_point() else v for n, v in named.items() if n in first}


# ---- snapshots ----


def _on_host(average: StoredWeights, dtype: torch.dtype, keep: bool) -> Layout:
    """Return copies of the tensors of an average on the host. Sharded ones are gathered by all ranks.

    Args:
        average: The average.
        dtype: The floating dtype of the copies, except that float32 leaves float64 as it is.
        keep: True if this rank needs the result.
    """
    copies: Layout = {}
    for kind, named in average.state_dict().items():
        copies[kind] = {}
        for name, tensor in named.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if keep:
                narrow = whole.is_floating_point() and dtype is not torch.float32
                copies[kind][name] = whole.detach().to("cpu", dtype if narrow else whole.dtype, copy=True)
    return copies


def _file_of(folder: Path, updates: int) -> Path:
    return folder.expanduser() / f"snapshot-{updates:010d}.pt"


def _write(content: dict[str, Any], file: Path) -> None:
    """Write a file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        torch.save(content, temporary)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def _read(file: Path) -> dict[str, Any]:
    """Read a snapshot without running code from it; tensors are read when they are used."""
    content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return content
