"""The functions, then the class. Symbols: w is a weight, R its norm, u the update, eta the learning rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import Tensor

from composer.algorithms.utils.hidden_matrices import HiddenMatrices, check_patterns, find_hidden_matrices
from composer.algorithms.utils.optimizer_steps import (
    Rate,
    WeightsBeforeStep,
    check_schedulers,
    copy_before_step,
    take_over_decay,
)
from composer.algorithms.warnings import warn_no_effect
from composer.core import (
    AVERAGES_WEIGHTS,
    CHANGES_LAYERS,
    DECAYS_WEIGHTS,
    DISPLACES_WEIGHTS,
    FREEZES_WEIGHTS,
    PINS_NORMS,
    REPLACES_MODEL,
    REPLACES_OPTIMIZER,
    WRAPS_OPTIMIZER,
    Algorithm,
    Event,
    Placement,
)
from composer.utils import check_finite, local_part, plain_number, unwrapped_model

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

# Norms of updates below this one count as zero: no direction can be computed from them.
_LEAST_NORM = 1e-30


@torch.no_grad()
def matrix_norms(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the Frobenius norm of each weight.

    Args:
        weights: Weights of any shapes. Of a `DTensor`, every rank gets the norm of the whole.

    Returns:
        A tensor without dimensions for each weight, on its device, in float64 for float64 and float32 otherwise.

    Example:
        >>> matrix_norms([torch.tensor([[3.0, 4.0]])])
        [tensor(5.)]
    """
    norms: dict[int, Tensor] = {}
    for indices, mesh, dims in _alike(weights):
        found = _norms([_widened(local_part(weights[i])) for i in indices], mesh, dims)
        norms.update(zip(indices, found.unbind(), strict=True))
    return [norms[i] for i in range(len(weights))]


@torch.no_grad()
def apply_hyperball(
    weights: Sequence[Tensor], previous: Sequence[Tensor], radii: Sequence[Tensor], lr: Rate | Sequence[Rate]
) -> None:
    """Turn the weights by an angle in the direction of a step of an optimizer, in place; their norms are the radii.

    With w the weight before the step, u = w - (the weight after the step), and n(x) = x / ||x||, the Frobenius norm:
    `weight <- R * n(w - eta * R * n(u))`. A weight that the step did not move stays as it is.

    Args:
        weights: The weights after the step.
        previous: The weights before the step, in the same order. Of a `DTensor`, the local part is enough.
        radii: The norm R of each weight, usually that of its initialization: `matrix_norms(weights)` then.
        lr: The learning rate eta, one or one for each weight: about the angle of a step, in radians.

    Raises:
        ValueError: The sequences have different lengths.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
        >>> radii, before = matrix_norms([weight]), weight.detach().clone()
        >>> with torch.no_grad():
        ...     _ = weight.sub_(torch.tensor([[0.0, 1e-3]]))  # a step of an optimizer
        >>> apply_hyperball([weight], [before], radii, lr=1.0)
        >>> weight.detach()
        tensor([[ 4.7434, -1.5811]])

    Source: Wen et al., "Fantastic Pretraining Optimizers and Where to Find Them II: Hyperball Optimization",
        arXiv:2606.16899.
    Differs: see `Hyperball`.
    """
    rates = [lr] * len(weights) if isinstance(lr, (int, float, Tensor)) else list(lr)
    if not len(weights) == len(previous) == len(radii) == len(rates):
        raise ValueError(
            f"`weights`, `previous`, `radii` and `lr` must have the same lengths, got {len(weights)}, {len(previous)}, "
            f"{len(radii)} and {len(rates)}."
        )
    for indices, mesh, dims in _alike(weights):
        after = [local_part(weights[i]) for i in indices]
        before = [_widened(local_part(previous[i])) for i in indices]
        updates = list(torch._foreach_sub(before, [_widened(weight) for weight in after]))
        radius = torch.stack([radii[i] for i in indices])
        norms = _norms(updates, mesh, dims)
        is_still = norms < _LEAST_NORM  # such a weight stays as it was, bit for bit
        factors = torch.where(is_still, 0.0, radius / norms)
        torch._foreach_mul_(updates, _times(factors, [rates[i] for i in indices]))
        moved = list(torch._foreach_sub(before, updates))
        factors = torch.where(is_still, 1.0, radius / _norms(moved, mesh, dims))
        torch._foreach_mul_(moved, list(factors.unbind()))
        torch._foreach_copy_(after, moved)


