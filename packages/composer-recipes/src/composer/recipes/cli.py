"""The command `composer-train`, with the options of each recipe from its hyperparameters and algorithms."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, cast, get_args, get_origin

from docstring_parser import parse as parse_docstring
from jsonargparse import ActionYesNo, ArgumentParser, Namespace
from rich.console import Console

from composer.core import Algorithm
from composer.recipes._recipe import Recipe, Runs, Task
from composer.recipes._results import as_json, draw_curves, print_report
from composer.recipes.runner import PROFILED, Comparison
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
    "segmentation": "a U-Net on scenes of Fashion-MNIST",
}
"""Summaries of the recipes by name; each name is a module of this package."""

PROGRAM = "composer-train"
_NOT_OPTIONS = {"image_key", "input_key", "target_key"}  # fixed by the batches of the recipes
_JSONARGPARSE_WORDING = ((r'Parser key "([\w.]+)"', r"`--\1`"), (r"<class '(\w+)'>", r"\1"), (r"\btyping\.", ""))
_OPEN = "To look at it, open https://ui.perfetto.dev and drop the file there; it does not leave your machine."


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
    trace = comparison.profile(out / "profile") if options.profile else None
    if not is_rank_zero:
        return
    print_report(results, console)
    curves, values, config = (out / name for name in ("curves.png", "results.json", "config.yaml"))
    draw_curves(results, dataset.describe()).savefig(curves, dpi=150)
    values.write_text(json.dumps(as_json(results, dataset), indent=2) + "\n", encoding="utf-8")
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
    """Write the page about all runs if `composer-report` is installed, and return a message about it."""
    if find_spec("composer.report") is None:
        folder = out / "runs"
        return f"All runs: {folder}. For a page about them: pip install composer-report, composer-report {folder}"
    page = import_module("composer.report").write_report(comparison.folders, out / "report.html")
    return f"A page about all runs, to open in a browser: {page}"


class _Parser(ArgumentParser):
    """Parser that reports an error in one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        text = " ".join(message.split())
        text = self._choices(text) or text
        for pattern, replacement in _JSONARGPARSE_WORDING:
            text = re.sub(pattern, replacement, text)
        print(f"{self.prog}: error: {text.removesuffix('.')}. See `{self.prog} --help`.", file=sys.stderr)
        sys.exit(2)

    def _choices(self, text: str) -> str | None:
        """Return a message with the allowed values, instead of one about each type of a union; None: not a union."""
        key, value = re.search(r'Parser key "([\w.]+)"', text), re.search(r"(?:Given|Got) value: (.*)$", text)
        matches = [action for action in self._actions if key is not None and action.dest == key[1]]
        if key is None or value is None or not matches:
            return None
        allowed = _allowed(getattr(matches[0], "_typehint", None))
        if len(allowed) < 2:
            return None
        return f"`--{key[1]}` must be {', '.join(allowed[:-1])} or {allowed[-1]}, got {value[1]}"


def _allowed(hint: Any) -> list[str]:
    """Return the values of a `Literal`, and the names of the other types of a union."""
    if get_origin(hint) is Literal:
        return [str(word) for word in get_args(hint)]
    if get_origin(hint) in (Union, UnionType):
        return [word for part in get_args(hint) for word in _allowed(part)]
    return ["null"] if hint is type(None) else [getattr(hint, "__name__", str(hint))]


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
        "--profile",
        action="store_true",
        help="Afterwards, profile an epoch of the last recipe, and write a trace for https://ui.perfetto.dev.",
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
    recipes = [task.plain(data, network, training)] if options.compare or not options.algorithms else []
    if options.algorithms:
        algorithms = [_algorithm(task, name, _arguments(options, name), data) for name in options.algorithms]
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
