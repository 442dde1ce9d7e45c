"""SOAP of `pytorch-optimizer` for the hidden matrices of a model, beside the optimizer of everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from composer.algorithms.utils.hidden_matrices import (
    HiddenMatrices,
    check_patterns,
    check_schedulers_of_matrices,
    find_hidden_matrices,
    take_hidden_matrices,
)
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
)
from composer.utils import check_finite, check_integers, plain_number

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger


def build_soap(
    model: nn.Module,
    lr: float | Tensor = 3e-3,
    weight_decay: float = 0.01,
    *,
    max_size: int = 8192,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    adamw_betas: tuple[float, float] = (0.9, 0.95),
    **options: Any,
) -> tuple[torch.optim.Optimizer, torch.optim.AdamW]:
    """Make the optimizers of a model: SOAP for its hidden matrices, AdamW for its other parameters.

    Both have one learning rate and one weight decay; AdamW does not decay parameters with fewer than two dimensions.

    Args:
        model: The model, after all changes of its layers.
        lr: Learning rate of both. A tensor is read once: a step of SOAP needs a number, and would change a tensor.
        weight_decay: Decoupled weight decay of both.
        max_size: See `SOAP`, as for the following.
        include: Names of parameters for SOAP.
        exclude: Names of parameters for AdamW.
        adamw_betas: Of AdamW.
        **options: Further arguments of `pytorch_optimizer.SOAP`.

    Raises:
        ValueError: The model has no hidden matrix, or none of its parameters is left for AdamW.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> soap, adamw = build_soap(model, lr=2e-3)
        >>> [sum(p.numel() for group in o.param_groups for p in group["params"]) for o in (soap, adamw)]
        [256, 228]
    """
    from pytorch_optimizer import SOAP as SOAPOptimizer  # imports as much as torch does

    split = _divided(model, include, exclude, max_size)
    if not split.matrices or not split.others:
        raise ValueError(
            "`model` must have hidden matrices and other parameters, got\n"
            f"{split}\nUse `include` and `exclude`, or one optimizer."
        )
    decayed = [parameter for parameter in split.others.values() if parameter.dim() > 1]
    plain = [parameter for parameter in split.others.values() if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    matrices = [{"params": [matrix.parameter for matrix in split.matrices.values()]}]
    options |= {"lr": float(lr), "weight_decay": weight_decay, "max_precondition_dim": max_size}
    soap = SOAPOptimizer(matrices, **options)
    return soap, torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=adamw_betas)


class SOAP(Algorithm):
    """SOAP: AdamW in the eigenbasis of each hidden matrix's gradients.

    At INIT the hidden matrices move from the optimizers of the run to a `pytorch_optimizer.SOAP`, the new first
    optimizer, and keep the learning rate and the weight decay of their groups. The other parameters stay.
    `engine.explain()` prints which parameter went where, and why.

    **Events** INIT, FIT_START. **Reads** `state.model`. **Writes** `state.optimizers`. **Cost** eight matrix products
    per matrix and step, and a QR decomposition for each side of a matrix every `precondition_frequency` steps,
    independent of the batch; two square matrices for each side, and two buffers per weight as AdamW has. The first step
    only measures: it moves no hidden matrix. **Microbatches** are not exactly one batch:
    rounding decides the basis of directions without gradients, in which later gradients are normalized. Ranks compute
    the same. **Compilation** static: the graphs of the model do not change. **When not to use it** with models that are
    sharded over ranks (a ValueError), with weights in half precision, or with an optimizer like SGD, whose learning
    rates do not transfer (pass `lr`).

    Args:
        lr: Learning rate of the matrices. None: that of their parameter groups, which must be one for AdamW.
        weight_decay: Decoupled weight decay of the matrices. None: that of their groups.
        betas: Decay of the running means of the gradient, and of its squares in the eigenbasis.
        shampoo_beta: Decay of the running means of `G G^T` and `G^T G`. None: the second of `betas`.
        precondition_frequency: Steps between two changes of the eigenbasis.
        eps: Added to the root of the squares.
        max_size: Matrices with a longer side stay with the other optimizer.
        include: Regular expressions; parameters whose name contains a match are hidden matrices.
        exclude: Regular expressions; parameters whose name contains a match are none.

    Attributes:
        split: Which parameter went where; None before INIT.

    Raises:
        TypeError: An argument has another type.
        ValueError: An argument is out of range; at INIT, if an optimizer cannot lose parameters; at FIT_START, if the
            model is sharded, or there are schedulers, but none of them changes the learning rate of the matrices.

    Warns:
        NoEffectWarning: The optimizers have no hidden matrix of the model.

    Example:
        >>> SOAP(precondition_frequency=1).betas
        (0.95, 0.95)

    Source: Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", arXiv:2409.11321, algorithm 3. The
        optimizer is that of https://github.com/kozistr/pytorch_optimizer.
    Differs: hidden matrices only. The paper has the identity in place of the eigenbasis of a side that is too long.
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
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float | None = None,
        precondition_frequency: int = 10,
        eps: float = 1e-8,
        max_size: int = 8192,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
    ) -> None:
        check_finite(least=0, eps=eps)
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if value is not None:
                check_finite(least=0, **{name: value})
        pair: Any = betas  # whatever the caller passes
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(f"`betas` must be two numbers, got {betas!r}. Use (0.95, 0.95).")
        for name, beta in (("betas", betas[0]), ("betas", betas[1]), ("shampoo_beta", shampoo_beta)):
            if beta is not None:
                check_finite("It is the decay of a running mean.", **{name: beta}, least=0, most=0.99999)
        check_integers("Use 10.", precondition_frequency=precondition_frequency, least=1)
        check_integers("Use 8192.", max_size=max_size, least=1)
        check_patterns(include=include, exclude=exclude)
        self.lr, self.weight_decay, self.eps = plain_number(lr), plain_number(weight_decay), plain_number(eps)
        self.betas, self.shampoo_beta = (plain_number(betas[0]), plain_number(betas[1])), plain_number(shampoo_beta)
        self.precondition_frequency, self.max_size = plain_number(precondition_frequency), plain_number(max_size)
        self.include, self.exclude = tuple(include), tuple(exclude)
        self.split: HiddenMatrices | None = None

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Divide the parameters of the optimizers, unless one is a SOAP already; check the model and the schedulers."""
        from pytorch_optimizer import SOAP as SOAPOptimizer  # imports as much as torch does

        optimizers = [getattr(optimizer, "base_optimizer", optimizer) for optimizer in state.optimizers]
        given = [optimizer for optimizer in optimizers if isinstance(optimizer, SOAPOptimizer)]
        if event is Event.FIT_START:
            params = [p for optimizer in given for group in optimizer.param_groups for p in group["params"]]
            if any(hasattr(parameter, "placements") for parameter in params):
                raise ValueError(
                    "`SOAP` must have whole matrices, but the model is sharded: the optimizer of `pytorch-optimizer` "
                    "makes its statistics of each matrix with plain tensors. Train with DDP, or use `Muon`."
                )
            if self.split is not None and given:
                check_schedulers_of_matrices(state.schedulers, SOAPOptimizer, "SOAP")
            return
        if given:
            return
        self.split = _divided(state.model, self.include, self.exclude, self.max_size)
        taken = take_hidden_matrices(self.split, state.optimizers, "SOAP", self.lr, self.weight_decay)
        found = {name for names, _ in taken for name in names}
        self.split = self.split.without([name for name in self.split.matrices if name not in found], "in no optimizer")
        if not taken:
            warn_no_effect(
                "`SOAP` changed nothing: the optimizers have no hidden matrix of the model. Its parameters are\n"
                f"{self.split}"
            )
            return
        # A step of the library multiplies the rate in place, which would change a tensor.
        groups = [
            {"params": [self.split.matrices[name].parameter for name in names], **options, "lr": float(options["lr"])}
            for names, options in taken
        ]
        soap = SOAPOptimizer(
            groups,
            betas=self.betas,
            shampoo_beta=self.shampoo_beta,
            precondition_frequency=self.precondition_frequency,
            max_precondition_dim=self.max_size,
            eps=self.eps,
        )
        rest = [o for o in state.optimizers if any(group["params"] for group in o.param_groups)]
        state.optimizers = [soap, *rest]
        logger.log_hyperparameters({"soap/num_matrices": len(found)})

    def explain(self) -> str:
        """Return which parameter went where, and why; "" before INIT."""
        return "" if self.split is None else str(self.split)


def _divided(model: nn.Module, include: Sequence[str], exclude: Sequence[str], max_size: int) -> HiddenMatrices:
    split = find_hidden_matrices(model, include, exclude)
    large = [name for name, matrix in split.matrices.items() if max(matrix.parameter.shape) > max_size]
    return split.without(large, f"a side above {max_size}")
