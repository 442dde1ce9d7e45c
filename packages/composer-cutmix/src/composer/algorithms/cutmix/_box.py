"""Draw a box, and paste it. Images are (..., W, H); a box is (x1, y1, x2, y2), where x counts along W and y along H."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch

__all__: list[str] = []

Box = tuple[int, int, int, int]


def _choose_box(
    input: torch.Tensor, length: float | None, alpha: float, bbox: Box | None, uniform_sampling: bool
) -> Box:
    """The box that is given, or one drawn with sides that are given or drawn."""
    width, height = input.shape[-2:]
    if bbox is not None:
        if length is not None:
            raise ValueError(f"`length` must not be given together with `bbox`, got {length!r}. Pass one of them.")
        x1, y1, x2, y2 = bbox
        if not (0 <= x1 <= x2 <= width and 0 <= y1 <= y2 <= height):
            raise ValueError(
                f"`bbox` must be (x1, y1, x2, y2) inside an image of {width} by {height} pixels, got {bbox!r}. "
                f"x counts along dimension 2, y along dimension 3."
            )
        return bbox
    if length is None:
        return _rand_bbox(width, height, _gen_cutmix_coef(alpha), uniform_sampling=uniform_sampling)
    if not 0 <= length <= 1:
        raise ValueError(f"`length` must be in [0, 1], got {length!r}. It is a fraction of the image's sides.")
    return _place_box(width, height, length, None, None, uniform_sampling)


def _rand_bbox(
    W: int,
    H: int,
    cutmix_lambda: float,
    cx: int | None = None,
    cy: int | None = None,
    uniform_sampling: bool = False,
) -> Box:
    """Draw the box that leaves the share `cutmix_lambda` of the image, unless it sticks out; (cx, cy) is its centre."""
    return _place_box(W, H, math.sqrt(1 - cutmix_lambda), cx, cy, uniform_sampling)


def _place_box(width: int, height: int, fraction: float, cx: int | None, cy: int | None, uniform_sampling: bool) -> Box:
    x1, x2 = _place_side(width, int(width * fraction), cx, uniform_sampling)
    y1, y2 = _place_side(height, int(height * fraction), cy, uniform_sampling)
    return x1, y1, x2, y2


def _place_side(size: int, side: int, center: int | None, uniform_sampling: bool) -> tuple[int, int]:
    """Place a side on the host: it only slices, and one drawn on a device would have to be read back."""
    if center is not None:
        start = center - side // 2
    elif uniform_sampling:  # every start that leaves a pixel inside: each pixel is in as many sides as any other
        start = int(torch.randint(min(1 - side, 0), size, ()))
    else:
        start = int(torch.randint(size, ())) - side // 2
    return min(max(start, 0), size), max(min(start + side, size), 0)


def _adjust_lambda(x: torch.Tensor, bbox: Box) -> float:
    """The fraction of the image outside the box."""
    x1, y1, x2, y2 = bbox
    return 1 - (x2 - x1) * (y2 - y1) / (x.shape[-2] * x.shape[-1])


def _paste(image: torch.Tensor, indices: torch.Tensor, bbox: Box) -> torch.Tensor:
    """A copy of the images, each with the box of its partner; gathers no pixel outside the box."""
    x1, y1, x2, y2 = bbox
    mixed = image.clone()
    mixed[..., x1:x2, y1:y2] = image[..., x1:x2, y1:y2].index_select(0, indices)
    return mixed


def _check_alpha(alpha: Any) -> None:
    if isinstance(alpha, bool) or not isinstance(alpha, Real):
        raise TypeError(f"`alpha` must be a number, got {alpha!r}. Use for example `alpha=1.0`.")
    if not 0 <= float(alpha) < math.inf:
        raise ValueError(
            f"`alpha` must not be negative or infinite, got {alpha!r}. Use `alpha=1.0` to draw all areas alike."
        )


def _gen_cutmix_coef(alpha: float) -> float:
    """Draw the share of the image that the box leaves, on the host, where it is needed to slice."""
    _check_alpha(alpha)
    if alpha == 0:
        return 0.0
    # A Beta draw is the share of one of two Gamma draws; `_standard_gamma` is the sampler behind torch.distributions.
    first, second = torch._standard_gamma(torch.full((2,), float(alpha), dtype=torch.float64)).tolist()
    return float(first / max(first + second, torch.finfo(torch.float64).tiny))


def _gen_indices(
    num_samples: int, device: torch.device | str = "cpu", generator: torch.Generator | None = None
) -> torch.Tensor:
    return torch.randperm(num_samples, device=device, generator=generator)
