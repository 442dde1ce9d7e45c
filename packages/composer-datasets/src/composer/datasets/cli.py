"""The command `composer-datasets`: write images into files that are read fast, and check them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from composer.datasets._missing import missing_files
from composer.datasets.image_files import ImageFiles
from composer.datasets.image_writer import (
    ImageSource,
    WriteOptions,
    array_source,
    check_image_files,
    folder_source,
    write_image_files,
)

PROGRAM = "composer-datasets"
_KINDS = {
    "imagenet": "SRC has `train` and `val`, each with a folder for each class; so has DST",
    "cifar10": "SRC is the root folder passed to torchvision; DST gets `train` and `test`",
    "cifar100": "as cifar10",
    "folder": "SRC has a folder for each class",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: The command line without the command's name. None: that of this process.

    Returns:
        The exit status: 0, or 1 if images are damaged or cannot be written.

    Raises:
        SystemExit: With status 2 if the command line is invalid.
    """
    options = _parser().parse_args(arguments)
    try:
        done: int = options.run(options)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted. Run the same command again to continue.", file=sys.stderr)
        return 130
    return done


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Image files for `composer.datasets.ImageFiles`.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    write = commands.add_parser(
        "write",
        help="write images into memory-mapped files",
        description=(
            "Write images into memory-mapped files. Without options, image files are copied byte for byte, and the "
            "pixels of CIFAR are stored as they are. If it is interrupted, the same command continues."
        ),
        epilog="kinds:\n" + "".join(f"  {name:<10}{text}\n" for name, text in _KINDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    write.add_argument("kind", choices=_KINDS, metavar="KIND", help="what SRC is; see below")
    write.add_argument("source", type=Path, metavar="SRC", help="the images")
    write.add_argument("destination", type=Path, metavar="DST", help="the folder to write")
    sides = write.add_mutually_exclusive_group()
    sides.add_argument("--max-side", type=int, metavar="PIXELS", help="shrink images to this longer side")
    sides.add_argument("--short-side", type=int, metavar="PIXELS", help="shrink images to this shorter side")
    write.add_argument(
        "--quality",
        type=int,
        metavar="1-100",
        help="encode images as JPEG of which parts can be decoded; 90 for images that are shrunk",
    )
    write.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="default: one per core (%(default)s)"
    )
    write.add_argument(
        "--shard-images", type=int, metavar="N", help="images per file; default: 4096, or more for at most 256 files"
    )
    write.set_defaults(run=_write)
    check = commands.add_parser("check", help="compare all images of a folder with their checksums")
    check.add_argument("folder", type=Path, metavar="DIR", help="a folder that `write` wrote")
    check.set_defaults(run=_check)
    return parser


def _write(options: argparse.Namespace) -> int:
    how = WriteOptions(max_side=options.max_side, short_side=options.short_side, quality=options.quality)
    for name, source in _sources(options.kind, options.source):
        folder = options.destination / name
        with _progress(len(source.images), f"Writing {folder}") as report:
            write_image_files(
                source,
                folder,
                how,
                processes=options.processes,
                shard_images=options.shard_images,
                progress=report,
            )
        size = sum(path.stat().st_size for path in folder.glob("shard-*.bin"))
        print(f"{folder}: {len(source.images):,} images, {len(source.classes):,} classes, {size / 1e6:,.1f} MB")
    return 0


def _check(options: argparse.Namespace) -> int:
    folders = [path for path in (options.folder, *sorted(options.folder.glob("*"))) if (path / "plan.json").is_file()]
    damaged = []
    for folder in folders or [options.folder]:  # the error of a folder without such files
        with _progress(len(ImageFiles(folder)), f"Checking {folder}") as report:
            damaged += check_image_files(folder, report)
    for line in damaged:
        print(line, file=sys.stderr)
    if not damaged:
        print("All images are as they were written.")
    return 1 if damaged else 0


def _sources(kind: str, root: Path) -> Iterator[tuple[str, ImageSource]]:
    """Return the subfolder of each part, and its images."""
    if kind == "folder":
        if not root.is_dir():
            raise FileNotFoundError(f"`SRC` must be a folder with a folder for each class, got {str(root)!r}.")
        yield "", folder_source(root)
    elif kind == "imagenet":
        from composer.datasets.imagenet import COMMAND

        parts = [part for part in ("train", "val") if (root / part).is_dir()]
        if not parts:
            raise missing_files("ImageNet", [root / "train", root / "val"], COMMAND.format(datadir=root))
        for part in parts:
            yield part, folder_source(root / part)
    else:
        from composer.datasets.cifar import load_cifar10, load_cifar100

        load, count = (load_cifar10, 10) if kind == "cifar10" else (load_cifar100, 100)
        for part in ("train", "test"):
            images, labels = load(root, part == "train")
            yield part, array_source(images, labels, [str(label) for label in range(count)])


@contextmanager
def _progress(count: int, title: str) -> Iterator[Callable[[int], object]]:
    """Show a progress bar with the remaining time; a line every minute if the output is not a terminal."""
    often = 0.2 if sys.stderr.isatty() else 60.0
    with tqdm(total=count, desc=title, unit=" images", mininterval=often, maxinterval=often, dynamic_ncols=True) as bar:
        yield bar.update
