"""The command `composer-train`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from composer.recipes._hparams import Runs
from composer.recipes._options import PROGRAM, make_parser, make_recipes, section
from composer.recipes._plot import save_curves
from composer.recipes._profile import PROFILED
from composer.recipes._report import as_json, print_report, write_json
from composer.recipes._run import Comparison
from composer.recipes._task import Task
from composer.utils import dist

__all__ = ["RECIPES", "main"]

RECIPES = {
    "digits": "a small residual network on the handwritten digits of scikit-learn; nothing is downloaded",
    "fashion_mnist": "a convolutional network on Fashion-MNIST",
    "cifar10_resnet9": "ResNet-9 on CIFAR-10, for a GPU",
    "cifar10_resnet20": "ResNet-20 on CIFAR-10",
    "tiny_lm": "a small GPT-2 on Tiny Shakespeare",
    "segmentation": "a U-Net on scenes of Fashion-MNIST",
}
"""What can be trained, by the names that the command line uses: each is a module of this package."""

_OPEN = "To look at it, open https://ui.perfetto.dev and drop the file there; it does not leave your machine."


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        arguments: What follows the command's name; None is what this process was given.
    """
    chosen = _parse(sys.argv[1:] if arguments is None else arguments)
    task: Task = import_module(f"composer.recipes.{chosen.recipe}").TASK
    try:
        _run(task, chosen.options)
    except KeyboardInterrupt:
        sys.exit(f"{PROGRAM}: interrupted")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    width = max(map(len, RECIPES))
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} RECIPE [options]",
        description="Train a network plainly and with composed algorithms, and compare.",
        epilog="recipes:\n"
        + "".join(f"  {name:<{width}}  {summary}\n" for name, summary in RECIPES.items())
        + f"\nThe options of a recipe: {PROGRAM} RECIPE --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", metavar="RECIPE", choices=list(RECIPES), help="What to train; see below.")
    parser.add_argument("options", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _run(task: Task, arguments: Sequence[str]) -> None:
    parser = make_parser(task)
    options = parser.parse_args(arguments)
    first = dist.get_global_rank() == 0  # of several processes, one reports
    console = Console(quiet=not first)
    try:
        recipes = make_recipes(task, parser, options)
        runs = section(Runs, options)
        out = Path(options.out)
        out.mkdir(parents=True, exist_ok=True)
        comparison = Comparison(recipes, runs, folder=out / "runs")
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    dataset = comparison.datasets[0]
    console.print(dataset.describe(), highlight=False, soft_wrap=True)
    results = comparison.run()
    trace = comparison.profile(out / "profile") if options.profile else None
    if not first:
        return
    print_report(results, console)
    curves, values, config = (out / name for name in ("curves.png", "results.json", "config.yaml"))
    save_curves(results, dataset.describe(), curves)
    write_json(values, as_json(results, dataset))
    config.write_text(parser.dump(options), encoding="utf-8")
    console.print(
        f"\nLearning curves: {curves}\nAll results: {values}\nThis recipe, for --config: {config}\n"
        f"{_write_page(comparison, out)}",
        highlight=False,
        soft_wrap=True,
    )
    if trace is not None:
        console.print(f"Profile of {PROFILED}: {trace}\n{_OPEN}", highlight=False, soft_wrap=True)


def _write_page(comparison: Comparison, out: Path) -> str:
    """Write the page about all runs, if the package for that is installed; returns what to tell of it."""
    if find_spec("composer.report") is None:
        folder = out / "runs"
        return f"All runs: {folder}. For a page about them: pip install composer-report, composer-report {folder}"
    page = import_module("composer.report").write_report(comparison.folders, out / "report.html")
    return f"A page about all runs, to open in a browser: {page}"
