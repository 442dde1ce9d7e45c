"""Muon next to a tuned AdamW on the characters of a text: fewer steps to the same loss, and the cost of a step.

The text is split into parts to train (90 %), to choose settings (5 %) and to report (5 %). Both optimizers choose a
learning rate, then a weight decay, then a warm-up, from the same grids and with the same two seeds; a choice at the
edge of a grid extends it. AdamW then trains `--steps` steps with each of `--seeds` fresh seeds, and Muon `--steps` /
`--ratio` steps, from the same initial weights and with the same data order. All runs are complete: each has a schedule
of its own length, and settings that were chosen for this length. Muon reaches the loss of AdamW in fewer steps if the
95 % interval of the difference is not above zero.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from composer import Trainer
from composer.algorithms import Muon
from composer.models import ComposerModel
from composer.optim import CosineAnnealingWithWarmupScheduler
from tools.bench._measure import interleaved, machine, spread

LENGTH, _BATCH = 64, 32
# The first guess of each setting, and the values that are tried; one factor lies between neighbors.
_FIRST = {"lr": 4e-3, "weight_decay": 0.1, "warmup": 0.1}
_GRIDS = {
    "lr": (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
    "weight_decay": (0.03, 0.1, 0.3),
    "warmup": (0.05, 0.1, 0.2),
}
_LEAST = {"lr": 0.0, "weight_decay": 0.0, "warmup": 0.005}  # less than one step of 200 is no warm-up
_TUNING_SEEDS = (1000, 1001)
_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}  # 97.5 %, by n
SEEDS = sorted(_T)  # how many there may be

Settings = dict[str, float]
Algorithms = Callable[[], list[Any]]


class Block(torch.nn.Module):
    """A block of a decoder, with normalization before each part."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (torch.nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        q, k, v = (
            layer(normed).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        down: torch.Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + down


class Decoder(ComposerModel):
    """A small GPT with learned positions."""

    def __init__(self, vocabulary: int, width: int, depth: int, num_heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(vocabulary, width), torch.nn.Embedding(length, width)
        self.blocks = torch.nn.Sequential(*(Block(width, num_heads) for _ in range(depth)))
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
                torch.nn.init.normal_(module.weight, std=0.02)
        for name, weight in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                torch.nn.init.normal_(weight, std=0.02 / math.sqrt(2 * depth))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.tokens(batch[:, :-1]) + self.positions.weight[: batch.shape[1] - 1]
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    def loss(self, outputs: Any, batch: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch[:, 1:].flatten())


@cache
def parts(path: Path) -> tuple[list[torch.Tensor], int]:
    """Return the codes of the characters to train, to choose and to report, and the number of different ones."""
    text = path.read_text(encoding="utf-8")
    codes = {character: code for code, character in enumerate(sorted(set(text)))}
    data = torch.tensor([codes[character] for character in text])
    train, held = len(data) * 9 // 10, len(data) // 20
    return list(torch.split(data, [train, held, len(data) - train - held])), len(codes)


def make_model(path: Path, seed: int) -> Decoder:
    """Return the model of a run."""
    torch.manual_seed(seed)
    return Decoder(parts(path)[1], width=96, depth=3, num_heads=4, length=LENGTH)


def batches(path: Path, steps: int, seed: int) -> list[torch.Tensor]:
    """Return the batches of a run: random windows of the text to train on."""
    train = parts(path)[0][0]
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(train) - LENGTH - 1, (steps, _BATCH), generator=generator)
    windows = train.unfold(0, LENGTH + 1, 1)
    return [windows[row] for row in starts]


def groups(model: torch.nn.Module, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    """Return parameter groups, of which biases and norms are not decayed."""
    decay = [p for p in model.parameters() if p.dim() > 1]
    no_decay = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


def loss_of(model: Decoder, path: Path, part: int) -> float:
    """Return the mean loss of all whole windows of a part."""
    model.eval()
    with torch.no_grad():
        held = parts(path)[0][part].unfold(0, LENGTH + 1, LENGTH)
        losses = [(model.loss(model(batch), batch), len(batch)) for batch in torch.split(held, 256)]
    return sum(float(loss) * count for loss, count in losses) / len(held)


def mean_with_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and half of its 95 % interval by Student's distribution."""
    half = _T[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), half


def _train(path: Path, with_: Settings, steps: int, seed: int, algorithms: Algorithms, part: int) -> float:
    """Train, and return the loss of a part."""
    model = make_model(path, seed)
    parameters = groups(model, with_["weight_decay"])
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(parameters, lr=with_["lr"], betas=(0.9, 0.95), fused=True),
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup=f"{with_['warmup']}dur"),
        train_dataloader=batches(path, steps, seed),
        max_duration="1ep",
        algorithms=algorithms(),
        progress_bar=False,
        device="cpu",
        seed=seed,
    )
    trainer.fit()
    trainer.close()
    return loss_of(model, path, part)


