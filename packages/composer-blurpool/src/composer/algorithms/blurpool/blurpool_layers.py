"""Blurring, and layers that blur where they subsample. Feature maps are (N, C, H, W) or (C, H, W).

What the layers run has the plain types that TorchScript knows; the public functions take more kinds of arguments.
"""

from __future__ import annotations

from typing import Union

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["BlurConv2d", "BlurMaxPool2d", "BlurPool2d", "blur_2d", "blurmax_pool2d"]

_Pair = tuple[int, int]
_Size = Union[int, _Pair]


def blur_2d(
    input: torch.Tensor, channels: int = -1, stride: _Size = 1, filter: torch.Tensor | None = None
) -> torch.Tensor:
    """Blur every channel with a filter, and subsample.

    A cross-correlation of each channel, with zeros around the image, of which every `stride`-th position is computed:
    ceil(H / stride) by ceil(W / stride).

    Args:
        input: Shape (N, C, H, W) or (C, H, W), floating; not modified.
        channels: C, if it is known: `filter` must then have C maps, and nothing is looked up in the input, which helps
            tracing. Less than 1: C is read from the input, and a `filter` of one map serves all channels.
        stride: Distance of the positions that are kept.
        filter: Shape (C, 1, h, w) or (1, 1, h, w), with odd h and w; brought to the input's device and dtype. None: the
            product of [1, 2, 1] / 4 with itself, made on the input's device.

    Returns:
        The blurred input; dtype and device are kept.

    Raises:
        IndexError: A side of `filter` is even.
        ValueError: `filter` does not have four dimensions.

    Example:
        >>> blur_2d(torch.tensor([[[[0.0, 0.0, 0.0], [0.0, 16.0, 0.0], [0.0, 0.0, 0.0]]]]))
        tensor([[[[1., 2., 1.],
                  [2., 4., 2.],
                  [1., 2., 1.]]]])

    Source: Zhang, "Making Convolutional Networks Shift-Invariant Again", arXiv:1904.11486, section 3.2.
    Differs: the image is surrounded by zeros; the paper's code reflects it.
    """
    if filter is None:
        filter = _default_2d_filter(device=input.device, dtype=input.dtype).expand(max(channels, 1), -1, -1, -1)
    _check_filter(filter)
    if channels < 1:
        channels = input.shape[-3]
        filter = filter if filter.shape[0] == channels else filter.expand(channels, -1, -1, -1)
    return _blur(input, filter, _pair(stride), _same_padding(filter), channels)


