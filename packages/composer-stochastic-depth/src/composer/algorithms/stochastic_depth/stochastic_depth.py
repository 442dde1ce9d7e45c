"""The function that makes blocks stochastic, then the algorithm. The blocks are in `stochastic_layers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torchvision.models.resnet import Bottleneck

from composer.algorithms.stochastic_depth.stochastic_layers import (
    can_be_stochastic,
    check,
    make_residual_block_stochastic,
    make_resnet_bottleneck_stochastic,
    rate_of,
)
from composer.algorithms.warnings import warn_no_effect
from composer.core import REPLACES_BLOCKS, Algorithm, Event, Placement, Time, TimeUnit
from composer.utils import check_finite, module_surgery, plain_number

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

_STOCHASTIC_LAYER_MAPPING = {"ResNetBottleneck": (Bottleneck, make_resnet_bottleneck_stochastic)}


Target = str | type[nn.Module] | Callable[[nn.Module], bool]


def apply_stochastic_depth(
    model: nn.Module,
    target_layer_name: Target,
    stochastic_method: str = "block",
    drop_rate: float = 0.2,
    drop_distribution: str = "linear",
) -> None:
    """Skip blocks of a residual network at random in training. Changes the blocks of a model in place.

    The blocks stay the same objects with the same weights. In evaluation every block is used, and its branch is scaled
    by the probability of not dropping it.

    Args:
        model: The model. A block that is the model itself is not changed.
        target_layer_name: The blocks. "ResNetBottleneck": `torchvision.models.resnet.Bottleneck`, but not a subclass.
            Otherwise a class, such as a `BasicBlock` or `Bottleneck` of torchvision or timm, or a predicate on modules.
            These select residual blocks that compute `act(f(x) + skip(x))` of one input, where `f` ends with a module,
            `skip` is the input or one module, and `act` is one module or nothing.
        stochastic_method: "block": a block is skipped, and not computed, for the whole batch. "sample": the branch of a
            block is computed, and zeroed for some examples.
        drop_rate: The largest probability that a block is dropped, in [0, 1].
        drop_distribution: "linear": block l of L, counted from 1, drops with probability `l / L * drop_rate`.
            "uniform": each drops with `drop_rate`.

    Raises:
        ValueError: A name is unknown, or `drop_rate` is outside [0, 1].
        TypeError: A selected block does not have this form.

    Warns:
        NoEffectWarning: The model has no such block.

    Example:
        >>> model = nn.Sequential(Bottleneck(4, 1), Bottleneck(4, 1))
        >>> apply_stochastic_depth(model, "ResNetBottleneck")
        >>> model[0].drop_rate, model[1].drop_rate
        (tensor(0.1000), tensor(0.2000))

    Source: Huang, Sun, Liu, Sedra, Weinberger, "Deep Networks with Stochastic Depth", arXiv:1603.09382, section 3.
    Differs: `drop_rate` is 1 - p_L of the paper; dropping by example is an addition.
    """
    _validate(target_layer_name, stochastic_method, drop_rate, drop_distribution)
    if not _make_stochastic(model, target_layer_name, stochastic_method, drop_rate, drop_distribution):
        warn_no_effect(f"`apply_stochastic_depth` had no effect: the model has no {_name_of(target_layer_name)}.")


def _make_stochastic(
    model: nn.Module, target_layer_name: Target, method: str, drop_rate: float, distribution: str
) -> list[nn.Module]:
    """Make the blocks of a model stochastic; return them in the order of their drop rates."""
    is_target = _selector(target_layer_name)
    count = sum(is_target(module) for module in model.modules() if module is not model)
    blocks: list[nn.Module] = []

    def replace(module: nn.Module, index: int) -> nn.Module | None:
        if not is_target(module):
            return None
        make = make_resnet_bottleneck_stochastic if can_be_stochastic(module) else make_residual_block_stochastic
        block: nn.Module = make(module, len(blocks), count, drop_rate, distribution, method)
        blocks.append(block)
        return block

    module_surgery.replace_module_classes(model, {nn.Module: replace})
    return blocks


def _selector(target: Target) -> Callable[[nn.Module], bool]:
    if isinstance(target, str):
        return can_be_stochastic
    if isinstance(target, type):
        return lambda module: isinstance(module, target)
    return lambda module: bool(target(module))


def _name_of(target: Target) -> str:
    return target if isinstance(target, str) else f"block of {getattr(target, '__name__', repr(target))}"


class StochasticDepth(Algorithm):
    """Skips blocks of a residual network at random, later blocks more often.

    At INIT the blocks are made stochastic; see `apply_stochastic_depth`. With a warmup the drop rates then grow
    linearly: before each batch is loaded, and at BATCH_START, they are set to `min(elapsed / drop_warmup, 1)` of their
    final values. Each microbatch draws separately, so microbatches do not equal one batch.

    **Events** INIT; BEFORE_DATALOADER and BATCH_START with a warmup. **Reads** the elapsed time. **Writes** blocks of
    `state.model`. **Cost** "block" saves the computation of skipped blocks, on average half of `drop_rate` of them with
    the linear distribution; "sample" adds a multiplication per block. With "block", `DistributedDataParallel` must find
    unused parameters, because ranks skip different blocks. **Compilation** "sample" is static; with "block"
    each block is a graph of its own in training, as the host decides whether it runs. Blocks other than torchvision's
    `Bottleneck` cause a graph break with both methods, and cannot be scripted.

    **Logs** `stochastic_depth/num_stochastic_layers` once, and with a warmup `stochastic_depth/drop_rate` per batch.

    Args:
        target_layer_name: The blocks: "ResNetBottleneck", a class, or a predicate on modules; see
            `apply_stochastic_depth`. The algorithm can be restored from a checkpoint only if this is a string.
        stochastic_method: "block" or "sample".
        drop_rate: The largest probability that a block is dropped.
        drop_distribution: "linear" or "uniform".
        drop_warmup: The time over which the rates grow from 0; a number is a fraction of the run. Only for "block".

    Attributes:
        num_stochastic_layers: The number of stochastic blocks; 0 before INIT.

    Raises:
        ValueError: A name is unknown, a value is out of range, or there is a `drop_warmup` with "sample".

    Example:
        >>> StochasticDepth("ResNetBottleneck", drop_warmup="10ep").drop_warmup
        Time(10, TimeUnit.EPOCH)

    Source: Huang, Sun, Liu, Sedra, Weinberger, "Deep Networks with Stochastic Depth", arXiv:1603.09382, section 3.
    Differs: `drop_rate` is 1 - p_L of the paper; dropping by example and the warmup are additions.
    """

    # Other algorithms may run the model between BEFORE_DATALOADER and BATCH_START; some loops only run BATCH_START.
    events = frozenset({Event.INIT, Event.BEFORE_DATALOADER, Event.BATCH_START})
    placement = Placement(provides={REPLACES_BLOCKS})

    def __init__(
        self,
        target_layer_name: Target,
        stochastic_method: str = "block",
        drop_rate: float = 0.2,
        drop_distribution: str = "linear",
        drop_warmup: float | Time[Any] | str = 0.0,
    ) -> None:
        drop_rate, drop_warmup = plain_number(drop_rate), plain_number(drop_warmup)
        if isinstance(drop_warmup, (int, float)):
            check_finite(drop_warmup=drop_warmup)
        _validate(target_layer_name, stochastic_method, drop_rate, drop_distribution)
        self.target_layer_name = target_layer_name
        self.stochastic_method = stochastic_method
        self.drop_rate = drop_rate
        self.drop_distribution = drop_distribution
        self.drop_warmup: Time[Any] = (
            Time(drop_warmup, TimeUnit.DURATION)
            if isinstance(drop_warmup, (int, float))
            else Time.from_input(drop_warmup)
        )
        if self.drop_warmup.value < 0:
            raise ValueError(f"`drop_warmup` must not be negative, got {drop_warmup!r}. Use 0 for no warmup.")
        if self.drop_warmup.value and stochastic_method == "sample":
            raise ValueError(f"`drop_warmup` must be 0 with 'sample', got {drop_warmup!r}. Use 'block' for a warmup.")
        self.num_stochastic_layers = 0
        self._blocks: list[nn.Module] = []
        self._rate = drop_rate  # the current value of `drop_rate`

    @property
    def find_unused_parameters(self) -> bool:
        """True with "block", because the parameters of skipped blocks get no gradient."""
        return self.stochastic_method == "block"

    @staticmethod
    def required_on_load() -> bool:
        """Return True: a run that was trained with stochastic depth is resumed with it."""
        return True

    def match(self, event: Event, state: State) -> bool:
        """Return True at INIT, and before each batch if there is a warmup."""
        return event is Event.INIT or (event in self.events and self.drop_warmup.value > 0)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Make the blocks stochastic, or update their drop rates."""
        if event is Event.INIT:
            arguments = (self.target_layer_name, self.stochastic_method, self.drop_rate, self.drop_distribution)
            self._blocks, self._rate = _make_stochastic(state.model, *arguments), self.drop_rate
            self.num_stochastic_layers = len(self._blocks)
            if not self._blocks:
                warn_no_effect(f"`StochasticDepth` had no effect: the model has no {_name_of(self.target_layer_name)}.")
            logger.log_metrics({"stochastic_depth/num_stochastic_layers": self.num_stochastic_layers})
            return
        warmup = self.drop_warmup
        is_fraction = warmup.unit is TimeUnit.DURATION
        elapsed: Time[Any] | None = state.get_elapsed_duration() if is_fraction else state.timestamp.get(warmup.unit)
        assert elapsed is not None, "the engine requires `max_duration` at this event"
        self._set_rates(min(float(elapsed.value / warmup.value), 1.0) * self.drop_rate)
        if event is Event.BATCH_START:
            logger.log_metrics({"stochastic_depth/drop_rate": self._rate})

    def _set_rates(self, drop_rate: float) -> None:
        if drop_rate == self._rate:
            return
        self._rate = drop_rate
        for index, block in enumerate(self._blocks):
            rate = rate_of(index, len(self._blocks), drop_rate, self.drop_distribution)
            block.drop_rate = torch.tensor(rate)

    def state_dict(self) -> dict[str, Any]:
        """Return the current drop rate."""
        return {**super().state_dict(), "drop_rate": self._rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the drop rate, which an evaluation before further training uses."""
        self._set_rates(state.get("drop_rate", self._rate))


def _validate(target_layer_name: Target, stochastic_method: str, drop_rate: float, drop_distribution: str) -> None:
    if isinstance(target_layer_name, str) or not callable(target_layer_name):
        known = tuple(_STOCHASTIC_LAYER_MAPPING)
        check("target_layer_name", target_layer_name, known, "a class", "a function of a module")
    check("stochastic_method", stochastic_method, ("block", "sample"))
    rate_of(0, 1, drop_rate, drop_distribution)
