"""Draw the pictures of the READMEs with the functions that the packages export (all packages must be installed).

python -m tools.pictures             # all of them: packages/<distribution>/images/<name>.png or .svg
python -m tools.pictures cutmix ema  # these two

Drawing is seeded: the same versions of torch, Pillow and matplotlib give the same files.
"""

from __future__ import annotations

import argparse
import io
import math
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib
import torch
from matplotlib.figure import Figure
from PIL import Image, ImageDraw
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

from composer import functional as cf
from composer.algorithms.blurpool import blur_2d
from composer.algorithms.squeeze_excite import SqueezeExcite2d
from composer.evidence.charts import STYLE, as_svg
from tools import charts
from tools.workspace import Workspace

SIZE = 160  # pixels of a scene, along each side
DPI = 100


@dataclass(frozen=True)
class Picture:
    """A picture of a README.

    Attributes:
        distribution: The package whose README shows it.
        suffix: `png` for images, `svg` for curves.
        draw: Returns the figure.
    """

    distribution: str
    suffix: str
    draw: Callable[[], Figure]


def house() -> Image.Image:
    """Draw a house on a hill, in RGB."""
    image, draw, s = _canvas((126, 190, 232))
    draw.ellipse(s(112, 14, 140, 42), fill=(255, 221, 102))
    for left, top in ((16, 22), (30, 15), (44, 22)):
        draw.ellipse(s(left, top, left + 26, top + 18), fill=(250, 252, 255))
    draw.polygon(s(0, 104, 46, 54, 96, 104), fill=(120, 134, 160))
    draw.polygon(s(32, 69, 46, 54, 60, 69), fill=(242, 246, 250))
    draw.polygon(s(60, 104, 118, 62, 160, 104), fill=(98, 112, 142))
    draw.ellipse(s(-60, 92, 220, 260), fill=(108, 172, 92))
    draw.rectangle(s(56, 86, 108, 130), fill=(236, 214, 178))
    draw.polygon(s(49, 88, 82, 60, 115, 88), fill=(190, 74, 60))
    draw.rectangle(s(76, 106, 90, 130), fill=(122, 82, 56))
    for left in (60, 94):
        draw.rectangle(s(left, 98, left + 10, 110), fill=(92, 140, 186))
    draw.rectangle(s(131, 100, 137, 132), fill=(110, 78, 52))
    draw.ellipse(s(116, 66, 152, 108), fill=(58, 128, 70))
    draw.polygon(s(76, 130, 90, 130, 112, 160, 52, 160), fill=(214, 196, 156))
    return image.resize((SIZE, SIZE), Image.Resampling.LANCZOS)


def cat() -> Image.Image:
    """Draw the face of a cat, in RGB."""
    image, draw, s = _canvas((246, 226, 196))
    for row in range(0, SIZE, 20):
        draw.rectangle(s(0, row, 160, row + 9), fill=(240, 214, 178))
    fur, dark, pink = (222, 142, 66), (170, 96, 40), (240, 150, 150)
    draw.polygon(s(28, 84, 32, 18, 76, 48), fill=fur)
    draw.polygon(s(132, 84, 128, 18, 84, 48), fill=fur)
    draw.polygon(s(38, 64, 40, 32, 62, 48), fill=pink)
    draw.polygon(s(122, 64, 120, 32, 98, 48), fill=pink)
    draw.ellipse(s(22, 38, 138, 144), fill=fur)
    for left in (66, 77, 88):
        draw.polygon(s(left, 40, left + 6, 40, left + 3, 64), fill=dark)
    draw.ellipse(s(54, 96, 106, 136), fill=(250, 236, 218))
    for left in (44, 92):
        draw.ellipse(s(left, 70, left + 24, 96), fill=(250, 250, 240))
        draw.ellipse(s(left + 3, 72, left + 21, 95), fill=(122, 176, 92))
        draw.ellipse(s(left + 9, 72, left + 15, 95), fill=(30, 30, 30))
    draw.polygon(s(73, 101, 87, 101, 80, 110), fill=pink)
    for points in ((80, 110, 80, 118), (80, 118, 70, 123), (80, 118, 90, 123)):
        draw.line(s(*points), fill=dark, width=8)
    for points in ((50, 110, 8, 102), (50, 116, 8, 120), (110, 110, 152, 102), (110, 116, 152, 120)):
        draw.line(s(*points), fill=dark, width=4)
    return image.resize((SIZE, SIZE), Image.Resampling.LANCZOS)


