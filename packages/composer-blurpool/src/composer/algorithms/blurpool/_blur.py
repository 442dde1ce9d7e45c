"""Blurring and blurred pooling as functions. Feature maps are (N, C, H, W) or (C, H, W).

What the layers run (`blur`, `blurmax`) has the plain types that TorchScript knows; the public functions take more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.jit import is_scripting, is_tracing  # type: ignore[attr-defined]

__all__ = ["blur_2d", "blurmax_pool2d"]

Pair = tuple[int, int]
Size = int | Pair

_is_tracing: Callable[[], bool] = is_tracing  # torch does not annotate it


def blur_2d(
    input: torch.Tensor, channels: int = -1, stride: Size = 1, filter: torch.Tensor | None = None
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
    return blur(input, filter, pair(stride), _same_padding(filter), channels)


def blurmax_pool2d(
    input: torch.Tensor,
    kernel_size: Size | None = None,
    stride: Size = 2,
    padding: Size = 0,
    dilation: Size = 1,
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
        ValueError: `filter` does not have four dimensions, or `padding` is more than half the window.

    Example:
        >>> blurmax_pool2d(torch.ones(1, 3, 8, 8), kernel_size=3, padding=1).shape
        torch.Size([1, 3, 4, 4])

    Source: Zhang, arXiv:1904.11486, section 3.2, "Max-pooling".
    Differs: as `blur_2d`.
    """
    if filter is None:
        filter = _default_2d_filter(device=input.device, dtype=input.dtype)
    _check_filter(filter)
    kernel = (2, 2) if kernel_size is None else pair(kernel_size)
    check_padding(kernel, pair(padding))
    return blurmax(input, kernel, pair(stride), pair(padding), pair(dilation), ceil_mode, filter)


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


def check_padding(kernel_size: Pair, padding: Pair) -> None:
    """Refuse a padding that `max_pool2d` refuses: some windows would see nothing of the image."""
    half = (kernel_size[0] // 2, kernel_size[1] // 2)
    if padding[0] > half[0] or padding[1] > half[1]:
        raise ValueError(f"`padding` must be at most half the window, {half}, got {padding}. Use a larger window.")


def pair(size: Size) -> Pair:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _same_padding(filter: torch.Tensor) -> Pair:
    return filter.shape[2] // 2, filter.shape[3] // 2


def blur(input: torch.Tensor, filter: torch.Tensor, stride: Pair, padding: Pair, channels: int) -> torch.Tensor:
    return F.conv2d(input, filter.to(input), None, stride, padding, (1, 1), channels)


def blurmax(
    input: torch.Tensor,
    kernel_size: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    ceil_mode: bool,
    filter: torch.Tensor,
) -> torch.Tensor:
    channels = input.shape[-3]
    if ceil_mode:
        right = _overhang(input.shape[-1], kernel_size[1], stride[1], padding[1], dilation[1])
        bottom = _overhang(input.shape[-2], kernel_size[0], stride[0], padding[0], dilation[0])
        input = F.pad(input, [0, right, 0, bottom], value=-float("inf"))
    pooled = _pool_every_position(input, kernel_size, padding, dilation)
    output = blur(pooled, filter.expand(channels, -1, -1, -1), stride, _same_padding(filter), channels)
    return output.contiguous() if input.is_contiguous() else output


def _pool_every_position(input: torch.Tensor, kernel_size: Pair, padding: Pair, dilation: Pair) -> torch.Tensor:
    if not is_scripting() and input.device.type == "cpu" and not _is_captured():
        # On the CPU torch vectorises both of these, but not pooling in the usual layout, which takes ten times as long.
        if not (input.requires_grad and torch.is_grad_enabled()):
            return _largest_shift(input, kernel_size, padding, dilation)
        if input.dim() == 4 and input.shape[1] >= 8:
            input = input.contiguous(memory_format=torch.channels_last)
    return F.max_pool2d(input, kernel_size, (1, 1), padding, dilation)


def _is_captured() -> bool:
    """Whether a graph is being captured, which had better hold the pooling operator itself."""
    return _is_tracing() or torch.compiler.is_compiling()


def _largest_shift(input: torch.Tensor, kernel_size: Pair, padding: Pair, dilation: Pair) -> torch.Tensor:
    """Pool every position as the maximum of shifted images: rows first, then columns."""
    best = input
    if padding != (0, 0):
        best = F.pad(input, [padding[1], padding[1], padding[0], padding[0]], value=-float("inf"))
    for dim in (-2, -1):
        image, positions = best, best.shape[dim] - dilation[dim] * (kernel_size[dim] - 1)
        best = image.narrow(dim, 0, positions)
        for i in range(1, kernel_size[dim]):
            best = torch.maximum(best, image.narrow(dim, i * dilation[dim], positions))
    return best


def _overhang(size: int, kernel_size: int, stride: int, padding: int, dilation: int) -> int:
    """By how much the last window of `ceil_mode` sticks out of the padded image."""
    dense = size + 2 * padding - dilation * (kernel_size - 1)  # the number of windows at stride 1
    windows = (dense + stride - 2) // stride + 1
    if (windows - 1) * stride >= size + padding:  # torch: the last window must start inside the image
        windows -= 1
    return max((windows - 1) * stride + 1 - dense, 0)
