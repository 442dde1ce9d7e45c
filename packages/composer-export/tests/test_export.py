"""The model that is exported, where the file goes, and errors in arguments."""

from __future__ import annotations

import copy
import shutil
import warnings
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
    trained_conv,
    widen,
)

import composer.utils
from composer.checkpoint import export_safetensors, save_checkpoint
from composer.core import Algorithm, Event, State
from composer.inference import ExportFormat, export_for_inference, export_with_logger, quantize_dynamic
from composer.loggers import Logger, LoggerDestination
from composer.testing import SimpleConvModel, SimpleModel, run_on_ranks
from composer.utils import dist

pytestmark = [
    pytest.mark.filterwarnings("ignore:(?s).*torch.jit.*is deprecated"),  # reading TorchScript
    pytest.mark.filterwarnings("ignore:(?s).*quantized tensor creation"),
]


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


class FolderStore:
    """An object store in a folder, by its public methods only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def upload_object(self, object_name: str, filename: str, callback: Any = None) -> None:
        (self.folder / object_name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(filename, self.folder / object_name)

    def download_object(self, object_name: str, filename: str, overwrite: bool = False, callback: Any = None) -> None:
        shutil.copyfile(self.folder / object_name, filename)


@pytest.mark.parametrize("source", ["file", "URI", "object store", "safetensors", "weights"])
def test_weights_are_loaded_from_anywhere(tmp_path: Path, source: str) -> None:
    trained = SimpleModel(seed=5)
    run, store = str(tmp_path / "run.pt"), None
    save_checkpoint(State(model=trained, max_duration="1ep", rank_zero_seed=0), run)
    if source == "URI":
        run = f"file://{run}"
    elif source == "object store":
        store = FolderStore(tmp_path / "store")
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


def test_weights_that_do_not_fit_give_a_warning_or_an_error(tmp_path: Path) -> None:
    sample, path = (torch.randn(4, 1, 4, 4), torch.zeros(4)), tmp_path / "model.pt2"
    weights = SimpleModel(seed=5).state_dict()
    del weights["fc1.bias"]
    torch.save({**weights, "more": torch.zeros(1)}, tmp_path / "weights.pt")
    arguments: dict[str, Any] = {"sample_input": sample, "load_path": tmp_path / "weights.pt"}

    with pytest.warns(UserWarning, match=r"\['fc1.bias'\] are missing, and \['more'\] are unexpected"):
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


def test_a_torch_without_torchscript(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(torch.jit, "script")
    with pytest.raises(RuntimeError, match=r"no longer has TorchScript. Use 'torch_export'"):
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
    store = FolderStore(tmp_path / "store")
    export_for_inference(SimpleModel(), "torch_export", "deep/model.pt2", store, sample_input=SMALL)

    for path in (f"{name}/deep/model.pt2", f"file://{tmp_path}/store/deep/model.pt2"):
        with fsspec.open(path, "rb") as file:
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
    store = FolderStore(tmp_path / "store")
    export_with_logger(state.model, "torch_export", "{run_name}/x.pt2", logger, store, sample_input=SMALL)

    assert len(kept.files) == 1
    assert (tmp_path / "uri.pt2").exists()
    assert (tmp_path / "store" / "run" / "x.pt2").exists()
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
        (
            {"input_names": ["a", "b", "c"]},
            ValueError,
            r"of the 2 tensors .* \(input\), got \['a', 'b', 'c'\]",
        ),
        ({"input_names": []}, ValueError, r"must be different names .* got \[\]"),
        ({"input_names": ["a", "a"]}, ValueError, "must be different names"),
        ({"input_names": ["no name"]}, ValueError, "must be Python identifiers, got 'no name'"),
        ({"output_names": ["a", "b"]}, ValueError, r"has 1 \(output\), got \['a', 'b'\]"),
        ({"model": 3}, TypeError, r"`model` must be a `torch.nn.Module`, got int"),
        ({"model": torch.nn.Linear(1, 1, device="meta")}, ValueError, "are on the meta device"),
        ({"transforms": lambda model: 3}, TypeError, "`transforms` must return the model.*returned int"),
        ({"surgery_algs": lambda model: 3}, TypeError, "`surgery_algs` must return the model.*returned int"),
    ],
)
def test_invalid_arguments(tmp_path: Path, arguments: dict[str, Any], error: type[Exception], match: str) -> None:
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

    with pytest.raises(ValueError, match="`Late` does nothing at the start of a run"):
        export_for_inference(SimpleModel(), "torchscript", tmp_path / "m.pt", surgery_algs=[Late()])


def export_on_ranks(folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    path = f"{folder}/rank{dist.get_global_rank()}.pt2"
    wrapped = torch.nn.parallel.DistributedDataParallel(SimpleModel())
    export_for_inference(wrapped, "torch_export", path, sample_input=SMALL)
    sharded = SimpleModel()
    fully_shard(sharded)
    with pytest.raises(ValueError, match=r"parameters are sharded across ranks\. Save a checkpoint"):
        export_for_inference(sharded, "torch_export", path, sample_input=SMALL)


def test_rank_0_exports_a_model_in_ddp_and_all_ranks_refuse_a_sharded_one(tmp_path: Path) -> None:
    run_on_ranks(export_on_ranks, 2, str(tmp_path))

    assert [file.name for file in tmp_path.iterdir()] == ["rank0.pt2"]
    x = torch.randn(3, 1, 2, 2)
    assert_same(loaded(tmp_path / "rank0.pt2")(x), expected(SimpleModel(), (x, None)), depth=5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("save_format", "name", "call"),
    [
        ("torch_export", "model.pt2", lambda path, batch: loaded(path)(batch[0])),
        ("torchscript", "model.pt", lambda path, batch: torch.jit.load(path)(batch)),
    ],
)
def test_a_model_on_a_gpu_gives_a_file_for_the_cpu(tmp_path: Path, save_format: str, name: str, call: Any) -> None:
    model, batch = trained_conv(), conv_batch()
    on_gpu = copy.deepcopy(model).cuda()
    export_for_inference(on_gpu, save_format, tmp_path / name, sample_input=tuple(part.cuda() for part in batch))

    assert {parameter.device.type for parameter in on_gpu.parameters()} == {"cuda"}
    assert_same(call(tmp_path / name, batch), expected(model, batch), depth=8 * 9)
