"""Write images into the memory-mapped files that `ImageFiles` reads."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from composer.datasets._shards import INDEX, PARTIAL, PLAN, Shard, ShardTask, WriteOptions, durable, shard_name
from composer.datasets.image_files import ImageFiles
from composer.utils import check_finite

__all__ = ["ImageSource", "WriteOptions", "array_source", "check_image_files", "folder_source", "write_image_files"]

_LEAST_PER_SHARD = 4096
_MOST_SHARDS = 256  # a process can keep that many open
_POLL_SECONDS = 0.5


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
    digest = hashlib.sha256(pixels)
    digest.update(labels.numpy())
    return ImageSource(pixels, labels.tolist(), list(classes), digest.hexdigest())


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
        progress: Called with the number of images that were finished since the last call; first with those that an
            interrupted call left.

    Raises:
        FileExistsError: The folder holds files of other images or options.
        RuntimeError: A process was killed; the finished files stay.
        ValueError: There is no image, a number is not positive, or an image cannot be read.
    """
    options, report = options or WriteOptions(), progress or _ignore
    check_finite(processes=processes, images=len(source.images), least=1)
    per_shard = shard_images or max(_LEAST_PER_SHARD, -(-len(source.images) // _MOST_SHARDS))
    check_finite(shard_images=per_shard, least=1)
    root = Path(folder).expanduser()
    plan = {
        "format": "composer-image-files",
        "version": 1,
        "images": len(source.images),
        "classes": list(source.classes),
        "shard_images": per_shard,
        "options": asdict(options),
        "source": source.fingerprint,
    }
    _begin(root, plan)
    count = -(-len(source.images) // per_shard)
    tasks = []
    for number in range(count):
        chosen = slice(number * per_shard, (number + 1) * per_shard)
        task = ShardTask(root / shard_name(number), source.images[chosen], source.labels[chosen], options)
        if task.is_done():
            report(len(task.images))
        else:
            tasks.append(task)
    if min(processes, len(tasks)) > 1:
        _write_in_processes(tasks, min(processes, len(tasks)), report)
    else:
        for task in tasks:
            task.write(lambda: report(1))
    sizes = [(root / shard_name(number)).stat().st_size for number in range(count)]
    _write_json(root / INDEX, {**plan, "shards": sizes})


def check_image_files(folder: str | Path, progress: Callable[[int], object] | None = None) -> list[str]:
    """Compare every image of a folder with its checksum.

    Args:
        folder: What `write_image_files` wrote.
        progress: Called with the number of images that were compared since the last call.

    Returns:
        A line about each damaged image or file; none if all are as they were written.

    Raises:
        FileNotFoundError: The folder has no such files, or not all of them.
    """
    root, report = Path(folder).expanduser(), progress or _ignore
    try:
        ImageFiles(root)
    except ValueError as error:
        return [str(error)]
    damaged = []
    for path in sorted(root.glob("shard-*.bin")):
        try:
            shard = Shard(path)
        except ValueError as error:
            damaged.append(str(error))
            continue
        for place, record in enumerate(shard.records.tolist()):
            if not shard.is_intact(record):
                damaged.append(f"Image {place} of {str(path)!r} is damaged: its checksum differs.")
            report(1)
    return damaged


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


def _write_in_processes(tasks: Sequence[ShardTask], processes: int, report: Callable[[int], object]) -> None:
    context = multiprocessing.get_context("spawn")
    counter, errors, reported = context.Value("q", 0), context.SimpleQueue(), 0
    workers = [
        context.Process(target=_write_tasks, args=(tasks[first::processes], counter, errors), daemon=True)
        for first in range(processes)
    ]
    for worker in workers:
        worker.start()
    try:
        running = workers
        while running:
            wait([worker.sentinel for worker in running], _POLL_SECONDS)
            running = [worker for worker in workers if worker.is_alive()]
            finished = counter.value
            report(finished - reported)
            reported = finished
            if not errors.empty():
                raise ValueError(errors.get())
            killed = [worker.exitcode for worker in workers if worker.exitcode]
            if killed:
                raise RuntimeError(
                    f"A writing process ended with exit code {killed[0]}; it may have been killed for want of memory. "
                    f"Run the same command again, with fewer processes if need be; it continues."
                )
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()


def _write_tasks(tasks: Sequence[ShardTask], counter: Any, errors: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def count() -> None:
        with counter.get_lock():
            counter.value += 1

    try:
        for task in tasks:
            task.write(count)
    except (OSError, ValueError) as error:
        errors.put(str(error))


def _end_with_parent() -> None:
    """Exit if the parent process is killed, instead of finishing the work first."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with durable(path) as file:
        file.write(json.dumps(content, indent=1).encode())


def _ignore(_: int) -> None:
    pass
