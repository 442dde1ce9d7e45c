"""Draw the pictures of the READMEs with the functions that the packages export (all packages must be installed).

python -m tools.pictures             # all of them: packages/<distribution>/images/<name>.png or .svg
python -m tools.pictures cutmix ema  # these two

Drawing is seeded: the same versions of torch, Pillow and matplotlib give the same files.
"""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from PIL import Image, ImageDraw
from torchvision.models.resnet import Bottleneck
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

from composer import functional as cf
from composer import optim
from composer.algorithms import SWA, SeqLengthWarmup
from composer.algorithms.alibi.attention_surgery_functions import register_alibi
from composer.algorithms.blurpool import blur_2d
from composer.core import Engine, Event, State
from composer.evidence.ledger import PUBLISHED, Ledger
from composer.evidence.page import verdicts
from composer.recipes import Metric
from tools.workspace import Workspace

SIZE = 160  # pixels of a scene, along each side
DPI = 100
BLUE, ORANGE, GRAY = "#1f77b4", "#ff7f0e", "#b8bec6"
STYLE: Any = {
    "font.family": ["DejaVu Sans", "sans-serif"],  # the first ships with matplotlib
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "composer",
}


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
    count = len(images)
    side, gap, head = SIZE / DPI, 0.12, 0.27
    figure = Figure(figsize=(count * side + (count + 1) * gap, side + head + gap), dpi=DPI)
    width, height = figure.get_size_inches()
    for index, (image, title) in enumerate(zip(images, titles, strict=True)):
        picture = to_pil_image(image.clamp(0, 1)) if isinstance(image, torch.Tensor) else image
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


def alibi() -> Figure:
    """Show what two heads add to the scores of their attention."""
    heads, tokens = 8, 12
    both = register_alibi(torch.nn.Module(), heads, tokens, causal=False).alibi
    assert isinstance(both, torch.Tensor)
    figure = Figure(figsize=(7.2, 2.7), layout="constrained")
    hidden = torch.ones(tokens, tokens).triu(1).bool()
    shades = matplotlib.colormaps["Blues_r"].resampled(24).with_extremes(bad=GRAY)
    shown = [("head 1, causal mask", both[0, 0].masked_fill(hidden, math.nan)), ("head 1", both[0, 0])]
    shown.append(("head 3", both[0, 2]))
    axes: Any = figure.subplots(1, len(shown), sharey=True)
    for axis, (title, bias) in zip(axes, shown, strict=True):
        axis.imshow(bias, cmap=shades, vmin=-6, vmax=0)
        axis.set(title=title, xlabel="key", xticks=[0, 5, 11], yticks=[0, 5, 11])
    axes[0].set_ylabel("query")
    figure.colorbar(axes[0].images[0], ax=axes, label="bias", shrink=0.8)
    return figure


def ema() -> Figure:
    """Show a weight that training moves about, and its average."""
    steps, weight = 150, torch.nn.Linear(1, 1, bias=False)
    average = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(weight.weight)
    average.load_state_dict(weight.state_dict())
    weights, averages = [], []
    for batch in range(steps):
        with torch.no_grad():
            weight.weight.fill_(1 - math.exp(-batch / 30) + 0.15 * torch.randn(()).item())
        cf.compute_ema(weight, average, smoothing=2 ** (-1 / 10))
        weights.append(weight.weight.item())
        averages.append(average.weight.item())
    figure, axes = _plot("batch", "one weight")
    axes.plot(weights, color=GRAY, linewidth=1, label="training weight")
    axes.plot(averages, color=BLUE, linewidth=2, label='average, half_life="10ba"')
    axes.legend(frameon=False, loc="lower right")
    return figure


def swa() -> Figure:
    """Show when SWA averages, and when the average becomes the weights."""
    algorithm = SWA(swa_start="0.6dur", swa_end="0.9dur", update_interval="1ep")
    state = State(
        model=torch.nn.Linear(1, 1), max_duration="20ep", rank_zero_seed=0, dataloader=[0], algorithms=[algorithm]
    )
    engine = Engine(state)
    engine.run_event(Event.INIT)
    engine.run_event(Event.FIT_START)
    averaged, replaced = [], []
    for epoch in range(20):
        counter, completed = algorithm.step_counter, algorithm.swa_completed
        state.timestamp = state.timestamp.to_next_batch(samples=1).to_next_epoch()
        engine.run_event(Event.EPOCH_END)
        if algorithm.step_counter > counter:
            averaged.append(epoch + 1)
        if algorithm.swa_completed and not completed:
            replaced.append(epoch + 1)
    figure, axes = _plot("epoch", "", height=1.7)
    axes.scatter(range(1, 21), [0] * 20, s=80, facecolors="white", edgecolors=GRAY, label="weights after an epoch")
    axes.scatter(averaged, [0] * len(averaged), s=80, color=BLUE, label="averaged")
    for epoch in replaced:
        axes.annotate(
            "swa_end: the average\nbecomes the weights", (epoch, 0.008), (epoch, 0.045), ha="center", va="bottom",
            arrowprops={"arrowstyle": "->"},
        )  # fmt: skip
    axes.annotate(
        "swa_start", (averaged[0], 0.008), (averaged[0], 0.045), ha="center", va="bottom",
        arrowprops={"arrowstyle": "->"},
    )  # fmt: skip
    axes.set(ylim=(-0.03, 0.11), yticks=[], xticks=range(0, 21, 5))
    axes.spines["left"].set_visible(False)
    axes.legend(frameon=False, loc="upper left", ncols=1)
    return figure


