"""The options of a recipe: made from its hyperparameters and algorithms, read from the command line or YAML."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, cast, get_args, get_origin

from docstring_parser import parse as parse_docstring
from jsonargparse import ActionYesNo, ArgumentParser, Namespace

from composer.core import Algorithm
from composer.recipes._hparams import Recipe
from composer.recipes._task import Task

__all__ = ["PROGRAM", "make_parser", "make_recipes", "section"]

T = TypeVar("T")

PROGRAM = "composer-train"
_NOT_OPTIONS = {"input_key", "target_key"}  # where things are in a batch is known here
_PLAINER = ((r'Parser key "([\w.]+)"', r"`--\1`"), (r"<class '(\w+)'>", r"\1"), (r"\btyping\.", ""))  # of jsonargparse


class _Parser(ArgumentParser):
    """Answers a mistake in one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        text = " ".join(message.split())
        text = self._choices(text) or text
        for pattern, plain in _PLAINER:
            text = re.sub(pattern, plain, text)
        print(f"{self.prog}: error: {text.removesuffix('.')}. See `{self.prog} --help`.", file=sys.stderr)
        sys.exit(2)

    def _choices(self, text: str) -> str | None:
        """What an option may be, instead of what each type of its union had expected; None: it has no such type."""
        key, value = re.search(r'Parser key "([\w.]+)"', text), re.search(r"(?:Given|Got) value: (.*)$", text)
        found = [action for action in self._actions if key is not None and action.dest == key[1]]
        if key is None or value is None or not found:
            return None
        allowed = _allowed(getattr(found[0], "_typehint", None))
        if len(allowed) < 2:
            return None
        return f"`--{key[1]}` must be {', '.join(allowed[:-1])} or {allowed[-1]}, got {value[1]}"


def _allowed(hint: Any) -> list[str]:
    """The words of a `Literal`, and the names of other types of a union."""
    if get_origin(hint) is Literal:
        return [str(word) for word in get_args(hint)]
    if get_origin(hint) in (Union, UnionType):
        return [word for part in get_args(hint) for word in _allowed(part)]
    return ["null"] if hint is type(None) else [getattr(hint, "__name__", str(hint))]


def make_parser(task: Task) -> ArgumentParser:
    """The options of a task's recipes.

    Args:
        task: The task.
    """
    parser = _Parser(prog=f"{PROGRAM} {task.name}", description=task.summary)
    parser.add_argument("--config", action="config", help="Read options from a YAML file; see --print_config.")
    parser.add_argument(
        "--out", type=str, default=f"composer-{task.name}", help="The folder to write plot and results to."
    )
    for part in _parts(task):
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
        "--algorithms",
        nargs="*",
        type=Literal[tuple(task.algorithms)],
        default=list(task.chosen),
        help="What to compose. Nothing after it: train plainly only.",
    )
    for name, algorithm in task.algorithms.items():
        skipped = _NOT_OPTIONS | set(task.fitted(task.data).get(name, {}))
        parser.add_class_arguments(algorithm, name, skip=skipped, instantiate=False)
        parser.set_defaults({f"{name}.{key}": value for key, value in task.tuned.get(name, {}).items()})
        _explain(parser, name, algorithm)
    return parser


def make_recipes(task: Task, parser: ArgumentParser, options: Namespace) -> list[Recipe]:
    """The plain recipe, and the composed one if there is anything to compose.

    Args:
        task: The task.
        parser: What `make_parser` made for it.
        options: What it read.

    Raises:
        ValueError: An option has a value that cannot work, or none would look at it.
    """
    data, network = section(type(task.data), options), section(type(task.network), options)
    training = section(type(task.training), options)
    for name in task.algorithms:
        given, default = _arguments(options, name), _arguments(parser.get_defaults(), name)
        changed = [key for key in given if given[key] != default[key]]
        if changed and name not in options.algorithms:
            raise ValueError(
                f"`--{name}.{changed[0]}` has no effect, because `{name}` is not among `--algorithms`, which are "
                f"{' '.join(options.algorithms) or 'none'}. Add it there."
            )
    if len(set(options.algorithms)) < len(options.algorithms):
        raise ValueError(f"`--algorithms` must name each algorithm once, got {' '.join(options.algorithms)}.")
    recipes = [task.plain(data, network, training)]
    if options.algorithms:
        algorithms = [_algorithm(task, name, _arguments(options, name), data) for name in options.algorithms]
        recipes.append(task.composed(data, network, training, algorithms))
    return recipes


def section(group: type[T], options: Namespace) -> T:
    """One group of hyperparameters out of all options.

    Args:
        group: A dataclass.
        options: All of them.
    """
    assert is_dataclass(group)
    values: dict[str, Any] = {field.name: options[field.name] for field in fields(group)}
    return cast(T, group(**values))


def _parts(task: Task) -> tuple[Any, ...]:
    return task.data, task.network, task.training, task.runs


def _explain(parser: ArgumentParser, name: str, algorithm: type) -> None:
    """Take the help of options from `Args:` of the docstring only; `Attributes:` may describe the same names."""
    described = {
        p.arg_name: p.description for p in parse_docstring(algorithm.__doc__ or "").params if p.args[0] == "param"
    }
    for action in parser._actions:
        group, _, key = action.dest.partition(".")
        if group == name and key in described:
            action.help = described[key]


def _arguments(options: Namespace, name: str) -> Mapping[str, Any]:
    given = options.get(name)  # nothing is there for an algorithm without arguments
    return {} if given is None else dict(vars(given))


def _algorithm(task: Task, name: str, arguments: Mapping[str, Any], data: Any) -> Algorithm:
    try:
        return task.make_algorithms([name], {name: arguments}, data)[0]
    except (TypeError, ValueError) as error:
        raise ValueError(f"`--{name}`: {error}") from error
