"""Layers of two factors. Images are (N, C, H, W) or (C, H, W)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from composer.algorithms.factorize.factorize_core import (
    LowRankSolution,
    clean_rank,
    factorize_conv2d,
    factorize_matrix,
    wide,
)

Size = int | tuple[int, int]


def factorizing_could_speedup(module: nn.Module, latent_size: int | float) -> bool:
    """Return True if two factors with `latent_size` channels or features between them need fewer multiplications.

    Args:
        module: A layer. The result is False unless it is a `Conv2d` without groups, a `Linear` or a factorized layer.
        latent_size: A number; below 1, a fraction of the smaller of the two sizes of the layer.

    Example:
        >>> [factorizing_could_speedup(nn.Linear(8, 8), n) for n in (3, 4)]
        [True, False]
    """
    if isinstance(module, _FactorizedModule):
        return module.should_factorize(latent_size)
    if isinstance(module, nn.Conv2d):
        if module.groups > 1:
            return False
        latent = clean_rank(latent_size, min(module.in_channels, module.out_channels))
        most = FactorizedConv2d.max_allowed_latent_features(
            module.in_channels,
            module.out_channels,
            module.kernel_size,  # type: ignore[arg-type]  # torch types pairs as tuples of any length
        )
        return latent <= most
    if isinstance(module, nn.Linear):
        latent = clean_rank(latent_size, min(module.in_features, module.out_features))
        return latent <= FactorizedLinear.max_allowed_latent_channels(module.in_features, module.out_features)
    return False


class _FactorizedModule(nn.Module, ABC):
    """Two layers in sequence that replace one of larger rank.

    Attributes:
        module0: The first factor, without a bias.
        module1: The second factor.
        latent_size: The number of channels or features between them; the rank.
    """

    module0: nn.Module
    module1: nn.Module

    def __init__(self, in_size: int, out_size: int, latent_size: int | float) -> None:
        super().__init__()
        self.in_size, self.out_size = in_size, out_size
        self.latent_size = clean_rank(latent_size, min(in_size, out_size))
        self._has_new_bias = False  # the replaced layer has none

    def _check_latent_size(self, most: int) -> None:
        if self.latent_size > most:
            raise ValueError(
                f"The latent size must be at most {most} to save multiplications between {self.in_size} and "
                f"{self.out_size}, got {self.latent_size}. Do not factorize the layer if this is too small."
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply both factors."""
        output: torch.Tensor = self.module1(self.module0(input))
        return output

    def composer_plain_state(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the product and the bias: for `composer.export.plain_state_dict`.

        Raises:
            ValueError: The factors have a bias, and the layer that they replaced had none.
        """
        if self._has_new_bias:
            raise ValueError("its factors have a bias, and the layer that they replaced has none")
        return {name: value.detach() for name in ("weight", "bias") if (value := getattr(self, name)) is not None}

    def reset_parameters(self) -> None:
        """Initialize the weights again."""
        for module in (self.module0, self.module1):
            module.reset_parameters()  # type: ignore[operator]

    def should_factorize(self, proposed_rank: int | float) -> bool:
        """Return True if a rank is below the current one."""
        return self._clean(proposed_rank) < self.latent_size

    def set_rank(self, input: torch.Tensor, rank: int | float) -> None:
        """Lower the rank such that the outputs for given inputs change as little as possible.

        The factors get new parameters, which must be passed to the optimizer; see
        `composer.utils.module_surgery.update_params_in_optimizer`.

        Args:
            input: A large, representative sample of the inputs of this layer.
            rank: The new latent size; below 1, a fraction of the smaller of the two sizes of the layer.

        Raises:
            ValueError: The rank is above the current one.
        """
        rank = self._clean(rank)
        if rank > self.latent_size:
            raise ValueError(
                f"`rank` must be at most the current one, {self.latent_size}, got {rank}. It can only be lowered."
            )
        if rank < self.latent_size:
            self.apply_solution(self.solution_for_rank(input, rank))

    @abstractmethod
    def solution_for_rank(self, input: torch.Tensor, rank: int) -> LowRankSolution:
        """Return the factors of a lower rank that change the outputs for given inputs least."""

    @abstractmethod
    def apply_solution(self, solution: LowRankSolution) -> None:
        """Replace the factors by those of a solution."""

    def _clean(self, rank: int | float) -> int:
        return clean_rank(rank, min(self.in_size, self.out_size))

    def _set_factors(self, solution: LowRankSolution, Wa: torch.Tensor, Wb: torch.Tensor) -> None:
        pairs = [(self.module0, "weight", Wa), (self.module1, "weight", Wb), (self.module1, "bias", solution.bias)]
        for module, name, value in pairs:
            old = getattr(module, name)
            if old is not None and value is not None:
                parameter = nn.Parameter(value.to(old).contiguous(), requires_grad=old.requires_grad)
                setattr(module, name, parameter)
        self.latent_size = solution.rank


class FactorizedConv2d(_FactorizedModule):
    """A `torch.nn.Conv2d` split into one with fewer channels and a 1 by 1 convolution, which has a bias.

    Args:
        in_channels: See `torch.nn.Conv2d`.
        out_channels: See `torch.nn.Conv2d`.
        kernel_size: See `torch.nn.Conv2d`.
        latent_channels: Channels between the two; below 1, a fraction of the smaller of the other two numbers.
        **kwargs: Other arguments of `torch.nn.Conv2d`, such as `stride`, for the first convolution.

    Raises:
        ValueError: `latent_channels` is too large to save multiplications.
        NotImplementedError: `groups` is not 1.

    Example:
        >>> layer = FactorizedConv2d(64, 64, 3, padding=1)
        >>> layer.latent_channels, layer(torch.zeros(1, 64, 8, 8)).shape
        (16, torch.Size([1, 64, 8, 8]))

    Source: Zhang et al., arXiv:1505.06798, section 3.1.
    Differs: the weights are initialized, not computed from a trained layer.
    """

    module0: nn.Conv2d
    module1: nn.Conv2d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        latent_channels: int | float = 0.25,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, latent_channels)
        self.in_channels, self.out_channels = in_channels, out_channels
        if kwargs.get("groups", 1) > 1:
            raise NotImplementedError(f"`groups` must be 1, got {kwargs['groups']!r}. Do not factorize such a layer.")
        self._check_latent_size(self.max_allowed_latent_features(in_channels, out_channels, kernel_size))
        place = {name: kwargs[name] for name in ("device", "dtype") if name in kwargs}
        self.module0 = nn.Conv2d(in_channels, self.latent_size, kernel_size, bias=False, **kwargs)
        self.module1 = nn.Conv2d(self.latent_size, out_channels, kernel_size=1, bias=True, **place)

    @property
    def latent_channels(self) -> int:
        """Channels between the two convolutions."""
        return self.latent_size

    @property
    def weight(self) -> torch.Tensor:
        """The product, shape (out, in, h, w), for code that reads the weight of a convolution or its device."""
        return torch.einsum("ok,kihw->oihw", self.module1.weight[:, :, 0, 0], self.module0.weight)

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias of the second convolution."""
        return self.module1.bias

    @staticmethod
    def max_allowed_latent_features(in_channels: int, out_channels: int, kernel_size: Size) -> int:
        """Return the largest number of channels between the two convolutions that saves multiplications."""
        height, width = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        return _most_latent(in_channels * height * width, out_channels)

    @staticmethod
    def from_conv2d(module: nn.Conv2d, module_ix: int = -1, **kwargs: Any) -> FactorizedConv2d:
        """Return the replacement of a convolution, newly initialized.

        Args:
            module: The layer to replace. The replacement has the same shape, dtype and device.
            module_ix: Its index among the replaced layers; unused.
            **kwargs: Arguments of `FactorizedConv2d`, such as `latent_channels`.
        """
        options: dict[str, Any] = {
            name: getattr(module, name) for name in ("stride", "padding", "dilation", "groups", "padding_mode")
        }
        options |= {"device": module.weight.device, "dtype": module.weight.dtype, **kwargs}
        kernel: Any = module.kernel_size
        new = FactorizedConv2d(module.in_channels, module.out_channels, kernel, **options)
        new._has_new_bias = module.bias is None
        return new

    def solution_for_rank(self, input: torch.Tensor, rank: int) -> LowRankSolution:
        """Return the solution of `factorize_conv2d`."""
        first, second = self.module0, self.module1
        images = _padded(input if input.dim() == 4 else input[None], first)
        options: dict[str, Any] = {"stride": first.stride, "dilation": first.dilation}
        return factorize_conv2d(images, first.weight, second.weight, rank, biasB=second.bias, **options)

    def apply_solution(self, solution: LowRankSolution) -> None:
        """Set the filters, of shapes (rank, in, h, w) and (out, rank, 1, 1)."""
        assert solution.Wa is not None
        assert solution.Wb is not None
        self._set_factors(solution, solution.Wa, solution.Wb)
        self.module0.out_channels = self.module1.in_channels = solution.rank


class FactorizedLinear(_FactorizedModule):
    """A `torch.nn.Linear` split into two.

    Args:
        in_features: See `torch.nn.Linear`.
        out_features: See `torch.nn.Linear`.
        bias: True if the second layer has a bias.
        latent_features: Features between the two; below 1, a fraction of the smaller of the other two numbers.
        **kwargs: `device` and `dtype`.

    Raises:
        ValueError: `latent_features` is too large to save multiplications.

    Example:
        >>> layer = FactorizedLinear(64, 48)
        >>> layer.latent_features, layer(torch.zeros(1, 64)).shape
        (12, torch.Size([1, 48]))

    Source: Denton et al., "Exploiting Linear Structure Within Convolutional Networks for Efficient Evaluation",
        arXiv:1404.0736: matrices as products of thinner ones.
    Differs: the weights are initialized, not computed from a trained layer.
    """

    module0: nn.Linear
    module1: nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        latent_features: int | float = 0.25,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, latent_features)
        self.in_features, self.out_features = in_features, out_features
        self._check_latent_size(self.max_allowed_latent_channels(in_features, out_features))
        self.module0 = nn.Linear(in_features, self.latent_size, bias=False, **kwargs)
        self.module1 = nn.Linear(self.latent_size, out_features, bias=bias, **kwargs)

    @property
    def latent_features(self) -> int:
        """Features between the two layers."""
        return self.latent_size

    @property
    def weight(self) -> torch.Tensor:
        """The product, of shape (out, in), for code that reads the weight of a linear layer instead of calling it."""
        return self.module1.weight @ self.module0.weight

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias of the second layer."""
        return self.module1.bias

    @staticmethod
    def max_allowed_latent_channels(in_features: int, out_features: int) -> int:
        """Return the largest number of features between the two layers that saves multiplications."""
        return _most_latent(in_features, out_features)

    @staticmethod
    def from_linear(module: nn.Linear, module_ix: int = -1, **kwargs: Any) -> FactorizedLinear:
        """Return the replacement of a linear layer, newly initialized.

        Args:
            module: The layer to replace. The replacement has the same shape, dtype and device.
            module_ix: Its index among the replaced layers; unused.
            **kwargs: Arguments of `FactorizedLinear`, such as `latent_features`.
        """
        options: dict[str, Any] = {
            "bias": module.bias is not None,
            "device": module.weight.device,
            "dtype": module.weight.dtype,
            **kwargs,
        }
        return FactorizedLinear(module.in_features, module.out_features, **options)

    @torch.no_grad()
    def solution_for_rank(self, input: torch.Tensor, rank: int) -> LowRankSolution:
        """Return the solution of `factorize_matrix`."""
        rows = input.reshape(-1, self.in_size)
        first, second = wide(self.module0.weight.T), wide(self.module1.weight.T)
        outputs = wide(rows) @ first @ second + (0 if self.bias is None else self.bias)
        return factorize_matrix(rows, outputs, first, second, self.bias, rank)

    def apply_solution(self, solution: LowRankSolution) -> None:
        """Set the matrices, of shapes (in, rank) and (rank, out)."""
        assert solution.Wa is not None
        assert solution.Wb is not None
        self._set_factors(solution, solution.Wa.T, solution.Wb.T)
        self.module0.out_features = self.module1.in_features = solution.rank


def _most_latent(fan_in: int, out: int) -> int:
    """Return the largest r with r * (fan_in + out) < fan_in * out."""
    return (fan_in * out - 1) // (fan_in + out)


def _padded(images: torch.Tensor, conv: nn.Conv2d) -> torch.Tensor:
    """Pad images like a convolution does."""
    if conv.padding == "valid":
        return images
    sides: list[int] = []
    for i in (1, 0):  # `F.pad` takes the last dimension first
        if conv.padding == "same":
            total = conv.dilation[i] * (conv.kernel_size[i] - 1)
            sides += [total // 2, total - total // 2]
        else:
            sides += [int(conv.padding[i])] * 2
    return F.pad(images, sides, mode="constant" if conv.padding_mode == "zeros" else conv.padding_mode)
