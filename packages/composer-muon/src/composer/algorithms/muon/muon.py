"""Muon for the hidden matrices of a model, beside the optimizer of everything else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from composer.algorithms.muon.optimizer import Coefficients, MuonOptimizer, check_muon_arguments
from composer.algorithms.utils.hidden_matrices import HiddenMatrices, check_patterns, find_hidden_matrices
from composer.algorithms.warnings import warn_no_effect
from composer.core import (
    CHANGES_LAYERS,
    FREEZES_WEIGHTS,
    REPLACES_MODEL,
    REPLACES_OPTIMIZER,
    WRAPS_OPTIMIZER,
    Algorithm,
    Event,
    Placement,
)
from composer.utils import check_finite, check_flags, plain_number
from composer.utils.module_surgery import has_own_state_dict

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger


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

    **Events** INIT, FIT_START. **Reads** `state.model`. **Writes** `state.optimizers`. **Cost** a few matrix products
    per matrix and step, independent of the batch; one buffer per weight instead of the two of AdamW. Sharded matrices
    are gathered once per step, and orthogonalized on every rank. **Compilation** static: the graphs of the model do not
    change. **When not to use it** with an optimizer like SGD, whose learning rates do not transfer (pass `lr`), or to
    fine-tune weights that were trained with AdamW, where it often gains nothing.

    Args:
        lr: Learning rate of the matrices. None: that of their parameter groups, which must be one for AdamW.
        weight_decay: Decoupled weight decay of the matrices. None: that of their groups.
        momentum: See `MuonOptimizer`, as for the following.
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
        Scalable for LLM Training", arXiv:2502.16982.
    Differs: none.
    """

    events = frozenset({Event.INIT, Event.FIT_START})
    placement = Placement(
        provides={REPLACES_OPTIMIZER},
        after={CHANGES_LAYERS, REPLACES_MODEL, FREEZES_WEIGHTS},
        before={WRAPS_OPTIMIZER},
        excludes={REPLACES_OPTIMIZER},
    )

    def __init__(
        self,
        lr: float | None = None,
        weight_decay: float | None = None,
        momentum: float = 0.95,
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
    ) -> None:
        check_muon_arguments(momentum, scale, steps, coefficients, beta2)
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
        self.momentum, self.steps, self.beta2 = plain_number(momentum), plain_number(steps), plain_number(beta2)
        self.nesterov, self.scale, self.coefficients = nesterov, scale, coefficients
        self.cautious, self.normalize, self.fixed_norm = cautious, normalize, fixed_norm
        self.include, self.exclude = tuple(include), tuple(exclude)
        self.split: HiddenMatrices | None = None

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Divide the parameters of the optimizers, unless one is a `MuonOptimizer` already; check the schedulers."""
        if event is Event.FIT_START:
            if self.split is not None and any(map(_is_muon, state.optimizers)):
                _check_schedulers(state)
            return
        if any(isinstance(optimizer, MuonOptimizer) for optimizer in state.optimizers):
            return
        self.split = find_hidden_matrices(state.model, self.include, self.exclude)
        matrices = {id(matrix.parameter): name for name, matrix in self.split.matrices.items()}
        optimized = {id(p) for o in state.optimizers for group in o.param_groups for p in group["params"]}
        left_out = [name for key, name in matrices.items() if key not in optimized]
        self.split = self.split.without(left_out, "in no optimizer")
        groups: list[dict[str, Any]] = []
        for optimizer in state.optimizers:
            taken = {id(p) for group in optimizer.param_groups for p in group["params"]} & matrices.keys()
            if not taken:
                continue
            if type(optimizer).__name__ == "Muon":  # torch has one, and other libraries, too
                raise ValueError(
                    f"`Muon` must take parameters from another optimizer, but {type(optimizer).__module__}.Muon trains "
                    f"matrices of the model already. Leave out one of them."
                )
            if has_own_state_dict(optimizer):
                raise ValueError(
                    f"`Muon` must take parameters from an optimizer, but {type(optimizer).__name__} is a wrapper with "
                    f"a state of its own. Make the optimizers with `build_muon` instead."
                )
            if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
                raise ValueError(
                    f"`Muon` must take parameters from an optimizer without modes, but {type(optimizer).__name__} has "
                    f"`train` and `eval`: in evaluation its parameters would be averages, and those of `Muon` not. Use "
                    f"`torch.optim.AdamW`, or leave `Muon` out."
                )
            for group in optimizer.param_groups:
                names = [matrices[id(p)] for p in group["params"] if id(p) in taken]
                lr = group["lr"] if self.lr is None else self.lr
                decay = _decay_of(optimizer, group) if self.weight_decay is None else self.weight_decay
                groups += _muon_groups(self.split, names, {"lr": lr, "weight_decay": decay})
                for parameter in group["params"]:
                    if id(parameter) in taken:
                        optimizer.state.pop(parameter, None)
                group["params"][:] = [p for p in group["params"] if id(p) not in taken]
                group.pop("param_names", None)
        if not groups:
            warn_no_effect(
                "`Muon` changed nothing: the optimizers have no hidden matrix of the model. Its parameters are\n"
                f"{self.split}"
            )
            return
        options = {"scale": self.scale, "steps": self.steps, "coefficients": self.coefficients, "beta2": self.beta2}
        flags = {"nesterov": self.nesterov, "cautious": self.cautious, "normalize": self.normalize}
        flags["fixed_norm"] = self.fixed_norm
        muon = MuonOptimizer(groups, momentum=self.momentum, **options, **flags)  # type: ignore[arg-type]
        rest = [o for o in state.optimizers if any(group["params"] for group in o.param_groups)]
        state.optimizers = [muon, *rest]
        logger.log_hyperparameters({"muon/num_matrices": sum(len(group["params"]) for group in groups)})

    def explain(self) -> str:
        """Return which parameter went where, and why; "" before INIT."""
        return "" if self.split is None else str(self.split)


_WITH_KNOWN_DECAY = (torch.optim.AdamW, torch.optim.SGD)


def _decay_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Any:
    """Return the weight decay of a group, if it is defined as in `MuonOptimizer`."""
    decay, name = group.get("weight_decay", 0.0), type(optimizer).__name__
    if decay and type(optimizer) not in _WITH_KNOWN_DECAY:
        raise ValueError(
            f"`weight_decay` must be given to take parameters from {name}, which may define weight decay in another "
            f"way than `Muon`, where a step removes `lr * weight_decay` of the weights; got a group with {decay!r}. "
            f"That of `DecoupledAdamW` and `DecoupledSGDW` is equivalent if divided by the learning rate."
        )
    return decay


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


def _is_muon(optimizer: Any) -> bool:
    """Return True for a `MuonOptimizer`, even in a wrapper such as that of `SAM`."""
    return isinstance(getattr(optimizer, "base_optimizer", optimizer), MuonOptimizer)


def _check_schedulers(state: State) -> None:
    """Raise ValueError if only the other optimizers have schedulers."""
    targets = [getattr(scheduler, "optimizer", None) for scheduler in state.schedulers]
    if targets and not any(map(_is_muon, targets)):
        names = ", ".join(type(target).__name__ for target in targets)
        raise ValueError(
            f"`schedulers` must change the learning rate of `Muon` too, but they belong to {names}, the optimizer of "
            f"the other parameters. Use a schedule of `composer.optim`, or make the optimizers with `build_muon` and a "
            f"scheduler for each."
        )
