"""Layers that weight channels. Feature maps are (N, C, H, W) or (C, H, W)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from composer.utils import check_finite, check_integers


class SqueezeExcite2d(nn.Module):
    """Multiplies each channel by a weight in (0, 1) that depends on the means of all channels.

    With z the means over all positions: `x * sigmoid(W2 relu(W1 z))`, without biases.

    Args:
        num_features: C, the number of channels.
        latent_channels: The size of `W1 z`: below 1 a fraction of C, rounded down to at least 1; otherwise a number.

    Attributes:
        pool_and_mlp: The module that computes the weights, shape (N, C) or (C,).

    Raises:
        ValueError: `latent_channels` is not positive.

    Example:
        >>> SqueezeExcite2d(16)(torch.ones(2, 16, 4, 4)).shape
        torch.Size([2, 16, 4, 4])

    Source: Hu et al., "Squeeze-and-Excitation Networks", arXiv:1709.01507, section 3.
    """

    def __init__(self, num_features: int, latent_channels: float = 0.125) -> None:
        super().__init__()
        check_integers(num_features=num_features)
        check_latent_channels(latent_channels)
        latent = max(int(latent_channels if latent_channels >= 1 else latent_channels * num_features), 1)
        self.pool_and_mlp = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(-3),
            nn.Linear(num_features, latent, bias=False),
            nn.ReLU(),
            nn.Linear(latent, num_features, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Weight the channels of a tensor of shape (N, C, H, W) or (C, H, W)."""
        weights: torch.Tensor = self.pool_and_mlp(input)
        return input * weights[..., None, None]


class SqueezeExciteConv2d(nn.Module):
    """A `torch.nn.Conv2d` followed by `SqueezeExcite2d`.

    Args:
        *args: Positional arguments of `torch.nn.Conv2d`, unless `conv` is given.
        latent_channels: See `SqueezeExcite2d`.
        conv: An existing convolution to use.
        **kwargs: Keyword arguments of `torch.nn.Conv2d`, unless `conv` is given.

    Attributes:
        conv: The convolution.
        se: The `SqueezeExcite2d`.

    Raises:
        ValueError: `latent_channels` is not positive.

    Example:
        >>> SqueezeExciteConv2d(3, 16, kernel_size=3, padding=1)(torch.zeros(2, 3, 8, 8)).shape
        torch.Size([2, 16, 8, 8])
    """

    def __init__(
        self, *args: Any, latent_channels: float = 0.125, conv: nn.Conv2d | None = None, **kwargs: Any
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(*args, **kwargs) if conv is None else conv
        self.conv._already_squeeze_excited = True  # type: ignore[assignment]
        self.se = SqueezeExcite2d(self.conv.out_channels, latent_channels)
        self.se.to(device=self.conv.weight.device, dtype=self.conv.weight.dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Convolve a tensor of shape (N, C, H, W) or (C, H, W), and weight the channels of the result."""
        output: torch.Tensor = self.se(self.conv(input))
        return output

    @property
    def weight(self) -> torch.Tensor:
        """The weight of the convolution, for networks that read its device or dtype."""
        return self.conv.weight

    def composer_plain_state(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Raise ValueError: for `composer.export.plain_state_dict`."""
        raise ValueError("it weights channels by the image, which a convolution does not")

    @staticmethod
    def from_conv2d(module: nn.Conv2d, module_index: int = -1, latent_channels: float = 0.125) -> SqueezeExciteConv2d:
        """Wrap a convolution.

        Args:
            module: The convolution; it is not copied.
            module_index: Not used.
            latent_channels: See `SqueezeExcite2d`.
        """
        return SqueezeExciteConv2d(conv=module, latent_channels=latent_channels)


def check_latent_channels(latent_channels: float) -> None:
    """Raise ValueError unless the number, or the fraction of the channels, is above 0."""
    hint = "Use for example 64, or 0.125 for an eighth of the channels."
    check_finite(hint, latent_channels=latent_channels, above=0)
