"""Layers that blur where they subsample. Feature maps are (N, C, H, W) or (C, H, W)."""

from __future__ import annotations

import torch
from torch import nn

from composer.algorithms.blurpool._blur import Size, blur, blurmax, check_padding, pair
from composer.algorithms.blurpool._blur import _default_2d_filter as _default_2d_filter
from composer.algorithms.blurpool._blur import blur_2d as blur_2d
from composer.algorithms.blurpool._blur import blurmax_pool2d as blurmax_pool2d
from composer.utils.module_surgery import overrides_forward

__all__ = ["BlurConv2d", "BlurMaxPool2d", "BlurPool2d", "blur_2d", "blurmax_pool2d"]


class BlurMaxPool2d(nn.Module):
    """A `torch.nn.MaxPool2d` that pools every position, then blurs and subsamples.

    Args:
        kernel_size: Of the pooling windows.
        stride: Distance of the positions that are kept. None is `kernel_size`.
        padding: Of the pooling.
        dilation: Of the pooling windows.
        ceil_mode: Whether a last window may stick out of the image.

    Attributes:
        filt2d: The filter, shape (1, 1, 3, 3); a buffer.

    Raises:
        ValueError: `padding` is more than half the window.

    Example:
        >>> BlurMaxPool2d(kernel_size=3, stride=2, padding=1)
        BlurMaxPool2d(kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), dilation=(1, 1), ceil_mode=False)
    """

    def __init__(
        self,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        dilation: Size = 1,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__()
        self.kernel_size = pair(kernel_size)
        self.stride = self.kernel_size if stride is None else pair(stride)
        self.padding, self.dilation, self.ceil_mode = pair(padding), pair(dilation), ceil_mode
        check_padding(self.kernel_size, self.padding)
        self.filt2d: torch.Tensor
        self.register_buffer("filt2d", _default_2d_filter())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Pool, blur and subsample a tensor of shape (N, C, H, W) or (C, H, W)."""
        return blurmax(input, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode, self.filt2d)

    def extra_repr(self) -> str:
        names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    @staticmethod
    def from_maxpool2d(module: nn.MaxPool2d, module_index: int = -1) -> BlurMaxPool2d:
        """Make the replacement of a max-pooling layer.

        Args:
            module: The layer to replace.
            module_index: Its number among the layers replaced. The replacement does not depend on it.

        Raises:
            ValueError: The layer returns indices, or has a `forward` of its own, such as one that pads by itself.
        """
        if overrides_forward(module, nn.MaxPool2d):
            raise ValueError(
                f"`module` must not have a `forward` of its own, got {type(module).__name__}. Leave this layer alone."
            )
        if module.return_indices:
            raise ValueError("`module` must not return indices: blurred maxima have none. Leave this layer as it is.")
        return BlurMaxPool2d(module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)


class BlurConv2d(nn.Module):
    """A strided `torch.nn.Conv2d` that blurs where it subsamples.

    With `blur_first`, the input is blurred and the convolution keeps its stride. Otherwise the convolution computes
    every position, and its output is blurred and subsampled.

    Args:
        in_channels: As all other arguments that are not described, one of `torch.nn.Conv2d`.
        out_channels: See `in_channels`.
        kernel_size: See `in_channels`.
        stride: Distance of the positions that are kept. None is `kernel_size`; not with `blur_first`.
        padding: See `in_channels`.
        dilation: See `in_channels`.
        groups: See `in_channels`.
        bias: See `in_channels`.
        blur_first: Whether to blur the input instead of the output.
        padding_mode: See `in_channels`.

    Attributes:
        conv: The convolution.
        blur_filter: The filter, shape (channels, 1, 3, 3), with the channels of what is blurred; a buffer.

    Raises:
        ValueError: `blur_first` without a `stride`.

    Example:
        >>> BlurConv2d(16, 32, kernel_size=3, stride=2, padding=1)(torch.zeros(1, 16, 8, 8)).shape
        torch.Size([1, 32, 4, 4])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size | None = None,
        padding: str | Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        blur_first: bool = True,
        *,
        padding_mode: str = "zeros",
    ) -> None:
        super().__init__()
        if stride is None and blur_first:
            raise ValueError("`stride` must be given with `blur_first`, got None. Pass that of the convolution.")
        kernel, keep = pair(kernel_size), pair(kernel_size if stride is None else stride)
        # A 1 by 1 convolution reads only the positions that it keeps, so the blur need not compute the others.
        pointwise = kernel == (1, 1) and padding in (0, (0, 0), "valid")
        conv_stride, self.blur_stride = (keep, (1, 1)) if blur_first and not pointwise else ((1, 1), keep)
        self.blur_first = blur_first
        self.channels = in_channels if blur_first else out_channels
        self.conv = nn.Conv2d(
            in_channels,
            out_channels,
            kernel,
            conv_stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,  # type: ignore[arg-type,unused-ignore]  # newer torch lists the modes in the type
        )
        self.conv._already_blurpooled = True  # type: ignore[assignment]
        self.blur_filter: torch.Tensor
        self.register_buffer("blur_filter", _default_2d_filter().repeat(self.channels, 1, 1, 1))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Blur and convolve, in the order asked for, a tensor of shape (N, C, H, W) or (C, H, W)."""
        if self.blur_first:
            input = blur(input, self.blur_filter, self.blur_stride, (1, 1), self.channels)
        output: torch.Tensor = self.conv(input)
        if self.blur_first:
            return output
        return blur(output, self.blur_filter, self.blur_stride, (1, 1), self.channels)

    @property
    def weight(self) -> torch.Tensor:
        """The weight of the convolution, for networks that read its device or dtype."""
        return self.conv.weight

    @staticmethod
    def from_conv2d(module: nn.Conv2d, module_index: int = -1, blur_first: bool = True) -> BlurConv2d:
        """Put a convolution inside a layer that blurs its input or output.

        The convolution stays the same object, with its parameters, parametrizations and hooks. It may be of a subclass;
        one with a `forward` of its own is then called as it is, with its stride.

        Args:
            module: The convolution. Its stride becomes 1 where the blur subsamples instead.
            module_index: Its number among the layers replaced. The replacement does not depend on it.
            blur_first: Whether to blur the input instead of the output.

        Raises:
            ValueError: The output is to be blurred, and `module` has a `forward` of its own, of which nobody knows
                where it reads the stride.
        """
        own_forward = overrides_forward(module, nn.Conv2d)
        if own_forward and not blur_first:
            raise ValueError(
                f"`module` must not have a `forward` of its own if its output is blurred, got {type(module).__name__}. "
                f"Use `blur_first=True`, or leave this layer as it is."
            )
        with torch.device("meta"):  # weights drawn here would be thrown away, but shift the random numbers of others
            new = BlurConv2d(
                module.in_channels,
                module.out_channels,
                module.kernel_size,  # type: ignore[arg-type]  # torch types pairs as tuples of any length
                module.stride,  # type: ignore[arg-type]
                module.padding,  # type: ignore[arg-type]
                blur_first=blur_first,
            )
        stride = new.conv.stride
        new.conv = module
        if own_forward:
            new.blur_stride = (1, 1)
        else:
            module.stride = stride
        module._already_blurpooled = True  # type: ignore[assignment]
        new.blur_filter = _default_2d_filter().to(module.weight).repeat(new.channels, 1, 1, 1)
        return new


class BlurPool2d(nn.Module):
    """Blurs and subsamples: `blur_2d` as a layer.

    Args:
        channels: Of the input. 0: read from the input.
        stride: Distance of the positions that are kept.
        padding: Zeros around the image.

    Attributes:
        blur_filter: The filter, shape (1, 1, 3, 3) or (channels, 1, 3, 3); a buffer.

    Example:
        >>> BlurPool2d()(torch.zeros(1, 16, 8, 8)).shape
        torch.Size([1, 16, 4, 4])
    """

    def __init__(self, channels: int = 0, stride: Size = 2, padding: Size = 1) -> None:
        super().__init__()
        self.channels, self.stride, self.padding = channels, pair(stride), pair(padding)
        self.blur_filter: torch.Tensor
        self.register_buffer("blur_filter", _default_2d_filter().repeat(max(channels, 1), 1, 1, 1))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Blur and subsample a tensor of shape (N, C, H, W) or (C, H, W)."""
        channels = self.channels if self.channels > 0 else input.shape[-3]
        return blur(input, self.blur_filter.expand(channels, -1, -1, -1), self.stride, self.padding, channels)

    def extra_repr(self) -> str:
        return f"channels={self.channels}, stride={self.stride}, padding={self.padding}"
