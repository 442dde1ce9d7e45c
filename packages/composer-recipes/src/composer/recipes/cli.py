"""The command `composer-train`, with the options of each recipe from its hyperparameters and algorithms."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, cast

from docstring_parser import parse as parse_docstring
from jsonargparse import ActionYesNo, ArgumentParser, Namespace
from rich.console import Console

from composer.core import Algorithm
from composer.recipes._recipe import Recipe, Runs, Task
from composer.recipes._results import as_json, print_report
from composer.recipes.runner import Comparison
from composer.report import write_report
from composer.utils import dist

T = TypeVar("T")

RECIPES = {
    "digits": "a small residual network on the handwritten digits of scikit-learn; nothing is downloaded",
    "fashion_mnist": "a convolutional network on Fashion-MNIST",
    "cifar10_resnet9": "ResNet-9 on CIFAR-10, for a GPU",
    "cifar10_resnet20": "ResNet-20 on CIFAR-10",
    "cifar10_record": "the network and the methods of the CIFAR-10 speed records, for a GPU",
    "imagenet_resnet50": "ResNet-50 on ImageNet, for several GPUs",
    "tiny_lm": "a small GPT-2 on Tiny Shakespeare",
    "gpt_record": "the GPT and the methods of the public records, on a text",
    "segmentation": "a U-Net on scenes of Fashion-MNIST",
}
"""Summaries of the recipes by name; each name is a module of this package."""

PROGRAM = "composer-train"
_NOT_OPTIONS = {"image_key", "input_key", "target_key"}  # fixed by the batches of the recipes


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        arguments: The command line without the command's name. None: that of this process.
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
    options = parser.parse_args(_with_stacks(task, arguments))
    is_rank_zero = dist.get_global_rank() == 0
    console = Console(quiet=not is_rank_zero)
    try:
        recipes = make_recipes(task, parser, options)
        runs = _section(Runs, options)
        out = Path(options.out)
        out.mkdir(parents=True, exist_ok=True)
        comparison = Comparison(recipes, runs, folder=out / "runs")
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    dataset = comparison.datasets[0]
    console.print(dataset.describe(), highlight=False, soft_wrap=True)
    results = comparison.run()
    if not is_rank_zero:
        return
    print_report(results, console)
    values, config = out / "results.json", out / "config.yaml"
    values.write_text(json.dumps(as_json(results, dataset), indent=2) + "\n", encoding="utf-8")
    config.write_text(parser.dump(options), encoding="utf-8")
    page = write_report(comparison.folders, out / "report.html")
    console.print(
        f"\nA page with the curves of all runs: {page}\nAll results: {values}\nThis recipe, for --config: {config}",
        highlight=False,
        soft_wrap=True,
    )


class _Parser(ArgumentParser):
    """Parser that reports an error in one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        text = " ".join(message.split()).removesuffix(".")
        print(f"{self.prog}: error: {text}. See `{self.prog} --help`.", file=sys.stderr)
        sys.exit(2)


def make_parser(task: Task) -> ArgumentParser:
    """Return a parser of the options of a task's recipes."""
    parser = _Parser(prog=f"{PROGRAM} {task.name}", description=task.summary)
    named = f", or take those named {', '.join(task.stacks)}" if task.stacks else ""
    parser.add_argument("--config", action="config", help=f"Read options from a YAML file{named}; see --print_config.")
    parser.add_argument(
        "--out", type=str, default=f"composer-{task.name}", help="The folder to write plot and results to."
    )
    parts: tuple[Any, ...] = (task.data, task.network, task.training, task.runs)
    for part in parts:
        parser.add_class_arguments(type(part), skip={"progress"})
        parser.set_defaults({key: value for key, value in asdict(part).items() if key != "progress"})
    parser.add_argument(
        "--progress",
        action=ActionYesNo(yes_prefix="", no_prefix="no-"),
        default=task.runs.progress,
        help="Show a progress bar for each training run.",
    )
    parser.add_argument(
        "--compare",
        action=ActionYesNo(yes_prefix="", no_prefix="no-"),
        default=True,
        help="Also train without the algorithms, to compare.",
    )
    parser.add_argument(
        "--algorithms",
        nargs="*",
        type=Literal[tuple(task.algorithms)],
        default=list(task.chosen),
        help="The algorithms to compose. Without a value: only the plain training.",
    )
    parser.add_argument(
        "--without",
        nargs="*",
        type=Literal[tuple(task.algorithms)],
        default=[],
        help="Algorithms to leave out of `--algorithms`, for example of those of a file.",
    )
    for name, algorithm in task.algorithms.items():
        skipped = _NOT_OPTIONS | set(task.fitted(task.data).get(name, {}))
        parser.add_class_arguments(algorithm, name, skip=skipped, instantiate=False)
        parser.set_defaults({f"{name}.{key}": value for key, value in task.tuned.get(name, {}).items()})
        # Only from `Args:` of the docstring; `Attributes:` may describe the same names.
        described = {
            p.arg_name: p.description for p in parse_docstring(algorithm.__doc__ or "").params if p.args[0] == "param"
        }
        for action in parser._actions:
            group, _, key = action.dest.partition(".")
            if group == name and key in described:
                action.help = described[key]
    return parser


