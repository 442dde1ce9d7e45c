"""Each algorithm's own work against the best alternative a user has, on the same data and one CPU thread."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image
from timm.utils.agc import adaptive_clip_grad
from torchvision.transforms import v2

from composer import functional as cf
from composer.algorithms.augmix import AugmentAndMixTransform
from composer.algorithms.blurpool import BlurMaxPool2d
from composer.algorithms.ema import EMA
from composer.algorithms.randaugment import RandAugmentTransform
from composer.algorithms.sam import SAMOptimizer
from composer.core import Engine, State
from composer.loss import soft_cross_entropy
from composer.optim import DecoupledAdamW, DecoupledSGDW
from tools.bench._measure import interleaved, keep_memory, machine, spread, timed

Run = Callable[[], object]


@dataclass(frozen=True)
class Match:
    """Two ways to do the same work.

    Attributes:
        name: What is done.
        ours: Our way.
        theirs: The other way.
        rival: Who or what the other way is.
        bar: The ratio of the times, ours to theirs, that must not be exceeded.
    """

    name: str
    ours: Run
    theirs: Run
    rival: str
    bar: float


def _mixes() -> Iterator[Match]:
    for shape in ((128, 3, 32, 32), (64, 3, 224, 224)):
        x, y = torch.rand(shape), torch.randint(0, 100, shape[:1])
        size = f"{shape[0]} images of {shape[2]}"
        mixup, cutmix = v2.MixUp(num_classes=100, alpha=1.0), v2.CutMix(num_classes=100, alpha=1.0)

        def mixed(x: torch.Tensor = x, y: torch.Tensor = y) -> object:
            inputs, partner, weight = cf.mixup_batch(x, y, alpha=1.0)
            return inputs, torch.lerp(F.one_hot(y, 100).float(), F.one_hot(partner, 100).float(), weight)

        def cut(x: torch.Tensor = x, y: torch.Tensor = y) -> object:
            inputs, partner, area, _ = cf.cutmix_batch(x, y, alpha=1.0)
            return inputs, torch.lerp(F.one_hot(partner, 100).float(), F.one_hot(y, 100).float(), area)

        def gathered(x: torch.Tensor = x) -> object:
            return x.index_select(0, torch.randperm(len(x))).lerp_(x, 0.7)

        def filled(x: torch.Tensor = x, half: int = shape[2] // 4) -> object:
            result = x.clone()
            result[..., half : 3 * half, half : 3 * half] = 0
            return result

        def dropped(x: torch.Tensor = x) -> object:
            keep = int(0.85 * x.shape[-1])
            rows, columns = torch.randperm(x.shape[-1])[:keep].sort().values, torch.randperm(x.shape[-1])[:keep].sort()
            return x.index_select(-2, rows).index_select(-1, columns.values)

        rival = "torchvision v2"
        yield Match(f"mixup, dense targets, {size}", mixed, partial(mixup, x, y), rival, 1.0)
        yield Match(f"mixup, {size}", partial(cf.mixup_batch, x, y, alpha=1.0), gathered, "index_select, lerp_", 1.2)
        yield Match(f"cutmix, dense targets, {size}", cut, partial(cutmix, x, y), rival, 1.0)
        yield Match(f"cutout, {size}", partial(cf.cutout_batch, x, length=0.5), filled, "clone, fill", 1.2)
        yield Match(f"colout, {size}", partial(cf.colout_batch, x), dropped, "two index_select", 1.1)


def _smoothing() -> Iterator[Match]:
    logits, targets = torch.randn(1024, 1000), torch.randint(0, 1000, (1024,))
    grad = logits.clone().requires_grad_()

    def scattered() -> object:
        return torch.full_like(logits, 0.1 / 1000).scatter_(1, targets[:, None], 0.9 + 0.1 / 1000)

    def ours() -> object:
        return torch.autograd.grad(soft_cross_entropy(grad, cf.smooth_labels(grad, targets, smoothing=0.1)), grad)

    def theirs() -> object:
        return torch.autograd.grad(F.cross_entropy(grad, targets, label_smoothing=0.1), grad)

    yield Match("smooth_labels, 1024x1000", lambda: cf.smooth_labels(logits, targets), scattered, "full, scatter_", 1.2)
    yield Match("smoothed loss, forward and backward", ours, theirs, "cross_entropy(label_smoothing)", 1.1)


def _blur() -> Iterator[Match]:
    x = torch.randn(16, 64, 56, 56)
    pool = BlurMaxPool2d(3, stride=2, padding=1)
    kernel = torch.outer(torch.tensor([1.0, 2, 1]), torch.tensor([1.0, 2, 1])).div(16).repeat(64, 1, 1, 1)

    def naive() -> object:
        return F.conv2d(F.max_pool2d(x, 3, 1, 1), kernel, padding=1, groups=64)[..., ::2, ::2]

    def ours() -> object:
        with torch.no_grad():
            return pool(x)

    yield Match("BlurMaxPool2d, 16x64x56x56", ours, naive, "pool at stride 1, then blur", 0.2)


def _weights() -> Iterator[Match]:
    model = torchvision.models.resnet50()
    ema = EMA(half_life="100ba")
    state = State(model=model, max_duration="1ep", dataloader=[0], algorithms=ema)
    engine = Engine(state)
    for event in ("init", "fit_start"):
        engine.run_event(event)
    state.timestamp = state.timestamp.to_next_batch(1)
    engine.run_event("batch_end")  # averaging starts
    assert ema.ema_model is not None
    averages = dict(chain(ema.ema_model.named_parameters(), ema.ema_model.named_buffers()))
    values = {name: value.detach() for name, value in model.state_dict().items() if value.is_floating_point()}
    weights = [averages[name] for name in values], [*values.values()]  # the same memory as ours

    @torch.no_grad()
    def cached() -> None:
        torch._foreach_lerp_(weights[0], weights[1], 0.01)

    @torch.no_grad()
    def looped() -> None:
        for a, b in zip(*weights, strict=True):
            a.copy_(a * 0.99 + b * 0.01)

    def ours() -> None:
        engine.run_event("batch_end")

    yield Match("EMA of ResNet-50", ours, cached, "cached _foreach_lerp_", 1.1)
    yield Match("EMA of ResNet-50", ours, looped, "a loop over tensors", 1 / 3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    parameters = list(model.parameters())
    clip: Any = adaptive_clip_grad  # it has no types
    yield Match(
        "adaptive clipping of ResNet-50",
        lambda: cf.apply_gradient_clipping(model, "adaptive", 0.01),
        lambda: clip(parameters, 0.01),
        "timm",
        1.0,
    )


def _clipping() -> Iterator[Match]:
    model = torchvision.models.resnet50()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    parameters = list(model.parameters())
    for kind, theirs in (("norm", torch.nn.utils.clip_grad_norm_), ("value", torch.nn.utils.clip_grad_value_)):
        ours = partial(cf.apply_gradient_clipping, parameters, kind, 1e-3)
        yield Match(f"clipping of ResNet-50, {kind}", ours, partial(theirs, parameters, 1e-3), theirs.__name__, 1.1)


def _sam() -> Iterator[Match]:
    """A step of SAM against two steps without it; a network with many weights and little to compute, so the worst."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
    inputs = torch.randn(256, 1024)

    def closure() -> torch.Tensor:
        network.zero_grad()
        loss = network(inputs).square().mean()
        loss.backward()
        return cast("torch.Tensor", loss.detach())

    plain = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9, fused=True)
    sam = SAMOptimizer(torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9, fused=True))

    def twice() -> None:
        closure()
        closure()
        plain.step()

    yield Match("SAM, 8 layers of 1024x1024", partial(sam.step, closure), twice, "two passes", 1.05)