def _canvas(color: tuple[int, int, int]) -> tuple[Image.Image, ImageDraw.ImageDraw, Callable[..., list[int]]]:
    """Return an image of four times the size, to be smoothed by shrinking, and a function that scales coordinates."""
    image = Image.new("RGB", (4 * SIZE, 4 * SIZE), color)
    return image, ImageDraw.Draw(image), lambda *points: [4 * point for point in points]


def scenes() -> torch.Tensor:
    """Return the house and the cat as a batch in [0, 1] of shape (2, 3, SIZE, SIZE)."""
    return torch.stack([pil_to_tensor(image) for image in (house(), cat())]).float() / 255


def panels(images: Sequence[torch.Tensor | Image.Image], titles: Sequence[str]) -> Figure:
    """Show images side by side at their true size, one pixel for each pixel; aligned at the bottom."""
    pictures = [to_pil_image(image.clamp(0, 1)) if isinstance(image, torch.Tensor) else image for image in images]
    count, tallest = len(pictures), max(picture.height for picture in pictures) / DPI
    side, gap, head = SIZE / DPI, 0.12, 0.27
    figure = Figure(figsize=(count * side + (count + 1) * gap, tallest + head + gap), dpi=DPI)
    width, height = figure.get_size_inches()
    for index, (picture, title) in enumerate(zip(pictures, titles, strict=True)):
        center, w, h = gap + index * (side + gap) + side / 2, picture.width / DPI, picture.height / DPI
        axes = figure.add_axes(((center - w / 2) / width, gap / height, w / width, h / height))
        axes.imshow(picture, cmap="gray", interpolation="nearest", aspect="auto")
        axes.axis("off")
        figure.text(center / width, 1 - 0.6 * head / height, title, ha="center", va="center")
    return figure


def augmix() -> Figure:
    """Show an image and what AugMix makes of it."""
    return panels(
        [house(), *(cf.augmix_image(house(), severity=3) for _ in range(3))], ["image", *3 * ["augmix_image"]]
    )


def randaugment() -> Figure:
    """Show an image and what RandAugment makes of it."""
    images = [house(), *(cf.randaugment_image(house(), severity=9, depth=2) for _ in range(3))]
    return panels(images, ["image", *3 * ["randaugment_image"]])


def alternating_flip() -> Figure:
    """Show an image in consecutive epochs."""
    epochs = range(4)
    images = [cf.flip_batch(scenes()[:1], torch.tensor([1]), epoch)[0] for epoch in epochs]
    return panels(images, [f"epoch {epoch}" for epoch in epochs])


def test_time_augmentation() -> Figure:
    """Show the views of an image at level 2."""
    views: list[torch.Tensor] = []

    def collect(images: torch.Tensor) -> torch.Tensor:
        views.append(images[0])
        return torch.zeros(1, 2)

    cf.average_views(collect, scenes()[:1], level=2, shift=16)
    return panels([*views[:2], *views[2::2]], [*2 * ["1/4"], *2 * ["1/8, and mirrored 1/8"]])