def layer_freezing() -> Figure:
    """Show which layers are trained, over a run."""
    names, steps = ["conv1", "conv2", "conv3", "conv4", "linear"], 200
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in names))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    frozen_at = [1.0] * len(names)
    for step in range(steps + 1):
        count, _ = cf.freeze_layers(model, optimizer, step / steps, freeze_start=0.4, freeze_level=1.0)
        for layer in range(count):
            frozen_at[layer] = min(frozen_at[layer], step / steps)
    figure, axes = _plot("fraction of the run", "")
    axes.barh(names, frozen_at, color=BLUE, height=0.6, label="trained")
    axes.barh(names, [1 - at for at in frozen_at], left=frozen_at, color=GRAY, height=0.6, label="frozen")
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return figure


def seq_length_warmup() -> Figure:
    """Show how long the sequences of the batches are, over a run."""
    batches, length = 100, 128
    algorithm = SeqLengthWarmup(duration=0.5, min_seq_length=16, max_seq_length=length, step_size=16)
    tokens = torch.zeros(1, length, dtype=torch.int64)
    state = State(
        model=torch.nn.Linear(1, 1), max_duration=f"{batches}ba", rank_zero_seed=0, dataloader=[0],
        algorithms=[algorithm],
    )  # fmt: skip
    engine = Engine(state)
    lengths = []
    for _ in range(batches):
        state.batch = {"input_ids": tokens}
        engine.run_event(Event.AFTER_DATALOADER)
        lengths.append(state.batch["input_ids"].shape[1])
        state.timestamp = state.timestamp.to_next_batch(samples=1)
    figure, axes = _plot("batch", "tokens per sequence")
    axes.plot(lengths, color=BLUE, linewidth=2, drawstyle="steps-post")
    axes.set(ylim=(0, 1.05 * length), yticks=range(0, length + 1, 32))
    return figure


def batch_size_warmup() -> Figure:
    """Show the size of batches over the samples of a run."""
    figure, axes = _plot("samples", "samples per batch")
    for shape, color in (("doubling", BLUE), ("linear", ORANGE)):
        drawn, sizes = [0], []
        while drawn[-1] < 10_000:
            sizes.append(cf.compute_batch_size(drawn[-1], duration=6_000, initial=16, final=256, shape=shape))
            drawn.append(drawn[-1] + sizes[-1])
        axes.plot(drawn[:-1], sizes, color=color, linewidth=2, drawstyle="steps-post", label=f'shape="{shape}"')
    axes.set(ylim=(0, 275), yticks=[16, 64, 128, 256], xlim=(0, 10_000))
    axes.legend(frameon=False, loc="lower right")
    return figure


def logit_softcap() -> Figure:
    """Show capped logits as a function of the logits."""
    figure, axes = _plot("logit", "capped logit")
    logits = torch.linspace(-120, 120, 241)
    axes.plot(logits, logits, color=GRAY, linewidth=1, label="not capped")
    for cap, color in ((30.0, BLUE), (50.0, ORANGE)):
        axes.plot(logits, cf.softcap_logits(logits, cap), color=color, linewidth=2, label=f"cap {cap:g}")
    axes.set(ylim=(-62, 62), yticks=[-50, -30, 0, 30, 50])
    axes.legend(frameon=False, loc="upper left")
    return figure


def stochastic_depth() -> Figure:
    """Show with which probability each block of a network is skipped."""
    figure, axes = _plot("block", "probability to skip it")
    for distribution, color, marker in (("linear", BLUE, "o"), ("uniform", ORANGE, "s")):
        model: Any = torch.nn.Sequential(*(Bottleneck(64, 16) for _ in range(16)))
        cf.apply_stochastic_depth(model, "ResNetBottleneck", drop_rate=0.2, drop_distribution=distribution)
        rates = [float(block.drop_rate) for block in model]
        axes.plot(range(1, 17), rates, marker=marker, color=color, label=f'drop_distribution="{distribution}"')
    axes.set(ylim=(0, 0.27), xticks=[1, 4, 8, 12, 16])
    axes.legend(frameon=False, loc="upper left", ncols=2)
    return figure


