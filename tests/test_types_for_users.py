"""What a type checker, and so an editor, tells a user."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import composer
from tools.link_sources import link
from tools.workspace import Workspace

pytest.importorskip("basedpyright", reason="basedpyright is not installed: `pip install basedpyright`")

SCRIPT = """\
import torch

from composer import Trainer
from composer import functional as cf
from composer.algorithms import EMA, MixUp
from composer.callbacks import LRMonitor
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier

model = ComposerClassifier(torch.nn.Linear(3, 2), num_classes=2)
trainer = Trainer(model=model, algorithms=[EMA(), MixUp()], callbacks=[LRMonitor()], loggers=[InMemoryLogger()])
trainer.fit(duration="1ep")
reveal_type(trainer)
reveal_type(cf.mixup_batch(torch.zeros(2, 3), torch.arange(2)))
Trainer(model=model, max_durations="1ep")
MixUp(alpha="x")
trainer.fitt()
"""
EXPECTED = {
    13: 'Type of "trainer" is "Trainer"',
    14: 'is "tuple[Tensor, Tensor, float]"',
    15: 'No parameter named "max_durations"',
    16: 'Argument of type "Literal[\'x\']" cannot be assigned to parameter "alpha"',
    17: 'Cannot access attribute "fitt" for class "Trainer"',
}


def check(script: Path, *extra_paths: Path) -> dict[int, str]:
    """Return what the type checker says of each line of a script, by its number."""
    settings = {"include": [script.name], "typeCheckingMode": "standard", "extraPaths": [str(p) for p in extra_paths]}
    (script.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    process = subprocess.run(command, check=False, cwd=script.parent, capture_output=True, text=True)
    found = json.loads(process.stdout)["generalDiagnostics"]
    return {each["range"]["start"]["line"] + 1: each["message"] for each in found}


@pytest.mark.parametrize("installed_as", ["wheels", "links"])
def test_misspelt_arguments_are_reported_and_all_names_are_known(installed_as: str, tmp_path: Path) -> None:
    """Editables need one folder with links to all sources, as `nox -s dev` makes it."""
    editable = "site-packages" not in Path(composer.__path__[0]).parts
    if installed_as == "wheels" and editable:
        pytest.skip("the packages are editable here, not installed from wheels; `nox -s together` has wheels")
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)
    extra_paths = [] if installed_as == "wheels" else [tmp_path / "src"]
    for path in extra_paths:
        link(Workspace(), path)

    found = check(script, *extra_paths)

    assert set(EXPECTED) == set(found), found
    assert [] == [found[line] for line, part in EXPECTED.items() if part not in found[line]]
