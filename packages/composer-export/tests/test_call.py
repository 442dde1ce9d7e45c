"""Inputs and outputs of exported models: which tensors of a batch they are, and their names."""

from __future__ import annotations

import logging
from collections import UserDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import (
    Multiply,
    assert_same,
    expected,
    loaded,
    text_batch,
)

from composer.inference import export_for_inference
from composer.models import ComposerModel
from composer.testing import SimpleTransformerModel

pytestmark = [
    pytest.mark.filterwarnings("ignore:(?s).*torch.jit.*is deprecated"),  # reading TorchScript
    pytest.mark.filterwarnings("ignore:(?s).*quantized tensor creation"),
]


def test_the_inputs_of_a_mapping_are_its_entries_without_labels(folder: Path, caplog: Any) -> None:
    model, path = SimpleTransformerModel(), folder / "text.pt2"
    with caplog.at_level(logging.INFO, "composer"):
        export_for_inference(model, "torch_export", path, sample_input=text_batch())
    batch = text_batch(7)
    del batch["labels"]

    assert "takes input_ids (batch, 8), attention_mask (batch, 8) and returns ['output']" in caplog.text
    assert_same(loaded(path)(**batch), expected(model, batch), depth=64)


class TellsLoss(ComposerModel):
    """As models of transformers do: with labels, the loss is among the outputs."""

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        loss = {"loss": (batch["x"] - batch["labels"]).square().mean()} if "labels" in batch else {}
        return {**loss, "doubled": batch["x"] * 2}

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError


def test_labels_are_inputs_only_if_they_are_named(folder: Path) -> None:
    x, path = torch.randn(4, 3), folder / "labels.pt2"
    batch = {"x": x, "labels": x + 1}
    export_for_inference(TellsLoss(), "torch_export", path, sample_input=batch)
    assert loaded(path)(x=x[:3]).keys() == {"doubled"}
    export_for_inference(TellsLoss(), "torch_export", path, sample_input=batch, input_names=["x", "labels"])
    assert_same(loaded(path)(x=x[:3], labels=x[:3] + 1)["loss"], torch.tensor(1.0), depth=9)


class Encoding(UserDict):  # type: ignore[type-arg]
    """As tokenizers return: a mapping that is no dict."""


Pair = namedtuple("Pair", "image target")


