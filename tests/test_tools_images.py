"""The Dockerfile and the dev container; no image is built."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tools.workspace import ROOT, Workspace

DOCKERFILE = ROOT / "tools" / "images" / "Dockerfile"


def instructions(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the instructions of a Dockerfile with their arguments."""
    lines = (line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    text = re.sub(r"\\\n", " ", "\n".join(lines))
    for line in filter(None, text.splitlines()):
        name, _, arguments = line.partition(" ")
        yield name, arguments


def test_the_dockerfile_can_be_read() -> None:
    found = list(instructions(DOCKERFILE))

    assert {name for name, _ in found} == {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "CMD"}
    for name, arguments in found:
        if name == "RUN":
            command = re.sub(r"^ *--mount=\S+", "", arguments)
            subprocess.run(["bash", "-n", "-c", command], check=True)
        if name == "COPY":
            assert (ROOT / arguments.split()[0]).exists(), arguments
        if name == "FROM":
            assert re.fullmatch(r"python:\$\{PYTHON\}-slim-bookworm( AS \w+)?", arguments)
    assert found[0][1].removeprefix("PYTHON=") in Workspace().settings["pythons"]
    assert [arguments for name, arguments in found if name == "USER"] == ["1000"], "nothing runs as root"


def test_the_dev_container_makes_the_environment_of_the_readme() -> None:
    settings = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))

    assert settings["image"].rpartition(":")[2] in Workspace().settings["pythons"]
    assert settings["postCreateCommand"].endswith("nox --session dev")


def test_owners_are_named_for_paths_that_exist() -> None:
    lines = (ROOT / ".github" / "CODEOWNERS").read_text(encoding="utf-8").splitlines()
    paths = [line.split()[0] for line in lines if line and not line.startswith("#")]

    assert paths[0] == "*"
    assert [path for path in paths[1:] if not (ROOT / path.lstrip("/")).exists()] == []