def schedules() -> Figure:
    """Show the factors of the learning rate, over a run."""
    shown = [
        ("StepScheduler", optim.StepScheduler("20ep", gamma=0.5)),
        ("LinearScheduler", optim.LinearScheduler()),
        ("CosineAnnealingScheduler", optim.CosineAnnealingScheduler()),
        ("CosineAnnealingWarmRestartsScheduler", optim.CosineAnnealingWarmRestartsScheduler("20ep", t_mult=1.6)),
        ("PolynomialScheduler", optim.PolynomialScheduler(power=3.0)),
        ("CosineAnnealingWithWarmupScheduler", optim.CosineAnnealingWithWarmupScheduler("20ep")),
    ]
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes: Any = figure.subplots(2, 3, sharex=True, sharey=True)
    for axis, (name, schedule) in zip(axes.flat, shown, strict=True):
        state = State(model=torch.nn.Linear(1, 1), max_duration="100ep", rank_zero_seed=0, dataloader=[0])
        factors = []
        while state.timestamp < "100ep":
            factors.append(schedule(state))
            state.timestamp = state.timestamp.to_next_batch(samples=1).to_next_epoch()
        axis.plot(factors, color=BLUE, linewidth=2)
        axis.set_title(name, fontsize=7.5)
        axis.set(ylim=(0, 1.05), yticks=[0, 1], xticks=[0, 50, 100])
    figure.supxlabel("epoch", fontsize=9)
    figure.supylabel("factor", fontsize=9)
    return figure


def effects() -> Figure:
    """Show what the published ledger says of all methods on its first task: effects with their intervals."""
    (task, _), entries = next(iter(verdicts([Ledger(PUBLISHED)]).items()))
    shown = [entry for entry in entries if entry.get("comparison") is not None]
    shown.sort(key=lambda entry: float(entry["comparison"]["effect"]))
    metric = Metric(**shown[0]["metric"])
    figure, axes = _plot(f"{metric.title} of {task}, difference to plain training", "", height=0.6 + 0.19 * len(shown))
    colors = {"gain": BLUE, "loss": ORANGE}
    for row, entry in enumerate(shown):
        low, middle, high = (metric.scale * entry["comparison"][key] for key in ("low", "effect", "high"))
        color = colors.get(entry["verdict"]["word"], GRAY)
        axes.plot([low, high], [row, row], color=color, linewidth=2)
        axes.plot(middle, row, marker="o", color=color)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(yticks=range(len(shown)), yticklabels=[entry["method"] for entry in shown], ylim=(-0.7, len(shown) - 0.3))
    return figure


def _plot(xlabel: str, ylabel: str, height: float = 2.4) -> tuple[Figure, Any]:
    figure = Figure(figsize=(6.4, height), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    return figure, axes


PICTURES = {
    "alibi": Picture("composer-alibi", "svg", alibi),
    "alternating_flip": Picture("composer-alternating-flip", "png", alternating_flip),
    "augmix": Picture("composer-augmix", "png", augmix),
    "batch_size_warmup": Picture("composer-batch-size-warmup", "svg", batch_size_warmup),
    "blurpool": Picture("composer-blurpool", "png", blurpool),
    "colout": Picture("composer-colout", "png", colout),
    "cutmix": Picture("composer-cutmix", "png", cutmix),
    "cutout": Picture("composer-cutout", "png", cutout),
    "effects": Picture("composer-evidence", "svg", effects),
    "ema": Picture("composer-ema", "svg", ema),
    "layer_freezing": Picture("composer-layer-freezing", "svg", layer_freezing),
    "logit_softcap": Picture("composer-logit-softcap", "svg", logit_softcap),
    "mixup": Picture("composer-mixup", "png", mixup),
    "progressive_resizing": Picture("composer-progressive-resizing", "png", progressive_resizing),
    "randaugment": Picture("composer-randaugment", "png", randaugment),
    "schedules": Picture("composer-optim", "svg", schedules),
    "seq_length_warmup": Picture("composer-seq-length-warmup", "svg", seq_length_warmup),
    "stochastic_depth": Picture("composer-stochastic-depth", "svg", stochastic_depth),
    "swa": Picture("composer-swa", "svg", swa),
    "test_time_augmentation": Picture("composer-test-time-augmentation", "png", test_time_augmentation),
}


def render(name: str) -> bytes:
    """Return the file of a picture, drawn with a fixed seed."""
    picture, file = PICTURES[name], io.BytesIO()
    with (
        torch.random.fork_rng(devices=[]),
        matplotlib.rc_context(matplotlib.rcParamsDefault),
        matplotlib.rc_context(STYLE),
    ):
        torch.default_generator.manual_seed(6)
        figure = picture.draw()
        if picture.suffix == "svg":
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
            lines = file.getvalue().decode().splitlines()
            return "".join(f"{line.rstrip()}\n" for line in lines).encode()
        figure.savefig(file, format="png", dpi=DPI)
    image = Image.open(file).convert("RGB").quantize(160, dither=Image.Dither.NONE)
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
