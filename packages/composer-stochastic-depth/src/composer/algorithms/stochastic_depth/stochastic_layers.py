"""Layers that are skipped at random. Images are (N, C, H, W); a branch is what a residual layer adds to its input."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import fx, nn
from torchvision.models.resnet import Bottleneck

from composer.utils import check_finite
from composer.utils.module_surgery import overrides_forward

Function = TypeVar("Function", bound=Callable[..., Any])


def _not_in_graphs(function: Function) -> Function:
    """Keep a function out of the graphs of `torch.compile`; the functions that it calls are still compiled.

    The decision to skip a block is made on the host in each step, so no graph can contain it.
    """
    disable: Any = torch.compiler.disable  # it has no types
    return cast(Function, disable(function, recursive=False))


class BlockStochasticModule(nn.Module):
    """Adds the output of a module to a residual, or skips the module for the whole batch.

    With the drop rate r: in training `main(x) + residual(x)` with probability 1 - r, otherwise `residual(x)`. In
    evaluation `(1 - r) * main(x) + residual(x)`. Draws come from the default CPU generator.

    Args:
        main: The branch.
        residual: The module whose output the branch is added to. None: the identity.
        drop_rate: r.

    Example:
        >>> module = BlockStochasticModule(torch.nn.Identity(), drop_rate=0.5).eval()
        >>> module(torch.tensor([2.0]))
        tensor([3.])

    Source: Huang et al., "Deep Networks with Stochastic Depth", arXiv:1603.09382, section 3.
    Differs: no nonlinearity after the sum.
    """

    def __init__(self, main: nn.Module, residual: nn.Module | None = None, drop_rate: float = 0.2) -> None:
        super().__init__()
        self.main, self.residual = main, residual
        self.drop_rate = torch.tensor(drop_rate)  # the decision is made on the host

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the module, or skip it."""
        if self.training:
            return self._forward_in_training(x)
        shortcut = self._shortcut(x)  # first, as in training: either may change `x` in place
        branch: torch.Tensor = self.main(x)
        return branch * (1 - self.drop_rate) + shortcut

    @_not_in_graphs
    def _forward_in_training(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = self._shortcut(x)
        if bool(torch.rand(()) < self.drop_rate):
            return shortcut
        branch: torch.Tensor = self.main(x)
        return branch + shortcut

    def _shortcut(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.residual is None else cast(torch.Tensor, self.residual(x))


class _StochasticBottleneck(Bottleneck):  # type: ignore[misc]  # torchvision has no types
    """A torchvision `Bottleneck` whose branch is dropped at random.

    Attributes:
        drop_rate: The probability that the branch is dropped; a tensor on the host, whatever the device of the weights.
    """

    def _shortcut(self, x: torch.Tensor) -> torch.Tensor:
        identity: torch.Tensor = x
        if self.downsample is not None:
            identity = self.downsample(x)
        return identity

    def composer_plain_state(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the weights of a `Bottleneck` with the same outputs: for `composer.export.plain_state_dict`."""
        return _scaled(self, "bn3", state)

    def _branch(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        branch: torch.Tensor = self.bn3(self.conv3(out))
        return branch


# Layers whose outputs are linear in their weight and bias.
_SCALABLE = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.GroupNorm,
    nn.LayerNorm,
)


def _scaled(block: nn.Module, name: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of a block, with those of the last layer of its branch times the probability to keep it.

    Raises:
        ValueError: That layer has no weights, or its outputs may not be linear in them.
    """
    last = block.get_submodule(name)
    base = next((kind for kind in _SCALABLE if isinstance(last, kind)), None)
    if base is None or overrides_forward(last, base) or f"{name}.weight" not in state:
        raise ValueError(
            f"it scales its branch, which ends with `{name}` ({type(last).__name__}), whose outputs no weights scale"
        )
    keep = 1 - cast(torch.Tensor, block.drop_rate)
    scaled = {key: state[key] * keep for key in (f"{name}.weight", f"{name}.bias") if key in state}
    return state | scaled


class BlockStochasticBottleneck(_StochasticBottleneck):
    """A `Bottleneck` whose branch is skipped, without being computed, for the whole batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block, or only its shortcut."""
        if self.training:
            return self._forward_in_training(x)
        output: torch.Tensor = self.relu(self._branch(x) * (1 - self.drop_rate) + self._shortcut(x))
        return output

    @_not_in_graphs
    def _forward_in_training(self, x: torch.Tensor) -> torch.Tensor:
        if not bool(torch.rand(()) < self.drop_rate):
            return self._whole(x)
        # Without a downsampling layer the shortcut is already the output of a ReLU.
        return x if self.downsample is None else self._skipped(x)

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.relu(self._branch(x) + self._shortcut(x))
        return output

    def _skipped(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.relu(self._shortcut(x))
        return output


class SampleStochasticBottleneck(_StochasticBottleneck):
    """A `Bottleneck` whose branch is dropped for some examples of the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block, without the branch for some examples."""
        branch = self._branch(x)
        if self.training:
            # In float32 whatever the dtype of the branch: bfloat16 is too coarse for small rates.
            kept = torch.rand([branch.shape[0], 1, 1, 1], device=branch.device, dtype=torch.float32) >= self.drop_rate
            total = torch.addcmul(self._shortcut(x), branch, kept.to(branch.dtype))
        else:
            total = branch * (1 - self.drop_rate) + self._shortcut(x)
        output: torch.Tensor = self.relu(total)
        return output


_METHODS = {"block": BlockStochasticBottleneck, "sample": SampleStochasticBottleneck}
_DISTRIBUTIONS = ("linear", "uniform")


def make_resnet_bottleneck_stochastic(
    module: Bottleneck,
    module_index: int,
    module_count: int,
    drop_rate: float,
    drop_distribution: str,
    stochastic_method: str = "block",
) -> Bottleneck:
    """Make a block stochastic, in place: it stays the same object with the same weights, and gets another class.

    Args:
        module: A torchvision `Bottleneck`.
        module_index: The index of the block, from 0.
        module_count: The number of blocks.
        drop_rate: The largest drop rate.
        drop_distribution: "linear": the block drops with `(module_index + 1) / module_count * drop_rate`. "uniform":
            with `drop_rate`.
        stochastic_method: "block" or "sample"; see `apply_stochastic_depth`.

    Returns:
        The block.

    Raises:
        ValueError: An argument is out of range or unknown.

    Example:
        >>> block = make_resnet_bottleneck_stochastic(Bottleneck(4, 1), 1, 4, 0.2, "linear")
        >>> block.drop_rate
        tensor(0.1000)
    """
    check("stochastic_method", stochastic_method, tuple(_METHODS))
    rate = rate_of(module_index, module_count, drop_rate, drop_distribution)
    module.__class__ = _METHODS[stochastic_method]
    assert isinstance(module, _StochasticBottleneck)
    module.drop_rate = torch.tensor(rate)
    return module


def can_be_stochastic(module: nn.Module) -> bool:
    """Return True for the exact class of torchvision: subclasses may do something else between the layers."""
    return type(module) is Bottleneck or isinstance(module, _StochasticBottleneck)


def rate_of(index: int, count: int, drop_rate: float, drop_distribution: str) -> float:
    """Return the drop rate of a block."""
    check("drop_distribution", drop_distribution, _DISTRIBUTIONS)
    check_finite("It is a probability.", drop_rate=drop_rate, least=0, most=1)
    return (index + 1) / count * drop_rate if drop_distribution == "linear" else drop_rate


def check(name: str, value: Any, known: tuple[str, ...], *others: str) -> None:
    """Raise ValueError unless `value` is one of the known names."""
    if value not in known:
        allowed = " or ".join([*map(repr, known), *others])
        raise ValueError(f"`{name}` must be {allowed}, got {value!r}. Check its spelling.")


def make_residual_block_stochastic(
    module: nn.Module,
    module_index: int,
    module_count: int,
    drop_rate: float,
    drop_distribution: str,
    stochastic_method: str = "block",
) -> nn.Module:
    """Make any block that computes `act(f(x) + skip(x))` stochastic, in place: it keeps its class and its weights.

    The original `forward` runs whenever the branch f is computed; the output of the last module of f is scaled.

    Args:
        module: The block: f ends with a module, `skip` is the input or one module, `act` one module or nothing.
        module_index: The index of the block, from 0.
        module_count: The number of blocks.
        drop_rate: The largest drop rate.
        drop_distribution: "linear" or "uniform"; see `make_resnet_bottleneck_stochastic`.
        stochastic_method: "block" or "sample".

    Returns:
        The block.

    Raises:
        ValueError: An argument is out of range or unknown.
        TypeError: The block does not have this form.
    """
    check("stochastic_method", stochastic_method, tuple(_METHODS))
    rate = rate_of(module_index, module_count, drop_rate, drop_distribution)
    forward = module.__dict__.get("forward")
    if isinstance(forward, functools.partial) and forward.func is _forward_stochastic:
        parts = forward.args[1]  # the block is stochastic already
    elif hasattr(module, "drop_rate"):
        raise _block_error(module, "already has an attribute `drop_rate`")
    else:
        parts = _find_parts(module)
    module.forward = functools.partial(_forward_stochastic, module, parts, stochastic_method)
    module.composer_plain_state = functools.partial(_scaled, module, parts.last)  # type: ignore[assignment]
    module.drop_rate = torch.tensor(rate)
    return module


class _Parts(NamedTuple):
    """Names of the modules in `act(last(...) + skip(x))`; None if there is no such module."""

    last: str
    skip: str | None
    act: str | None


def _forward_stochastic(block: nn.Module, parts: _Parts, method: str, x: torch.Tensor) -> torch.Tensor:
    if block.training and method == "block":
        return _forward_or_skip(block, parts, x)
    forward = functools.partial(type(block).forward, block)
    # Looked up in each pass, because the module may have been replaced.
    hook = block.get_submodule(parts.last).register_forward_hook(functools.partial(_scale_branch, block))
    try:
        return cast(torch.Tensor, forward(x))
    finally:
        hook.remove()


@_not_in_graphs
def _forward_or_skip(block: nn.Module, parts: _Parts, x: torch.Tensor) -> torch.Tensor:
    if not bool(torch.rand(()) < cast(torch.Tensor, block.drop_rate)):
        return cast(torch.Tensor, type(block).forward(block, x))
    if parts.act is None:
        return x if parts.skip is None else cast(torch.Tensor, block.get_submodule(parts.skip)(x))
    # The activation may be in place, so copy the input.
    shortcut = x.clone() if parts.skip is None else block.get_submodule(parts.skip)(x)
    return cast(torch.Tensor, block.get_submodule(parts.act)(shortcut))


def _scale_branch(block: nn.Module, module: nn.Module, args: Any, branch: torch.Tensor) -> torch.Tensor:
    rate = cast(torch.Tensor, block.drop_rate)
    if not block.training:
        return branch * (1 - rate)
    shape = [branch.shape[0]] + [1] * (branch.dim() - 1)
    kept = torch.rand(shape, device=branch.device, dtype=torch.float32) >= rate
    return branch * kept.to(branch.dtype)


class _OneLevel(fx.Tracer):
    """Tracer that does not enter the children of a block."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _find_parts(block: nn.Module) -> _Parts:
    """Find the parts of a block in a trace of its forward pass."""
    try:
        graph = _OneLevel().trace(block)
    except Exception as error:
        raise _block_error(block, f"could not be traced ({type(error).__name__}: {error})") from error
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.nodes if node.op == "output").args[0]
    if len(inputs) != 1 or not isinstance(output, fx.Node):
        raise _block_error(block, "has more than one input or output")
    act = None
    if output.op == "call_module" and list(output.all_input_nodes) == list(output.args):
        act, output = str(output.target), output.args[0]
    if not _is_sum(output):
        raise _block_error(block, "does not end with a sum of two tensors, or one module after it")
    skips = [node for node in output.all_input_nodes if node is inputs[0]]
    skips = skips or [
        node
        for node in output.all_input_nodes
        if node.op == "call_module" and list(node.args) == inputs and not node.kwargs
    ]
    branches = [node for node in output.all_input_nodes if node not in skips]
    if len(branches) != 1 or len(skips) != 1:
        raise _block_error(block, "does not add a branch to its input, or to the output of one module")
    (branch,), (skip,) = branches, skips
    calls = [node for node in graph.nodes if node.op == "call_module" and node.target == branch.target]
    if calls != [branch] or len(branch.users) != 1:
        raise _block_error(block, "has a branch that does not end with a separate module")
    return _Parts(str(branch.target), None if skip is inputs[0] else str(skip.target), act)


def _is_sum(node: Any) -> bool:
    if not isinstance(node, fx.Node) or len(node.args) != 2 or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    return node.target in (operator.add, operator.iadd, torch.add, "add", "add_")


def _block_error(block: nn.Module, reason: str) -> TypeError:
    return TypeError(
        f"`target_layer_name` must select residual blocks that compute `act(f(x) + skip(x))`, got a "
        f"{type(block).__name__}, which {reason}. Select fewer modules, or build the block from a "
        f"`BlockStochasticModule(main, residual)` without the algorithm."
    )
