"""Messages of a type checker, and so of an editor, about programs of users."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import composer
from tools import wheelhouse
from tools.link_sources import link
from tools.workspace import Workspace, find_uv

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


SCRIPT_OF_HOSTS = """\
import lightning.pytorch as pl
import torch
import transformers
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy

from composer import Trainer
from composer.algorithms import EMA, MixUp
from composer.loop import HostedRun
from composer.hosts.accelerate import AcceleratedRun
from composer.hosts.huggingface import ComposerMixin, ComposerTrainer
from composer.hosts.ignite import IgniteRun
from composer.hosts.lightning import ComposeCallback

net = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
trainer = Trainer(
    model=net,
    loss=cross_entropy,
    metrics={"accuracy": MulticlassAccuracy(num_classes=2)},
    optimizers=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    device=torch.device("cpu"),
    precision=torch.bfloat16,
    input_key=0,
    target_key=lambda batch: batch[1],
)
reveal_type(trainer.plot())
reveal_type(trainer.engine.explain())
Trainer(model=net, lossfn=cross_entropy)
run = HostedRun(net, [EMA()], loss=lambda outputs, batch: cross_entropy(outputs, batch[1]), max_duration="2ep")
for batch in run.epoch():
    run.backward(run.loss(batch))
    reveal_type(run.step())
pl.Trainer(callbacks=[ComposeCallback([MixUp(), EMA()], loss=lambda outputs, batch: outputs.sum())])
ComposeCallback(algorithm=EMA())
accelerated = AcceleratedRun(Accelerator(), net, MixUp(), loss=lambda outputs, batch: outputs.sum(), max_duration="1ep")
net, optimizer = accelerated.prepare(net, optimizer)
for batches in accelerated.epochs():
    for batch in batches:
        reveal_type(accelerated.loss(batch))
AcceleratedRun(net)
engine = IgniteRun(net, EMA(), optimizer=torch.optim.SGD(net.parameters()), max_duration="1ep")
reveal_type(engine.create_supervised_trainer())
IgniteRun(net, max_durations="1ep")


class Mine(ComposerMixin, transformers.Seq2SeqTrainer):
    pass


ComposerTrainer(net, transformers.TrainingArguments("out"), algorithms=[EMA()])
Mine(net, algorithms=EMA()).train()
"""
EXPECTED_OF_HOSTS = {
    28: 'Type of "trainer.plot()" is "Figure"',
    29: 'Type of "trainer.engine.explain()" is "Plan"',
    30: 'No parameter named "lossfn"',
    34: 'Type of "run.step()" is "bool"',
    36: 'No parameter named "algorithm"',
    41: 'Type of "accelerated.loss(batch)" is "Tensor"',
    42: 'Arguments missing for parameters "model", "max_duration"',
    44: 'Type of "engine.create_supervised_trainer()" is "Engine"',
    45: 'No parameter named "max_durations"',
}


SCRIPT_OF_MIXUP = """\
import torch

from composer import functional as cf
from composer.algorithms import MixUp

reveal_type(MixUp(alpha=0.2))
reveal_type(cf.mixup_batch)
MixUp(alhpa=0.2)
cf.mixup_batch(torch.zeros(2, 3), torch.arange(2), alhpa=0.2)
from composer.algorithms import EMA
"""
EXPECTED_OF_MIXUP = {
    6: 'Type of "MixUp(alpha=0.2)" is "MixUp"',
    7: 'Type of "cf.mixup_batch" is "(input: Tensor, target: Tensor,',
    8: 'No parameter named "alhpa"',
    9: 'No parameter named "alhpa"',
    10: '"EMA" is unknown import symbol',  # its package is not installed
}


def check(folder: Path, programs: dict[str, str], *extra_paths: Path, python: str = sys.executable) -> dict[Any, str]:
    """Return what the type checker says of each line of some programs, by their name and its number."""
    for name, text in programs.items():
        (folder / name).write_text(text)
    settings = {"include": [*programs], "typeCheckingMode": "standard", "extraPaths": [str(p) for p in extra_paths]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", python]
    process = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True)
    found = json.loads(process.stdout)["generalDiagnostics"]
    return {(Path(each["file"]).name, each["range"]["start"]["line"] + 1): each["message"] for each in found}


def assert_found(found: dict[Any, str], **expected: dict[int, str]) -> None:
    parts = {(f"{name}.py", line): part for name, lines in expected.items() for line, part in lines.items()}
    assert set(parts) == set(found), found
    assert [] == [found[line] for line, part in parts.items() if part not in found[line]]


@pytest.mark.parametrize("installed_as", ["wheels", "links"])
def test_misspelt_arguments_are_reported_and_all_names_are_known(installed_as: str, tmp_path: Path) -> None:
    """Editables need one folder with links to all sources, as `nox -s dev` makes it."""
    editable = "site-packages" not in Path(composer.__path__[0]).parts
    if installed_as == "wheels" and editable:
        pytest.skip("the packages are editable here, not installed from wheels; `nox -s together` has wheels")
    extra_paths = [] if installed_as == "wheels" else [tmp_path / "src"]
    for path in extra_paths:
        link(Workspace(), path)

    programs, expected = {"trainer.py": SCRIPT}, {"trainer": EXPECTED}
    if installed_as == "wheels":  # the libraries of the hosts take the checker most of its time
        programs["hosts.py"], expected["hosts"] = SCRIPT_OF_HOSTS, EXPECTED_OF_HOSTS

    assert_found(check(tmp_path, programs, *extra_paths), **expected)


def test_with_wheels_of_core_and_one_method_that_method_is_known_and_others_are_not(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    python = str(environment / "bin" / "python")
    subprocess.run([find_uv(), "venv", "--quiet", "--python", sys.executable, str(environment)], check=True)
    install = [find_uv(), "pip", "install", "--quiet", "--no-deps", "--python", python]
    subprocess.run([*install, *map(str, wheelhouse.wheels(Workspace(), ["composer-mixup"]))], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    for module in (torch, np):
        (packages / module.__name__).symlink_to(Path(module.__path__[0]))

    found = check(tmp_path, {"program.py": SCRIPT_OF_MIXUP}, python=python)

    assert_found(found, program=EXPECTED_OF_MIXUP)
