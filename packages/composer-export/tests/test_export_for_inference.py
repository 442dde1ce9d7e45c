"""Exported models run without the code that built them, and compute what the model computes."""

from __future__ import annotations

import copy
import logging
import warnings
from collections import UserDict, namedtuple
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from exporting import (
    SMALL,
    Multiply,
    Widen,
    assert_same,
    conv_batch,
    expected,
    loaded,
    text_batch,
    trained_conv,
    widen,
)

import composer.utils
from composer.checkpoint import export_safetensors, save_checkpoint
from composer.checkpoint.object_store import ObjectStore
from composer.core import Algorithm, Event, State
from composer.inference import ExportFormat, export_for_inference, export_with_logger, quantize_dynamic
from composer.loggers import Logger, LoggerDestination
from composer.models import ComposerModel
from composer.testing import SimpleConvModel, SimpleModel, SimpleTransformerModel, run_on_ranks
from composer.utils import dist

pytestmark = [
    pytest.mark.filterwarnings("ignore:(?s).*torch.jit.*is deprecated"),  # reading TorchScript
    pytest.mark.filterwarnings("ignore:(?s).*quantized tensor creation"),
]


@pytest.fixture(scope="module")
def conv() -> SimpleConvModel:
    return trained_conv()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exported")


@pytest.fixture(scope="module")
def conv_pt2(conv: SimpleConvModel, folder: Path) -> Path:
    export_for_inference(conv, "torch_export", folder / "conv.pt2", sample_input=conv_batch())
    return folder / "conv.pt2"


# ---- what is exported computes what the model computes ----


@pytest.mark.parametrize("rows", [1, 4, 9])
def test_torch_export_takes_images_of_any_batch_size(conv: SimpleConvModel, conv_pt2: Path, rows: int) -> None:
    batch = conv_batch(rows)
    assert_same(loaded(conv_pt2)(batch[0]), expected(conv, batch), depth=8 * 9)


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


def test_a_mapping_gives_the_names_and_training_labels_are_left_out(folder: Path, caplog: Any) -> None:
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


def test_a_module_with_named_arguments_is_traced(tmp_path: Path) -> None:
    class Branches(Multiply):  # generators do not compile
        def forward(self, x: Any, y: Any, scale: Any = None) -> Any:
            return sum(super(Branches, self).forward(x, y, scale) for _ in range(2))

    x, y = torch.randn(4, 2), torch.randn(4, 2)
    export_for_inference(Branches(), "torchscript", tmp_path / "m.pt", sample_input={"y": y, "x": x})
    assert_same(torch.jit.load(tmp_path / "m.pt")(x[:3], y[:3]), 2 * (x * y)[:3], depth=2)


def test_a_sample_of_one_row_does_not_fix_the_batch_size(conv: SimpleConvModel, folder: Path) -> None:
    export_for_inference(conv, "torch_export", folder / "one.pt2", sample_input=conv_batch(1))
    assert_same(loaded(folder / "one.pt2")(conv_batch(6)[0]), expected(conv, conv_batch(6)), depth=8 * 9)


def test_the_file_holds_nothing_of_the_sample(conv_pt2: Path) -> None:
    args, kwargs = torch.export.load(conv_pt2).example_inputs

    assert [(tuple(tensor.shape), float(tensor.abs().max())) for tensor in args] == [((2, 3, 16, 16), 0.0)]
    assert not kwargs


# ---- the model that is exported, and the one that is trained ----


def state_of(model: torch.nn.Module) -> Any:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return (
        [(name, id(tensor), tensor.device, tensor.detach().clone()) for name, tensor in tensors.items()],
        [(name, None if p.grad is None else p.grad.clone()) for name, p in model.named_parameters()],
        [(name, m.training, list(m._forward_hooks), id(m)) for name, m in model.named_modules()],
        model.logger,
        torch.get_rng_state(),
    )


