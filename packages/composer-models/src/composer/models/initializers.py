"""Weight initializers, looked up by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from composer.utils.string_enum import StringEnum


class Initializer(StringEnum):
    """Initializers of the layers of a model; each member is for some types of layers.

    - `KAIMING_NORMAL`, `KAIMING_UNIFORM`, `XAVIER_NORMAL`, `XAVIER_UNIFORM`: the weight of `Linear` and `Conv2d`, with
      the defaults of `torch.nn.init`.
    - `BN_UNIFORM`, `BN_ONES`: the weight of `BatchNorm2d`, drawn from U(0, 1) or 1; its bias is 0.
    - `LINEAR_LOG_CONSTANT_BIAS`: the bias of `Linear`, -log(n) for n outputs: a sigmoid per output starts near 1/n.

    Other layers are not changed.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm2d(4))
        >>> for name in ("kaiming_normal", "bn_ones", "linear_log_constant_bias"):
        ...     model = model.apply(Initializer(name).get_initializer())
        >>> model[0].bias
        Parameter containing:
        tensor([-1.3863, -1.3863, -1.3863, -1.3863], requires_grad=True)

    Source: He et al., "Delving Deep into Rectifiers", arXiv:1502.01852, section 2.2 (Kaiming); Glorot and Bengio,
    "Understanding the difficulty of training deep feedforward neural networks", AISTATS 2010, section 4.2.1 (Xavier).
    """

    KAIMING_NORMAL = "kaiming_normal"
    KAIMING_UNIFORM = "kaiming_uniform"
    BN_UNIFORM = "bn_uniform"
    BN_ONES = "bn_ones"
    XAVIER_UNIFORM = "xavier_uniform"
    XAVIER_NORMAL = "xavier_normal"
    LINEAR_LOG_CONSTANT_BIAS = "linear_log_constant_bias"

    def get_initializer(self, *, generator: torch.Generator | None = None) -> Callable[[nn.Module], None]:
        """Return a function that initializes a module in place, for `torch.nn.Module.apply`.

        Args:
            generator: Generator of random values. None: torch's global generator.
        """
        if self is Initializer.LINEAR_LOG_CONSTANT_BIAS:
            return _linear_log_constant_bias
        if self is Initializer.BN_ONES:
            return partial(_batch_norm, fill=nn.init.ones_)
        if self is Initializer.BN_UNIFORM:
            return partial(_batch_norm, fill=partial(nn.init.uniform_, generator=generator))
        return partial(_weight, fill=partial(_WEIGHT_FUNCTIONS[self], generator=generator))


_WEIGHT_FUNCTIONS: dict[Initializer, Callable[..., torch.Tensor]] = {
    Initializer.KAIMING_NORMAL: nn.init.kaiming_normal_,
    Initializer.KAIMING_UNIFORM: nn.init.kaiming_uniform_,
    Initializer.XAVIER_NORMAL: nn.init.xavier_normal_,
    Initializer.XAVIER_UNIFORM: nn.init.xavier_uniform_,
}


def _weight(module: nn.Module, fill: Callable[[torch.Tensor], torch.Tensor]) -> None:
    if isinstance(module, nn.Linear | nn.Conv2d):
        fill(module.weight)


def _batch_norm(module: nn.Module, fill: Callable[[torch.Tensor], torch.Tensor]) -> None:
    if isinstance(module, nn.BatchNorm2d) and module.affine:
        fill(module.weight)
        nn.init.zeros_(module.bias)


def _linear_log_constant_bias(module: nn.Module) -> None:
    # with `bias=False`, the bias is None, although torch's annotations do not say so
    if isinstance(module, nn.Linear) and isinstance(module.bias, nn.Parameter):
        nn.init.constant_(module.bias, -math.log(module.out_features))
