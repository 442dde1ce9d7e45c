"""Kill and resume runs with every pair of algorithms that compose, with sampled triples, and real processes.

`nox -s chaos` does everything; `nox -s chaos -- --sample 20` as many pairs and triples, and a tenth as many processes.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import multiprocessing
import random
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from algorithm_runs import (
    CLASSES,
    LANGUAGE,
    LOWER_PRECISION,
    WITHOUT_LOGITS,
    EvaluatedCaptioned,
    Measured,
    MeasuredCaptioned,
    arguments_of,
    captioned,
    make,
    noise,
)
from torch.utils.data import DataLoader
from torchvision.transforms import Compose, RandomHorizontalFlip, ToTensor

from composer import Trainer
from composer.core import Precision
from composer.optim import LinearWithWarmupScheduler
from composer.testing import assert_resumes_exactly
from tools.pairs import judge

LENGTH, BATCHES = 3, 6  # of an epoch, and of the run
TRIPLES, KILLED_PROCESSES = 200, 40
KILLS_OF_A_PROCESS = 5


@dataclass(frozen=True)
class Run:
    """A small run with some algorithms; called with a folder it makes the Trainer.

    Attributes:
        names: Of the algorithms.
        kills: Where it is killed, in batches.
        save_every: Batches between checkpoints.
        is_process: Whether it is a process that is killed by SIGKILL.
    """

    names: tuple[str, ...]
    kills: tuple[float, ...]
    save_every: int = 1
    is_process: bool = False

    def __call__(self, folder: Path) -> Trainer:
        has_text = bool(LANGUAGE & set(self.names))
        is_lower = bool(LOWER_PRECISION & set(self.names))
        keys = {"input_key": "image", "target_key": "label"} if has_text else {}
        collate: Any = captioned if has_text else None
        training = noise(8 * LENGTH, Compose([RandomHorizontalFlip(), ToTensor()]))
        without = WITHOUT_LOGITS & set(self.names)
        end = 1.0 if "ScheduleFree" in self.names else 0.0  # it refuses rates that fall
        model = EvaluatedCaptioned() if without else MeasuredCaptioned() if has_text else Measured()
        return Trainer(
            model=model,
            train_dataloader=DataLoader(training, batch_size=8, shuffle=True, collate_fn=collate),
            eval_dataloader=DataLoader(noise(4), batch_size=4, collate_fn=collate),
            eval_interval="3ba",
            max_duration=f"{BATCHES}ba",
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            schedulers=LinearWithWarmupScheduler("3ba", scale_warmup=True, alpha_f=end),
            algorithms=[make(name, keys, arguments_of(name)) for name in self.names],
            precision=Precision.AMP_BF16 if is_lower else Precision.FP32,
            progress_bar=False,
            device="cpu",
            seed=3,
            run_name="run",
            save_folder=folder,
            save_interval=f"{self.save_every}ba",
            save_metrics=True,
            autoresume=True,
        )

    def check(self) -> str:
        """Return how the resumed run differs from the uninterrupted one; "" if it does not."""
        torch.set_num_threads(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                assert_resumes_exactly(self, self.kills, sigkill=self.is_process)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is reported, and the next run follows
                return f"{type(error).__name__}: {error}"
        return ""


def _compose(names: Sequence[str]) -> bool:
    made = [make(name, {}) for name in names]
    return not any(judge(one, other).refused for one, other in itertools.combinations(made, 2))


def _drawn(names: Sequence[str], draw: random.Random) -> Run:
    save_every = draw.choice([1, 1, 2])
    return Run(tuple(names), (draw.randrange(save_every, BATCHES),), save_every)


def pairs(draw: random.Random) -> list[Run]:
    """Return a run for every pair of algorithms that compose."""
    found = [names for names in itertools.combinations(sorted(CLASSES), 2) if _compose(names)]
    return [_drawn(names, draw) for names in found]


def triples(draw: random.Random, count: int) -> list[Run]:
    """Return runs of different triples that compose."""
    found: dict[tuple[str, ...], Run] = {}
    while len(found) < count:
        names = tuple(sorted(draw.sample(sorted(CLASSES), 3)))
        if names not in found and _compose(names):
            found[names] = _drawn(names, draw)
    return list(found.values())


def processes(draw: random.Random, kills: int) -> Iterator[Run]:
    """Yield runs of processes that are killed at random moments, so often in all."""
    while kills > 0:
        run = triples(draw, 1)[0]
        number = min(kills, KILLS_OF_A_PROCESS)
        moments = sorted(round(draw.uniform(1, BATCHES - 0.01), 2) for _ in range(number))
        if len(set(moments)) == number:
            yield Run(run.names, tuple(moments), is_process=True)
            kills -= number


def _check(run: Run) -> tuple[Run, str]:
    logging.disable(logging.WARNING)
    return run, run.check()


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill and resume runs, and compare them with uninterrupted ones.")
    parser.add_argument("--sample", type=int, metavar="N", help="only N pairs, N triples and N // 10 killed processes")
    parser.add_argument("--seed", type=int, default=0, help="determines triples and moments (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once (default: 2)")
    options = parser.parse_args()
    draw, sample = random.Random(options.seed), options.sample
    two = pairs(draw)
    three = triples(draw, TRIPLES if sample is None else sample)
    if sample is not None:
        two = draw.sample(two, min(sample, len(two)))
    killed = list(processes(draw, KILLED_PROCESSES if sample is None else sample // 10))
    begun, failed = time.monotonic(), []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context) as pool:
        for number, (run, difference) in enumerate(pool.map(_check, [*two, *three, *killed]), start=1):
            if difference:
                failed.append(run)
                print(f"{' + '.join(run.names)}, killed at {list(run.kills)}: {difference}\n", flush=True)
            if number % 50 == 0:
                print(f"{number} runs, {len(failed)} differ, {time.monotonic() - begun:.0f} s", flush=True)
    kinds = {"pairs": two, "triples": three, "processes": killed}
    equal = {kind: sum(run not in failed for run in runs) for kind, runs in kinds.items()}
    print(
        f"{sum(len(run.kills) for run in [*two, *three, *killed])} kills, "
        f"{sum(len(run.kills) for run in killed)} of them by SIGKILL. "
        f"Equal to the uninterrupted run: {equal['pairs']} of {len(two)} pairs, {equal['triples']} of {len(three)} "
        f"triples, {equal['processes']} of {len(killed)} killed processes."
    )
    if failed:
        sys.exit("Not equal: " + "; ".join(" + ".join(run.names) for run in failed))


if __name__ == "__main__":
    import chaos  # under the name that processes can import it by

    chaos.main()
