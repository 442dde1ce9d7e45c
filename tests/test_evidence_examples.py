"""The tasks of the guide "Measure methods on your task", end to end on small data: tune, measure, page and recipe."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from composer.evidence import Ledger
from composer.evidence.page import ranked
from tools.readme_blocks import blocks
from tools.workspace import ROOT

pytest.importorskip("timm")
GUIDE = ROOT / "tools" / "site" / "guides" / "measuring.md"
NUMBERS = "--seeds 2 --controls 2 --tuning-seeds 1 --ladder-seeds 2 --stack-seeds 2 --repeats 0 --workers 2".split()


def pictures(folder: Path) -> None:
    """Write 20 images of each of two classes: dark ones and bright ones."""
    generator = np.random.default_rng(0)
    for label, brightness in enumerate((60, 190)):
        (folder / f"class{label}").mkdir(parents=True)
        for number in range(20):
            pixels = generator.normal(brightness, 30, (16, 16, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"class{label}" / f"{number}.png")


def reviews(folder: Path) -> None:
    """Write 40 texts of two classes, and a BERT of one layer that knows their words."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "film", "book", "day"]
    (folder / "model").mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder / "model")
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    BertForSequenceClassification(config).save_pretrained(folder / "model")
    with (folder / "texts.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("text", "label"))
        for number in range(40):
            writer.writerow((f"a {('bad', 'good')[number % 2]} {words[8 + number % 3]}", number % 2))


@pytest.mark.parametrize(
    ("name", "make", "methods"),
    [("pictures", pictures, ("EMA", "Alibi")), ("reviews", reviews, ("MixUp",))],  # the last one is not applicable
)
def test_a_task_of_the_guide_ends_with_verdicts_and_a_page(
    name: str, make: Callable[[Path], None], methods: tuple[str, ...], tmp_path: Path
) -> None:
    make(tmp_path / "data")
    text = next(block.code for block in blocks(GUIDE.read_text()) if f'name="{name}"' in block.code)
    text = text.replace("SIZE = 64", "SIZE = 32")
    for steps in ("steps=400,", "steps=300,"):
        text = text.replace(steps, "steps=4, ladder=(0.5, 1.0),")
    text = re.sub(r"Grid\(\(.*?\)\)", "Grid((3e-3,))", text)  # quick, not good
    (tmp_path / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "composer.evidence", "run", f"{name}:task", "--hours", "1", "--data", "data"]
    variables = {**os.environ, "CHECKPOINT": str(tmp_path / "data" / "model"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "--methods", *methods, "--out", "out", *NUMBERS],
        cwd=tmp_path, env=variables, check=False, capture_output=True, text=True,
    )  # fmt: skip

    assert 0 == done.returncode, done.stdout + done.stderr
    (entries,) = ranked([Ledger(tmp_path / "out")]).values()
    words = {entry["method"]: entry["verdict"]["word"] for entry in entries}
    assert {"A/A", *methods} == words.keys()
    assert "not applicable" == words[methods[-1]]
    assert all(words[method] in ("gain", "loss", "no effect found") for method in methods[:-1])
    assert name in (tmp_path / "out" / "evidence.html").read_text(encoding="utf-8")