def blurmax_pool2d(
    input: torch.Tensor,
    kernel_size: _Size | None = None,
    stride: _Size = 2,
    padding: _Size = 0,
    dilation: _Size = 1,
    ceil_mode: bool = False,
    filter: torch.Tensor | None = None,
) -> torch.Tensor:
    """Max-pool every position, then blur and subsample: `torch.nn.functional.max_pool2d` with less aliasing.

    Args:
        input: Shape (N, C, H, W) or (C, H, W), floating; not modified.
        kernel_size: Of the pooling windows. None is 2 by 2.
        stride: Distance of the positions that are kept after blurring.
        padding: Of the pooling, with minus infinity.
        dilation: Of the pooling windows.
        ceil_mode: Whether a last window may stick out of the image.
        filter: As in `blur_2d`.

    Returns:
        The blurred maxima, in the shape that `max_pool2d` gives them; dtype, device and memory format are kept.

    Raises:
        IndexError: A side of `filter` is even.
        ValueError: `filter` does not have four dimensions.

    Example:
        >>> blurmax_pool2d(torch.ones(1, 3, 8, 8), kernel_size=3, padding=1).shape
        torch.Size([1, 3, 4, 4])

    Source: Zhang, arXiv:1904.11486, section 3.2, "Max-pooling".
    Differs: as `blur_2d`.
    """
    if filter is None:
        filter = _default_2d_filter(device=input.device, dtype=input.dtype)
    _check_filter(filter)
    kernel = (2, 2) if kernel_size is None else _pair(kernel_size)
    return _blurmax(input, kernel, _pair(stride), _pair(padding), _pair(dilation), ceil_mode, filter)


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

    Example:
        >>> BlurMaxPool2d(kernel_size=3, stride=2, padding=1)
        BlurMaxPool2d(kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), dilation=(1, 1), ceil_mode=False)
    """

    def __init__(
        self,
        kernel_size: _Size,
        stride: _Size | None = None,
        padding: _Size = 0,
        dilation: _Size = 1,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__()
        self.kernel_size = _pair(kernel_size)
        self.stride = self.kernel_size if stride is None else _pair(stride)
        self.padding, self.dilation, self.ceil_mode = _pair(padding), _pair(dilation), ceil_mode
        self.filt2d: torch.Tensor
        self.register_buffer("filt2d", _default_2d_filter())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Pool, blur and subsample a tensor of shape (N, C, H, W) or (C, H, W)."""
        return _blurmax(input, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode, self.filt2d)

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
            ValueError: The layer returns indices.
        """
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
        kernel_size: _Size,
        stride: _Size | None = None,
        padding: str | _Size = 0,
        dilation: _Size = 1,
        groups: int = 1,
        bias: bool = True,
        blur_first: bool = True,
        *,
        padding_mode: str = "zeros",
    ) -> None:
        super().__init__()
        if stride is None and blur_first:
            raise ValueError("`stride` must be given with `blur_first`, got None. Pass that of the convolution.")
        kernel, keep = _pair(kernel_size), _pair(kernel_size if stride is None else stride)
        # A 1 by 1 convolution reads only the positions that it keeps, so the blur need not compute the others.
        pointwise = kernel == (1, 1) and padding in (0, (0, 0), "valid")
        conv_stride, self.blur_stride = (keep, (1, 1)) if blur_first and not pointwise else ((1, 1), keep)
        self.blur_first = blur_first
        self.channels = in_channels if blur_first else out_channels
        self.conv = nn.Conv2d(
            in_channels, out_channels, kernel, conv_stride, padding, dilation, groups, bias, padding_mode
        )
        self.conv._already_blurpooled = True  # type: ignore[assignment]
        self.blur_filter: torch.Tensor
        self.register_buffer("blur_filter", _default_2d_filter().repeat(self.channels, 1, 1, 1))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Blur and convolve, in the order asked for, a tensor of shape (N, C, H, W) or (C, H, W)."""
        if self.blur_first:
            input = _blur(input, self.blur_filter, self.blur_stride, (1, 1), self.channels)
        output: torch.Tensor = self.conv(input)
        if self.blur_first:
            return output
        return _blur(output, self.blur_filter, self.blur_stride, (1, 1), self.channels)

    @staticmethod
    def from_conv2d(module: nn.Conv2d, module_index: int = -1, blur_first: bool = True) -> BlurConv2d:
        """Make the replacement of a convolution, with parameters of its own that hold the same values.

        Args:
            module: The layer to replace.
            module_index: Its number among the layers replaced. The replacement does not depend on it.
            blur_first: Whether to blur the input instead of the output.
        """
        new = BlurConv2d(
            module.in_channels,
            module.out_channels,
            module.kernel_size,  # type: ignore[arg-type]  # torch types pairs as tuples of any length
            module.stride,  # type: ignore[arg-type]
            module.padding,  # type: ignore[arg-type]
            module.dilation,  # type: ignore[arg-type]
            module.groups,
            module.bias is not None,
            blur_first,
            padding_mode=module.padding_mode,
        )
        new.to(device=module.weight.device, dtype=module.weight.dtype)
        for name, parameter in module.named_parameters(recurse=False):
            copy = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            setattr(new.conv, name, copy)
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

    def __init__(self, channels: int = 0, stride: _Size = 2, padding: _Size = 1) -> None:
        super().__init__()
        self.channels, self.stride, self.padding = channels, _pair(stride), _pair(padding)
        self.blur_filter: torch.Tensor
        self.register_buffer("blur_filter", _default_2d_filter().repeat(max(channels, 1), 1, 1, 1))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Blur and subsample a tensor of shape (N, C, H, W) or (C, H, W)."""
        channels = self.channels if self.channels > 0 else input.shape[-3]
        return _blur(input, self.blur_filter.expand(channels, -1, -1, -1), self.stride, self.padding, channels)

    def extra_repr(self) -> str:
        return f"channels={self.channels}, stride={self.stride}, padding={self.padding}"


def _default_2d_filter(device: torch.device | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The product of [1, 2, 1] / 4 with itself, shape (1, 1, 3, 3)."""
    line = 2 - torch.arange(-1, 2, device=device).abs()  # made on the device: a copy from the host would stall it
    return torch.outer(line, line).to(torch.get_default_dtype() if dtype is None else dtype).div(16)[None, None]


