"""Make an algorithm package from the template of its kind. Its tests pass immediately; then change what it does.

    python -m tools.new_package composer-foo Foo --kind batch

Each kind is a folder of `tools/template`: "batch" changes inputs and targets before the forward pass, "model" changes
modules before training, "gradient" changes gradients after the backward pass, and "loss" changes the loss. The files in
`tools/template/shared` belong to all of them.
"""

from __future__ import annotations

import argparse
import keyword
import re
import shutil
import sys
from pathlib import Path

from tools import derived
from tools.workspace import PREFIX, Workspace

TEMPLATE = Path(__file__).with_name("template")
# For each kind: the name of its function, and one line on the example.
KINDS = {
    "batch": ("{}_batch", "train on batches in which some examples are replaced by others"),
    "model": ("apply_{}", "train the slopes of the activations"),
    "gradient": ("apply_{}", "train with gradients whose mean is zero"),
    "loss": ("{}_loss", "train with a penalty for confident predictions"),
}


def make(workspace: Workspace, distribution: str, class_name: str, kind: str = "batch") -> Path:
    """Write the package `distribution` with the algorithm `class_name`; return its directory.

    Args:
        workspace: Where to put it.
        distribution: For example `composer-label-smoothing`.
        class_name: For example `LabelSmoothing`, as the paper writes it.
        kind: A key of `KINDS`.

    Raises:
        ValueError: A name is malformed or taken, or the kind is unknown.
    """
    if kind not in KINDS:
        raise ValueError(f"`kind` must be one of {list(KINDS)}, got {kind!r}.")
    if not re.fullmatch(rf"{PREFIX}[a-z][a-z0-9]*(-[a-z0-9]+)*", distribution):
        raise ValueError(
            f"`distribution` must be `{PREFIX}` and lower-case words joined by hyphens, got {distribution!r}. "
            "For example composer-label-smoothing."
        )
    if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", class_name):
        raise ValueError(f"`class_name` must be a class name such as LabelSmoothing, got {class_name!r}.")
    path = workspace.root / "packages" / distribution
    if any("__pycache__" not in file.parts for file in path.rglob("*") if file.is_file()):
        raise ValueError(f"`distribution` must be a new name, but {distribution!r} exists already. Choose another.")
    snake = distribution.removeprefix(PREFIX).replace("-", "_")
    for name, value in (("distribution", snake), ("class_name", class_name)):
        if keyword.iskeyword(value):
            raise ValueError(f"`{name}` must name a module and a class, but {value!r} is a keyword. Choose another.")
    for other in workspace.packages.values():
        module = other.path / "src" / "composer" / "algorithms" / snake
        if module.is_dir() or module.with_suffix(".py").is_file():
            raise ValueError(f"`distribution` must be a new name, but {other.name} has the module {snake!r}.")
    function, summary = KINDS[kind]
    function = function.format(snake)
    catalog = derived.catalog(workspace)
    for group, name in (("composer.algorithms", class_name), ("composer.functional", function)):
        if name in catalog.get(group, {}):
            raise ValueError(f"`{group}.{name}` must be a new name; `{catalog[group][name]}` has it. Choose another.")
    words = {
        "__DIST__": distribution,
        "__SNAKE__": snake,
        "__CLASS__": class_name,
        "__FUNCTION__": function,
        "__SUMMARY__": summary,
    }
    for folder in (TEMPLATE / "shared", TEMPLATE / kind):
        for source in sorted(folder.rglob("*")):
            if source.is_file() and "__pycache__" not in source.parts:
                target = path / _fill(source.relative_to(folder).as_posix(), words)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(_fill(source.read_text(encoding="utf-8"), words), encoding="utf-8")
    shutil.copyfile(workspace.root / "LICENSE", path / "LICENSE")
    return path


def _fill(text: str, words: dict[str, str]) -> str:
    for mark, word in words.items():
        text = text.replace(mark, word)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description="Make an algorithm package from a template.")
    parser.add_argument("distribution", help="for example composer-label-smoothing")
    parser.add_argument("class_name", help="for example LabelSmoothing")
    parser.add_argument("--kind", choices=KINDS, default="batch", help="the template (default: batch)")
    arguments = parser.parse_args()
    workspace = Workspace()
    try:
        path = make(workspace, arguments.distribution, arguments.class_name, arguments.kind)
    except ValueError as error:
        sys.exit(str(error))
    derived.write(Workspace()[derived.CORE])  # a new view of the repository, which now holds the package
    print(
        f"{path.relative_to(workspace.root)} has the method of the template, which `nox -s "
        f'"tests({arguments.distribution})"` tests. Write yours, its paper and its tests in its place; `nox -s docs '
        "together` then checks it with all packages. If you have a `.venv`, `nox -s dev` adds the package to it."
    )


if __name__ == "__main__":
    main()
