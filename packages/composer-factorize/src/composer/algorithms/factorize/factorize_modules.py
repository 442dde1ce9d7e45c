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

__all__ = ["FactorizedConv2d", "FactorizedLinear", "factorizing_could_speedup"]

Size = int | tuple[int, int]


def factorizing_could_speedup(module: nn.Module, latent_size: int | float) -> bool:
    """Whether two factors with `latent_size` channels or features between them need fewer multiplications.

    Args:
        module: A layer. Anything but a `Conv2d` without groups, a `Linear` or a factorized layer cannot be sped up.
        latent_size: A number, or below 1 a fraction of the smaller of the layer's two sizes.

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
    """Two layers in a row that stand for one of larger rank.

    Attributes:
        module0: The first factor, without a bias.
        module1: The second factor.
        latent_size: What is between them; the rank.
    """

    module0: nn.Module
    module1: nn.Module

    def __init__(self, in_size: int, out_size: int, latent_size: int | float) -> None:
        super().__init__()
        self.in_size, self.out_size = in_size, out_size
        self.latent_size = clean_rank(latent_size, min(in_size, out_size))

    def _check_latent_size(self, most: int) -> None:
        if self.latent_size > most:
            raise ValueError(
                f"The latent size must be at most {most} to save multiplications between {self.in_size} and "
                f"{self.out_size}, got {self.latent_size}. Keep a layer for which that is too small."
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply one factor, then the other."""
        output: torch.Tensor = self.module1(self.module0(input))
        return output

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        for module in (self.module0, self.module1):
            module.reset_parameters()  # type: ignore[operator]

    def should_factorize(self, proposed_rank: int | float) -> bool:
        """Whether a rank is below the present one."""
        return self._clean(proposed_rank) < self.latent_size

    def set_rank(self, input: torch.Tensor, rank: int | float) -> None:
        """Lower the rank, so that the outputs for given inputs change as little as possible.

        The factors get new parameters, of which an optimizer must be told; see
        `composer.utils.module_surgery.update_params_in_optimizer`.

        Args:
            input: Inputs of this layer, many and typical.
            rank: The new latent size, or below 1 a fraction of the smaller of the layer's two sizes.

        Raises:
            ValueError: It is above the present one.
        """
        rank = self._clean(rank)
        if rank > self.latent_size:
            raise ValueError(f"`rank` must be at most the present one, {self.latent_size}, got {rank}.")
        if rank < self.latent_size:
            self.apply_solution(self.solution_for_rank(input, rank))

    @abstractmethod
    def solution_for_rank(self, input: torch.Tensor, rank: int) -> LowRankSolution:
        """The factors of a lower rank that change the outputs for given inputs least."""

    @abstractmethod
    def apply_solution(self, solution: LowRankSolution) -> None:
        """Take over factors."""

    def _clean(self, rank: int | float) -> int:
        return clean_rank(rank, min(self.in_size, self.out_size))

    def _take_over(self, solution: LowRankSolution, Wa: torch.Tensor, Wb: torch.Tensor) -> None:
        pairs = [(self.module0, "weight", Wa), (self.module1, "weight", Wb), (self.module1, "bias", solution.bias)]
        for module, name, value in pairs:
            old = getattr(module, name)
            if old is not None and value is not None:
                parameter = nn.Parameter(value.to(old).contiguous(), requires_grad=old.requires_grad)
                setattr(module, name, parameter)
        self.latent_size = solution.rank


