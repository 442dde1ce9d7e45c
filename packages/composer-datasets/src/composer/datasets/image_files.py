"""A dataset of images in memory-mapped files that `composer-datasets write` wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from composer.datasets._missing import missing_files, require
from composer.datasets._shards import INDEX, PLAN, VERSION, Shard, shard_name
from composer.datasets.utils import pil_image, pil_image_collate
from composer.utils import check_finite

_OPEN_SHARDS = 512  # per process: every mapping holds a file descriptor, and 1,024 are the usual limit
_COMMAND = "composer-datasets write folder SRC {folder}"


class Box(NamedTuple):
    """A rectangle of pixels."""

    top: int
    left: int
    height: int
    width: int


class CropDecoder(Protocol):
    """Protocol that chooses what `ImageFiles` decodes: a rectangle of an image, at a size.

    Attributes:
        size: Height and width of the result.
        fast: Repeat chroma for 2 x 2 pixels instead of interpolating it, which decodes 10% faster.
    """

    @property
    def size(self) -> int: ...
    @property
    def fast(self) -> bool: ...

    def draw(self, height: int, width: int) -> tuple[Box, bool]:
        """Return the rectangle, and True if it is to be mirrored left to right.

        Args:
            height: Height of the image.
            width: Width of the image.
        """
        ...


@dataclass(frozen=True)
class RandomCropDecoder:
    """Decode a random rectangle of an image, resized to a square; as torchvision's `RandomResizedCrop` and a flip.

    Args:
        size: Height and width of the result.
        scale: Range of the area of the rectangle, as a fraction of that of the image.
        ratio: Range of width / height of the rectangle.
        flip: Probability of mirroring it left to right.
        fast: Repeat chroma for 2 x 2 pixels instead of interpolating it, which decodes 10% faster.

    Raises:
        ValueError: A number is out of range.

    Source: Szegedy et al., "Going Deeper with Convolutions", arXiv:1409.4842, section 6.
    """

    size: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    fast: bool = True

    def __post_init__(self) -> None:
        check_finite(size=self.size, least=1)
        check_finite(flip=self.flip, least=0, most=1)
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if not 0 < low <= high or (name == "scale" and high > 1):
                limit = ", at most 1" if name == "scale" else ""
                raise ValueError(f"`{name}` must be two positive numbers in order{limit}, got {(low, high)!r}.")

    def draw(self, height: int, width: int) -> tuple[Box, bool]:
        """Return a random rectangle, or the largest in the center if ten do not fit; and True if it is mirrored."""
        numbers = torch.rand(23, dtype=torch.float64).tolist()  # one call is faster than 23
        mirrored = numbers[22] < self.flip
        (low, high), (narrow, wide) = self.scale, self.ratio
        for first, second in zip(numbers[:10], numbers[10:20], strict=True):
            area = height * width * (low + first * (high - low))
            ratio = narrow * (wide / narrow) ** second
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                top, left = int(numbers[20] * (height - h + 1)), int(numbers[21] * (width - w + 1))
                return Box(top, left, h, w), mirrored
        w, h = min(width, max(round(height * wide), 1)), min(height, max(round(width / narrow), 1))
        return Box((height - h) // 2, (width - w) // 2, h, w), mirrored


@dataclass(frozen=True)
class CenterCropDecoder:
    """Decode the square in the center of an image, resized.

    Args:
        size: Height and width of the result.
        resize_size: The shorter side of the image is resized to this first. None: `size` * 256 / 224.
        fast: Repeat chroma for 2 x 2 pixels instead of interpolating it.

    Raises:
        ValueError: `resize_size` is below `size`.
    """

    size: int
    resize_size: int | None = None
    fast: bool = False

    def __post_init__(self) -> None:
        check_finite(size=self.size, least=1)
        if self.resize_size is not None and self.resize_size < self.size:
            raise ValueError(f"`resize_size` must be at least `size`, {self.size}, got {self.resize_size!r}.")

    def draw(self, height: int, width: int) -> tuple[Box, bool]:
        """Return the square in the center, never mirrored."""
        resized = round(self.size * 256 / 224) if self.resize_size is None else self.resize_size
        side = max(round(min(height, width) * self.size / resized), 1)
        return Box((height - side) // 2, (width - side) // 2, side, side), False


class ImageFiles(Dataset[tuple[Any, int]]):
    """Map-style dataset of the images that `composer-datasets write` stored in a folder.

    Files are memory-mapped, and an image is read by its index, so any order is as fast as any other. Worker processes
    get only the path. `ResumableDataLoader` gives every rank its share, and resumes.

    A `crop` decodes JPEGs at a fraction of their size if the result is small, cuts the rectangle that it draws, and
    resizes it.

    Args:
        folder: What `composer-datasets write` wrote.
        crop: What to decode of an image, such as `RandomCropDecoder(224)`. None: the whole image.
        transform: Applied to each Pillow image after the crop, as in the datasets of torchvision. None: samples have
            tensors instead, which is faster.

    Attributes:
        folder: The folder.
        crop: As passed to the constructor.
        transform: May be replaced, as `add_vision_dataset_transform` does.
        classes: Names of the classes; labels are their indices.

    Samples are `(image, label)`. The image is a tensor of shape (3, H, W), uint8, in the channels-last memory format,
    or what `transform` returns.

    Raises:
        FileNotFoundError: The folder has no such files, or not all of them; the message says what to do.
        ModuleNotFoundError: simplejpeg is not installed.
        ValueError: The files have another size than they were written with, or an unknown format.
    """

    def __init__(
        self, folder: str | Path, crop: CropDecoder | None = None, transform: Callable[[Any], Any] | None = None
    ) -> None:
        _decoder()  # raises now if it is missing, not at the first sample
        self.folder, self.crop, self.transform = Path(folder).expanduser(), crop, transform
        index = _read_index(self.folder)
        self.classes: list[str] = index["classes"]
        self._length: int = index["images"]
        self._per_shard: int = index["shard_images"]
        for name, size in index["files"].items():
            path = self.folder / name
            actual = path.stat().st_size if path.is_file() else None
            if actual != size:
                state = "does not exist" if actual is None else f"has {actual:,} bytes"
                raise ValueError(
                    f"{str(path)!r} must have {size:,} bytes, but {state}. The folder was changed or copied in part: "
                    f"copy it again, or remove it and write it again."
                )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, int]]:
        """Return several samples. They are requested from the disk together."""
        found = []
        for index in indices:
            if not 0 <= index < self._length:
                raise IndexError(f"`index` must be from 0 to {self._length - 1}, got {index!r}.")
            number, place = divmod(index, self._per_shard)
            shard = _open_shard(f"{self.folder}/{shard_name(number)}")
            record: Any = shard.records.item(place)
            shard.prefetch(*record[:2])
            found.append((shard, record))
        return [self._decode(*each, index) for each, index in zip(found, indices, strict=True)]

    def _decode(self, shard: Shard, record: tuple[int, ...], index: int) -> tuple[Any, int]:
        offset, num_bytes, label, height, width = record
        crop, box, mirrored = self.crop, Box(0, 0, height, width), False
        if crop is not None:
            box, mirrored = crop.draw(height, width)
        try:
            pixels = _decode_box(shard.read(offset, num_bytes), (height, width), box, crop)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"Image {index} of {str(self.folder)!r} is damaged: {error}. Copy the folder again, or remove it and "
                f"write it again."
            ) from error
        # In the channels-last format, with a batch dimension of its own stride: torch resizes twice as fast.
        image = torch.from_numpy(np.ascontiguousarray(pixels))[None].permute(0, 3, 1, 2)
        if crop is not None and image.shape[2:] != (crop.size, crop.size):
            image = torch.nn.functional.interpolate(image, (crop.size, crop.size), mode="bilinear", antialias=True)
        if mirrored:
            image = image.flip(3)
        return image[0] if self.transform is None else self.transform(pil_image(image[0])), label


def _decode_box(data: bytes, shape: tuple[int, int], box: Box, crop: CropDecoder | None) -> np.ndarray:
    """Return the pixels of a rectangle of an image, shape (H, W, 3), uint8.

    A rectangle of a JPEG that is at least twice as large as the result of `crop` is decoded at a fraction of its size.
    """
    options: dict[str, Any] = {}
    if crop is not None:
        options["fastupsample"] = crop.fast
        if min(box.height, box.width) >= 2 * crop.size:
            least = [math.ceil(whole * crop.size / part) for whole, part in zip(shape, box[2:], strict=True)]
            options |= {"min_height": least[0], "min_width": least[1], "min_factor": 2}
    try:
        pixels: np.ndarray = _decoder().decode_jpeg(data, **options)
    except ValueError:  # another format, or a JPEG of other colors or with flaws, that Pillow decodes
        from PIL import Image

        pixels = np.array(Image.open(BytesIO(data)).convert("RGB"))
    if pixels.shape[:2] != shape:
        factors = 2 * (pixels.shape[0] / shape[0], pixels.shape[1] / shape[1])
        box = Box(*(round(value * factor) for value, factor in zip(box, factors, strict=True)))
    return pixels[box.top : box.top + box.height, box.left : box.left + box.width]


def _decoder() -> Any:
    return require("simplejpeg", "Reading image files", "images")


def image_collate(batch: Sequence[tuple[Any, Any]]) -> tuple[Tensor, Tensor]:
    """Collate the samples of `ImageFiles` into images of shape (N, 3, H, W), uint8, and labels of shape (N,), int64.

    The images are in the channels-last memory format, as they were decoded. Pillow images are collated likewise.

    Raises:
        ValueError: The batch is empty, or the images differ in shape.
    """
    images = [image for image, _ in batch]
    if not images or not all(isinstance(image, Tensor) for image in images):
        return pil_image_collate(batch, torch.channels_last)
    shapes = sorted({tuple(image.shape) for image in images})
    if len(shapes) > 1:
        raise ValueError(f"The images of a batch must have the same shape, got {shapes}. Pass `crop` to `ImageFiles`.")
    pixels = torch.stack([image.permute(1, 2, 0) for image in images])
    return pixels.permute(0, 3, 1, 2), torch.tensor([label for _, label in batch])


def is_image_files(folder: Path) -> bool:
    """Return True if `composer-datasets write` wrote to a folder, even if it was interrupted."""
    return (folder / INDEX).is_file() or (folder / PLAN).is_file()


@lru_cache(maxsize=_OPEN_SHARDS)
def _open_shard(path: str) -> Shard:
    return Shard(Path(path))


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    if not path.is_file():
        if (folder / PLAN).is_file():
            raise FileNotFoundError(
                f"{str(folder)!r} is not complete: its writer was interrupted, or is still running. Run the same "
                f"`composer-datasets write` again; it continues."
            )
        raise missing_files("A folder of image files", [path], _COMMAND.format(folder=folder))
    index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if index.get("format") != "composer-image-files" or index.get("version") != VERSION:
        raise ValueError(
            f"{str(path)!r} must be of the format 'composer-image-files', version {VERSION}, got "
            f"{index.get('format')!r}, version {index.get('version')!r}. Upgrade composer-datasets, or write it again."
        )
    return index
