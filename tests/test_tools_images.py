"""The Dockerfiles and the dev container; no image is built."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import images
from tools.tiny_tree import Tree, run_tool
from tools.workspace import ROOT, Workspace

DOCKERFILES = sorted((ROOT / "tools" / "images").glob("*.Dockerfile"))


def instructions(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the instructions of a Dockerfile with their arguments."""
    lines = (line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    text = re.sub(r"\\\n", " ", "\n".join(lines))
    for line in filter(None, text.splitlines()):
        name, _, arguments = line.partition(" ")
        yield name, arguments


def test_the_images_of_this_repository_are_current() -> None:
    run = run_tool("images", "--check")

    assert run.returncode == 0, run.stderr
    assert {image.name for image in images.images(Workspace())} == {file.stem for file in DOCKERFILES}


def test_each_python_has_the_pinned_torch_for_a_cpu_and_for_cuda() -> None:
    found = images.images(Workspace())

    newest = found[0].torch
    assert {(one.python, one.build[:2]) for one in found if one.torch == newest} == {
        (python, build) for python in Workspace().settings["pythons"] for build in ("cp", "cu")
    }
    assert {(one.python, one.torch, one.torchvision) for one in found if one.torch != newest} == {
        ("3.11", "2.6.0", "0.21.0")
    }


@pytest.mark.parametrize("file", DOCKERFILES, ids=[file.stem for file in DOCKERFILES])
def test_a_dockerfile_can_be_read(file: Path) -> None:
    found = list(instructions(file))

    assert {name for name, _ in found} == {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "CMD"}
    for name, arguments in found:
        assert "{" not in arguments.replace("${", ""), f"a mark of the template is left: {arguments}"
        if name == "RUN":
            command = re.sub(r"^ *--mount=\S+", "", arguments)
            subprocess.run(["bash", "-n", "-c", command], check=True)
        if name == "COPY":
            assert (ROOT / arguments.split()[0]).exists(), arguments
        if name == "FROM":
            assert re.fullmatch(r"python:3\.\d+-slim-bookworm( AS \w+)?", arguments)
    assert [arguments for name, arguments in found if name == "USER"] == ["1000"], "nothing runs as root"


def test_what_is_out_of_date_is_named_and_written_again(tree: Tree) -> None:
    tree.add("composer-core", {"core/__init__.py": ""}, dependencies=("torch>=2.6", "torchvision>=0.21"))
    folder = tree.root / "tools" / "images"
    assert len(images.stale(tree.workspace)) == 11
    images.write(tree.workspace)
    assert images.stale(tree.workspace) == []

    changed, left = folder / "README.md", folder / "py3.8-torch1.0-cpu.Dockerfile"
    changed.write_text("mine", encoding="utf-8")
    left.touch()

    assert images.stale(tree.workspace) == [changed, left]
    check = run_tool("images", "--check", cwd=tree.root)
    assert check.returncode == 1
    assert "not current: tools/images/README.md, tools/images/py3.8-torch1.0-cpu.Dockerfile" in check.stderr
    images.write(tree.workspace)
    assert not left.exists()
    assert images.stale(tree.workspace) == []


def test_the_dev_container_makes_the_environment_of_the_readme() -> None:
    settings = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))

    assert settings["image"].rpartition(":")[2] in Workspace().settings["pythons"]
    assert settings["postCreateCommand"].endswith("nox --session dev")


def test_owners_are_named_for_paths_that_exist() -> None:
    lines = (ROOT / ".github" / "CODEOWNERS").read_text(encoding="utf-8").splitlines()
    paths = [line.split()[0] for line in lines if line and not line.startswith("#")]

    assert paths[0] == "*"
    assert [path for path in paths[1:] if not (ROOT / path.lstrip("/")).exists()] == []