class Hyperball(Algorithm):
    """Hidden matrices keep the norms of their initialization; each step turns them by the learning rate, an angle.

    The optimizer steps as before. Then each hidden matrix moves from where it was before the step, in the direction of
    the step, by the learning rate times its norm, and is scaled back to its norm; see `apply_hyperball`. So neither the
    norms of the weights nor those of the updates depend on the optimizer, and weight decay, which would only set the
    norms, has nothing left to do: that of the hidden matrices is set to 0. `engine.explain()` prints which parameters
    are hidden matrices, why the others are not, and the weight decay that is replaced.

    A norm is that of a whole weight, also if it stores several matrices, such as queries, keys and values.

    **Events** INIT, FIT_START, AFTER_TRAIN_BATCH (keeps the weights before the step), BATCH_END. **Reads**
    `state.model`, the learning rates. **Writes** the hidden matrices; the parameter groups of `state.optimizers`.
    **Cost** a copy of the hidden matrices during the step, a few passes over them, and two reductions of one number per
    matrix if they are sharded. **Compilation** static: the graphs of the model do not change. **When not to use it** to
    fine-tune with few steps; with matrices that are zero at the start (`exclude` them).

    Args:
        lr: Learning rate of the hidden matrices, which schedules scale; with Muon 0.02 is a good one. None: that of
            their parameter groups.
        include: Regular expressions; parameters whose name contains a match are hidden matrices. See
            `composer.algorithms.utils.hidden_matrices.find_hidden_matrices`.
        exclude: Regular expressions; parameters whose name contains a match are none.

    Attributes:
        split: Which parameters are hidden matrices; None before INIT.

    Raises:
        TypeError: An argument has another type.
        ValueError: `lr` is not positive; at INIT, if an optimizer steps other weights than those of the model; at
            FIT_START, if a hidden matrix is zero, or a scheduler lacks the parameter groups that were divided.

    Warns:
        NoEffectWarning: The optimizers have no hidden matrix of the model.

    Example:
        >>> Hyperball(lr=0.02)
        Hyperball(lr=0.02,include=(),exclude=())

    Source: Wen et al., "Fantastic Pretraining Optimizers and Where to Find Them II: Hyperball Optimization",
        arXiv:2606.16899.
    Differs: which weights are hidden matrices is that of `find_hidden_matrices`: the first and the last layer are none.
    """

    events = frozenset({Event.INIT, Event.FIT_START, Event.AFTER_TRAIN_BATCH, Event.BATCH_END})
    placement = Placement(
        provides={PINS_NORMS},
        after={CHANGES_LAYERS, REPLACES_MODEL, FREEZES_WEIGHTS, REPLACES_OPTIMIZER},
        before={WRAPS_OPTIMIZER, DECAYS_WEIGHTS, DISPLACES_WEIGHTS, AVERAGES_WEIGHTS},
        excludes={PINS_NORMS},
    )

    def __init__(self, lr: float | None = None, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        if lr is not None:
            check_finite("None takes that of the parameter groups.", lr=lr, above=0)
        check_patterns(include=include, exclude=exclude)
        self.lr = None if lr is None else plain_number(lr)
        self.include, self.exclude = tuple(include), tuple(exclude)
        self._reset()

    def _reset(self) -> None:
        self.split: HiddenMatrices | None = None
        self._replaced: dict[str, float] = {}
        self._radii: dict[str, Tensor] = {}
        self._weights: dict[str, torch.nn.Parameter] = {}
        self._before: WeightsBeforeStep | None = None

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Find the hidden matrices and their norms; keep them before a step, and turn them after it."""
        if event is Event.INIT:
            self._reset()
            if state.optimizers:
                self._take_over(state)
        elif event is Event.FIT_START:
            if self.split is None:  # a host may make its optimizers after INIT
                self._take_over(state)
            check_schedulers("Hyperball", state.schedulers)
            self._find_weights(state)
        elif event is Event.AFTER_TRAIN_BATCH:
            # A closure may run several passes: the first are those at the weights from which the step begins.
            if self._before is None:
                self._before = copy_before_step(state.optimizers, self._weights)
        elif self._before is not None:
            before, self._before = self._before, None
            weights, radii = ([tensors[name] for name in before.names] for tensors in (self._weights, self._radii))
            apply_hyperball(weights, before.previous, radii, before.rates)

    def _take_over(self, state: State) -> None:
        split = find_hidden_matrices(unwrapped_model(state.model), self.include, self.exclude)
        matrices = {name: matrix.parameter for name, matrix in split.matrices.items()}
        self._replaced = take_over_decay("Hyperball", state.optimizers, matrices, self.lr)
        self.split = split.without(matrices.keys() - self._replaced.keys(), "in no optimizer")
        if not self.split.matrices:
            warn_no_effect(
                f"`Hyperball` changes nothing: the optimizers have no hidden matrix of the model. Its parameters "
                f"are\n{self.split}"
            )

    def _find_weights(self, state: State) -> None:
        """Find the matrices, which wrappers may have replaced since INIT; record norms that no checkpoint had."""
        present, self._before = dict(unwrapped_model(state.model).named_parameters()), None
        names = self._replaced.keys() & present.keys()
        self._weights = {name: present[name] for name in present if name in names}
        new = {name: weight for name, weight in self._weights.items() if name not in self._radii}
        norms = dict(zip(new, matrix_norms(list(new.values())), strict=True))
        # This waits for the device, once per run. Weights on the meta device have no values.
        if zero := [name for name, norm in norms.items() if not norm.is_meta and float(norm) == 0]:
            raise ValueError(
                f"`Hyperball` keeps the norms of the hidden matrices, but {', '.join(map(repr, zero[:5]))}"
                f"{' and others' if len(zero) > 5 else ''} are zero and would stay zero. Initialize them, or leave "
                f"them to the optimizer with its weight decay: add their names to `exclude`."
            )
        self._radii |= norms
        self._radii |= {name: self._radii[name].to(local_part(w).device) for name, w in self._weights.items()}

    def explain(self) -> str:
        """Return which parameters are hidden matrices, why others are not, and the replaced decay; "" before INIT."""
        if self.split is None:
            return ""
        replaced = ", ".join(str(value) for value in sorted({value for value in self._replaced.values() if value}))
        note = f"the optimizers' weight decay of the hidden matrices, {replaced}, is replaced by fixed norms"
        return f"{self.split}\n{note}" if replaced else str(self.split)

    def state_dict(self) -> dict[str, Any]:
        """Return the norms by name."""
        return {**super().state_dict(), "radii": dict(self._radii)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the norms, which are then not measured again."""
        self._radii = dict(state["radii"])


def _widened(tensor: Tensor) -> Tensor:
    """Return a tensor with at least the precision of float32, in which norms are exact enough."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def _alike(weights: Sequence[Tensor]) -> Iterator[tuple[list[int], Any, tuple[int, ...]]]:
    """Yield the indices of weights on one device that are sharded alike, their mesh, and its dimensions of shards."""
    buckets: dict[Any, list[int]] = {}
    for index, weight in enumerate(weights):
        mesh, placements = getattr(weight, "device_mesh", None), getattr(weight, "placements", ())
        dims = tuple(dim for dim, placement in enumerate(placements) if placement.is_shard())
        buckets.setdefault((local_part(weight).device, mesh, dims), []).append(index)
    for (_, mesh, dims), indices in buckets.items():
        yield indices, mesh, dims


def _norms(tensors: list[Tensor], mesh: Any, dims: tuple[int, ...]) -> Tensor:
    """Return the norms of weights, given their local parts; of all in one reduction per sharded dimension."""
    norms = torch.stack(torch._foreach_norm(tensors))
    if not dims:
        return norms
    squares = norms.square_()
    for dim in dims:
        torch.distributed.all_reduce(squares, group=mesh.get_group(dim))
    return squares.sqrt_()


def _times(values: Tensor, rates: list[Rate]) -> list[Tensor]:
    """Multiply each value with its rate, without reading or copying one between host and device."""
    numbers = [rate for rate in rates if not isinstance(rate, Tensor)]
    if len(numbers) < len(rates):
        return [value * rate for value, rate in zip(values.unbind(), rates, strict=True)]
    return list(torch._foreach_mul(values.unbind(), numbers))
