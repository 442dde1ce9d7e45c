"""Figures of a GPU: the Trainer's own cost per step, the host's share of it, CUDA graphs and memory."""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torchvision.models import resnet18, resnet50

from composer import Callback, Logger, State, Trainer, algorithms
from composer.models import ComposerClassifier, ComposerModel
from tools.bench._measure import TimedBatches, interleaved, low, machine
from tools.bench.overhead import Batches, Plain, make_batches, make_network

_LARGE_STEPS = 30  # steps of the large network


def main(arguments: list[str]) -> None:
    """Print the figures, and write them to a JSON file."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- gpu", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default: %(default)s)")
    parts = {"small": _small_steps, "large": _large_steps, "methods": _methods}
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts), help="what to measure (default: all)")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="the CPU only shows that this runs")
    options = parser.parse_args(arguments)
    if options.device == "gpu" and not torch.cuda.is_available():
        print("no CUDA device here; nothing was measured")
        return
    device = torch.device("cuda" if options.device == "gpu" else "cpu")
    figures: dict[str, Any] = {"machine": machine(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for name in options.parts:
        print(f"{name} ...", flush=True)
        figures.update(parts[name](device, options.rounds))
        print(json.dumps(figures, indent=2))
        if options.json is not None:
            options.json.write_text(json.dumps(figures, indent=2), encoding="utf-8")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)


def _bare(
    network: torch.nn.Module, batches: Any, device: torch.device, each: Callable[[], None] = lambda: None
) -> list[float]:
    """Train without the Trainer; return the losses."""
    network.to(device)
    optimizer, losses = _sgd(network), []
    for inputs, targets in batches:
        each()
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = cross_entropy(network(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach().clone())  # as in the runs with CUDA graphs, which overwrite it
    _synchronize(device)
    return [loss.item() for loss in losses]


class _Losses(Callback):
    """The losses of a run, and a call before each step."""

    def __init__(self, each: Callable[[], None] = lambda: None) -> None:
        self._each, self.losses = each, list[torch.Tensor]()

    def batch_start(self, state: State, logger: Logger) -> None:
        self._each()

    def batch_end(self, state: State, logger: Logger) -> None:
        self.losses.append(state.loss.detach().clone())


def _trained(model: ComposerModel, batches: Any, device: torch.device, **arguments: Any) -> list[float]:
    """Train; return the losses."""
    callback = _Losses(arguments.pop("each", lambda: None))
    trainer = Trainer(
        model=model,
        train_dataloader=batches,
        max_duration="1ep",
        optimizers=_sgd(model.to(device)),
        device="gpu" if device.type == "cuda" else "cpu",
        precision="amp_bf16",
        callbacks=callback,
        seed=0,
        console_stream=io.StringIO() if arguments.get("progress_bar") else "stderr",
        **{"progress_bar": False, **arguments},
    )
    trainer.fit()
    _synchronize(device)
    trainer.close()
    return [loss.item() for loss in callback.losses]


def _small_steps(device: torch.device, rounds: int) -> dict[str, Any]:
    """Measure the host's time per step of a network so small that it is all there is, plain and with CUDA graphs."""
    batches: Batches = TimedBatches((x.to(device), y.to(device)) for x, y in make_batches(300))
    graphs = {"mode": "reduce-overhead"} if device.type == "cuda" else {"backend": "aot_eager"}

    def steps(run: Callable[[], object]) -> Callable[[], list[float]]:
        def measure() -> list[float]:
            run()
            return batches.steps()

        return measure

    def classifier() -> ComposerModel:
        return ComposerClassifier(make_network(), num_classes=10)

    results = interleaved(
        {
            "bare loop": steps(lambda: _bare(make_network(), batches, device)),
            "Trainer": steps(lambda: _trained(Plain(make_network()), batches, device)),
            "Trainer, metrics and progress bar": steps(
                lambda: _trained(classifier(), batches, device, progress_bar=True)
            ),
            "Trainer, CUDA graphs": steps(
                lambda: _trained(Plain(make_network()), batches, device, compile_config=graphs)
            ),
        },
        rounds,
    )
    return {"host us per step, 5 % quantile": {name: round(low(values), 1) for name, values in results.items()}}