@pytest.mark.parametrize("save_format", ["torch_export", "torchscript"])
def test_the_model_is_as_before(conv: SimpleConvModel, tmp_path: Path, save_format: str) -> None:
    conv.logger = Logger(State(model=conv, max_duration="1ep"))
    conv.conv1.register_forward_hook(lambda *_: None)
    conv.conv2.eval()
    before = state_of(conv)
    export_for_inference(conv, save_format, tmp_path / "model.pt2", sample_input=conv_batch())
    after = state_of(conv)
    conv.conv2.train()
    conv.logger = None

    for old, new in zip(before[0], after[0], strict=True):
        assert old[:3] == new[:3]
        assert torch.equal(old[3], new[3])
    for old, new in zip(before[1], after[1], strict=True):
        assert old[1] is not None
        assert torch.equal(old[1], new[1])
    assert before[2:4] == after[2:4]
    assert torch.equal(before[4], after[4])


def double(model: torch.nn.Module) -> torch.nn.Module:
    assert not model.training
    with torch.no_grad():
        model.module[-1].weight.mul_(2)
        model.module[-1].bias.mul_(2)
    return model


@pytest.mark.parametrize("surgery", [widen, [Widen()], lambda model: widen(model) or model])
def test_surgery_then_weights_then_transforms(tmp_path: Path, surgery: Any) -> None:
    trained, fresh, path = SimpleConvModel(seed=1), SimpleConvModel(seed=2), tmp_path / "model.pt2"
    widen(trained)
    checkpoint = save_checkpoint(
        State(model=trained, max_duration="1ep", rank_zero_seed=0), str(tmp_path / "run.pt"), weights_only=True
    )
    assert checkpoint is not None
    export_for_inference(
        fresh,
        "torch_export",
        path,
        sample_input=conv_batch(),
        surgery_algs=surgery,
        load_path=checkpoint,
        load_strict=True,
        transforms=[double],
    )
    assert_same(loaded(path)(conv_batch(3)[0]), 2 * expected(trained, conv_batch(3)), depth=8 * 9)
    assert fresh.state_dict().keys() == SimpleConvModel().state_dict().keys()


@pytest.mark.parametrize("source", ["file", "URI", "object store", "safetensors", "weights"])
def test_weights_are_loaded_from_anywhere(tmp_path: Path, source: str) -> None:
    trained = SimpleModel(seed=5)
    run, store = str(tmp_path / "run.pt"), None
    save_checkpoint(State(model=trained, max_duration="1ep", rank_zero_seed=0), run)
    if source == "URI":
        run = f"file://{run}"
    elif source == "object store":
        store = ObjectStore(f"memory://{tmp_path.name}")
        store.upload_object("deep/run.pt", run)
        run = "deep/run.pt"
    elif source == "safetensors":
        run = str(export_safetensors(trained, tmp_path / "model.safetensors"))
    elif source == "weights":
        torch.save(trained.state_dict(), tmp_path / "weights.pt")
        run = str(tmp_path / "weights.pt")
    sample = (torch.randn(4, 1, 4, 4), torch.zeros(4))
    path = tmp_path / "model.pt2"
    model = SimpleModel(seed=6)
    export_for_inference(
        model, "torch_export", path, sample_input=sample, load_path=run, load_object_store=store, load_strict=True
    )
    assert_same(loaded(path)(sample[0]), expected(trained, sample), depth=5)


def test_weights_that_do_not_fit_are_told(tmp_path: Path) -> None:
    sample, path = (torch.randn(4, 1, 4, 4), torch.zeros(4)), tmp_path / "model.pt2"
    weights = SimpleModel(seed=5).state_dict()
    del weights["fc1.bias"]
    torch.save({**weights, "more": torch.zeros(1)}, tmp_path / "weights.pt")
    arguments: dict[str, Any] = {"sample_input": sample, "load_path": tmp_path / "weights.pt"}

    with pytest.warns(UserWarning, match=r"lacks \['fc1.bias'\], and has \['more'\] besides"):
        export_for_inference(SimpleModel(), "torch_export", path, **arguments)
    with pytest.raises(RuntimeError, match="Missing key"):
        export_for_inference(SimpleModel(), "torch_export", path, load_strict=True, **arguments)
    with pytest.raises(RuntimeError, match="has no weights of this model"):
        export_for_inference(Multiply(), "torch_export", path, **arguments)


