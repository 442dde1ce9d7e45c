"""Layers that blur where they subsample, and the functions behind them. Feature maps are (N, C, H, W) or (C, H, W).

`_blur` and `_blurmax`, which the layers call, only use types that TorchScript supports.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from composer.utils.module_surgery import overrides_forward

Pair = tuple[int, int]
Size = int | Pair


def blur_2d(
    input: torch.Tensor, channels: int = -1, stride: Size = 1, filter: torch.Tensor | None = None
) -> torch.Tensor:
    """Blur every channel with a filter, and subsample.

    Each channel is cross-correlated with the filter, with zero padding. Only every `stride`-th position is computed:
    the result has ceil(H / stride) by ceil(W / stride) positions.

    Args:
        input: Shape (N, C, H, W) or (C, H, W), floating; not modified.
        channels: C if known: `filter` must then have C maps, and the shape of the input is not read, which helps
            tracing. Less than 1: C is read from the input, and a `filter` with one map is used for all channels.
        stride: Distance between the positions that are computed.
        filter: Shape (C, 1, h, w) or (1, 1, h, w), with odd h and w; converted to the input's device and dtype. None:
            the outer product of [1, 2, 1] / 4 with itself.

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
    Differs: zero padding; the code of the paper uses reflection padding.
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
        kernel_size: Size of the pooling windows. None: 2 by 2.
        stride: Distance between the positions that remain after blurring.
        padding: Padding of the pooling, with minus infinity.
        dilation: Dilation of the pooling windows.
        ceil_mode: True if the last window may extend beyond the image.
        filter: See `blur_2d`.

    Returns:
        The blurred maxima, with the shape of the result of `max_pool2d`; dtype, device and memory format are kept.

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
    kernel = (2, 2) if kernel_size is None else _pair(kernel_size)
    _check_padding(kernel, _pair(padding))
    return _blurmax(input, kernel, _pair(stride), _pair(padding), _pair(dilation), ceil_mode, filter)


