"""Layers that are skipped at random. Images are (N, C, H, W); a branch is what a residual layer adds to its input."""

from __future__ import annotations

import torch
from torch import nn
from torchvision.models.resnet import Bottleneck

__all__ = [
    "BlockStochasticBottleneck",
    "BlockStochasticModule",
    "SampleStochasticBottleneck",
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


def check(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise ValueError unless a name is known."""
    if value not in known:
        raise ValueError(f"`{name}` must be {' or '.join(map(repr, known))}, got {value!r}. Check its spelling.")