class TakesMany(ComposerModel):
    """Takes nested batches, and returns a mapping with something else than tensors in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, batch: Any) -> Any:
        if isinstance(batch, Pair):
            x = batch.image
        elif isinstance(batch, Encoding):
            x = batch["views"][0] + batch["views"][1]
        else:
            (x, _), _ = batch
        return UserDict(logits=self.linear(x), sums=(x.sum(1), x.sum(0)), cache=object(), nothing=None)

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError


def many_batches() -> list[tuple[Any, tuple[torch.Tensor, ...], bool]]:
    """Batches, what the exported model is called with, and whether by names."""
    x, y = torch.randn(5, 3), torch.randn(5, 3)
    return [
        (Pair(x, torch.zeros(5)), (x,), False),
        (Encoding(views=[x, y], kind="test"), (x, y), True),
        ([[x, "name"], torch.zeros(5)], (x,), False),
    ]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_batches_of_any_kind(folder: Path, index: int) -> None:
    model = TakesMany()
    batch, given, by_name = many_batches()[index]
    path = folder / f"many{index}.pt2"
    export_for_inference(model, "torch_export", path, sample_input=batch)
    arguments = dict(zip(["views_0", "views_1"], given, strict=False)) if by_name else {}
    found = loaded(path)(*(() if by_name else given), **arguments)
    wanted = expected(model, batch)

    assert found.keys() == {"logits", "sums"}
    assert_same(found["logits"], wanted["logits"], depth=3)
    assert_same(found["sums"][1], wanted["sums"][1], depth=5)


def test_outputs_are_named(folder: Path) -> None:
    batch, given, _ = many_batches()[0]
    names = ["scores", "rows", "columns"]
    export_for_inference(
        TakesMany(), "torch_export", folder / "n.pt2", sample_input=batch, input_names=["image"], output_names=names
    )
    assert list(loaded(folder / "n.pt2")(*given)) == names


@pytest.mark.parametrize("form", ["arguments", "arguments by name", "mixed"])
def test_other_modules_take_their_arguments(tmp_path: Path, form: str) -> None:
    x, y, scale = torch.randn(4, 2), torch.randn(4, 2), torch.tensor(3.0)
    names = {"x": x, "y": y, "scale": scale}
    sample: Any = {"arguments": (x, y, scale), "arguments by name": names, "mixed": (x, {"y": y, "scale": scale})}[form]
    path = tmp_path / "model.pt2"
    export_for_inference(Multiply(), "torch_export", path, sample_input=sample)
    named = {"y": y[:3], "scale": scale, "input" if form == "mixed" else "x": x[:3]}
    found = loaded(path)(x[:3], y[:3], scale) if form == "arguments" else loaded(path)(**named)
    assert_same(found, (x * y * 3)[:3], depth=1)


def test_outputs_that_are_no_tensors(tmp_path: Path) -> None:
    class Returns(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x, {1, 2}

    with pytest.raises(TypeError, match="there is set in its outputs"):
        export_for_inference(Returns(), "torch_export", tmp_path / "m.pt2", sample_input=(torch.ones(2),))


class TakesTuple(ComposerModel):
    """Uses all parts of a batch that are not None."""

    def forward(self, batch: Any) -> torch.Tensor:
        return sum(part for part in batch if part is not None)  # type: ignore[no-any-return]

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError


@pytest.mark.parametrize(
    ("num_parts", "input_names", "num_inputs"),
    [(2, None, 1), (2, ["image", "target"], 2), (3, None, 3), (3, ["image", "mask"], 2)],
)
def test_the_inputs_of_a_tuple(tmp_path: Path, num_parts: int, input_names: Any, num_inputs: int) -> None:
    """The first item of a pair, otherwise all; `input_names` selects the first tensors. Others get None."""
    batch = tuple(torch.randn(4, 3) for _ in range(num_parts))
    path = tmp_path / "model.pt2"
    export_for_inference(TakesTuple(), "torch_export", path, sample_input=batch, input_names=input_names)
    inputs = [part[:3] for part in batch[:num_inputs]]

    assert_same(loaded(path)(*inputs), sum(inputs), depth=3)  # type: ignore[arg-type]


class NeedsEverything(TakesTuple):
    def forward(self, batch: Any) -> torch.Tensor:
        parts = (batch["x"], batch["labels"]) if isinstance(batch, dict) else batch
        return parts[0] * parts[1]  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", ["pair", "mapping"])
def test_a_model_that_needs_targets_or_labels_needs_input_names(tmp_path: Path, form: str) -> None:
    x, path = torch.randn(4, 3), tmp_path / "model.pt2"
    batch = (x, 2 * x) if form == "pair" else {"x": x, "labels": 2 * x}
    with pytest.raises(RuntimeError, match="pass the names of all its inputs as `input_names`"):
        export_for_inference(NeedsEverything(), "torch_export", path, sample_input=batch)
    names = ["x", "labels"]
    export_for_inference(NeedsEverything(), "torch_export", path, sample_input=batch, input_names=names)
    exported = loaded(path)(x[:3], x[:3]) if form == "pair" else loaded(path)(x=x[:3], labels=x[:3])
    assert_same(exported, x[:3] * x[:3], depth=1)


def test_unused_inputs_stay_and_names_leave_them_out(tmp_path: Path) -> None:
    x, path = torch.randn(4, 3), tmp_path / "model.pt2"
    batch = {"x": x, "index": torch.arange(4), "sizes": torch.ones(2)}
    export_for_inference(TellsLoss(), "torch_export", path, sample_input=batch)
    assert loaded(path)(x=x[:3], index=torch.arange(3), sizes=torch.ones(2)).keys() == {"doubled"}
    export_for_inference(TellsLoss(), "torch_export", path, sample_input=batch, input_names=["x"])
    assert loaded(path)(x=x[:3]).keys() == {"doubled"}


def test_several_positional_arguments_beside_named_ones_are_all_inputs(tmp_path: Path) -> None:
    x, y, scale = torch.randn(4, 2), torch.randn(4, 2), torch.tensor(3.0)
    path = tmp_path / "model.pt2"
    export_for_inference(Multiply(), "torch_export", path, sample_input=(x, y, {"scale": scale}))
    assert_same(loaded(path)(input_0=x[:3], input_1=y[:3], scale=scale), 3 * x[:3] * y[:3], depth=1)
