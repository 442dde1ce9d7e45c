"""Random transforms of volumes and their masks: crop, flip, blur, noise, brightness and contrast, in three dimensions.

A transform takes a volume of shape (C, D, H, W) and a mask of shape (D, H, W), and returns both. They draw from torch's
global generator; `torchvision.transforms.v2.Compose` chains them.

Source of the probabilities and ranges: Futrega et al., "Optimized U-Net for Brain Tumor Segmentation",
arXiv:2110.03352, data augmentation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


class CenterCrop3d:
    """Crop the center of a volume and its mask; smaller ones are padded with 0 on both sides.

    Args:
        size: Depth, height and width of the result.

    Raises:
        ValueError: `size` is not three positive numbers.
    """

    def __init__(self, size: Sequence[int]) -> None:
        self.size = _check_size(size)

    def __call__(self, volume: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cropped volume and mask."""
        return _cropped(volume, mask, self.size, lambda room: room // 2)


class RandomCrop3d:
    """Crop a volume and its mask at a random position; smaller ones are padded with 0 on both sides.

    Args:
        size: Depth, height and width of the result.

    Raises:
        ValueError: `size` is not three positive numbers.
    """

    def __init__(self, size: Sequence[int]) -> None:
        self.size = _check_size(size)

    def __call__(self, volume: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cropped volume and mask."""
        return _cropped(volume, mask, self.size, lambda room: int(torch.randint(room + 1, ())))


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


class RandomBlur3d:
    """Blur a volume with a probability; see `blur_volume`. The mask is unchanged.

    Args:
        p: The probability.
        sigma: Range of the standard deviation in voxels.

    Raises:
        ValueError: `p` is not in [0, 1], or `sigma` is not two positive numbers in order.
    """

    def __init__(self, p: float = 0.15, sigma: tuple[float, float] = (0.5, 1.5)) -> None:
        self.p, self.sigma = _check_range(p, "sigma", sigma, above=0)

    def __call__(self, volume: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the blurred volume, and the mask."""
        sigma = _draw(self.p, self.sigma)
        return (volume if sigma is None else blur_volume(volume, sigma)), mask


class RandomNoise3d:
    """Add Gaussian noise to each voxel of a volume with a probability. The mask is unchanged.

    Args:
        p: The probability.
        std: Range of the standard deviation of the noise.

    Raises:
        ValueError: `p` is not in [0, 1], or `std` is not two numbers of at least 0 in order.
    """

    def __init__(self, p: float = 0.15, std: tuple[float, float] = (0.0, 0.33)) -> None:
        self.p, self.std = _check_range(p, "std", std, least=0)

    def __call__(self, volume: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the noisy volume, and the mask."""
        std = _draw(self.p, self.std)
        return (volume if std is None else volume + std * torch.randn_like(volume)), mask


class RandomBrightness3d:
    """Multiply a volume by a random factor with a probability. The mask is unchanged.

    Args:
        p: The probability.
        factor: Range of the factor.

    Raises:
        ValueError: `p` is not in [0, 1], or `factor` is not two numbers of at least 0 in order.
    """

    def __init__(self, p: float = 0.15, factor: tuple[float, float] = (0.7, 1.3)) -> None:
        self.p, self.factor = _check_range(p, "factor", factor, least=0)

    def __call__(self, volume: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the multiplied volume, and the mask."""
        factor = _draw(self.p, self.factor)
        return (volume if factor is None else volume * factor), mask


class RandomContrast3d:
    """Multiply a volume by a random factor with a probability, clamped to its old range. The mask is unchanged.

    Args:
        p: The probability.
        factor: Range of the factor.

    Raises:
        ValueError: `p` is not in [0, 1], or `factor` is not two numbers of at least 0 in order.
    """

    def __init__(self, p: float = 0.15, factor: tuple[float, float] = (0.65, 1.5)) -> None:
        self.p, self.factor = _check_range(p, "factor", factor, least=0)

    def __call__(self, volume: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the changed volume, with the same smallest and largest value allowed in each channel; and the mask."""
        factor = _draw(self.p, self.factor)
        if factor is None:
            return volume, mask
        dims = (1, 2, 3)
        low, high = volume.amin(dims, keepdim=True), volume.amax(dims, keepdim=True)
        return (volume * factor).clamp(low, high), mask


def _cropped(volume: Tensor, mask: Tensor, size: Sequence[int], start: Callable[[int], int]) -> tuple[Tensor, Tensor]:
    missing = [max(want - have, 0) for want, have in zip(size, mask.shape, strict=True)]
    padding = [part for count in reversed(missing) for part in (count // 2, count - count // 2)]
    if any(padding):
        volume, mask = pad(volume, padding), pad(mask, padding)
    for dim, want in enumerate(size, start=-3):
        first = start(mask.shape[dim] - want)
        volume, mask = volume.narrow(dim, first, want), mask.narrow(dim, first, want)
    return volume.contiguous(), mask.contiguous()


def _check_size(size: Sequence[int]) -> tuple[int, ...]:
    if len(size) != 3 or min(size) < 1:
        raise ValueError(f"`size` must be three positive numbers, got {size!r}.")
    return tuple(size)


def _check_range(
    p: float, name: str, values: tuple[float, float], **bounds: float
) -> tuple[float, tuple[float, float]]:
    check_finite(p=p, least=0, most=1)
    low, high = values
    check_finite(**{name: low}, **bounds)
    check_finite(**{name: high}, least=low)
    return p, (low, high)


def _draw(p: float, values: tuple[float, float]) -> float | None:
    """Return a random number in a range, or None with probability 1 - p."""
    chance, place = torch.rand(2).tolist()
    return values[0] + place * (values[1] - values[0]) if chance < p else None