def _tune(path: Path, steps: int, algorithms: Algorithms) -> Settings:
    """Return the settings with the best loss on the second part, chosen one after the other; none at an edge."""
    chosen = dict(_FIRST)
    means: dict[tuple[float, ...], float] = {}

    def loss(name: str, value: float) -> float:
        settings = {**chosen, name: value}
        key = tuple(settings.values())
        if key not in means:
            found = [_train(path, settings, steps, seed, algorithms, part=1) for seed in _TUNING_SEEDS]
            means[key] = statistics.mean(found) if all(map(math.isfinite, found)) else math.inf
            print(f"  {name} {value:<8g} {means[key]:.4f}", flush=True)
        return means[key]

    for name, grid in _GRIDS.items():
        values, factor = list(grid), grid[1] / grid[0]
        best = min(values, key=partial(loss, name))
        step = 1 / factor if best == values[0] else factor if best == values[-1] else None
        while step is not None and _LEAST[name] < best and loss(name, best * step) < loss(name, best):
            best *= step
        chosen[name] = best
    return chosen


def _compare(path: Path, steps: int, seeds: int, ratio: float) -> None:
    shorter = int(steps / ratio)
    contestants: dict[str, tuple[int, Algorithms]] = {
        "AdamW": (steps, list),
        "AdamW, as short": (shorter, list),
        "Muon": (shorter, lambda: [Muon()]),
    }
    begin = time.perf_counter()
    losses: dict[str, list[float]] = {}
    for name, (length, algorithms) in contestants.items():
        print(f"{name}, {length} steps: settings, mean losses of 2 seeds to choose", flush=True)
        settings = _tune(path, length, algorithms)
        losses[name] = [_train(path, settings, length, seed, algorithms, part=2) for seed in range(seeds)]
        mean, deviation = statistics.mean(losses[name]), statistics.stdev(losses[name])
        print(
            f"{name}, {length} steps, {', '.join(f'{key} {value:g}' for key, value in settings.items())}: {mean:.4f}, "
            f"standard deviation {deviation:.4f}, n = {seeds}\n",
            flush=True,
        )
    for name in ("AdamW, as short", "Muon"):
        mean, half = mean_with_interval([a - b for a, b in zip(losses[name], losses["AdamW"], strict=True)])
        verdict = "reaches its loss" if mean + half <= 0 else "does not reach it" if mean > half else "undecided"
        print(
            f"{name} ({shorter} steps) minus AdamW ({steps} steps): {mean:+.4f} +- {half:.4f} nats per character "
            f"(95 %, {seeds} pairs): {verdict}, in 1/{steps / shorter:.2f} of the steps"
        )
    print(f"{time.perf_counter() - begin:.0f} s", flush=True)


def _cpu_seconds(run: Callable[[], object]) -> float:
    # A step takes many seconds: other processes of the machine would be measured with it.
    begin = time.process_time()
    run()
    return time.process_time() - begin


def _cost(rounds: int) -> None:
    """Measure a step of a model of 10.7 million parameters, with batches of 64 times 256 characters, in CPU time."""
    batch = torch.randint(65, (64, 257), generator=torch.Generator().manual_seed(0))
    runs, count = {}, 0
    for name, algorithms in (("AdamW", []), ("Muon", [Muon()])):
        torch.manual_seed(0)
        model = Decoder(65, width=384, depth=6, num_heads=6, length=256)
        trainer = Trainer(
            model=model,
            optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
            train_dataloader=[batch],
            max_duration="1000ep",
            algorithms=algorithms,
            device_train_microbatch_size=8,
            progress_bar=False,
            device="cpu",
        )
        count = sum(parameter.numel() for parameter in model.parameters())
        runs[name] = lambda trainer=trainer: _cpu_seconds(lambda: trainer.fit(duration="1ep"))
    results = interleaved(runs, rounds)
    ratios = [a / b for a, b in zip(results["Muon"], results["AdamW"], strict=True)]
    print(
        f"\na step of {count / 1e6:.1f} million parameters, 64 x 256 characters, in CPU time: AdamW "
        f"{statistics.median(results['AdamW']):.2f} s; Muon {statistics.median(ratios):.3f} times ({spread(ratios, 3)})"
    )


def main(arguments: list[str]) -> None:
    """Print the losses, their differences, and the ratio of step times."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- characters", description=__doc__)
    parser.add_argument("--text", type=Path, help="a text file; without it only steps are measured")
    parser.add_argument("--steps", type=int, default=420, help="steps of AdamW (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=10, choices=SEEDS, help="pairs (default: %(default)s)")
    parser.add_argument("--ratio", type=float, default=1.4, help="how many times fewer steps Muon has")
    parser.add_argument("--rounds", type=int, default=5, help="steps that are timed; 0: none")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(machine(), flush=True)
    if options.text is not None:
        _compare(options.text, options.steps, options.seeds, options.ratio)
    if options.rounds:
        _cost(options.rounds)
