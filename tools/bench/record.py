"""A step of the record stack of `composer-train gpt_record`, next to one of Muon + AdamW: their runs take turns."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import yaml

from composer.core import Algorithm
from composer.loop import HostedRun
from composer.recipes.gpt_record import TASK, RecordGPT
from tools.bench._measure import machine, spread

_WARM_UP = 2  # steps, in which optimizers and methods make their buffers


def _steps(algorithms: list[Algorithm], steps: int, options: argparse.Namespace) -> Iterator[float]:
    """Train a run, and yield the seconds of each step: in CPU time, without those of other processes."""
    torch.manual_seed(0)
    model = RecordGPT(65, options.width, options.layers, heads=6, projection_std=0.5)
    tokens = torch.randint(65, (options.batch, options.length))
    loader: list[Any] = [{"input_ids": tokens, "labels": tokens}] * steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, fused=True)
    run = HostedRun(model, algorithms, optimizers=optimizer, dataloader=loader, max_duration="1ep")
    run.begin_fit()
    begin = time.process_time()
    for batch in run.epoch():
        run.backward(run.loss(batch))
        run.step()
        yield time.process_time() - begin
        begin = time.process_time()


def main(arguments: list[str]) -> None:
    """Print the median of the ratios of steps, and their spread."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- record", description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="steps of each run (default: %(default)s)")
    parser.add_argument("--width", type=int, default=384, help="width of the network (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="its blocks (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a batch (default: %(default)s)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    settings = yaml.safe_load(TASK.stacks["record"].read_text(encoding="utf-8"))
    stack = TASK.make_algorithms(settings["algorithms"], {name: settings[name] for name in settings["algorithms"]})
    total = options.steps + _WARM_UP
    runs = {"plain": _steps(TASK.make_algorithms(["muon"]), total, options), "stack": _steps(stack, total, options)}
    pairs = list(zip(*runs.values(), strict=True))[_WARM_UP:]
    ratios = [with_stack / alone for alone, with_stack in pairs]
    print(
        f"{machine()}; width {options.width}, {options.layers} blocks, {options.batch} x {options.length} tokens; "
        f"{options.steps} steps\nMuon + AdamW {statistics.median(alone for alone, _ in pairs):.3f} s; the stack "
        f"{statistics.median(ratios):.3f} times ({spread(ratios, 3)})"
    )
