"""The command `composer-evidence`."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from composer.evidence.auto import run_all, run_quick, write_recipe
from composer.evidence.ledger import PUBLISHED, Ledger, merge
from composer.evidence.methods import class_of, method_of, names_of, reason_against
from composer.evidence.page import explain, table, write_page
from composer.evidence.runner import Incomplete, Runner
from composer.evidence.study import Plan, Study, replay
from composer.evidence.task import load_task
from composer.evidence.tasks import TASKS

PROGRAM = "composer-evidence"
_INCOMPLETE = 75  # EX_TEMPFAIL of sysexits.h: repeat the command later


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        arguments: The command line without the command's name. None: that of this process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    chosen = _parser().parse_args(given)
    logging.getLogger("composer").setLevel(logging.ERROR)  # advice about arguments would repeat for each method
    chosen.line = shlex.join([PROGRAM, *_without_places(given)])
    handler: Callable[[argparse.Namespace], None] = chosen.handler
    try:
        handler(chosen)
    except Incomplete as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        sys.exit(_INCOMPLETE)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(f"{PROGRAM}: interrupted; repeat the command to continue")


def _without_places(given: Sequence[str]) -> list[str]:
    """Replace the folders in a command line, since others read the entries of the ledger.

    >>> _without_places(["tune", "digits", "--data", "/home/me/data", "--out=ledger"])
    ['tune', 'digits', '--data', 'FOLDER', '--out=FOLDER']
    """
    line, options = list(given), ("--data", "--out")
    for i, word in enumerate(line):
        name, equals, _ = word.partition("=")
        if name in options and equals:
            line[i] = f"{name}=FOLDER"
        elif word in options and i + 1 < len(line):
            line[i + 1] = "FOLDER"
    return line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Measure which training methods pay on a task.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, handler: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(handler=handler)
        command.add_argument("--out", type=Path, default=Path("composer-evidence"), help="folder of the ledger")
        return command

    add("tasks", _tasks, "List the built-in tasks and the methods that apply to each.")
    for name, handler, text in (
        ("tune", _tune, "Tune plain training for all budgets on the validation part."),
        ("measure", _measure, "Measure methods on the test part, beside plain and A/A, and confirm gains."),
        ("stack", _stack, "Choose a stack on the validation part, measure it, and leave each member out once."),
        ("run", _run, "Do everything that fits in some hours, and write a page and a recipe."),
    ):
        command = add(name, handler, text)
        tasks = f"{', '.join(TASKS)}, or module:attribute"
        if name == "run":
            command.add_argument("tasks", metavar="TASK", nargs="+", help=tasks)
        else:
            command.add_argument("task", metavar="TASK", help=tasks)
        if name == "measure":
            command.add_argument(
                "methods", metavar="METHOD", nargs="+", help="an algorithm, or a stack such as EMA+Muon"
            )
        if name == "tune":
            command.add_argument("methods", metavar="METHOD", nargs="*", help="methods and stacks to tune, too")
        if name == "stack":
            command.add_argument(
                "methods", metavar="METHOD", nargs="*", help="default: those that beat plain when tuned"
            )
            command.add_argument("--whole", action="store_true", help="all METHODs are the stack, without a selection")
        if name == "run":
            command.add_argument(
                "--hours",
                type=float,
                help="time of all tasks and sittings together; with numbers of runs, all methods are measured anyway",
            )
            command.add_argument("--methods", nargs="+", help="methods to try (default: all that apply)")
            command.add_argument(
                "--quick", action="store_true", help="a rough answer in about five minutes, without tuning"
            )
        unused = {"tune": set(_NUMBERS) - {"num_tuning_seeds"}, "measure": {"num_stack_seeds"}}.get(name, set())
        _add_places(command)
        command.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
        command.add_argument("--precision", choices=("fp32", "amp_fp16", "amp_bf16"), default="fp32")
        command.add_argument(
            "--shard", type=_shard, default=(1, 1), metavar="i/n", help="train only this part of the runs"
        )
        group = command.add_argument_group("numbers, fixed before the first run")
        for number, (option, text) in _NUMBERS.items():
            if number not in unused:
                group.add_argument(option, type=int, dest=number, help=text)
    replaying = add("replay", _replay, "Train the runs of an entry again, and say whether the intervals overlap.")
    replaying.add_argument("entry", metavar="ENTRY", help="the id of an entry, or the beginning of it")
    _add_places(replaying)
    explaining = add("explain", _explain, "Say how an entry was measured.")
    explaining.add_argument("entry", metavar="ENTRY", help="the id of an entry, or the beginning of it")
    tables = add("table", _table, "Print the verdicts as tables in Markdown.")
    tables.add_argument("ledgers", type=Path, nargs="*", help="other folders of ledgers")
    page = add("page", _page, "Write the page about all tasks of the ledger.")
    page.add_argument("ledgers", type=Path, nargs="*", help="other folders of ledgers")
    for command in (replaying, explaining, tables, page):
        command.add_argument("--published", action="store_true", help="of the ledger that comes with composer-evidence")
    command = add("merge", _merge, "Add the lines of other ledgers, such as those of shards.")
    command.add_argument("ledgers", type=Path, nargs="+", help="folders of the other ledgers")
    return parser


_NUMBERS = {
    "num_seeds": ("--seeds", "runs of each method (default: 10)"),
    "num_controls": ("--controls", "runs of plain (default: 20)"),
    "num_tuning_seeds": ("--tuning-seeds", "runs of each trial (default: 2)"),
    "num_stack_seeds": ("--stack-seeds", "runs of each candidate (default: 4)"),
    "num_ladder_seeds": ("--ladder-seeds", "runs of each rung (default: 10)"),
    "num_curves": ("--curves", "runs with a learning curve (default: 0)"),
    "repeats": ("--repeats", "processes that measure step times (default: 3; 0: none)"),
}
"""Field of a plan -> its option and its help."""


def _add_places(command: argparse.ArgumentParser) -> None:
    command.add_argument("--data", type=Path, help="folder of datasets (default: the variable COMPOSER_DATA)")
    command.add_argument("--workers", type=int, help="runs at the same time (default: one per core, or per GPU)")


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    try:
        return int(part), int(parts)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a part and a number of parts such as 1/4, got {text!r}") from error


def _study(chosen: argparse.Namespace, reference: str) -> Study:
    runner = Runner(
        reference,
        chosen.out,
        data_folder=chosen.data,
        workers=chosen.workers,
        device=chosen.device,
        precision=chosen.precision,
        shard=chosen.shard,
        say=lambda text: print(text, flush=True),
    )
    for name in getattr(chosen, "methods", None) or ():
        for member in name.split("+"):
            class_of(method_of(runner.task, member).name)  # a misspelt name is an error, not a verdict
    return Study(runner, _plan(chosen), chosen.line)


def _plan(chosen: argparse.Namespace) -> Plan:
    return Plan(**_given(chosen))


def _given(chosen: argparse.Namespace) -> dict[str, int]:
    """Return the numbers of the plan that were given on the command line."""
    return {name: value for name in _NUMBERS if (value := getattr(chosen, name, None)) is not None}


def _tasks(chosen: argparse.Namespace) -> None:
    for name in TASKS:
        task = load_task(name)
        applicable = [method for method in names_of(task) if reason_against(task, [method]) is None]
        print(f"{name}: {task.summary} {task.steps} steps, by {task.metric.title}.")
        print(f"  methods: {' '.join(applicable)}")


def _tune(chosen: argparse.Namespace) -> None:
    study = _study(chosen, chosen.task)
    for fraction, plain in study.tune(chosen.methods).items():
        score = study.task.metric.show(plain.score)
        print(f"{fraction:g} of the budget, {plain.steps} steps: {plain.variant}, {dict(plain.settings)}, {score}")


def _measure(chosen: argparse.Namespace) -> None:
    _study(chosen, chosen.task).measure(chosen.methods)
    print(table([Ledger(chosen.out)]))


def _stack(chosen: argparse.Namespace) -> None:
    study = _study(chosen, chosen.task)
    entries = study.stack(chosen.methods or None, select=not chosen.whole)
    print(explain(study.ledger, entries[-1]))
    path = write_recipe(study, chosen.out)
    if path is not None:
        print(f"recipe: {path}")


def _run(chosen: argparse.Namespace) -> None:
    if chosen.quick:
        for task in chosen.tasks:
            print(run_quick(_study(chosen, task).runner, methods=chosen.methods))
        return
    if chosen.hours is None:
        raise ValueError("`--hours` must be given, the time for all tasks, or `--quick` for a rough answer.")
    plan = _plan(chosen) if _given(chosen) else None
    hours = chosen.hours / len(chosen.tasks)
    for task in chosen.tasks:
        runner = _study(chosen, task).runner
        page = run_all(runner, hours=hours, methods=chosen.methods, plan=plan, command=chosen.line)
        print(f"page: {page}")
    print(table([Ledger(chosen.out)]))


def _replay(chosen: argparse.Namespace) -> None:
    if chosen.published:
        chosen.out /= "published"  # so that its measurements join no family of tests of the user's own
        merge(Ledger(chosen.out), [PUBLISHED])
    ledger = Ledger(chosen.out)
    entry = ledger.entry(chosen.entry)
    chosen.device, chosen.precision, chosen.shard = entry["device"], entry["precision"], (1, 1)
    study = _study(chosen, entry["reference"])
    replays = chosen.out / "replays"
    folder = replays / f"{entry['id']}-{len(list(replays.glob(entry['id'] + '-*'))) + 1}"
    found = replay(study, entry, folder)
    print(explain(study.ledger, found))
    same = "all scores are the same" if found["identical"] else "scores differ"
    print(f"the intervals {'overlap' if found['overlaps'] else 'DO NOT overlap'}; {same}")
    for difference in found["elsewhere"]:
        print(f"  differs: {difference}")
    if not found["overlaps"]:
        sys.exit(1)


def _explain(chosen: argparse.Namespace) -> None:
    (ledger,) = _ledgers(chosen)
    print(explain(ledger, ledger.entry(chosen.entry)))


def _table(chosen: argparse.Namespace) -> None:
    print(table(_ledgers(chosen)))


def _page(chosen: argparse.Namespace) -> None:
    print(write_page(_ledgers(chosen), chosen.out / "evidence.html"))


def _ledgers(chosen: argparse.Namespace) -> list[Ledger]:
    first = PUBLISHED if chosen.published else chosen.out
    return [Ledger(folder) for folder in [first, *getattr(chosen, "ledgers", ())]]


def _merge(chosen: argparse.Namespace) -> None:
    print(f"{merge(Ledger(chosen.out), chosen.ledgers)} new lines in {chosen.out}")
