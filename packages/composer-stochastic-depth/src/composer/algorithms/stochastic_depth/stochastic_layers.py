"""Layers that are skipped at random. Images are (N, C, H, W); a branch is what a residual layer adds to its input."""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple, cast

import torch
from torch import fx, nn
from torchvision.models.resnet import Bottleneck

__all__ = [
    "BlockStochasticBottleneck",
    "BlockStochasticModule",
    "SampleStochasticBottleneck",
    "make_residual_block_stochastic",
    "make_resnet_bottleneck_stochastic",
]


class BlockStochasticModule(nn.Module):
    """Adds the output of a module to a residual, or skips the module for the whole batch.

    With the drop rate r: in training `main(x) + residual(x)` with probability 1 - r, otherwise `residual(x)`. In
    evaluation `(1 - r) * main(x) + residual(x)`. The draw is one of torch's CPU generator.

    Args:
        main: Computes the branch.
        residual: Computes what the branch is added to. None: the input.
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
        self.drop_rate = torch.tensor(drop_rate)  # on the host, where the draw is

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the module, or skip it."""
        residual = x
        if self.residual is not None:
            residual = self.residual(x)
        if self.training:
            if bool(torch.rand(()) < self.drop_rate):
                return residual
            branch: torch.Tensor = self.main(x)
            return branch + residual
        branch = self.main(x)
        return branch * (1 - self.drop_rate) + residual


