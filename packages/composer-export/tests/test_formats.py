"""Models exported with torch.export and TorchScript compute what the model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import (
    SMALL,
    Multiply,
    assert_same,
    conv_batch,
    expected,
    loaded,
)

from composer.inference import export_for_inference, formats
from composer.models import ComposerModel
from composer.testing import SimpleConvModel, SimpleModel

pytestmark = [
    pytest.mark.filterwarnings("ignore:(?s).*torch.jit.*is deprecated"),  # reading TorchScript
    pytest.mark.filterwarnings("ignore:(?s).*quantized tensor creation"),
]


@pytest.fixture(scope="module")
def conv_pt2(conv: SimpleConvModel, folder: Path) -> Path:
    export_for_inference(conv, "torch_export", folder / "conv.pt2", sample_input=conv_batch())
    return folder / "conv.pt2"


@pytest.mark.parametrize("rows", [1, 4, 9])
def test_torch_export_takes_images_of_any_batch_size(conv: SimpleConvModel, conv_pt2: Path, rows: int) -> None:
    batch = conv_batch(rows)
    assert_same(loaded(conv_pt2)(batch[0]), expected(conv, batch), depth=8 * 9)


def test_a_sample_of_one_row_does_not_fix_the_batch_size(conv: SimpleConvModel, folder: Path) -> None:
    export_for_inference(conv, "torch_export", folder / "one.pt2", sample_input=conv_batch(1))
    assert_same(loaded(folder / "one.pt2")(conv_batch(6)[0]), expected(conv, conv_batch(6)), depth=8 * 9)


def test_the_file_holds_nothing_of_the_sample(conv_pt2: Path) -> None:
    args, kwargs = torch.export.load(conv_pt2).example_inputs

    assert [(tuple(tensor.shape), float(tensor.abs().max())) for tensor in args] == [((2, 3, 16, 16), 0.0)]
    assert not kwargs


@pytest.mark.parametrize("rows", [1, 4, 9])
def test_a_traced_model_is_called_as_before(conv: SimpleConvModel, folder: Path, rows: int) -> None:
    path = folder / "conv.pt"
    if not path.exists():
        export_for_inference(conv, "torchscript", path, sample_input=conv_batch())
    batch = conv_batch(rows)
    assert_same(torch.jit.load(path)(batch), expected(conv, batch), depth=8 * 9)


class Scriptable(ComposerModel):
    """Its forward pass has a branch that tracing would lose."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = self.linear(batch[0])
        if bool(x.sum() > 0):
            x = -x
        return x

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError


def test_a_model_that_compiles_keeps_its_branches_in_torchscript(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Scriptable()
    export_for_inference(model, "torchscript", folder / "scripted.pt")
    found = torch.jit.load(folder / "scripted.pt")

    assert "PyTorch has deprecated TorchScript" in caplog.text
    for sign in (1, -1):
        batch = (sign * model.linear.weight.detach().sum(0, keepdim=True), torch.zeros(1))
        assert_same(found(batch), expected(model, batch), depth=3)


def test_a_module_with_named_arguments_is_traced(tmp_path: Path) -> None:
    class Branches(Multiply):  # generators do not compile
        def forward(self, x: Any, y: Any, scale: Any = None) -> Any:
            return sum(super(Branches, self).forward(x, y, scale) for _ in range(2))

    x, y = torch.randn(4, 2), torch.randn(4, 2)
    export_for_inference(Branches(), "torchscript", tmp_path / "m.pt", sample_input={"y": y, "x": x})
    assert_same(torch.jit.load(tmp_path / "m.pt")(x[:3], y[:3]), 2 * (x * y)[:3], depth=2)


class BakesRows(ComposerModel):
    """Its Python code fixes the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, batch: Any) -> Any:
        return self.linear(batch).reshape(4, 2)

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError


def test_a_model_for_one_batch_size_is_exported_for_that_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x, path = torch.randn(4, 3), tmp_path / "model.pt2"
    model = BakesRows()
    with pytest.warns(UserWarning, match=r"takes batches of the size of the sample only: input \(4, 3\)"):
        export_for_inference(model, "torch_export", path, sample_input=x)
    assert_same(loaded(path)(x), expected(model, x), depth=3)
    with caplog.at_level("WARNING"):
        export_for_inference(model, "torchscript", path, sample_input=x)
    assert "may take batches of the size of the sample only" in caplog.text
    assert_same(torch.jit.load(path)(x), expected(model, x), depth=3)
    with pytest.raises(RuntimeError, match="cannot be exported as 'torch_export'"):
        export_for_inference(model, "torch_export", path, sample_input=x, dynamic_axes={"input": [0]})
    export_for_inference(model, "torch_export", path, sample_input=x, dynamic_axes={})


def test_models_that_cannot_be_exported(tmp_path: Path) -> None:
    class Branches(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x if x.sum() > 0 else -x

    with pytest.raises(RuntimeError, match="The model cannot be exported as 'torch_export'"):
        export_for_inference(Branches(), "torch_export", tmp_path / "m.pt2", sample_input=torch.ones(4, 3))
    with pytest.raises(RuntimeError, match="cannot be compiled to TorchScript, and it cannot be traced without"):
        export_for_inference(SimpleModel(), "torchscript", tmp_path / "model.pt")

    class Never(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return sum(x.never for _ in range(2))  # generators do not compile

    with pytest.raises(RuntimeError, match=r"neither be compiled to TorchScript nor traced.*no attribute 'never'"):
        export_for_inference(Never(), "torchscript", tmp_path / "model.pt", sample_input=(torch.ones(1),))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_says_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"`onnx` and `onnxscript`.*pip install 'composer-export\[onnx\]'"):
        export_for_inference(SimpleModel(), "onnx", tmp_path / "model.onnx", sample_input=SMALL)


def test_arguments_without_effect_give_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="`onnx_opset_version` has no effect for `save_format='torch_export'`"):
        export_for_inference(
            SimpleModel(), "torch_export", tmp_path / "model.pt2", sample_input=SMALL, onnx_opset_version=18
        )
    with pytest.warns(UserWarning, match="`input_names` has no effect for `save_format='torchscript'`"):
        export_for_inference(SimpleModel(), "torchscript", tmp_path / "model.pt", sample_input=SMALL, input_names=["x"])
