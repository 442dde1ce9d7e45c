"""Make an algorithm package from the template. It passes its tests at once; then change what it does.

python -m tools.new_package composer-foo Foo
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

from tools import derived
from tools.workspace import PREFIX, Workspace

TEMPLATE = Path(__file__).with_name("template")


def make(workspace: Workspace, distribution: str, class_name: str) -> Path:
    """Write the package `distribution` with the algorithm `class_name`; return its directory.

    Args:
        workspace: Where to put it.
        distribution: For example `composer-label-smoothing`.
        class_name: For example `LabelSmoothing`, as the paper writes it.

    Raises:
        ValueError: A name is malformed or taken.
    """
    if not re.fullmatch(rf"{PREFIX}[a-z][a-z0-9]*(-[a-z0-9]+)*", distribution):
        raise ValueError(
            f"`distribution` must be `{PREFIX}` and lower-case words joined by hyphens, got {distribution!r}. "
            "For example composer-label-smoothing."
        )
    if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", class_name):
        raise ValueError(f"`class_name` must be a class name such as LabelSmoothing, got {class_name!r}.")
    path = workspace.root / "packages" / distribution
    if path.exists():
        raise ValueError(f"`distribution` must be a new name, got {distribution!r}, which is there. Choose another.")
    snake = distribution.removeprefix(PREFIX).replace("-", "_")
    taken = derived.catalog(workspace)
    for group, name in (("composer.algorithms", class_name), ("composer.functional", f"{snake}_batch")):
        if name in taken.get(group, {}):
            raise ValueError(f"`{group}.{name}` must be a new name; `{taken[group][name]}` has it. Choose another.")
    words = {"__DIST__": distribution, "__SNAKE__": snake, "__CLASS__": class_name}
    for source in sorted(TEMPLATE.rglob("*")):
        if source.is_file() and "__pycache__" not in source.parts:
            target = path / _fill(source.relative_to(TEMPLATE).as_posix(), words)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_fill(source.read_text(encoding="utf-8"), words), encoding="utf-8")
    shutil.copyfile(workspace.root / "LICENSE", path / "LICENSE")
    return path


def _fill(text: str, words: dict[str, str]) -> str:
    for mark, word in words.items():
        text = text.replace(mark, word)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description="Make an algorithm package from the template.")
    parser.add_argument("distribution", help="for example composer-label-smoothing")
    parser.add_argument("class_name", help="for example LabelSmoothing")
    arguments = parser.parse_args()
    workspace = Workspace()
    try:
        path = make(workspace, arguments.distribution, arguments.class_name)
    except ValueError as error:
        sys.exit(str(error))
    derived.write(Workspace()[derived.CORE])  # a new view of the tree, which now holds the package
    print(f'{path.relative_to(workspace.root)} is ready: nox -s "tests({arguments.distribution})"')


if __name__ == "__main__":
    main()
