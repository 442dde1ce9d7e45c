"""Importing the public modules loads no heavy library that `import torch` does not load itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tools.bench.imports import readme_imports

HEAVY = """
    torchmetrics torchvision transformers matplotlib tensorboard scipy sklearn pandas PIL fsspec yaml requests sympy
    torch._dynamo torch._inductor torch.distributed.tensor torch.distributed.fsdp torch.distributed.checkpoint
    torch.fx.experimental.symbolic_shapes
""".split()
AREAS = "algorithms callbacks checkpoint core devices distributed functional loggers loss models optim trainer utils"

PROGRAM = """
import sys
import torch
before = set(sys.modules)
exec(sys.argv[1])
print(*sorted(set(sys.argv[2:]) & set(sys.modules) - before))
"""


def loaded(program: str, names: list[str]) -> str:
    """Run imports in a new process, and return those of the modules that they loaded beyond `import torch`."""
    command = [sys.executable, "-c", PROGRAM, program, *names]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    "program",
    [readme_imports(), "\n".join(f"import composer.{area}" for area in AREAS.split())],
    ids=["README.md", "every area"],
)
def test_imports_load_no_heavy_library(program: str) -> None:
    assert loaded(program, HEAVY) == ""


def test_the_imports_of_the_readme_are_those_of_its_first_programs() -> None:
    """Otherwise the test above would check nothing."""
    lines = readme_imports().splitlines()

    assert {"import torch", "from composer import Trainer"} < set(lines)
    assert any(line.startswith("from composer.algorithms import") for line in lines)
    assert loaded("\n".join(lines), ["composer.trainer.trainer", "composer.algorithms.mixup.mixup"]) == (
        "composer.algorithms.mixup.mixup composer.trainer.trainer"
    )


def test_a_model_imports_torchmetrics_only_if_it_has_metrics() -> None:
    program = """
from composer.models import ComposerClassifier
classifier = ComposerClassifier(torch.nn.Linear(4, 3), train_metrics={}, val_metrics={})
assert classifier.get_metrics(is_train=True) == classifier.get_metrics(is_train=False) == {}
assert "torchmetrics" not in sys.modules
classifier = ComposerClassifier(torch.nn.Linear(4, 3), num_classes=3)
assert all(isinstance(metric, sys.modules["torchmetrics"].Metric) for metric in classifier.get_metrics(True).values())
"""

    assert loaded(program, ["torchmetrics"]) == "torchmetrics"


def test_a_function_of_an_algorithm_loads_few_modules() -> None:
    program = """
import sys
from composer.algorithms.mixup import mixup_batch
print(sum(name.partition(".")[0] == "composer" for name in sys.modules))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert int(run.stdout) <= 20
