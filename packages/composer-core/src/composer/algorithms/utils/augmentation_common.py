"""Convert between tensors and Pillow images. Pillow is only imported to create an image."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from composer.utils.import_helpers import MissingConditionalImportError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["image_as_type", "is_pillow_image", "map_pillow_function"]

T = TypeVar("T")


def is_pillow_image(image: object) -> bool:
    """Return True for a Pillow image, without importing Pillow."""
    module = sys.modules.get("PIL.Image")  # already imported if an image exists
    return module is not None and isinstance(image, module.Image)


def image_as_type(image: Any, typ: type[T]) -> T:
    """Convert an image to a tensor or a Pillow image.

    Args:
        image: A Pillow image, or a tensor of shape (H, W) or (C, H, W) with 1 to 4 channels, floating in [0, 1] or
            uint8; not modified.
        typ: `torch.Tensor` or `PIL.Image.Image`.

    Returns:
        The image itself if it has that type. A new tensor has shape (C, H, W) and is float32 in [0, 1], or has the
        values of the image if they are not bytes. A new Pillow image has rounded bytes; values outside [0, 1] are
        clamped.

    Raises:
        TypeError: `typ` is another type, or `image` is not an image or has another dtype.
        ValueError: `image` is a tensor of another shape.
        MissingConditionalImportError: Pillow is needed and not installed.

    Example:
        >>> import PIL.Image
        >>> image = image_as_type(torch.zeros(3, 4, 6), PIL.Image.Image)
        >>> image.size, image_as_type(image, torch.Tensor).shape
        ((6, 4), torch.Size([3, 4, 6]))

    Differs: (H, W) tensors are accepted. Floats are rounded to bytes, not truncated, so float16 images are exact.
    """
    if isinstance(image, typ):
        return image
    if typ is torch.Tensor and is_pillow_image(image):
        pixels: Any = _pixels_of(image)
        return pixels.to(torch.float32).div_(255) if pixels.dtype is torch.uint8 else pixels  # type: ignore[no-any-return]
    if isinstance(image, torch.Tensor) and typ is _pillow().Image:
        return _pillow_of(image)  # type: ignore[return-value]
    raise TypeError(
        f"`image` must be a tensor or a Pillow image and `typ` one of their types, got {type(image).__name__} and "
        f"{typ!r}. Use `torch.Tensor` or `PIL.Image.Image`."
    )


def map_pillow_function(f_pil: Callable[[Image], Image], imgs: T) -> T:
    """Apply a function on Pillow images to one or several images.

    Args:
        f_pil: A function that takes a Pillow image and returns one.
        imgs: A Pillow image, a tensor of shape (H, W), (C, H, W) or (N, C, H, W) as in `image_as_type`, or an iterable
            of these; not modified.

    Returns:
        A value of the type of `imgs`, or a list for an iterable; tensors keep shape, dtype and device.

    Raises:
        TypeError: `imgs` is none of these.
        ValueError: A tensor has another shape.
        MissingConditionalImportError: Pillow is needed and not installed.

    Example:
        >>> map_pillow_function(lambda image: image.rotate(90), torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
        tensor([[1., 0.],
                [0., 0.]])

    Differs: (H, W) tensors are accepted; dtype and device are kept.
    """
    result: Any
    if is_pillow_image(imgs):
        result = f_pil(imgs)  # type: ignore[arg-type]
    elif isinstance(imgs, torch.Tensor):
        result = _map_tensor(f_pil, imgs)
    elif isinstance(imgs, Iterable) and not isinstance(imgs, str):
        result = [map_pillow_function(f_pil, img) for img in imgs]
    else:
        raise TypeError(
            f"`imgs` must be a Pillow image, a tensor or an iterable of these, got {type(imgs).__name__}. Convert it "
            f"with `PIL.Image.fromarray` or `torch.as_tensor`."
        )
    return result  # type: ignore[no-any-return]


def _map_tensor(f_pil: Callable[[Image], Image], images: torch.Tensor) -> torch.Tensor:
    if images.dim() == 4:
        return torch.stack([_map_tensor(f_pil, image) for image in images]) if len(images) else images.clone()
    pixels = _pixels_of(f_pil(_pillow_of(images)))
    if images.dim() == 2 and len(pixels) == 1:
        pixels = pixels[0]
    if not images.is_floating_point():
        return pixels.to(images.device)
    return pixels.to(images.dtype).div_(255).to(images.device)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        if error.name != "PIL":
            raise
        raise MissingConditionalImportError("vision", "pillow") from None
    return Image


def _pillow_of(image: torch.Tensor) -> Image:
    if image.dim() not in (2, 3) or (image.dim() == 3 and image.shape[0] not in (1, 2, 3, 4)):
        raise ValueError(
            f"`image` must have shape (H, W) or (C, H, W) with 1 to 4 channels, got {tuple(image.shape)}. Put the "
            f"channels first, and convert the images of a batch one by one."
        )
    pixels = image.detach().cpu()
    if pixels.is_floating_point():
        pixels = pixels.mul(255).round_().clamp_(0, 255).to(torch.uint8)
    elif pixels.dtype is not torch.uint8:
        raise TypeError(f"`image` must be floating or uint8, got {image.dtype}. Use `image.to(torch.uint8)`.")
    if pixels.dim() == 3:
        pixels = pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0).contiguous()
    result: Image = _pillow().fromarray(pixels.numpy())
    return result


def _pixels_of(image: Image) -> torch.Tensor:
    """Return a copy of the values as a tensor of shape (C, H, W)."""
    array = np.array(image)
    pixels = torch.from_numpy(array.astype(np.uint8) * 255 if image.mode == "1" else array)
    return pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1).contiguous()