def test_a_quantized_model_goes_into_torchscript_only(tmp_path: Path) -> None:
    model, sample = SimpleModel(num_features=64), (torch.randn(4, 64, 2, 2), torch.zeros(4))
    export_for_inference(model, "torchscript", tmp_path / "model.pt", sample_input=sample, transforms=quantize_dynamic)
    found = torch.jit.load(tmp_path / "model.pt")
    wanted = expected(quantize_dynamic(copy.deepcopy(model).eval()), sample)

    assert "quantized" in str(found.inlined_graph)
    assert_same(found(sample), wanted, depth=64)
    assert isinstance(model.fc1, torch.nn.Linear)
    with pytest.raises(RuntimeError, match=r"cannot be exported as 'torch_export'.* Use `save_format='torchscript'`"):
        export_for_inference(
            model, "torch_export", tmp_path / "model.pt2", sample_input=sample, transforms=quantize_dynamic
        )


def test_quantize_dynamic_takes_what_torch_takes() -> None:
    model = torch.nn.Sequential(torch.nn.LSTM(4, 4), torch.nn.Linear(4, 4)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.float16)
    assert isinstance(found[0], torch.nn.LSTM)
    assert not isinstance(found[1], torch.nn.Linear)
    assert isinstance(quantize_dynamic(model, {torch.nn.LSTM})[1], torch.nn.Linear)


def test_a_torch_without_quantization_or_torchscript_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(torch.ao.quantization, "quantize_dynamic")
    with pytest.raises(RuntimeError, match=r"has no dynamic quantization any more. Use a function of `torchao`"):
        quantize_dynamic(torch.nn.Linear(1, 1))
    monkeypatch.delattr(torch.jit, "script")
    with pytest.raises(RuntimeError, match=r"has no TorchScript any more. Use 'torch_export'"):
        export_for_inference(SimpleModel(), "torchscript", tmp_path / "model.pt")


def test_compiled_parts_and_tensors_that_are_no_parameters(tmp_path: Path) -> None:
    model = SimpleModel()
    model.module[2] = torch.compile(model.module[2])
    with torch.no_grad():
        model.offset = torch.ones(2)  # neither parameter nor buffer
    model.computed = model.fc1.weight * 2  # not a leaf, which cannot be deep-copied by itself
    whole = torch.compile(model)
    sample = (torch.randn(4, 1, 4, 4), torch.zeros(4))
    export_for_inference(whole, "torch_export", tmp_path / "model.pt2", sample_input=sample)
    assert_same(loaded(tmp_path / "model.pt2")(sample[0]), expected(SimpleModel(), sample), depth=5)


# ---- where it goes ----


