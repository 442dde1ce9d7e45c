"""Muon for the hidden matrices of a model, beside the optimizer of everything else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from composer.algorithms.muon.optimizer import (
    Coefficients,
    MuonOptimizer,
    check_muon_arguments,
    check_soap_arguments,
)
from composer.algorithms.utils.hidden_matrices import (
    HiddenMatrices,
    check_patterns,
    check_schedulers_of_matrices,
    find_hidden_matrices,
    take_hidden_matrices,
)
from composer.algorithms.utils.weight_swaps import has_passed, parse_time
from composer.algorithms.warnings import warn_no_effect
from composer.core import (
    CHANGES_LAYERS,
    FREEZES_WEIGHTS,
    REPLACES_MODEL,
    REPLACES_OPTIMIZER,
    STEPS_MATRICES,
    WRAPS_OPTIMIZER,
    Algorithm,
    Event,
    Placement,
    Time,
    TimeUnit,
)
from composer.utils import check_finite, check_flags, plain_number

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

# Arguments of `Muon` that are those of `MuonOptimizer`, for all parameter groups.
_OPTIONS = (
    *("nesterov", "scale", "steps", "coefficients", "cautious", "normalize", "beta2", "fixed_norm"),
    *("momentum_weights", "row_floor", "soap_beta", "soap_frequency", "soap_max_size"),
)


def build_muon(
    model: nn.Module,
    lr: float | Tensor = 1e-3,
    weight_decay: float = 0.1,
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-10,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    **options: Any,
) -> tuple[MuonOptimizer, torch.optim.AdamW]:
    """Make the optimizers of a model: Muon for its hidden matrices, AdamW for its other parameters.

    Both have one learning rate and one weight decay; AdamW does not decay parameters with fewer than two dimensions.

    Args:
        model: The model, after all changes of its layers.
        lr: Learning rate of both.
        weight_decay: Decoupled weight decay of both.
        betas: Of AdamW.
        eps: Of AdamW.
        include: See `split_muon_parameters`.
        exclude: See `split_muon_parameters`.
        **options: Further arguments of `MuonOptimizer`.

    Raises:
        ValueError: The model has no hidden matrix, or none of its parameters is left for AdamW.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> muon, adamw = build_muon(model, lr=2e-3)
        >>> [sum(p.numel() for group in o.param_groups for p in group["params"]) for o in (muon, adamw)]
        [256, 228]
    """
    split = find_hidden_matrices(model, include, exclude)
    if not split.matrices or not split.others:
        raise ValueError(
            "`model` must have hidden matrices and other parameters, got\n"
            f"{split}\nUse `include` and `exclude`, or one optimizer."
        )
    decayed = [parameter for parameter in split.others.values() if parameter.dim() > 1]
    plain = [parameter for parameter in split.others.values() if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    muon = MuonOptimizer(_muon_groups(split, split.matrices, {}), lr=lr, weight_decay=weight_decay, **options)
    return muon, torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=betas, eps=eps)


class Muon(Algorithm):
    """Muon: orthogonal updates for hidden matrices, at the learning rate of AdamW.

    At INIT the hidden matrices move from the optimizers of the run to a `MuonOptimizer`, the new first optimizer, and
    keep the learning rate and the weight decay of their groups. The other parameters stay. `engine.explain()` prints
    which parameter went where, and why.

    **Events** INIT, FIT_START; BATCH_START with `momentum_start` or `momentum_after`. **Reads** `state.model`, and the
    time with these two. **Writes** `state.optimizers`. **Cost** a few matrix products per matrix and step, independent
    of the batch; one buffer per weight and momentum, where AdamW has two per weight. Sharded matrices are gathered once
    per step, and orthogonalized on every rank. With `soap_beta`, another buffer and two square matrices for each side
    of a matrix, eight matrix products, and two QR decompositions every `soap_frequency` steps. **Compilation** static:
    the graphs of the model do not change. **When not to use it** with an optimizer like SGD, whose learning rates do
    not transfer (pass `lr`), or to fine-tune weights that were trained with AdamW, where it often gains nothing.

    Args:
        lr: Learning rate of the matrices. None: that of their parameter groups, which must be one for AdamW.
        weight_decay: Decoupled weight decay of the matrices. None: that of their groups.
        momentum: One or several; see `MuonOptimizer`, as for the following.
        nesterov: Use Nesterov momentum.
        scale: Factor of an update.
        steps: Steps of the orthogonalization.
        coefficients: Polynomials of the orthogonalization.
        cautious: Decay only the weights that the update moves towards zero.
        normalize: Normalize the rows of the updates (NorMuon).
        beta2: Decay of the running mean for `normalize`.
        include: See `split_muon_parameters`.
        exclude: See `split_muon_parameters`.
        fixed_norm: Scale the matrices to a fixed norm before each update; see `MuonOptimizer`.
        momentum_weights: The weights of several momenta.
        momentum_start: When `momentum` begins, in any unit; several begin as the momentum is by then. None: with the
            run.
        momentum_before: The momentum until `momentum_start`.
        momentum_after: The momentum at `momentum_end`, or several. From `momentum_start` on, `momentum` moves to it:
            the mean ages of the gradients in it, `momentum / (1 - momentum)` steps, change linearly. None: `momentum`.
        momentum_end: When `momentum_after` is reached, in the unit of `momentum_start`.
        row_floor: The least norm of a row of an update, as a fraction of that of the weight; see `MuonOptimizer`.
        soap_beta: The decay of the running means for SOAP's preconditioning of the updates; see `MuonOptimizer`. 0.9 in
            public records. None: no preconditioning.
        soap_frequency: Steps between two changes of the basis of the preconditioning.
        soap_max_size: Matrices with a longer side are not preconditioned.

    Attributes:
        split: Which parameter went where; None before INIT.

    Raises:
        TypeError: An argument has another type.
        ValueError: An argument is out of range; at INIT, if an optimizer cannot lose parameters; at FIT_START, if there
            are schedulers, but none of them changes the learning rate of the matrices.

    Warns:
        NoEffectWarning: The optimizers have no hidden matrix of the model.

    Example:
        >>> Muon(momentum=0.9).momentum
        0.9

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is
        Scalable for LLM Training", arXiv:2502.16982. See `MuonOptimizer` for those of the other arguments.
    Differs: the buffers of several momenta exist from the first step, and are equal until `momentum_start`.
    """

    events = frozenset({Event.INIT, Event.FIT_START})
    placement = Placement(
        provides={REPLACES_OPTIMIZER, STEPS_MATRICES},
        after={CHANGES_LAYERS, REPLACES_MODEL, FREEZES_WEIGHTS},
        before={WRAPS_OPTIMIZER},
        excludes={STEPS_MATRICES},
    )

    def __init__(
        self,
        lr: float | None = None,
        weight_decay: float | None = None,
        momentum: float | Sequence[float] = 0.95,
        nesterov: bool = True,
        scale: str = "match_rms_adamw",
        steps: int = 5,
        coefficients: str | Coefficients = "quintic",
        cautious: bool = False,
        normalize: bool = False,
        beta2: float = 0.95,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        *,
        fixed_norm: bool = False,
        momentum_weights: Sequence[float] | None = None,
        momentum_start: str | Time[Any] | None = None,
        momentum_before: float = 0.95,
        momentum_after: float | Sequence[float] | None = None,
        momentum_end: str | Time[Any] = "1dur",
        row_floor: float = 0.0,
        soap_beta: float | None = None,
        soap_frequency: int = 1,
        soap_max_size: int = 8192,
    ) -> None:
        check_muon_arguments(momentum, scale, steps, coefficients, beta2, momentum_weights, row_floor)
        check_soap_arguments(soap_beta, soap_frequency, soap_max_size)
        check_finite("Use 0.95.", momentum_before=momentum_before, least=0, most=0.9999)
        check_flags(nesterov=nesterov, cautious=cautious, normalize=normalize, fixed_norm=fixed_norm)
        check_patterns(include=include, exclude=exclude)
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if value is not None:
                check_finite(least=0, **{name: value})
        if lr is None and scale != "match_rms_adamw":
            raise ValueError(
                f"`lr` must be given with `scale={scale!r}`, whose learning rates are not those of AdamW. Use 0.02."
            )
        self.lr = None if lr is None else plain_number(lr)
        self.weight_decay = None if weight_decay is None else plain_number(weight_decay)
        self.steps, self.beta2, self.row_floor = plain_number(steps), plain_number(beta2), plain_number(row_floor)
        self.soap_beta, self.soap_frequency = plain_number(soap_beta), plain_number(soap_frequency)
        self.soap_max_size = plain_number(soap_max_size)
        self.momentum, self.momentum_after = _plain(momentum), _plain(momentum_after)
        self.momentum_weights = None if momentum_weights is None else tuple(map(plain_number, momentum_weights))
        self.momentum_before = plain_number(momentum_before)
        self._start = None if momentum_start is None else parse_time("momentum_start", momentum_start, least=0)
        self._end = parse_time("momentum_end", momentum_end, least=0, example="1dur")
        self.momentum_start, self.momentum_end = None if self._start is None else str(self._start), str(self._end)
        if momentum_after is not None:
            for each in _several(self.momentum_after):
                check_finite("Use 0.9.", momentum_after=each, least=0, most=0.9999)
            if len(_several(self.momentum_after)) != len(_several(self.momentum)):
                raise ValueError(
                    f"`momentum_after` must have as many numbers as `momentum`, got {momentum_after!r} and "
                    f"{momentum!r}."
                )
            begin = Time(0, self._end.unit) if self._start is None else self._start
            if begin.unit is not self._end.unit or self._end <= begin:
                raise ValueError(
                    f"`momentum_end` must be after `momentum_start` and in its unit, got '{self._end}' and '{begin}'."
                )
        if self._start is not None or momentum_after is not None:
            self.events = self.events | {Event.BATCH_START}
        self.nesterov, self.scale, self.coefficients = nesterov, scale, coefficients
        self.cautious, self.normalize, self.fixed_norm = cautious, normalize, fixed_norm
        self.include, self.exclude = tuple(include), tuple(exclude)
        self.split: HiddenMatrices | None = None

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Divide the parameters of the optimizers, unless one is a `MuonOptimizer` already; check the schedulers."""
        if event is Event.BATCH_START:
            for optimizer in state.optimizers if self.split is not None else ():
                for group in optimizer.param_groups if _is_muon(optimizer) else ():
                    group["momentum"] = self._momentum_at(state)
            return
        if event is Event.FIT_START:
            if self.split is not None and any(map(_is_muon, state.optimizers)):
                check_schedulers_of_matrices(state.schedulers, MuonOptimizer, "Muon")
            return
        if any(isinstance(optimizer, MuonOptimizer) for optimizer in state.optimizers):
            return
        self.split = find_hidden_matrices(state.model, self.include, self.exclude)
        taken = take_hidden_matrices(self.split, state.optimizers, "Muon", self.lr, self.weight_decay)
        groups = [group for names, options in taken for group in _muon_groups(self.split, names, options)]
        found = {name for names, _ in taken for name in names}
        self.split = self.split.without([name for name in self.split.matrices if name not in found], "in no optimizer")
        if not groups:
            warn_no_effect(
                "`Muon` changed nothing: the optimizers have no hidden matrix of the model. Its parameters are\n"
                f"{self.split}"
            )
            return
        options = {name: getattr(self, name) for name in _OPTIONS}
        muon = MuonOptimizer(groups, momentum=self._momentum_at(state), **options)
        rest = [o for o in state.optimizers if any(group["params"] for group in o.param_groups)]
        state.optimizers = [muon, *rest]
        logger.log_hyperparameters({"muon/num_matrices": sum(len(group["params"]) for group in groups)})

    def _momentum_at(self, state: State) -> Any:
        momenta = _several(self.momentum)
        if self._start is not None and not has_passed(self._start, state):
            # All buffers exist from the start, so that a checkpoint of any time has the same entries.
            momenta = (self.momentum_before,) * len(momenta)
        elif self.momentum_after is not None:
            unit, begin = self._end.unit, 0 if self._start is None else self._start.value
            now = state.get_elapsed_duration() if unit is TimeUnit.DURATION else state.timestamp.get(unit)
            progress = 0.0 if now is None else min((now.value - begin) / (self._end.value - begin), 1.0)
            pairs = zip(momenta, _several(self.momentum_after), strict=True)
            ages = [(1 - progress) * one / (1 - one) + progress * other / (1 - other) for one, other in pairs]
            momenta = tuple(age / (1 + age) for age in ages)
        return momenta if isinstance(self.momentum, tuple) else momenta[0]

    def explain(self) -> str:
        """Return which parameter went where, and why; "" before INIT."""
        if self.split is None:
            return ""
        size = math.inf if self.soap_beta is None else self.soap_max_size
        large = [name for name, matrix in self.split.matrices.items() if max(matrix.shape) > size]
        return "\n".join([str(self.split), *(f"{name} is not preconditioned: a side above {size}" for name in large)])


def _muon_groups(split: HiddenMatrices, names: Iterable[str], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return parameter groups of `MuonOptimizer`: one for each way to store a matrix."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for name in names:
        matrix = split.matrices[name]
        groups.setdefault((matrix.blocks, matrix.transposed, matrix.groups), []).append(matrix.parameter)
    return [
        {"params": params, "blocks": blocks, "transposed": transposed, "groups": number, **options}
        for (blocks, transposed, number), params in groups.items()
    ]


def _plain(momentum: Any) -> Any:
    """Return a momentum as a plain number, or several as a tuple of these."""
    return tuple(map(plain_number, momentum)) if isinstance(momentum, Sequence) else plain_number(momentum)


def _several(momentum: Any) -> tuple[float, ...]:
    """Return one momentum or several as a tuple."""
    return momentum if isinstance(momentum, tuple) else (momentum,)


def _is_muon(optimizer: Any) -> bool:
    """Return True for a `MuonOptimizer`, even in a wrapper such as that of `SAM`."""
    return isinstance(getattr(optimizer, "base_optimizer", optimizer), MuonOptimizer)
