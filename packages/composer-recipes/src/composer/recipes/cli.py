"""The command `composer-train`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from docstring_parser import parse as parse_docstring
from jsonargparse import ActionYesNo, ArgumentParser, Namespace
from rich.console import Console

from composer.core import Algorithm
from composer.recipes import digits
from composer.recipes._hparams import Data, Network, Recipe, Runs, Training
from composer.recipes._plot import save_curves
from composer.recipes._profile import PROFILED
from composer.recipes._report import as_json, describe_data, print_report, write_json
from composer.recipes._run import Comparison
from composer.utils import dist

__all__ = ["main"]

T = TypeVar("T")

_PROGRAM = "composer-train"
_GROUPS = (Data, Network, Training, Runs)
_DIGITS = (
    "Train a small residual network on small images from several seeds, first plainly and then with composed "
    "algorithms, with the same budget, and compare. Without --data the images are the handwritten digits of "
    "scikit-learn: nothing is downloaded."
)
_OPEN = "To look at it, open https://ui.perfetto.dev and drop the file there; it does not leave your machine."
_NOT_OPTIONS = {"input_key", "target_key", "resize_targets"}  # where things are in a batch is known here

_PLAINER = ((r'Parser key "([\w.]+)"', r"`--\1`"), (r"<class '(\w+)'>", r"\1"), (r"\btyping\.", ""))  # of jsonargparse


class _Parser(ArgumentParser):
    """Answers a mistake in one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        text = " ".join(message.split())
        for pattern, plain in _PLAINER:
            text = re.sub(pattern, plain, text)
        program = self.prog.replace(" [options]", "")
        print(f"{program}: error: {text.removesuffix('.')}. See `{_PROGRAM} digits --help`.", file=sys.stderr)
        sys.exit(2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        arguments: What follows the command's name; None is what this process was given.
    """
    parser = _Parser(prog=_PROGRAM, description="Train with composed algorithms.")
    recipe = _digits_parser()
    parser.add_subcommands(dest="recipe").add_subcommand("digits", recipe, help=_DIGITS)
    chosen = parser.parse_args(arguments)
    try:
        _run_digits(recipe, chosen.digits)
    except KeyboardInterrupt:
        sys.exit(f"{_PROGRAM}: interrupted")


def _digits_parser() -> _Parser:
    parser = _Parser(prog=f"{_PROGRAM} digits", description=_DIGITS)
    parser.add_argument("--config", action="config", help="Read options from a YAML file; see --print_config.")
    parser.add_argument("--out", type=str, default="composer-digits", help="The folder to write plot and results to.")
    for group in _GROUPS:
        parser.add_class_arguments(group, skip={"progress"})
    parser.add_argument(
        "--progress",
        action=ActionYesNo(yes_prefix="", no_prefix="no-"),
        default=True,
        help="Show a progress bar for each training run.",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="Afterwards, profile an epoch of the last recipe, and write a trace for https://ui.perfetto.dev.",
    )
    parser.add_argument(
        "--algorithms",
        nargs="*",
        type=Literal[tuple(digits.ALGORITHMS)],
        default=list(digits.COMPOSED),
        help="What to compose. Nothing after it: train plainly only.",
    )
    for name, algorithm in digits.ALGORITHMS.items():
        parser.add_class_arguments(algorithm, name, skip=_NOT_OPTIONS, instantiate=False)
        parser.set_defaults({f"{name}.{key}": value for key, value in digits.TUNED.get(name, {}).items()})
        _explain(parser, name, algorithm)
    return parser


def _explain(parser: ArgumentParser, name: str, algorithm: type) -> None:
    """Take the help of options from `Args:` of the docstring only; `Attributes:` may describe the same names."""
    described = {
        p.arg_name: p.description for p in parse_docstring(algorithm.__doc__ or "").params if p.args[0] == "param"
    }
    for action in parser._actions:
        group, _, key = action.dest.partition(".")
        if group == name and key in described:
            action.help = described[key]


def _run_digits(parser: _Parser, options: Namespace) -> None:
    first = dist.get_global_rank() == 0  # of several processes, one reports
    console = Console(quiet=not first)
    try:
        recipes = _recipes(parser, options)
        runs = _section(Runs, options)
        out = Path(options.out)
        out.mkdir(parents=True, exist_ok=True)
        comparison = Comparison(recipes, runs, folder=out / "runs")
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    images = comparison.images[0]
    console.print(describe_data(images), highlight=False, soft_wrap=True)
    results = comparison.run()
    trace = comparison.profile(out / "profile") if options.profile else None
    if not first:
        return
    print_report(results, console)
    curves, values, config = (out / name for name in ("curves.png", "results.json", "config.yaml"))
    title = f"{images.name}: {len(images.train_images):,} training images, {len(images.test_images):,} test images"
    save_curves(results, title, curves)
    write_json(values, as_json(results, images))
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


def _recipes(parser: _Parser, options: Namespace) -> list[Recipe]:
    """The plain recipe, and the composed one if there is anything to compose.

    Raises:
        ValueError: An option has a value that cannot work, or none would look at it.
    """
    data, network, training = _section(Data, options), _section(Network, options), _section(Training, options)
    for name in digits.ALGORITHMS:
        given, default = _arguments(options, name), _arguments(parser.get_defaults(), name)
        changed = [key for key in given if given[key] != default[key]]
        if changed and name not in options.algorithms:
            raise ValueError(
                f"`--{name}.{changed[0]}` has no effect, because `{name}` is not among `--algorithms`, which are "
                f"{' '.join(options.algorithms) or 'none'}. Add it there."
            )
    if len(set(options.algorithms)) < len(options.algorithms):
        raise ValueError(f"`--algorithms` must name each algorithm once, got {' '.join(options.algorithms)}.")
    recipes = [digits.plain(data, network, training)]
    if options.algorithms:
        algorithms = [_algorithm(name, _arguments(options, name)) for name in options.algorithms]
        recipes.append(digits.composed(data, network, training, algorithms))
    return recipes


def _arguments(options: Namespace, name: str) -> dict[str, Any]:
    given = options.get(name)  # nothing is there for an algorithm without arguments
    return {} if given is None else dict(vars(given))


def _algorithm(name: str, arguments: dict[str, Any]) -> Algorithm:
    try:
        return digits.ALGORITHMS[name](**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`--{name}`: {error}") from error


def _section(group: type[T], options: Namespace) -> T:
    """One group of hyperparameters out of all options."""
    values: dict[str, Any] = {field.name: options[field.name] for field in fields(group)}  # type: ignore[arg-type]
    return group(**values)
