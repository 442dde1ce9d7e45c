"""JPEG images of which a rectangle can be decoded at the cost of that rectangle.

A JPEG stores blocks of 8 or 16 pixels one after the other, each relative to the one before, so a decoder must read all
of them to reach the last. Restart markers end that dependence. `encode_jpeg` puts one after every block, which takes 5%
more bytes, and `index_jpeg` notes where they are; then a rectangle of blocks can be copied out of the file as a valid
JPEG of its own, without decoding anything. The files are ordinary ones: every decoder reads them.
"""

from __future__ import annotations

import io
import math
import struct
from typing import Any, NamedTuple

import numpy as np

from composer.datasets._missing import require

_SOF_BASELINE, _SOF_EXTENDED, _DRI, _SOS = 0xC0, 0xC1, 0xDD, 0xDA
_HEAD = 5  # numbers in an index before the lengths of runs
_MARKERS = np.tile(np.arange(0xD0, 0xD8, dtype=np.uint8), 2**13)  # numbered 0 to 7, repeatedly
_WORTH_CUTTING = 0.8  # a fraction of the area; for larger rectangles, decoding the whole image is as fast


class Box(NamedTuple):
    """A rectangle of pixels."""

    top: int
    left: int
    height: int
    width: int


def encode_jpeg(image: Any, quality: int) -> bytes:
    """Return a Pillow image in mode RGB as a JPEG with restart markers, with chroma at half the resolution.

    Args:
        image: The image.
        quality: From 1 to 100; Pillow advises against more than 95.
    """
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, subsampling="4:2:0", restart_marker_blocks=1)
    return file.getvalue()


def decode_jpeg(
    data: bytes | bytearray,
    shape: tuple[int, int],
    box: Box | None = None,
    size: int | None = None,
    *,
    fast: bool = False,
) -> np.ndarray:
    """Return the pixels of a JPEG, or of a rectangle of it, shape (H, W, 3), uint8.

    Args:
        data: The file.
        shape: Height and width of the image.
        box: The rectangle. None: the whole image.
        size: The rectangle will be resized to this height and width: if it is at least twice as large, it is decoded at
            a fraction of its size, but no smaller than this.
        fast: Repeat chroma for 2 x 2 pixels instead of interpolating it.

    Raises:
        ValueError: The file is damaged.
    """
    simplejpeg = require_decoder()
    if box is None or size is None or min(box.height, box.width) < 2 * size:
        pixels: np.ndarray = simplejpeg.decode_jpeg(data, fastupsample=fast)
    else:
        least = [math.ceil(whole * size / part) for whole, part in zip(shape, box[2:], strict=True)]
        pixels = simplejpeg.decode_jpeg(data, fastupsample=fast, min_height=least[0], min_width=least[1], min_factor=2)
        factors = 2 * (pixels.shape[0] / shape[0], pixels.shape[1] / shape[1])
        box = Box(*(round(value * factor) for value, factor in zip(box, factors, strict=True)))
    return pixels if box is None else pixels[box.top : box.top + box.height, box.left : box.left + box.width]


