"""Images and their targets: conversion between tensors and Pillow images, and targets with a value per pixel.

Pillow is only imported to create an image.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from composer.utils.import_helpers import MissingConditionalImportError

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")
_POSITIONS = frozenset({"bbox", "bboxes", "boxes", "keypoints"})  # keys of batches and targets for detection


def is_pillow_image(image: object) -> bool:
    """Return True for a Pillow image, without importing Pillow."""
    module = sys.modules.get("PIL.Image")  # already imported if an image exists
    return module is not None and isinstance(image, module.Image)


def image_size(image: Any) -> tuple[int, int] | None:
    """Return height and width of a Pillow image, or of a tensor of images; None for anything else."""
    if is_pillow_image(image):
        return image.height, image.width
    if isinstance(image, torch.Tensor) and image.dim() >= 2:
        return image.shape[-2], image.shape[-1]
    return None


def moves_with_pixels(target: Any, images: Any, method: str, *, is_batch: bool = True) -> bool:
    """Return True if a target has a value per pixel, so that a method that moves pixels must move it with the images.

    Such a target is a Pillow image or a tensor with at least two dimensions besides that of the batch, whose last two
    are height and width of the images: a segmentation mask of indices (N, H, W) or of one value per class (N, C, H, W).

    Args:
        target: The target of the images.
        images: A tensor of images (N, ..., H, W); or one image without N, or a Pillow image.
        method: The name of the method, for messages.
        is_batch: False if the images are only one.

    Raises:
        ValueError: The target has positions in another form, such as boxes: it is a tensor or array with as many
            dimensions as a mask, but with another size; or it is a mapping or sequence that contains a tensor or array
            with that many dimensions, or a key such as "boxes".

    Example:
        >>> images = torch.zeros(8, 3, 32, 32)
        >>> [
        ...     moves_with_pixels(target, images, "Flip")
        ...     for target in (torch.zeros(8, 32, 32), torch.zeros(8, 10))
        ... ]
        [True, False]
    """
    if not _has_positions(target, is_batch):
        return False
    if image_size(target) == image_size(images) is not None:
        return True
    got = f"shape {tuple(target.shape)}" if isinstance(target, torch.Tensor) else f"a {type(target).__name__}"
    raise ValueError(
        f"Targets with positions must have a value for each pixel of the images to be moved with them by `{method}`, "
        f"got {got} for images of {' x '.join(map(str, image_size(images) or ('unknown size',)))} pixels. Leave "
        f"`{method}` out, and transform images and targets together in the dataset, for example with "
        f"`torchvision.transforms.v2`."
    )


def has_pixel_maps(batch: Any, images: Any) -> bool:
    """Return True if a batch contains a mask for the pixels of its images, or targets of detection such as boxes.

    A tensor with the shape of the images does not count: it may be another view of them.

    Args:
        batch: The batch: a sequence or a mapping, with the images as one of its parts.
        images: A tensor of images (N, ..., H, W).
    """
    if isinstance(batch, Mapping) and not _POSITIONS.isdisjoint(batch):
        return True
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    for part in parts:
        if not _has_positions(part, True):
            continue
        is_view = isinstance(part, torch.Tensor) and part.shape == images.shape
        if isinstance(part, (Mapping, list, tuple)) or (image_size(part) == image_size(images) and not is_view):
            return True
    return False


def _has_positions(target: Any, is_batch: bool) -> bool:
    """Return True if a target is, or contains, anything with at least two dimensions for each image."""
    if isinstance(target, Mapping):
        names_them = not _POSITIONS.isdisjoint(target)
        return names_them or any(_has_positions(part, is_batch) for part in target.values())
    if isinstance(target, (list, tuple)):
        inner = is_batch and not any(isinstance(part, Mapping) for part in target)  # one mapping for each image
        return any(_has_positions(part, inner) for part in target)
    return is_pillow_image(target) or getattr(target, "ndim", 0) >= 2 + is_batch


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
        TypeError: `imgs` has another type.
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