class _StochasticBottleneck(Bottleneck):  # type: ignore[misc]  # torchvision has no types
    """A torchvision `Bottleneck` that was made stochastic.

    Attributes:
        drop_rate: The probability that the branch is dropped; a tensor on the host, whatever the device of the weights.
    """

    def _shortcut(self, x: torch.Tensor) -> torch.Tensor:
        identity: torch.Tensor = x
        if self.downsample is not None:
            identity = self.downsample(x)
        return identity

    def _branch(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        branch: torch.Tensor = self.bn3(self.conv3(out))
        return branch


class BlockStochasticBottleneck(_StochasticBottleneck):
    """A `Bottleneck` whose branch is skipped, not computed, for the whole batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block, or only its shortcut."""
        if self.training:
            if bool(torch.rand(()) < self.drop_rate):
                if self.downsample is None:
                    return x  # a ReLU's output already
                skipped: torch.Tensor = self.relu(self._shortcut(x))
                return skipped
            output: torch.Tensor = self.relu(self._branch(x) + self._shortcut(x))
            return output
        output = self.relu(self._branch(x) * (1 - self.drop_rate) + self._shortcut(x))
        return output


class SampleStochasticBottleneck(_StochasticBottleneck):
    """A `Bottleneck` whose branch is dropped for some examples of the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block, without the branch for some examples."""
        branch = self._branch(x)
        if self.training:
            # In float32 whatever the branch is: bfloat16 has too few numbers for a small rate.
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
        module_index: Its number, from 0.
        module_count: How many there are.
        drop_rate: As `drop_distribution` says.
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
    """Whether a block is torchvision's own: another class may do something else between its layers."""
    return type(module) is Bottleneck or isinstance(module, _StochasticBottleneck)


def rate_of(index: int, count: int, drop_rate: float, drop_distribution: str) -> float:
    """The drop rate of one of `count` blocks."""
    check("drop_distribution", drop_distribution, _DISTRIBUTIONS)
    if not 0 <= drop_rate <= 1:
        raise ValueError(f"`drop_rate` must be in [0, 1], got {drop_rate!r}. It is a probability.")
    return (index + 1) / count * drop_rate if drop_distribution == "linear" else drop_rate


def check(name: str, value: Any, known: tuple[str, ...], *others: str) -> None:
    """Raise ValueError unless a name is known."""
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

    Its own forward pass runs whenever the branch f is computed; the output of the last module of f is scaled.

    Args:
        module: The block: f ends with a module, `skip` is the input or one module, `act` one module or nothing.
        module_index: As in `make_resnet_bottleneck_stochastic`, like all that follow.
        module_count: How many there are.
        drop_rate: As `drop_distribution` says.
        drop_distribution: "linear" or "uniform".
        stochastic_method: "block" or "sample".

    Returns:
        The block.

    Raises:
        ValueError: An argument is out of range or unknown.
        TypeError: The block computes something else.
    """
    check("stochastic_method", stochastic_method, tuple(_METHODS))
    rate = rate_of(module_index, module_count, drop_rate, drop_distribution)
    forward = module.__dict__.get("forward")
    if isinstance(forward, functools.partial) and forward.func is _forward_stochastic:
        parts = forward.args[1]  # made before, with other arguments
    elif hasattr(module, "drop_rate"):
        raise _refusal(module, "has a `drop_rate` of its own")
    else:
        parts = _find_parts(module)
    module.forward = functools.partial(_forward_stochastic, module, parts, stochastic_method)
    module.drop_rate = torch.tensor(rate)
    return module


class _Parts(NamedTuple):
    """The names of the modules in `act(last(...) + skip(x))`; None: there is no such module."""

    last: str
    skip: str | None
    act: str | None


def _forward_stochastic(block: nn.Module, parts: _Parts, method: str, x: torch.Tensor) -> torch.Tensor:
    """The forward pass of a block of any class."""
    forward = functools.partial(type(block).forward, block)
    if block.training and method == "block":
        if not bool(torch.rand(()) < cast(torch.Tensor, block.drop_rate)):
            return cast(torch.Tensor, forward(x))
        if parts.act is None:
            return x if parts.skip is None else cast(torch.Tensor, block.get_submodule(parts.skip)(x))
        # A copy of the input, which the activation may overwrite.
        shortcut = x.clone() if parts.skip is None else block.get_submodule(parts.skip)(x)
        return cast(torch.Tensor, block.get_submodule(parts.act)(shortcut))
    # Looked up in each pass: the module may have been replaced.
    hook = block.get_submodule(parts.last).register_forward_hook(functools.partial(_scale_branch, block))
    try:
        return cast(torch.Tensor, forward(x))
    finally:
        hook.remove()


def _scale_branch(block: nn.Module, module: nn.Module, args: Any, branch: torch.Tensor) -> torch.Tensor:
    rate = cast(torch.Tensor, block.drop_rate)
    if not block.training:
        return branch * (1 - rate)
    shape = [branch.shape[0]] + [1] * (branch.dim() - 1)
    kept = torch.rand(shape, device=branch.device, dtype=torch.float32) >= rate
    return branch * kept.to(branch.dtype)


class _OneLevel(fx.Tracer):
    """Records which children a block calls, not what they do."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _find_parts(block: nn.Module) -> _Parts:
    """Read the parts of a block from a trace of its forward pass."""
    try:
        graph = _OneLevel().trace(block)
    except Exception as error:
        raise _refusal(block, f"could not be traced ({type(error).__name__}: {error})") from error
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.nodes if node.op == "output").args[0]
    if len(inputs) != 1 or not isinstance(output, fx.Node):
        raise _refusal(block, "has more than one input or output")
    act = None
    if output.op == "call_module" and list(output.all_input_nodes) == list(output.args):
        act, output = str(output.target), output.args[0]
    if not _is_sum(output):
        raise _refusal(block, "does not end with a sum of two, or a module behind it")
    skips = [node for node in output.all_input_nodes if node is inputs[0]]
    skips = skips or [node for node in output.all_input_nodes if _is_one_call(node, inputs[0])]
    branches = [node for node in output.all_input_nodes if node not in skips]
    if len(branches) != 1 or len(skips) != 1:
        raise _refusal(block, "does not add a branch to its input, or to one module's output")
    (branch,), (skip,) = branches, skips
    calls = [node for node in graph.nodes if node.op == "call_module" and node.target == branch.target]
    if calls != [branch] or len(branch.users) != 1:
        raise _refusal(block, "has a branch whose last step is not a module of its own")
    return _Parts(str(branch.target), None if skip is inputs[0] else str(skip.target), act)


def _is_sum(node: Any) -> bool:
    if not isinstance(node, fx.Node) or len(node.args) != 2 or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    return node.target in (operator.add, operator.iadd, torch.add, "add", "add_")


def _is_one_call(node: fx.Node, source: fx.Node) -> bool:
    """Return whether a node is one module's output for the input of the block."""
    return bool(node.op == "call_module" and list(node.args) == [source] and not node.kwargs)


def _refusal(block: nn.Module, reason: str) -> TypeError:
    return TypeError(
        f"`target_layer_name` must select residual blocks that compute `act(f(x) + skip(x))`, got a "
        f"{type(block).__name__}, which {reason}. Select fewer modules, or build the block from a "
        f"`BlockStochasticModule(main, residual)` without the algorithm."
    )