class BlurMaxPool2d(nn.Module):
    """A `torch.nn.MaxPool2d` that pools every position, then blurs and subsamples.

    Args:
        kernel_size: Size of the pooling windows.
        stride: Distance between the positions that remain. None: `kernel_size`.
        padding: Padding of the pooling.
        dilation: Dilation of the pooling windows.
        ceil_mode: True if the last window may extend beyond the image.

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
        self.kernel_size = _pair(kernel_size)
        self.stride = self.kernel_size if stride is None else _pair(stride)
        self.padding, self.dilation, self.ceil_mode = _pair(padding), _pair(dilation), ceil_mode
        _check_padding(self.kernel_size, self.padding)
        self.filt2d: torch.Tensor
        self.register_buffer("filt2d", _default_2d_filter())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Pool, blur and subsample a tensor of shape (N, C, H, W) or (C, H, W)."""
        return _blurmax(input, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode, self.filt2d)

    def extra_repr(self) -> str:
        names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def composer_plain_state(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Raise ValueError: for `composer.export.plain_state_dict`."""
        raise ValueError("it blurs where it subsamples, which max pooling does not")

    @staticmethod
    def from_maxpool2d(module: nn.MaxPool2d, module_index: int = -1) -> BlurMaxPool2d:
        """Return the replacement of a max-pooling layer.

        Args:
            module: The layer to replace.
            module_index: Its index among the replaced layers; unused.

        Raises:
            ValueError: The layer returns indices, or its class overrides `forward`, for example to pad.
        """
        if overrides_forward(module, nn.MaxPool2d):
            raise ValueError(
                f"`module` must not override `forward`, got {type(module).__name__}. Do not replace this layer."
            )
        if module.return_indices:
            raise ValueError("`module` must not return indices: blurred maxima have none. Do not replace this layer.")
        return BlurMaxPool2d(module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)


class BlurConv2d(nn.Module):
    """A strided `torch.nn.Conv2d` that blurs where it subsamples.

    With `blur_first`, the input is blurred and the convolution keeps its stride. Otherwise the convolution computes
    every position, and its output is blurred and subsampled.

    Args:
        in_channels: See `torch.nn.Conv2d`.
        out_channels: See `torch.nn.Conv2d`.
        kernel_size: See `torch.nn.Conv2d`.
        stride: Distance between the positions that remain. None: `kernel_size`; not allowed with `blur_first`.
        padding: See `torch.nn.Conv2d`.
        dilation: See `torch.nn.Conv2d`.
        groups: See `torch.nn.Conv2d`.
        bias: See `torch.nn.Conv2d`.
        blur_first: Blur the input instead of the output.
        padding_mode: See `torch.nn.Conv2d`.

    Attributes:
        conv: The convolution.
        blur_filter: The filter, shape (channels, 1, 3, 3), with the channels of the blurred tensor; a buffer.

    Raises:
        ValueError: `blur_first` is set without a `stride`.

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
            raise ValueError("`stride` must be given with `blur_first`, got None. Pass the stride of the convolution.")
        kernel, step = _pair(kernel_size), _pair(kernel_size if stride is None else stride)
        # A 1 by 1 convolution only reads the positions that remain, so the blur need not compute the others.
        pointwise = kernel == (1, 1) and padding in (0, (0, 0), "valid")
        conv_stride, self.blur_stride = (step, (1, 1)) if blur_first and not pointwise else ((1, 1), step)
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
        """Blur and convolve a tensor of shape (N, C, H, W) or (C, H, W), in the order given by `blur_first`."""
        if self.blur_first:
            input = _blur(input, self.blur_filter, self.blur_stride, (1, 1), self.channels)
        output: torch.Tensor = self.conv(input)
        if self.blur_first:
            return output
        return _blur(output, self.blur_filter, self.blur_stride, (1, 1), self.channels)

    @property
    def weight(self) -> torch.Tensor:
        """The weight of the convolution, for models that read its device or dtype."""
        return self.conv.weight

    def composer_plain_state(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Raise ValueError: for `composer.export.plain_state_dict`."""
        raise ValueError("it blurs where it subsamples, which takes a larger kernel than that of its convolution")

    @staticmethod
    def from_conv2d(module: nn.Conv2d, module_index: int = -1, blur_first: bool = True) -> BlurConv2d:
        """Wrap a convolution in a layer that blurs its input or output.

        The convolution stays the same object, with its parameters, parametrizations and hooks. If its class overrides
        `forward`, it keeps its stride.

        Args:
            module: The convolution. Its stride becomes 1 where the blur subsamples instead.
            module_index: Its index among the replaced layers; unused.
            blur_first: Blur the input instead of the output.

        Raises:
            ValueError: `blur_first` is False and the class of `module` overrides `forward`, which may use the stride in
                an unknown way.
        """
        own_forward = overrides_forward(module, nn.Conv2d)
        if own_forward and not blur_first:
            raise ValueError(
                f"`module` must not override `forward` if its output is blurred, got {type(module).__name__}. Use "
                f"`blur_first=True`, or do not replace this layer."
            )
        with torch.device("meta"):  # the new weights are discarded, so draw no random numbers for them
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
    """`blur_2d` as a layer.

    Args:
        channels: Channels of the input. 0: read from the input.
        stride: Distance between the positions that are computed.
        padding: Zeros around the image.

    Attributes:
        blur_filter: The filter, shape (1, 1, 3, 3) or (channels, 1, 3, 3); a buffer.

    Example:
        >>> BlurPool2d()(torch.zeros(1, 16, 8, 8)).shape
        torch.Size([1, 16, 4, 4])
    """

    def __init__(self, channels: int = 0, stride: Size = 2, padding: Size = 1) -> None:
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
    """Return the outer product of [1, 2, 1] / 4 with itself, shape (1, 1, 3, 3)."""
    line = 2 - torch.arange(-1, 2, device=device).abs()  # computed on the device: a copy from the host would stall it
    return torch.outer(line, line).to(torch.get_default_dtype() if dtype is None else dtype).div(16)[None, None]


def _check_filter(filter: torch.Tensor) -> None:
    if filter.dim() != 4:
        raise ValueError(f"`filter` must have four dimensions, got shape {tuple(filter.shape)}. Use (1, 1, h, w).")
    height, width = filter.shape[2:]
    if height % 2 == 0 or width % 2 == 0:
        raise IndexError(f"`filter` must have odd sides, got {height} by {width}. Pad it with zeros on one side.")


def _check_padding(kernel_size: Pair, padding: Pair) -> None:
    """Raise ValueError for a padding that `max_pool2d` refuses: some windows would not overlap the image."""
    half = (kernel_size[0] // 2, kernel_size[1] // 2)
    if padding[0] > half[0] or padding[1] > half[1]:
        raise ValueError(f"`padding` must be at most half the window, {half}, got {padding}. Use a larger window.")


def _pair(size: Size) -> Pair:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _same_padding(filter: torch.Tensor) -> Pair:
    return filter.shape[2] // 2, filter.shape[3] // 2


def _blur(input: torch.Tensor, filter: torch.Tensor, stride: Pair, padding: Pair, channels: int) -> torch.Tensor:
    return F.conv2d(input, filter.to(input), None, stride, padding, (1, 1), channels)


def _blurmax(
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
    pooled = F.max_pool2d(input, kernel_size, (1, 1), padding, dilation)
    return _blur(pooled, filter.expand(channels, -1, -1, -1), stride, _same_padding(filter), channels)


def _overhang(size: int, kernel_size: int, stride: int, padding: int, dilation: int) -> int:
    """Return by how much the last window of `ceil_mode` extends beyond the padded image."""
    dense = size + 2 * padding - dilation * (kernel_size - 1)  # the number of windows at stride 1
    windows = (dense + stride - 2) // stride + 1
    if (windows - 1) * stride >= size + padding:  # torch: the last window must start inside the image
        windows -= 1
    return max((windows - 1) * stride + 1 - dense, 0)