def make_recipes(task: Task, parser: ArgumentParser, options: Namespace) -> list[Recipe]:
    """Return the plain recipe, unless comparison is off, and the composed one if there are algorithms.

    Args:
        task: The task.
        parser: The result of `make_parser`.
        options: The options that it parsed.

    Raises:
        ValueError: An option has an invalid value, or no effect.
    """
    data, network = _section(type(task.data), options), _section(type(task.network), options)
    training = _section(type(task.training), options)
    unknown = [name for name in options.without if name not in options.algorithms]
    if unknown:
        raise ValueError(f"`--without` must name some of {' '.join(options.algorithms)}, got {' '.join(unknown)}.")
    for name in task.algorithms:
        arguments, defaults = _arguments(options, name), _arguments(parser.get_defaults(), name)
        changed = [key for key in arguments if _listed(arguments[key]) != _listed(defaults[key])]
        if changed and name not in options.algorithms:
            raise ValueError(
                f"`--{name}.{changed[0]}` has no effect, because `{name}` is not among `--algorithms`, which are "
                f"{' '.join(options.algorithms) or 'none'}. Add `{name}` to them."
            )
    if len(set(options.algorithms)) < len(options.algorithms):
        raise ValueError(f"`--algorithms` must name each algorithm once, got {' '.join(options.algorithms)}.")
    chosen = [name for name in options.algorithms if name not in options.without]
    recipes = [task.plain(data, network, training)] if options.compare or not chosen else []
    if chosen:
        algorithms = [_algorithm(task, name, _arguments(options, name), data) for name in chosen]
        recipes.append(task.composed(data, network, training, algorithms))
    return recipes


def _with_stacks(task: Task, arguments: Sequence[str]) -> list[str]:
    """Replace names of stacks after `--config` by their files."""
    replaced, previous = [], ""
    for argument in arguments:
        option, equals, name = argument.rpartition("=")
        if previous == "--config" or option == "--config":
            argument = f"{option}{equals}{task.stacks.get(name, name)}"
        replaced.append(argument)
        previous = argument
    return replaced


def _section(group: type[T], options: Namespace) -> T:
    """Return the options that belong to a dataclass of hyperparameters, as an instance of it."""
    assert is_dataclass(group)
    values: dict[str, Any] = {field.name: options[field.name] for field in fields(group)}
    return cast(T, group(**values))


def _listed(value: Any) -> Any:
    """Return a value with lists in place of tuples, as a YAML file has it."""
    return [_listed(each) for each in value] if isinstance(value, (list, tuple)) else value


def _arguments(options: Namespace, name: str) -> Mapping[str, Any]:
    arguments = options.get(name)  # None for an algorithm without arguments
    return {} if arguments is None else dict(vars(arguments))


def _algorithm(task: Task, name: str, arguments: Mapping[str, Any], data: Any) -> Algorithm:
    try:
        return task.make_algorithms([name], {name: arguments}, data)[0]
    except (TypeError, ValueError) as error:
        raise ValueError(f"`--{name}`: {error}") from error