class Kept(LoggerDestination):
    """Stores files."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.overwrites: list[bool] = []

    def can_upload_files(self) -> bool:
        return True

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        self.files[remote_file_name] = file_path.read_bytes()
        self.overwrites.append(overwrite)


def test_a_uri_and_an_object_store(tmp_path: Path) -> None:
    name = f"memory://{tmp_path.name}"
    export_for_inference(SimpleModel(), "torch_export", f"{name}/deep/model.pt2", sample_input=SMALL)
    store = ObjectStore(f"{name}/store")
    export_for_inference(SimpleModel(), "torch_export", "deep/model.pt2", store, sample_input=SMALL)

    assert store.list_objects() == ["deep/model.pt2"]
    for path in ("deep", "store/deep"):
        with fsspec.open(f"{name}/{path}/model.pt2", "rb") as file:
            assert torch.export.load(file).module()(SMALL[0]).shape == (2, 2)


def test_a_logger_that_stores_files_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = State(model=SimpleModel(), max_duration="1ep", run_name="run")
    kept = Kept()
    logger = Logger(state, [kept])
    export_with_logger(state.model, "torch_export", "{run_name}/model.pt2", logger, sample_input=SMALL)

    assert kept.files == {"run/model.pt2": Path("run/model.pt2").read_bytes()}
    assert kept.overwrites == [True]

    export_with_logger(state.model, "torch_export", f"file://{tmp_path}/uri.pt2", logger, sample_input=SMALL)
    store = ObjectStore(f"memory://{tmp_path.name}")
    export_with_logger(state.model, "torch_export", "{run_name}/x.pt2", logger, store, sample_input=SMALL)

    assert len(kept.files) == 1
    assert (tmp_path / "uri.pt2").exists()
    assert store.list_objects() == ["run/x.pt2"]
    assert not Path("run/x.pt2").exists()


def test_a_failed_export_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.pt2"
    path.write_text("earlier")

    def torn(program: Any, file: Any) -> None:
        file.write(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch.export, "save", torn)
    with pytest.raises(OSError, match="No space left"):
        export_for_inference(SimpleModel(), "torch_export", path, sample_input=SMALL)

    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    export_for_inference(SimpleModel(), "torch_export", path, sample_input=SMALL)
    assert loaded(path)(SMALL[0]).shape == (2, 2)


def test_the_names_are_where_programs_look_for_them() -> None:
    from composer.utils.inference import export_for_inference as found

    assert found is composer.utils.export_for_inference is composer.utils.inference.export_for_inference
    assert composer.utils.export_with_logger is export_with_logger
    assert composer.utils.quantize_dynamic is quantize_dynamic
    assert composer.utils.ExportFormat("TORCHSCRIPT") is ExportFormat.TORCHSCRIPT
    assert composer.utils.Transform is composer.utils.inference.Transform


# ---- what cannot work ----


class BakesRows(ComposerModel):
    """Its Python code fixes the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, batch: Any) -> Any:
        return self.linear(batch).reshape(4, 2)

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError


def test_a_model_for_one_batch_size_is_exported_for_that_one(tmp_path: Path) -> None:
    x, path = torch.randn(4, 3), tmp_path / "model.pt2"
    model = BakesRows()
    with pytest.warns(UserWarning, match=r"takes batches as large as the sample only: input \(4, 3\)"):
        export_for_inference(model, "torch_export", path, sample_input=x)
    assert_same(loaded(path)(x), expected(model, x), depth=3)
    with pytest.warns(UserWarning, match="The traced model takes batches as large as the sample only"):
        export_for_inference(model, "torchscript", path, sample_input=x)
    assert_same(torch.jit.load(path)(x), expected(model, x), depth=3)
    with pytest.raises(RuntimeError, match="cannot be exported as 'torch_export'"):
        export_for_inference(model, "torch_export", path, sample_input=x, dynamic_axes={"input": [0]})
    export_for_inference(model, "torch_export", path, sample_input=x, dynamic_axes={})


