"""The command `composer-datasets`: write images into files that are read fast."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from composer.datasets.image_writer import WriteOptions, folder_source, write_image_files

PROGRAM = "composer-datasets"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: The command line without the command's name. None: that of this process.

    Returns:
        The exit status: 0, or 1 if images cannot be written.

    Raises:
        SystemExit: With status 2 if the command line is invalid.
    """
    options = _parser().parse_args(arguments)
    try:
        for part in ("train", "val") if options.kind == "imagenet" else ("",):
            _write(options, part)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted. Run the same command again to continue.", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Image files for `composer.datasets.ImageFiles`.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    write = commands.add_parser(
        "write",
        help="write images into memory-mapped files",
        description=(
            "Write images into memory-mapped files. Without options, image files are copied byte for byte. If it is "
            "interrupted, the same command continues."
        ),
    )
    write.add_argument(
        "kind",
        choices=("imagenet", "folder"),
        metavar="KIND",
        help="imagenet: SRC has `train` and `val`, each with a folder for each class; folder: it has those itself",
    )
    write.add_argument("source", type=Path, metavar="SRC", help="the images")
    write.add_argument("destination", type=Path, metavar="DST", help="the folder to write")
    sides = write.add_mutually_exclusive_group()
    sides.add_argument("--max-side", type=int, metavar="PIXELS", help="shrink images to this longer side")
    sides.add_argument("--short-side", type=int, metavar="PIXELS", help="shrink images to this shorter side")
    write.add_argument(
        "--quality", type=int, metavar="1-100", help="encode images as JPEG; 90 for images that are shrunk"
    )
    write.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="default: one per core (%(default)s)"
    )
    return parser


def _write(options: argparse.Namespace, part: str) -> None:
    source, folder = options.source / part, options.destination / part
    images = folder_source(source)
    how = WriteOptions(max_side=options.max_side, short_side=options.short_side, quality=options.quality)
    # A line every minute if the output is not a terminal.
    often = 0.2 if sys.stderr.isatty() else 60.0
    count, title = len(images.images), f"Writing {folder}"
    with tqdm(total=count, desc=title, unit=" images", mininterval=often, maxinterval=often) as bar:
        write_image_files(images, folder, how, processes=options.processes, progress=bar.update)
    size = sum(path.stat().st_size for path in folder.glob("shard-*.bin"))
    print(f"{folder}: {count:,} images, {len(images.classes):,} classes, {size / 1e6:,.1f} MB")