class _Batches(TimedBatches[Any]):
    """Batches of images."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__(batches)
        self.batch_size = len(batches[0][0])


def _large_steps(device: torch.device, rounds: int) -> dict[str, Any]:
    """Measure a residual network: images per second, the host's share of a step, memory, and equality of the losses."""
    cuda = device.type == "cuda"
    size, rows, make = (224, 128, resnet50) if cuda else (32, 4, resnet18)
    steps = _LARGE_STEPS if cuda else 4
    generator = torch.Generator().manual_seed(0)
    batch = (
        torch.randn(rows, 3, size, size, generator=generator).to(device, memory_format=torch.channels_last),
        torch.randint(0, 10, (rows,), generator=generator).to(device),
    )
    batches = _Batches([batch] * steps)
    on_host = tuple(tensor.cpu().pin_memory() if cuda else tensor.cpu() for tensor in batch)
    host_batches = _Batches([on_host] * steps)

    def network() -> Any:
        torch.manual_seed(0)
        return make(num_classes=10).to(memory_format=torch.channels_last)

    def trained(batches: Any, each: Callable[[], None]) -> list[float]:
        model = ComposerClassifier(network(), num_classes=10)
        return _trained(model, batches, device, progress_bar=True, each=each)

    runs: dict[str, Callable[..., list[float]]] = {
        "bare loop": lambda each: _bare(network(), batches, device, each),
        "Trainer": lambda each: trained(batches, each),
        "bare loop, batches in pinned memory": lambda each: _bare(network(), host_batches, device, each),
        "Trainer, batches in pinned memory": lambda each: trained(host_batches, each),
    }
    alone = ("bare loop", "Trainer")
    losses = {name: runs[name](lambda: None) for name in alone}

    def seconds(run: Callable[..., list[float]]) -> float:
        starts: list[float] = []

        def each() -> None:
            if len(starts) in (5, steps - 1):
                _synchronize(device)
            starts.append(time.perf_counter())

        run(each)
        first = min(5, steps - 2)
        return (starts[-1] - starts[first]) / (steps - 1 - first)

    def host(run: Callable[..., list[float]]) -> float:
        waited: list[float] = []

        def each() -> None:
            start = time.perf_counter()
            _synchronize(device)
            waited.append(time.perf_counter() - start)

        run(each)
        # What the host does not wait for the device in a step that begins with an idle device.
        return max(0.0, 1.0 - statistics.median(waited) * 1e6 / statistics.median(batches.steps()))

    def memory(run: Callable[..., list[float]]) -> float:
        if not cuda:
            return 0.0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run(lambda: None)
        return torch.cuda.max_memory_allocated() / 2**30

    times = interleaved({name: partial(seconds, run) for name, run in runs.items()}, rounds)
    pairs = zip(losses["bare loop"], losses["Trainer"], strict=True)
    return {
        "network": f"{make.__name__}, {rows} images of {size} x {size}, bf16, channels last",
        "images per second": {name: round(rows / statistics.median(values), 1) for name, values in times.items()},
        "ratio of the seconds per step": round(
            statistics.median(a / b for a, b in zip(times["Trainer"], times["bare loop"], strict=True)), 4
        ),
        "host busy, share of a step": {name: round(host(runs[name]), 3) for name in alone},
        "peak memory, GiB": {name: round(memory(runs[name]), 3) for name in alone},
        "largest difference of the losses": max(abs(a - b) for a, b in pairs),
    }


# Those that act on images and on a residual network in each step; the others act on texts, on datasets or seldom.
_METHODS: dict[str, Callable[[], Any]] = {
    "BlurPool": algorithms.BlurPool,
    "ColOut": algorithms.ColOut,
    "CutMix": algorithms.CutMix,
    "CutOut": algorithms.CutOut,
    "EMA": partial(algorithms.EMA, half_life="100ba", update_interval="1ba"),
    "GradientClipping": partial(algorithms.GradientClipping, clipping_type="norm", clipping_threshold=1.0),
    "GradientClipping, adaptive": partial(
        algorithms.GradientClipping, clipping_type="adaptive", clipping_threshold=0.1
    ),
    "LabelSmoothing": algorithms.LabelSmoothing,
    "MixUp": algorithms.MixUp,
    "Muon": partial(algorithms.Muon, lr=0.02),
    "SAM, every step": partial(algorithms.SAM, interval=1),
    "SAM, every 10th step": partial(algorithms.SAM, interval=10),
    "ScheduleFree": partial(algorithms.ScheduleFree, warmup="2ba"),
    "SelectiveBackprop": partial(algorithms.SelectiveBackprop, start=0.0, end=1.0, interrupt=0),
    "SqueezeExcite": algorithms.SqueezeExcite,
    "StochasticDepth": partial(algorithms.StochasticDepth, target_layer_name="ResNetBottleneck", drop_rate=0.2),
    "WeightStandardization": algorithms.WeightStandardization,
}


def _methods(device: torch.device, rounds: int) -> dict[str, Any]:
    """Measure the seconds per step of a residual network with each method, relative to those without."""
    cuda = device.type == "cuda"
    size, rows, make, steps = (224, 128, resnet50, 20) if cuda else (32, 4, resnet50, 3)
    first = 5 if cuda else 1
    inputs = torch.randn(rows, 3, size, size, device=device).to(memory_format=torch.channels_last)
    batches = _Batches([(inputs, torch.randint(0, 10, (rows,), device=device))] * steps)

    def seconds(method: Callable[[], Any] | None) -> float:
        starts: list[float] = []

        def each() -> None:
            if len(starts) in (first, steps - 1):
                _synchronize(device)
            starts.append(time.perf_counter())

        model = ComposerClassifier(make(num_classes=10).to(memory_format=torch.channels_last), num_classes=10)
        chosen = [] if method is None else [method()]
        _trained(model, batches, device, algorithms=chosen, each=each)
        return (starts[-1] - starts[first]) / (steps - 1 - first)

    runs = {"plain": partial(seconds, None)} | {name: partial(seconds, make) for name, make in _METHODS.items()}
    times = interleaved(runs, min(rounds, 3))
    plain = times.pop("plain")
    return {
        "step with a method, ratio": {
            name: round(statistics.median(a / b for a, b in zip(values, plain, strict=True)), 3)
            for name, values in times.items()
        }
    }
