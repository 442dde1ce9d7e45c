"""Peak memory and tokens per second of a linear head with cross-entropy, in chunks and with all logits."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from composer.functional import compute_chunked_cross_entropy
from tools.bench._measure import interleaved, machine, spread, timed

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def _of_torch(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = F.linear_cross_entropy(  # type: ignore[attr-defined,unused-ignore]
        hidden, weight, targets, options=torch.nn.LinearCrossEntropyOptions()
    )
    return loss


_LOSSES: dict[str, Loss] = {"logits of all tokens": _plain, "chunked": compute_chunked_cross_entropy}
if hasattr(F, "linear_cross_entropy"):  # since torch 2.13
    _LOSSES["F.linear_cross_entropy"] = _of_torch


def _pass(name: str, tokens: int, width: int, classes: int, dtype: str) -> Callable[[], None]:
    """Return a function that runs forward and backward once."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    hidden = torch.randn(tokens, width, generator=generator).to(kind).requires_grad_()
    weight = torch.randn(classes, width, generator=generator).mul_(0.02).to(kind).requires_grad_()
    targets = torch.randint(classes, (tokens,), generator=generator)

    def run() -> None:
        hidden.grad = weight.grad = None
        _LOSSES[name](hidden, weight, targets).backward()  # type: ignore[no-untyped-call]

    return run


def _kibibytes(field: str) -> int:
    """Return a field of memory of this process."""
    with open("/proc/self/status", encoding="utf-8") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _print_peak(arguments: list[str]) -> None:
    """Print the MiB that a pass needs at most, beside its inputs; for a process of its own."""
    name, tokens, width, classes, dtype = arguments
    _pass(name, 8, 8, 8, dtype)()  # loads what the first pass loads
    run = _pass(name, int(tokens), int(width), int(classes), dtype)
    before = _kibibytes("VmRSS")
    run()
    print((_kibibytes("VmHWM") - before) / 1024)


def main(arguments: list[str]) -> None:
    """Print the figures of each loss, and their ratios to that with all logits."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- cross_entropy", description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--width", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--classes", type=int, default=50257, help="default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default: %(default)s)")
    options = parser.parse_args(arguments)
    sizes = (options.tokens, options.width, options.classes)
    peaks = {}
    for name in _LOSSES:
        command = [sys.executable, "-m", "tools.bench.cross_entropy", name, *map(str, sizes), options.dtype]
        peaks[name] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    runs = {name: partial(timed, _pass(name, *sizes, options.dtype)) for name in _LOSSES}
    seconds = interleaved(runs, options.rounds)
    print(f"{machine()}; {options.tokens} tokens, width {options.width}, {options.classes} classes, {options.dtype}")
    print(f"{'':24}{'peak MiB':>10}{'ratio':>8}{'tokens/s':>10}{'ratio in a round (median, range)':>36}")
    first = next(iter(_LOSSES))
    for name in _LOSSES:
        ratios = [plain / own for plain, own in zip(seconds[first], seconds[name], strict=True)]
        print(
            f"{name:24}{peaks[name]:10.0f}{peaks[name] / peaks[first]:8.3f}{options.tokens / min(seconds[name]):10.0f}"
            f"{statistics.median(ratios):22.2f} ({spread(ratios, 2)})"
        )


if __name__ == "__main__":
    _print_peak(sys.argv[1:])