def test_a_trace_that_bakes_a_number_is_found_out(tmp_path: Path) -> None:
    class Mean(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x.sum(0) / int(x.shape[0]) if isinstance(x, torch.Tensor) else [*x]

    with pytest.warns(UserWarning, match="With another number of rows, its outputs are not those of the model"):
        export_for_inference(Mean(), "torchscript", tmp_path / "model.pt", sample_input=(torch.randn(4, 3),))


def test_what_cannot_be_exported_says_why(tmp_path: Path) -> None:
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


def test_outputs_that_are_no_tensors(tmp_path: Path) -> None:
    class Returns(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x, {1, 2}

    with pytest.raises(TypeError, match="there is set in its outputs"):
        export_for_inference(Returns(), "torch_export", tmp_path / "m.pt2", sample_input=(torch.ones(2),))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"save_format": "pickle"}, ValueError, "must be one of 'torch_export', 'onnx', 'torchscript'"),
        ({"save_path": "model.bin"}, ValueError, r"`save_path` must end in '\.pt2'"),
        ({"save_path": "folder/"}, ValueError, "must be the path of a file"),
        ({"save_path": "nowhere://model.pt2"}, ValueError, "must have a scheme that fsspec knows"),
        ({"save_object_store": 3}, TypeError, "must have a method `upload_object`, got 3"),
        ({"sample_input": None}, ValueError, "`sample_input` must be given for `save_format='torch_export'`"),
        ({"sample_input": (None, {})}, ValueError, "`sample_input` must be given"),
        ({"sample_input": ["a", 1]}, ValueError, "`sample_input` must hold the tensors .* got list"),
        ({"dynamic_axes": {"image": [0]}}, ValueError, r"must have the names of inputs \(input\), got 'image'"),
        ({"dynamic_axes": {"input": [4]}}, ValueError, r"must have axes of 'input', which has 4, got \[4\]"),
        ({"input_names": ["a", "b"]}, ValueError, r"has 1 \(input\), got \['a', 'b'\]"),
        ({"input_names": ["no name"]}, ValueError, "must be names as in Python, got 'no name'"),
        ({"output_names": ["a", "b"]}, ValueError, r"has 1 \(output\), got \['a', 'b'\]"),
        ({"model": 3}, TypeError, r"`model` must be a `torch.nn.Module`, got int"),
        ({"model": torch.nn.Linear(1, 1, device="meta")}, ValueError, "are on the meta device"),
        ({"transforms": lambda model: 3}, TypeError, "`transforms` must return the model.*returned int"),
        ({"surgery_algs": lambda model: 3}, TypeError, "`surgery_algs` must return the model.*returned int"),
    ],
)
def test_what_cannot_work_is_told(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    given = {"model": SimpleModel(), "save_format": "torch_export", "save_path": "model.pt2", "sample_input": SMALL}
    given |= arguments
    if "://" not in given["save_path"]:
        given["save_path"] = f"{tmp_path}/{given['save_path']}"
    with pytest.raises(error, match=match):
        export_for_inference(**given)
    assert list(tmp_path.iterdir()) == []


def test_an_algorithm_that_changes_no_model(tmp_path: Path) -> None:
    class Late(Algorithm):
        def match(self, event: Event, state: State) -> bool:
            return event is Event.FIT_START

        def apply(self, event: Event, state: State, logger: Logger) -> None:
            raise AssertionError

    with pytest.raises(ValueError, match="`Late` does nothing at the beginning of a run"):
        export_for_inference(SimpleModel(), "torchscript", tmp_path / "m.pt", surgery_algs=[Late()])


def test_a_missing_package_says_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import composer.inference._formats as formats

    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"`onnx` and `onnxscript`.*pip install 'composer-export\[onnx\]'"):
        export_for_inference(SimpleModel(), "onnx", tmp_path / "model.onnx", sample_input=SMALL)


def test_arguments_without_a_meaning_are_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="`onnx_opset_version` has no meaning for `save_format='torch_export'`"):
        export_for_inference(
            SimpleModel(), "torch_export", tmp_path / "model.pt2", sample_input=SMALL, onnx_opset_version=18
        )
    with pytest.warns(UserWarning, match="`input_names` has no meaning for `save_format='torchscript'`"):
        export_for_inference(SimpleModel(), "torchscript", tmp_path / "model.pt", sample_input=SMALL, input_names=["x"])


# ---- several ranks ----


def export_on_ranks(folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    path = f"{folder}/rank{dist.get_global_rank()}.pt2"
    wrapped = torch.nn.parallel.DistributedDataParallel(SimpleModel())
    export_for_inference(wrapped, "torch_export", path, sample_input=SMALL)
    sharded = SimpleModel()
    fully_shard(sharded)
    with pytest.raises(ValueError, match=r"parameters are divided among ranks\. Save a checkpoint"):
        export_for_inference(sharded, "torch_export", path, sample_input=SMALL)


def test_of_a_wrapped_model_the_first_rank_exports_and_a_sharded_one_is_refused_on_all(tmp_path: Path) -> None:
    run_on_ranks(export_on_ranks, 2, str(tmp_path))

    assert [file.name for file in tmp_path.iterdir()] == ["rank0.pt2"]
    x = torch.randn(3, 1, 2, 2)
    assert_same(loaded(tmp_path / "rank0.pt2")(x), expected(SimpleModel(), (x, None)), depth=5)