class FactorizedConv2d(_FactorizedModule):
    """A `torch.nn.Conv2d` split into one of fewer channels and a 1 by 1 convolution, which has a bias.

    Args:
        in_channels: As in `torch.nn.Conv2d`.
        out_channels: As in `torch.nn.Conv2d`.
        kernel_size: As in `torch.nn.Conv2d`.
        latent_channels: Channels between the two, or below 1 a fraction of the smaller of the other two.
        **kwargs: Further arguments of `torch.nn.Conv2d`, such as `stride`, for the first of the two.

    Raises:
        ValueError: `latent_channels` is too large to save multiplications.
        NotImplementedError: `groups` other than 1.

    Example:
        >>> layer = FactorizedConv2d(64, 64, 3, padding=1)
        >>> layer.latent_channels, layer(torch.zeros(1, 64, 8, 8)).shape
        (16, torch.Size([1, 64, 8, 8]))

    Source: Zhang et al., arXiv:1505.06798, section 3.1.
    Differs: none in the layers; the weights are drawn, not taken from a trained layer.
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
        if kwargs.get("groups", 1) > 1:
            raise NotImplementedError(f"`groups` must be 1, got {kwargs['groups']!r}. Keep a layer that has groups.")
        self._check_latent_size(self.max_allowed_latent_features(in_channels, out_channels, kernel_size))
        place = {name: kwargs[name] for name in ("device", "dtype") if name in kwargs}
        self.module0 = nn.Conv2d(in_channels, self.latent_size, kernel_size, bias=False, **kwargs)
        self.module1 = nn.Conv2d(self.latent_size, out_channels, kernel_size=1, bias=True, **place)

    @property
    def in_channels(self) -> int:
        """Channels of the input."""
        return self.in_size

    @property
    def out_channels(self) -> int:
        """Channels of the output."""
        return self.out_size

    @property
    def latent_channels(self) -> int:
        """Channels between the two convolutions."""
        return self.latent_size

    @property
    def weight(self) -> torch.Tensor:
        """The product, shape (out, in, h, w), for code that reads the weight of a convolution, or its device."""
        return torch.einsum("ok,kihw->oihw", self.module1.weight[:, :, 0, 0], self.module0.weight)

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias of the second convolution, which is that of both."""
        return self.module1.bias

    @staticmethod
    def max_allowed_latent_features(in_channels: int, out_channels: int, kernel_size: Size) -> int:
        """The most channels between the two convolutions that still save multiplications."""
        height, width = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        return _most_latent(in_channels * height * width, out_channels)

    @staticmethod
    def from_conv2d(module: nn.Conv2d, module_ix: int = -1, **kwargs: Any) -> FactorizedConv2d:
        """Make the replacement of a convolution, newly initialised.

        Args:
            module: The layer to replace, whose shape, dtype and device are kept.
            module_ix: Its number among the layers replaced. The replacement does not depend on it.
            **kwargs: Arguments of `FactorizedConv2d`, such as `latent_channels`.
        """
        options: dict[str, Any] = {
            name: getattr(module, name) for name in ("stride", "padding", "dilation", "groups", "padding_mode")
        }
        options |= {"device": module.weight.device, "dtype": module.weight.dtype, **kwargs}
        kernel: Any = module.kernel_size
        return FactorizedConv2d(module.in_channels, module.out_channels, kernel, **options)

    def solution_for_rank(self, input: torch.Tensor, rank: int) -> LowRankSolution:
        """See `factorize_conv2d`."""
        first, second = self.module0, self.module1
        images = _padded(input if input.dim() == 4 else input[None], first)
        options: dict[str, Any] = {"stride": first.stride, "dilation": first.dilation}
        return factorize_conv2d(images, first.weight, second.weight, rank, biasB=second.bias, **options)

    def apply_solution(self, solution: LowRankSolution) -> None:
        """Take over filters of shapes (rank, in, h, w) and (out, rank, 1, 1)."""
        assert solution.Wa is not None
        assert solution.Wb is not None
        self._take_over(solution, solution.Wa, solution.Wb)
        self.module0.out_channels = self.module1.in_channels = solution.rank


class FactorizedLinear(_FactorizedModule):
    """A `torch.nn.Linear` split into two.

    Args:
        in_features: As in `torch.nn.Linear`.
        out_features: As in `torch.nn.Linear`.
        bias: Whether the second one has a bias.
        latent_features: Features between the two, or below 1 a fraction of the smaller of the other two.
        **kwargs: `device` and `dtype`.

    Raises:
        ValueError: `latent_features` is too large to save multiplications.

    Example:
        >>> layer = FactorizedLinear(64, 48)
        >>> layer.latent_features, layer(torch.zeros(1, 64)).shape
        (12, torch.Size([1, 48]))

    Source: Denton et al., "Exploiting Linear Structure Within Convolutional Networks for Efficient Evaluation",
        arXiv:1404.0736: matrices as products of thinner ones.
    Differs: the weights are drawn, not taken from a trained layer.
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
        self._check_latent_size(self.max_allowed_latent_channels(in_features, out_features))
        self.module0 = nn.Linear(in_features, self.latent_size, bias=False, **kwargs)
        self.module1 = nn.Linear(self.latent_size, out_features, bias=bias, **kwargs)

    @property
    def in_features(self) -> int:
        """Features of the input."""
        return self.in_size

    @property
    def out_features(self) -> int:
        """Features of the output."""
        return self.out_size

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
        """The bias, as a `torch.nn.Linear` has it."""
        return self.module1.bias

    @staticmethod
    def max_allowed_latent_channels(in_features: int, out_features: int) -> int:
        """The most features between the two layers that still save multiplications."""
        return _most_latent(in_features, out_features)

    @staticmethod
    def from_linear(module: nn.Linear, module_ix: int = -1, **kwargs: Any) -> FactorizedLinear:
        """Make the replacement of a linear layer, newly initialised.

        Args:
            module: The layer to replace, whose shape, dtype and device are kept.
            module_ix: Its number among the layers replaced. The replacement does not depend on it.
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
        """See `factorize_matrix`."""
        rows = input.reshape(-1, self.in_size)
        first, second = wide(self.module0.weight.T), wide(self.module1.weight.T)
        outputs = wide(rows) @ first @ second + (0 if self.bias is None else self.bias)
        return factorize_matrix(rows, outputs, first, second, self.bias, rank)

    def apply_solution(self, solution: LowRankSolution) -> None:
        """Take over matrices of shapes (in, rank) and (rank, out)."""
        assert solution.Wa is not None
        assert solution.Wb is not None
        self._take_over(solution, solution.Wa.T, solution.Wb.T)
        self.module0.out_features = self.module1.in_features = solution.rank


def _most_latent(fan_in: int, out: int) -> int:
    """The largest r with r * (fan_in + out) < fan_in * out."""
    return (fan_in * out - 1) // (fan_in + out)


def _padded(images: torch.Tensor, conv: nn.Conv2d) -> torch.Tensor:
    """Images with what a convolution puts around them."""
    if conv.padding == "valid":
        return images
    sides: list[int] = []
    for i in (1, 0):  # `F.pad` wants the last dimension first
        if conv.padding == "same":
            total = conv.dilation[i] * (conv.kernel_size[i] - 1)
            sides += [total // 2, total - total // 2]
        else:
            sides += [int(conv.padding[i])] * 2
    return F.pad(images, sides, mode="constant" if conv.padding_mode == "zeros" else conv.padding_mode)
