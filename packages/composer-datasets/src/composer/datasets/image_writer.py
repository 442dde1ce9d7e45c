"""Write images into the memory-mapped files that `ImageFiles` reads."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from composer.datasets._shards import INDEX, PARTIAL, PLAN, RECORD, VERSION, durable, shard_name
from composer.utils import check_finite

__all__ = ["ImageSource", "WriteOptions", "array_source", "folder_source", "write_image_files"]

_LEAST_PER_SHARD = 4096
_MOST_SHARDS = 256  # a process can keep that many open
_DEFAULT_QUALITY = 90


@dataclass(frozen=True)
class WriteOptions:
    """Options of the stored images. By default image files are copied byte for byte.

    Args:
        max_side: Shrink images so that the longer side has at most this many pixels.
        short_side: Shrink images so that the shorter side has at most this many pixels.
        quality: Encode images as JPEG with this quality. None: 90 for images that are shrunk or have no file; others
            are unchanged.

    Raises:
        ValueError: A number is out of range, or both sides are given.
    """

    max_side: int | None = None
    short_side: int | None = None
    quality: int | None = None

    def __post_init__(self) -> None:
        if self.max_side is not None and self.short_side is not None:
            raise ValueError(
                f"`max_side` and `short_side` must not be given together, got {self.max_side} and {self.short_side}."
            )
        for name, most in (("max_side", 65_535), ("short_side", 65_535), ("quality", 100)):
            if (value := getattr(self, name)) is not None:
                check_finite(**{name: value}, least=1, most=most)

    def new_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the size to which an image is shrunk."""
        limit = self.max_side or self.short_side
        side = min(width, height) if self.max_side is None else max(width, height)
        if limit is None or side <= limit:
            return width, height
        return max(round(width * limit / side), 1), max(round(height * limit / side), 1)


@dataclass(frozen=True)
class ImageSource:
    """Images to write.

    Attributes:
        images: Paths of image files, or arrays of pixels of shape (H, W, 3), uint8.
        labels: The class index of each image.
        classes: Names of the classes.
        fingerprint: Identifies the images, so that an interrupted writer continues with the same ones.
    """

    images: Sequence[Any]
    labels: Sequence[int]
    classes: Sequence[str]
    fingerprint: str


def folder_source(folder: str | Path) -> ImageSource:
    """Return the images of a folder with a folder for each class.

    Raises:
        FileNotFoundError: The folder has no class, or a class has no image.
    """
    from torchvision.datasets import ImageFolder

    root = Path(folder).expanduser()
    found = ImageFolder(str(root))
    paths, labels = zip(*found.samples, strict=True)
    names = "\n".join(os.path.relpath(path, root) for path in paths)
    return ImageSource(paths, labels, found.classes, hashlib.sha256(names.encode()).hexdigest())


def array_source(images: Any, labels: Any, classes: Sequence[str]) -> ImageSource:
    """Return images that are tensors of shape (N, 3, H, W), uint8, with labels of shape (N,).

    Args:
        images: The images.
        labels: Their class indices.
        classes: Names of the classes.
    """
    pixels = images.permute(0, 2, 3, 1).contiguous().numpy()
    return ImageSource(pixels, labels.tolist(), list(classes), hashlib.sha256(pixels).hexdigest())