def blurpool() -> Figure:
    """Show rings that get narrower, subsampled with and without a filter."""
    x = torch.linspace(0, 1, SIZE)
    rings = 0.5 + 0.5 * torch.cos(SIZE * math.pi * 0.42 * (x[:, None] ** 2 + x**2))[None, None]
    images = [rings, rings[..., ::2, ::2], blur_2d(rings, stride=2)]
    large = [image[0].repeat_interleave(SIZE // image.shape[-1], -1) for image in images]
    large = [image.repeat_interleave(SIZE // image.shape[-2], -2) for image in large]
    return panels(large, ["feature map", "every 2nd position", "blurred, then every 2nd"])


def colout() -> Figure:
    """Show an image without some rows and columns."""
    image = scenes()[0]
    fractions = (0.15, 0.3, 0.5)
    images = [image, *(cf.colout_batch(image, p, p) for p in fractions)]
    return panels(images, ["image", *(f"p_row = p_col = {p}" for p in fractions)])


def cutmix() -> Figure:
    """Show two images and a box of one in the other."""
    images, swap = scenes(), torch.tensor([1, 0])
    mixed, _, area, _ = cf.cutmix_batch(images, torch.tensor([0, 1]), bbox=(40, 44, 124, 128), indices=swap)
    titles = ["house", "cat", f"{area:.2f} house + {1 - area:.2f} cat"]
    return panels([*images, mixed[0]], titles)


def cutout() -> Figure:
    """Show an image with holes."""
    image = scenes()[1]
    images = [image, cf.cutout_batch(image, num_holes=1, length=0.5), cf.cutout_batch(image, num_holes=4, length=0.25)]
    return panels(images, ["image", "1 hole, length=0.5", "4 holes, length=0.25"])


def mixup() -> Figure:
    """Show two images and their mixture."""
    images, m = scenes(), 0.4
    mixed, *_ = cf.mixup_batch(images, torch.tensor([0, 1]), mixing=m, indices=torch.tensor([1, 0]))
    return panels([*images, mixed[0]], ["house", "cat", f"{1 - m:.1f} house + {m:.1f} cat"])


def progressive_resizing() -> Figure:
    """Show an image at the scales of a run, resized and cropped."""
    images = scenes()[1:]

    def smaller(scale: float, mode: str) -> torch.Tensor:
        return cf.resize_batch(images, None, scale, mode)[0][0]

    pictures = [smaller(0.5, "resize"), smaller(0.75, "resize"), images[0], smaller(0.5, "crop")]
    return panels(pictures, ["first half: 0.5", "then 0.75", "in the end 1.0", 'mode="crop": 0.5'])


def squeeze_excite() -> Figure:
    """Show feature maps, and what is left of them with the weights of their channels."""
    gray, edges = scenes()[:1].mean(1, keepdim=True), torch.tensor([[1.0, 0, -1], [2, 0, -2], [1, 0, -1]])
    small = torch.nn.functional.interpolate(gray, (120, 120), mode="area")
    filters = torch.stack([edges.abs() / 6, edges, edges.T, -edges.abs() / 6])[:, None]
    maps = torch.nn.functional.conv2d(small, filters, torch.tensor([0.0, 0, 0, 1])).clamp(0, 1)
    layer = SqueezeExcite2d(4, latent_channels=4)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(5)
        weights, weighted = layer.pool_and_mlp(maps)[0], layer(maps)[0]
    pairs = torch.cat([maps[0], torch.ones(4, 8, maps.shape[-1]), weighted], 1)
    return panels(list(pairs), [f"channel {index + 1}, times {weight:.2f}" for index, weight in enumerate(weights)])


_PACKAGES = {"composing": "composer-evidence", "effects": "composer-evidence", "schedules": "composer-optim"}
PICTURES = {
    name: Picture(_PACKAGES.get(name, f"composer-{name.replace('_', '-')}"), suffix, draw)
    for module, suffix in ((charts, "svg"), (sys.modules[__name__], "png"))
    for name, draw in sorted(vars(module).items())
    if getattr(draw, "__module__", "") == module.__name__ and typing.get_type_hints(draw) == {"return": Figure}
}
"""By name: the functions without arguments that return a figure, curves in `charts` and images here."""


def render(name: str) -> bytes:
    """Return the file of a picture, drawn with a fixed seed."""
    picture, file = PICTURES[name], io.BytesIO()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(6)
        if picture.suffix == "svg":
            return as_svg(picture.draw).encode()
        # A transparent ground and a gray that is read on white and on black suit light and dark pages.
        style = {**STYLE, "text.color": "#787f8a"}
        with matplotlib.rc_context(matplotlib.rcParamsDefault), matplotlib.rc_context(style):
            picture.draw().savefig(file, format="png", dpi=DPI, transparent=True)
    image = Image.open(file).quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    small = io.BytesIO()
    image.save(small, format="png", optimize=True)
    return small.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of the READMEs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(PICTURES)}; default: all")
    names = parser.parse_args().names or list(PICTURES)
    if unknown := sorted(set(names) - set(PICTURES)):
        parser.error(f"unknown pictures: {', '.join(unknown)}. Choose from {', '.join(PICTURES)}.")
    workspace = Workspace()
    for name in names:
        folder = workspace[PICTURES[name].distribution].path / "images"
        folder.mkdir(exist_ok=True)
        file = folder / f"{name}.{PICTURES[name].suffix}"
        file.write_bytes(render(name))
        print(f"{file.relative_to(workspace.root)}: {file.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