def _optimizers() -> Iterator[Match]:
    def made(cls: Any, **arguments: Any) -> Run:
        model = torchvision.models.resnet50()
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer = cls(model.parameters(), lr=0.01, weight_decay=1e-4, **arguments)
        step: Run = optimizer.step
        return step

    sgd = {"momentum": 0.9, "fused": True}
    yield Match("DecoupledSGDW", made(DecoupledSGDW, **sgd), made(torch.optim.SGD, **sgd), "fused SGD", 1.4)
    adam = {"fused": True}
    yield Match("DecoupledAdamW", made(DecoupledAdamW, **adam), made(torch.optim.AdamW, **adam), "fused AdamW", 1.1)


def _images() -> Iterator[Match]:
    for size in (32, 224):
        pixels = np.random.default_rng(1).integers(0, 256, (size, size, 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        rand, mix = RandAugmentTransform(severity=9, depth=2), AugmentAndMixTransform(severity=3)
        bilinear = v2.InterpolationMode.BILINEAR  # the default of one of them; ours always
        their_rand = v2.RandAugment(num_ops=2, magnitude=9, interpolation=bilinear)
        their_mix = v2.AugMix(severity=3, interpolation=bilinear)
        rival = "torchvision v2"
        yield Match(f"RandAugment, PIL, {size}", partial(rand, image), partial(their_rand, image), rival, 1.0)
        yield Match(f"AugMix, PIL, {size}", partial(mix, image), partial(their_mix, image), rival, 1.0)


def _repeated(run: Run) -> Callable[[], float]:
    """Seconds of the processor per call, over as many calls as take some milliseconds."""
    run()
    count = max(1, int(0.01 / max(timed(run), 1e-7)))

    def measure() -> float:
        return timed(lambda: [run() for _ in range(count)], time.process_time) / count

    return measure


def main(arguments: list[str]) -> None:
    """Print the ratio of each match, beside what it must not exceed."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- algorithms", description=__doc__)
    parser.add_argument("--rounds", type=int, default=21, help="rounds that count (default: %(default)s)")
    parser.add_argument("--only", default="", help="matches whose name holds this (default: all)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{machine()}; {options.rounds} interleaved rounds, medians")
    keep_memory()
    print(f"{'':44}{'rival':32}{'ours us':>10}{'theirs us':>10}{'ratio':>7}{'min-max':>12}{'at most':>9}")
    for group in (_mixes, _smoothing, _blur, _weights, _clipping, _sam, _optimizers, _images):
        for match in group():
            if options.only.lower() not in match.name.lower():
                continue
            contestants = {"ours": _repeated(match.ours), "theirs": _repeated(match.theirs)}
            results = interleaved(contestants, options.rounds)
            ours, theirs = (1e6 * statistics.median(values) for values in results.values())
            ratios = [a / b for a, b in zip(results["ours"], results["theirs"], strict=True)]
            ratio = statistics.median(ratios)
            verdict = "" if ratio <= match.bar else "  missed"
            print(
                f"{match.name:44}{match.rival:32}{ours:10.1f}{theirs:10.1f}{ratio:7.2f}{spread(ratios, 2):>12}"
                f"{match.bar:9.2f}{verdict}"
            )