def write_image_files(
    source: ImageSource,
    folder: str | Path,
    options: WriteOptions | None = None,
    *,
    processes: int = 1,
    shard_images: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Write images into a folder, or continue where an interrupted call stopped.

    A file appears under its name only when it is complete, and the index, without which nothing reads the folder, is
    written last. The files do not depend on the number of processes.

    Args:
        source: The images.
        folder: Where to write; made if it does not exist.
        options: What is done to the images.
        processes: Number of processes that read and encode. 1: only this one.
        shard_images: Images per file. None: 4,096, or more if there would be more than 256 files.
        progress: Called with the number of images of each file that is finished, also of those that an interrupted
            call left.

    Raises:
        FileExistsError: The folder holds files of other images or options.
        RuntimeError: A process was killed; the finished files stay, and another call continues.
        ValueError: There is no image, a number is not positive, or an image cannot be read.
    """
    options, count = options or WriteOptions(), len(source.images)
    check_finite(processes=processes, images=count, least=1)
    per_shard = shard_images or max(_LEAST_PER_SHARD, -(-count // _MOST_SHARDS))
    check_finite(shard_images=per_shard, least=1)
    root = Path(folder).expanduser()
    plan = {
        "format": "composer-image-files",
        "version": VERSION,
        "images": count,
        "classes": list(source.classes),
        "shard_images": per_shard,
        "options": asdict(options),
        "source": source.fingerprint,
        "labels": hashlib.sha256(np.asarray(source.labels, np.int64).tobytes()).hexdigest(),
    }
    _begin(root, plan)
    parts = [slice(first, first + per_shard) for first in range(0, count, per_shard)]
    paths = [root / shard_name(number) for number in range(len(parts))]
    tasks = (paths, [source.images[each] for each in parts], [source.labels[each] for each in parts])
    every, processes = [options] * len(parts), min(processes, len(parts))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn) if processes > 1 else nullcontext() as pool:
        for finished in (map if pool is None else pool.map)(_write_shard, *tasks, every):
            if progress is not None:
                progress(finished)
    written = [*paths, *(path.with_suffix(".npy") for path in paths)]
    _write_json(root / INDEX, {**plan, "files": {path.name: path.stat().st_size for path in written}})


def _begin(root: Path, plan: dict[str, Any]) -> None:
    """Write the plan, or check that the folder has the same one; remove files that an interrupted call left."""
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f"*{PARTIAL}"):
        left.unlink()
    path = root / PLAN
    if path.is_file():
        earlier = json.loads(path.read_text(encoding="utf-8"))
        different = sorted(key for key in plan if plan[key] != earlier.get(key))
        if different:
            raise FileExistsError(
                f"{str(root)!r} holds files that were written with other {', '.join(different)}. Use another folder, "
                f"or remove this one first."
            )
    elif any(root.iterdir()):
        raise FileExistsError(f"{str(root)!r} must be empty or hold files of the same images. Use another folder.")
    else:
        _write_json(path, plan)


def _write_shard(path: Path, images: Sequence[Any], labels: Sequence[int], options: WriteOptions) -> int:
    """Write a file and its table, unless an earlier call did; return the number of its images."""
    table = path.with_suffix(".npy")
    if not table.is_file():
        records = np.zeros(len(images), RECORD)
        with durable(path) as file:
            for place, (image, label) in enumerate(zip(images, labels, strict=True)):
                data, width, height = _encode(image, options)
                records[place] = (file.tell(), len(data), label, height, width)
                file.write(data)
        with durable(table) as file:
            np.save(file, records)
    return len(images)


def _encode(image: Any, options: WriteOptions) -> tuple[bytes, int, int]:
    """Return the bytes to store, width and height."""
    from PIL import Image

    data = None if isinstance(image, np.ndarray) else Path(image).read_bytes()
    try:
        picture: Any = Image.fromarray(image) if data is None else Image.open(BytesIO(data))
        picture.load()
    except OSError as error:
        raise ValueError(f"{str(image)!r} cannot be read as an image: {error}. Remove or replace it.") from error
    size = options.new_size(*picture.size)
    if data is not None and options.quality is None and size == picture.size:
        return data, *size
    picture = picture.convert("RGB")
    if size != picture.size:
        picture = picture.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)
    file = BytesIO()
    picture.save(file, "JPEG", quality=options.quality or _DEFAULT_QUALITY)
    return file.getvalue(), *size


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with durable(path) as file:
        file.write(json.dumps(content, indent=1).encode())
