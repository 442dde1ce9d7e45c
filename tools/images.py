"""Container images with all packages: a Dockerfile for each Python, torch and device, in `tools/images`.

    python -m tools.images [--check]    # write them, or only say which are not current

They follow from the template `Dockerfile.in`, the supported Pythons and the pinned versions.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from tools.wheelhouse import PINNED
from tools.workspace import Workspace

TEMPLATE = Path(__file__).parent / "images" / "Dockerfile.in"
_OLDEST_PYTHON = "3.11"  # as in `nox -s oldest`
_OLDEST_CUDA = "cu124"  # for which torch 2.6 was built

_TABLE = """\
# Container images

All packages of this tree, with torch for a CPU or for CUDA. Written by `nox -s fix`; do not edit.

```bash
docker build --file tools/images/{name}.Dockerfile --tag composer:{name} .
docker run --rm --gpus all -it composer:{cuda} python    # without --gpus for an image for CPUs
```

| image | Python | torch | torchvision | device |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Image:
    """A container image.

    Attributes:
        name: For example "py3.12-torch2.14-cu130".
        python: The Python version.
        torch: The version of torch.
        torchvision: The version of torchvision.
        build: The build of torch: "cpu", or a version of CUDA such as "cu130".
        uv: The version of uv.
    """

    name: str
    python: str
    torch: str
    torchvision: str
    build: str
    uv: str


def images(workspace: Workspace) -> list[Image]:
    """Return all images: each Python with the pinned torch, and one with the oldest."""
    pinned = [Requirement(line) for line in PINNED.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    versions = {requirement.name: next(iter(requirement.specifier)).version for requirement in pinned}
    cuda = Version(versions["cuda-toolkit"])
    new = (versions["torch"], versions["torchvision"], f"cu{cuda.major}{cuda.minor}")
    old = (_lowest(workspace, "torch"), _lowest(workspace, "torchvision"), _OLDEST_CUDA)
    combinations = [(python, new) for python in workspace.settings["pythons"]] + [(_OLDEST_PYTHON, old)]
    return [
        Image(
            f"py{python}-torch{Version(torch).major}.{Version(torch).minor}-{build}",
            python,
            torch,
            torchvision,
            build,
            versions["uv"],
        )
        for python, (torch, torchvision, cuda_build) in combinations
        for build in ("cpu", cuda_build)
    ]


def _lowest(workspace: Workspace, name: str) -> str:
    """Return the lowest version that all packages which need a distribution allow, with three parts."""
    bounds = [
        Version(one.version)
        for package in workspace.packages.values()
        for requirement in package.dependencies
        if requirement.name == name
        for one in requirement.specifier
        if one.operator == ">="
    ]
    return ".".join(map(str, (*max(bounds).release, 0, 0)[:3]))


def files(workspace: Workspace) -> dict[Path, str]:
    """Return the text of each generated file by its path: the Dockerfiles, and a table of them."""
    folder = workspace.root / "tools" / "images"
    template = TEMPLATE.read_text(encoding="utf-8")
    found = images(workspace)
    texts = {}
    for image in found:
        text = template
        for key, value in asdict(image).items():
            text = text.replace(f"{{{key}}}", value)
        texts[folder / f"{image.name}.Dockerfile"] = text
    rows = []
    for one in found:
        device = "CPU" if one.build == "cpu" else one.build
        rows.append(f"| {one.name} | {one.python} | {one.torch} | {one.torchvision} | {device} |\n")
    cuda = next(image.name for image in found if image.build != "cpu")
    texts[folder / "README.md"] = _TABLE.format(name=cuda, cuda=cuda) + "".join(rows)
    return texts


def stale(workspace: Workspace) -> list[Path]:
    """Return the generated files that are missing, out of date or no longer needed."""
    texts = files(workspace)
    folder = workspace.root / "tools" / "images"
    present = [*folder.glob("*.Dockerfile"), folder / "README.md"]
    wrong = [path for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    return sorted({*wrong, *(path for path in present if path not in texts)})


def write(workspace: Workspace) -> None:
    """Write the files that are not current, and remove those no longer needed."""
    texts = files(workspace)
    for path in stale(workspace):
        if path in texts:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts[path], encoding="utf-8")
        else:
            path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a Dockerfile for each Python, torch and device.")
    parser.add_argument("--check", action="store_true", help="only say which are not current")
    workspace = Workspace(Path.cwd())
    if parser.parse_args().check:
        wrong = [str(path.relative_to(workspace.root)) for path in stale(workspace)]
        sys.exit(f"not current: {', '.join(wrong)}. Run `nox -s fix`." if wrong else None)
    write(workspace)


if __name__ == "__main__":
    main()