def index_jpeg(data: bytes) -> bytes:
    """Return what `cut_jpeg` needs to know of a JPEG, or nothing if it cannot be cut.

    It can if it is not progressive and has restart markers that divide its rows of blocks evenly.
    """
    layout = _layout(data)
    if layout is None:
        return b""
    frame, scan, interval, block_height, block_width = layout
    height, width = struct.unpack_from(">HH", data, frame + 5)
    rows, columns = -(-height // block_height), -(-width // block_width)
    coded = np.frombuffer(data, np.uint8, offset=scan)
    escapes = np.flatnonzero(coded[:-1] == 0xFF)
    markers = escapes[(coded[escapes + 1] & 0xF8) == 0xD0]
    if columns % interval or len(markers) + 1 != rows * columns // interval:
        return b""
    runs = np.diff(markers + 2, prepend=0, append=len(coded))  # lengths of blocks, each with the marker after it
    numbers = np.array([frame, scan, block_height, interval * block_width, columns // interval, *runs])
    return numbers.astype("<u2").tobytes() if max(numbers.max(), len(runs)) < 2**16 else b""


def cut_jpeg(
    data: bytes, index: bytes, shape: tuple[int, int], box: Box
) -> tuple[bytes | bytearray, tuple[int, int], Box]:
    """Copy the blocks that a rectangle needs out of a JPEG.

    Decoding the result gives the same pixels in the rectangle as decoding the whole file.

    Args:
        data: The file.
        index: The result of `index_jpeg`.
        shape: Height and width of the image.
        box: The rectangle.

    Returns:
        A JPEG, its height and width, and the position of the rectangle in it. The arguments, if the file cannot be cut,
        or the rectangle is most of the image.
    """
    (height, width), (top, left, box_height, box_width) = shape, box
    if not index or box_height * box_width > _WORTH_CUTTING * height * width:
        return data, shape, box
    numbers = np.frombuffer(index, "<u2")
    frame, scan, run_height, run_width, per_row = numbers[:_HEAD].tolist()
    runs = numbers[_HEAD:].astype(np.int64)
    # One more pixel on each side, and at least 6 in a row: the decoder interpolates chroma between neighbors, except
    # in images that are not wider than 4 pixels.
    first_row, last_row = max(top - 1, 0) // run_height, -(-min(top + box_height + 1, height) // run_height)
    first_run, last_run = (
        max(min(left - 1, width - 6), 0) // run_width,
        -(-min(left + box_width + 1, width) // run_width),
    )
    ends = runs[: last_row * per_row].cumsum() + scan
    part_ends = runs.reshape(-1, per_row)[first_row:last_row, first_run:last_run].ravel().cumsum() + (scan - 1)

    begin = first_row * per_row + first_run
    starts = ends[begin::per_row] - runs[begin : last_row * per_row : per_row]
    stops = ends[first_row * per_row + last_run - 1 :: per_row]
    pieces = [data[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    part = bytearray(b"".join([data[:scan], *pieces]))
    part_top, part_left = first_row * run_height, first_run * run_width
    shape = min(last_row * run_height, height) - part_top, min(last_run * run_width, width) - part_left
    struct.pack_into(">HH", part, frame + 5, *shape)
    written = np.frombuffer(part, np.uint8)
    written[part_ends] = _MARKERS[: len(part_ends)]
    written[-1] = 0xD9  # the end of the image
    return part, shape, Box(top - part_top, left - part_left, box_height, box_width)


def jpeg_shape(data: bytes) -> tuple[int, int] | None:
    """Return height and width of a JPEG, or None if `decode_jpeg` cannot decode all of it to RGB."""
    if data[:2] != b"\xff\xd8":
        return None
    decoder = require_decoder()
    try:
        height, width, colors, _ = decoder.decode_jpeg_header(data)
        if colors not in ("YCbCr", "RGB", "Gray"):
            return None
        decoder.decode_jpeg(data)
    except ValueError:
        return None
    return height, width


def require_decoder() -> Any:
    """Return the module that decodes.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    return require("simplejpeg", "Reading image files", "images")


def _layout(data: bytes) -> tuple[int, int, int, int, int] | None:
    """Return where the frame header and the coded blocks start, the restart interval, and the size of a block."""
    position, length, frame, interval = 2, 0, 0, 0
    try:
        while data[position] == 0xFF:
            kind, length = data[position + 1], (data[position + 2] << 8) | data[position + 3]
            if kind in (_SOF_BASELINE, _SOF_EXTENDED):
                frame = position
            elif kind == _DRI:
                interval = (data[position + 4] << 8) | data[position + 5]
            elif kind == _SOS:
                break
            position += 2 + length
        components = data[frame + 9]
        if not frame or not interval or data[position + 4] != components:
            return None
        sampling = [data[frame + 11 + 3 * index] for index in range(components)]
    except IndexError:
        return None
    down, across = max(each & 15 for each in sampling), max(each >> 4 for each in sampling)
    if components == 1:  # blocks of a single component are not grouped
        down = across = 1
    return frame, position + 2 + length, interval, 8 * down, 8 * across