def _check_filter(filter: torch.Tensor) -> None:
    if filter.dim() != 4:
        raise ValueError(f"`filter` must have four dimensions, got shape {tuple(filter.shape)}. Use (1, 1, h, w).")
    height, width = filter.shape[2:]
    if height % 2 == 0 or width % 2 == 0:
        raise IndexError(f"`filter` must have odd sides, got {height} by {width}. Surround it with zeros on one side.")


def _pair(size: _Size) -> _Pair:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _same_padding(filter: torch.Tensor) -> _Pair:
    return filter.shape[2] // 2, filter.shape[3] // 2


def _blur(input: torch.Tensor, filter: torch.Tensor, stride: _Pair, padding: _Pair, channels: int) -> torch.Tensor:
    return F.conv2d(input, filter.to(input), None, stride, padding, (1, 1), channels)


def _blurmax(
    input: torch.Tensor,
    kernel_size: _Pair,
    stride: _Pair,
    padding: _Pair,
    dilation: _Pair,
    ceil_mode: bool,
    filter: torch.Tensor,
) -> torch.Tensor:
    channels = input.shape[-3]
    if ceil_mode:
        right = _overhang(input.shape[-1], kernel_size[1], stride[1], padding[1], dilation[1])
        bottom = _overhang(input.shape[-2], kernel_size[0], stride[0], padding[0], dilation[0])
        input = F.pad(input, [0, right, 0, bottom], value=-float("inf"))
    pooled = _pool_every_position(input, kernel_size, padding, dilation)
    output = _blur(pooled, filter.expand(channels, -1, -1, -1), stride, _same_padding(filter), channels)
    return output.contiguous() if input.is_contiguous() else output


def _pool_every_position(input: torch.Tensor, kernel_size: _Pair, padding: _Pair, dilation: _Pair) -> torch.Tensor:
    if not torch.jit.is_scripting() and input.device.type == "cpu" and not _is_captured():
        # Torch's kernel for the usual layout is not vectorised on the CPU. Both ways here are, and about 10 times as fast.
        if not (input.requires_grad and torch.is_grad_enabled()):
            return _largest_shift(input, kernel_size, padding, dilation)
        if input.dim() == 4 and input.shape[1] >= 8:
            input = input.contiguous(memory_format=torch.channels_last)
    return F.max_pool2d(input, kernel_size, (1, 1), padding, dilation)


def _largest_shift(input: torch.Tensor, kernel_size: _Pair, padding: _Pair, dilation: _Pair) -> torch.Tensor:
    """Pool every position as the maximum of shifted images: rows first, then columns."""
    best = F.pad(input, [padding[1], padding[1], padding[0], padding[0]], value=-float("inf"))
    for dim in (-2, -1):
        image, positions = best, best.shape[dim] - dilation[dim] * (kernel_size[dim] - 1)
        best = image.narrow(dim, 0, positions)
        for i in range(1, kernel_size[dim]):
            best = torch.maximum(best, image.narrow(dim, i * dilation[dim], positions))
    return best


def _is_captured() -> bool:
    """Whether a graph is made, which had better have a pooling operator in it."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def _overhang(size: int, kernel_size: int, stride: int, padding: int, dilation: int) -> int:
    """By how much the last window of `ceil_mode` sticks out of the padded image."""
    dense = size + 2 * padding - dilation * (kernel_size - 1)  # the number of windows at stride 1
    windows = (dense + stride - 2) // stride + 1
    if (windows - 1) * stride >= size + padding:  # torch: the last window must start inside the image
        windows -= 1
    return max((windows - 1) * stride + 1 - dense, 0)
