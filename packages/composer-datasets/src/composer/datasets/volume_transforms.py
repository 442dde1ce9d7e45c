"""Random transforms of volumes and their masks: crop, flip, blur, noise, brightness and contrast, in three dimensions.

A transform takes a volume of shape (C, D, H, W) and a mask of shape (D, H, W), and returns both. They draw from torch's
global generator; `torchvision.transforms.v2.Compose` chains them.

Source of the probabilities and ranges: Futrega et al., "Optimized U-Net for Brain Tumor Segmentation",
arXiv:2110.03352, data augmentation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import conv3d, pad

from composer.utils import check_finite

_TRUNCATE = 4  # standard deviations


def blur_volume(volume: Tensor, sigma: float) -> Tensor:
    """Return a volume blurred by a Gaussian in each of its three dimensions; its border values are replicated.

    Args:
        volume: Shape (C, D, H, W), floating; not modified.
        sigma: Standard deviation in voxels, above 0. The Gaussian is cut off at 4 of them.

    Example:
        >>> blur_volume(torch.ones(1, 3, 3, 3), 0.5).allclose(torch.ones(1, 3, 3, 3))
        True
    """
    check_finite(sigma=sigma, above=0)
    radius = max(round(_TRUNCATE * sigma), 1)
    places = torch.arange(-radius, radius + 1, dtype=volume.dtype, device=volume.device)
    kernel = torch.exp(-((places / sigma) ** 2) / 2)
    kernel /= kernel.sum()
    blurred = volume[:, None]  # channels as a batch: all have the same kernel
    for dim in range(3):
        padding, shape = [0] * 6, [1] * 5
        padding[4 - 2 * dim], padding[5 - 2 * dim], shape[2 + dim] = radius, radius, -1
        blurred = conv3d(pad(blurred, padding, mode="replicate"), kernel.view(shape))
    return blurred[:, 0]


class _Crop3d:
    """Crop a volume and its mask; smaller ones are padded with 0 on both sides."""

    def __init__(self, size: Sequence[int]) -> None:
        if len(size) != 3 or min(size) < 1:
            raise ValueError(f"`size` must be three positive numbers, got {size!r}.")
        self.size = tuple(size)

    def __call__(self, volume: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cropped volume and mask."""
        missing = [max(want - have, 0) for want, have in zip(self.size, mask.shape, strict=True)]
        padding = [part for count in reversed(missing) for part in (count // 2, count - count // 2)]
        volume, mask = pad(volume, padding), pad(mask, padding)
        for dim, want in enumerate(self.size, start=-3):
            first = self._first(mask.shape[dim] - want)
            volume, mask = volume.narrow(dim, first, want), mask.narrow(dim, first, want)
        return volume.contiguous(), mask.contiguous()

    def _first(self, room: int) -> int:
        raise NotImplementedError


class CenterCrop3d(_Crop3d):
    """Crop the center of a volume and its mask; smaller ones are padded with 0 on both sides.

    Args:
        size: Depth, height and width of the result.

    Raises:
        ValueError: `size` is not three positive numbers.
    """

    def _first(self, room: int) -> int:
        return room // 2


class RandomCrop3d(_Crop3d):
    """Crop a volume and its mask at a random position; otherwise like `CenterCrop3d`."""

    def _first(self, room: int) -> int:
        return int(torch.randint(room + 1, ()))


class RandomFlip3d:
    """Mirror a volume and its mask in each of the three dimensions with a probability.

    Args:
        p: The probability, for each dimension independently.

    Raises:
        ValueError: `p` is not in [0, 1].
    """

    def __init__(self, p: float = 0.5) -> None:
        check_finite(p=p, least=0, most=1)
        self.p = p

    def __call__(self, volume: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mirrored volume and mask."""
        dims = [dim for dim, draw in enumerate(torch.rand(3).tolist(), start=-3) if draw < self.p]
        return volume.flip(dims), mask.flip(dims)


class _RandomChange:
    """Change a volume by a random number with a probability; the mask is unchanged."""

    def __init__(self, p: float, values: tuple[float, float]) -> None:
        check_finite(p=p, least=0, most=1)
        check_finite(smallest=values[0], least=0)
        check_finite(largest=values[1], least=values[0])
        self.p, self.values = p, values

    def __call__(self, volume: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the changed volume, and the mask."""
        chance, place = torch.rand(2).tolist()
        low, high = self.values
        return (self._change(volume, low + place * (high - low)) if chance < self.p else volume), mask

    def _change(self, volume: Tensor, value: float) -> Tensor:
        raise NotImplementedError


class RandomBlur3d(_RandomChange):
    """Blur a volume with a probability; see `blur_volume`. The mask is unchanged.

    Args:
        p: The probability.
        sigma: Range of the standard deviation in voxels, above 0.

    Raises:
        ValueError: `p` is not in [0, 1], or the range is not two numbers in order.
    """

    def __init__(self, p: float = 0.15, sigma: tuple[float, float] = (0.5, 1.5)) -> None:
        super().__init__(p, sigma)

    def _change(self, volume: Tensor, value: float) -> Tensor:
        return blur_volume(volume, value)


class RandomNoise3d(_RandomChange):
    """Add Gaussian noise to each voxel of a volume with a probability. The mask is unchanged.

    Args:
        p: The probability.
        std: Range of the standard deviation of the noise.

    Raises:
        ValueError: `p` is not in [0, 1], or the range is not two numbers of at least 0 in order.
    """

    def __init__(self, p: float = 0.15, std: tuple[float, float] = (0.0, 0.33)) -> None:
        super().__init__(p, std)

    def _change(self, volume: Tensor, value: float) -> Tensor:
        return volume + value * torch.randn_like(volume)


class RandomBrightness3d(_RandomChange):
    """Multiply a volume by a random factor with a probability. The mask is unchanged.

    Args:
        p: The probability.
        factor: Range of the factor.

    Raises:
        ValueError: `p` is not in [0, 1], or the range is not two numbers of at least 0 in order.
    """

    def __init__(self, p: float = 0.15, factor: tuple[float, float] = (0.7, 1.3)) -> None:
        super().__init__(p, factor)

    def _change(self, volume: Tensor, value: float) -> Tensor:
        return volume * value


class RandomContrast3d(_RandomChange):
    """Multiply a volume by a random factor with a probability, clamped to the old range of each channel.

    Args:
        p: The probability.
        factor: Range of the factor.

    Raises:
        ValueError: `p` is not in [0, 1], or the range is not two numbers of at least 0 in order.
    """

    def __init__(self, p: float = 0.15, factor: tuple[float, float] = (0.65, 1.5)) -> None:
        super().__init__(p, factor)

    def _change(self, volume: Tensor, value: float) -> Tensor:
        dims = (1, 2, 3)
        return (volume * value).clamp(volume.amin(dims, keepdim=True), volume.amax(dims, keepdim=True))
