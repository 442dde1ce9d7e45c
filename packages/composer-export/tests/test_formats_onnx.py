"""Models exported to ONNX, run by ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import SMALL, assert_same, conv_batch, expected, text_batch

from composer.core import State
from composer.inference import export_for_inference, export_with_logger, formats
from composer.loggers import Logger, LoggerDestination
from composer.testing import SimpleConvModel, SimpleModel, SimpleTransformerModel

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


def session_of(path: Path) -> Any:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def run(path: Path, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    session = session_of(path)
    names = [output.name for output in session.get_outputs()]
    found = session.run(names, {name: tensor.numpy() for name, tensor in inputs.items()})
    return dict(zip(names, map(torch.from_numpy, found), strict=True))


@pytest.fixture(scope="module")
def images(conv: SimpleConvModel, folder: Path) -> Path:
    export_for_inference(conv, "onnx", folder / "images.onnx", sample_input=(conv_batch(), {}))
    return folder / "images.onnx"


@pytest.fixture(scope="module")
def text(folder: Path) -> Path:
    axes = {name: {0: "batch", 1: "sequence"} for name in ("input_ids", "attention_mask")}
    model, path = SimpleTransformerModel(), folder / "text.onnx"
    names = ["logits"]
    export_for_inference(model, "onnx", path, sample_input=text_batch(), dynamic_axes=axes, output_names=names)
    return path


@pytest.mark.parametrize("rows", [1, 4, 9])
def test_images_of_any_batch_size(conv: SimpleConvModel, images: Path, rows: int) -> None:
    batch = conv_batch(rows)
    assert_same(run(images, input=batch[0])["output"], expected(conv, batch), depth=8 * 9)


@pytest.mark.parametrize(("rows", "length"), [(1, 3), (5, 20)])
def test_text_of_any_length(text: Path, rows: int, length: int) -> None:
    batch = text_batch(rows, length)
    del batch["labels"]
    assert_same(run(text, **batch)["logits"], expected(SimpleTransformerModel(), batch), depth=64)


def test_sizes_that_vary_have_names(images: Path) -> None:
    assert [(i.name, i.shape) for i in session_of(images).get_inputs()] == [("input", ["batch", 3, 16, 16])]
    assert [(o.name, o.shape) for o in session_of(images).get_outputs()] == [("output", ["batch", 2])]


@pytest.mark.skipif(not formats._exports_graphs(), reason="this torch names sizes of outputs after its operations")
def test_two_sizes_that_vary_have_names(text: Path) -> None:
    assert [(o.name, o.shape) for o in session_of(text).get_outputs()] == [("logits", ["batch", "sequence", 32])]


def test_the_graph_is_valid(images: Path, text: Path) -> None:
    for path in (images, text):
        onnx.checker.check_model(str(path), full_check=True)


class Several(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return {"scores": x * 2, "sums": (x.sum(1), x.sum(0))}


def test_several_outputs_have_names(tmp_path: Path) -> None:
    x = torch.randn(4, 3)
    export_for_inference(Several(), "onnx", tmp_path / "m.onnx", sample_input=(x,), input_names=["x"])
    found = run(tmp_path / "m.onnx", x=x[:3])

    assert list(found) == ["scores", "sums_0", "sums_1"]
    for one, wanted in zip(found.values(), (x[:3] * 2, x[:3].sum(1), x[:3].sum(0)), strict=True):
        assert_same(one, wanted, depth=4)


def test_the_version_of_the_operators(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    export_for_inference(SimpleModel(), "onnx", path, sample_input=SMALL, onnx_opset_version=19)
    assert onnx.load(path).opset_import[0].version == 19


def test_a_layer_that_torch_runs_as_one_operation(tmp_path: Path) -> None:
    """In evaluation torch has a fast path for its transformer layers, which no other runtime has."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).requires_grad_(False).eval()
    x = torch.randn(3, 5, 8)
    export_for_inference(layer, "onnx", tmp_path / "layer.onnx", sample_input=(x,))

    assert torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        assert_same(run(tmp_path / "layer.onnx", input=x)["output"], layer(x), depth=64)


class Kept(LoggerDestination):
    """Stores files."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def can_upload_files(self) -> bool:
        return True

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        assert overwrite
        self.files[remote_file_name] = file_path.read_bytes()


@pytest.mark.skipif(not formats._exports_graphs(), reason="this torch decides itself how many files there are")
def test_weights_that_one_file_cannot_hold_go_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(formats, "_MAX_BYTES_IN_ONE_FILE", 10)
    model = SimpleModel(seed=3)
    kept = Kept()
    logger = Logger(State(model=model, max_duration="1ep", run_name="a{run}"), [kept])
    export_with_logger(model, "onnx", "{run_name}/model.onnx", logger, sample_input=SMALL)

    assert list(kept.files) == ["a{run}/model.onnx.data", "a{run}/model.onnx"]
    assert sorted(file.name for file in Path("a{run}").iterdir()) == ["model.onnx", "model.onnx.data"]
    x = torch.randn(3, 1, 2, 2)
    assert_same(run(Path("a{run}/model.onnx"), input=x)["output"], expected(model, (x, None)), depth=5)


class Decomposes(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.qr(x)[0]


def test_an_operator_that_onnx_lacks(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="The model cannot be exported as 'onnx'"):
        export_for_inference(Decomposes(), "onnx", tmp_path / "model.onnx", sample_input=(torch.randn(3, 4, 4),))
