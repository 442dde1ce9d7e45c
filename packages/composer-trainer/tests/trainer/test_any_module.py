"""The Trainer takes what people have: any module, loss function, batch, device and precision, and tells what it is."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from composer import Trainer
from composer.core import REPLACES_CONVS, WRAPS_OPTIMIZER, Algorithm, Evaluator, Event, Placement
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel, ModuleWithLoss
from composer.optim import CosineAnnealingScheduler
from composer.testing import deep_compare
from composer.trainer.description import _commit
from composer.utils import module_surgery


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


class Written(ComposerModel):
    """A model as `ModuleWithLoss` makes it, written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, batch: Any) -> Any:
        return self.network(batch[0])

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return F.cross_entropy(outputs, batch[1], *args, **kwargs)

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {"MulticlassAccuracy": MulticlassAccuracy(3)}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(outputs, batch[1])


@dataclass
class Labelled:
    pixels: torch.Tensor
    label: torch.Tensor


def examples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(3, 4, generator=generator), torch.randint(3, (), generator=generator)) for _ in range(32)]


def loader(collate: Any = None) -> Any:
    return torch.utils.data.DataLoader(examples(), batch_size=8, collate_fn=collate)  # type: ignore[arg-type]


def _as_mapping(parts: list[Any]) -> dict[str, torch.Tensor]:
    return {"input": torch.stack([x for x, _ in parts]), "label": torch.stack([y for _, y in parts])}


def _as_object(parts: list[Any]) -> Labelled:
    return Labelled(torch.stack([x for x, _ in parts]), torch.stack([y for _, y in parts]))


def trained(data: Any = None, model: torch.nn.Module | None = None, **arguments: Any) -> Trainer:
    if model is None:
        model = network()
        arguments = {"loss": F.cross_entropy, "metrics": MulticlassAccuracy(3)} | arguments
    defaults: dict[str, Any] = {
        "optimizers": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "device_train_microbatch_size": 4,
        "max_duration": "2ep",
        "eval_dataloader": loader() if data is None else data,
    }
    trainer = Trainer(
        model=model,
        train_dataloader=loader() if data is None else data,
        device="cpu",
        seed=3,
        progress_bar=False,
        **{**defaults, **arguments},
    )
    trainer.fit()
    return trainer


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return list(trainer.state.model.parameters())


def test_a_module_is_trained_as_a_model_written_by_hand() -> None:
    written = trained(model=Written())
    any_module = trained()
    deep_compare(weights(any_module), weights(written))
    deep_compare(any_module.state.eval_metric_values, written.state.eval_metric_values)
    deep_compare(any_module.state.train_metric_values, written.state.train_metric_values)


@pytest.mark.parametrize(
    ("collate", "keys"),
    [
        (_as_mapping, {}),
        (_as_mapping, {"input_key": "input", "target_key": "label"}),
        (_as_object, {"input_key": "pixels"}),
        (_as_object, {"input_key": lambda batch: batch.pixels, "target_key": lambda batch: batch.label}),
    ],
)
def test_batches_of_mappings_and_dataclasses(collate: Any, keys: dict[str, Any]) -> None:
    deep_compare(weights(trained(loader(collate), **keys)), weights(trained()))


def test_a_checkpoint_loads_into_the_module(tmp_path: Path) -> None:
    trainer = trained(save_folder=str(tmp_path), save_filename="run.pt", save_overwrite=True)
    trainer.close()

    saved = torch.load(tmp_path / "run.pt", weights_only=False)["state"]["model"]
    plain = network()
    plain.load_state_dict(saved)
    deep_compare(list(plain.parameters()), weights(trainer))

    whole = trained(max_duration="3ep")
    resumed = trained(max_duration="3ep", load_path=str(tmp_path / "run.pt"))
    deep_compare(weights(resumed), weights(whole))


def test_a_module_that_is_compiled_already(monkeypatch: pytest.MonkeyPatch) -> None:
    # The default compiler of older torch needs setuptools.
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="eager"))
    compiled = torch.compile(network(), backend="eager")
    deep_compare(weights(trained(model=compiled, loss=F.cross_entropy)), weights(trained()))  # type: ignore[arg-type]


class Surgery(Algorithm):
    """Replaces the last layer."""

    events = frozenset({Event.INIT})
    placement = Placement(provides={REPLACES_CONVS})

    def apply(self, event: Event, state: Any, logger: Any) -> None:
        def wider(module: torch.nn.Module, index: int) -> torch.nn.Module | None:
            return torch.nn.Linear(8, 5) if getattr(module, "out_features", 0) == 3 else None

        module_surgery.replace_module_classes(state.model, {torch.nn.Linear: wider}, optimizers=state.optimizers)


class Wrapper(Algorithm):
    """Needs the optimizer."""

    events = frozenset({Event.INIT})
    placement = Placement(provides={WRAPS_OPTIMIZER})

    def apply(self, event: Event, state: Any, logger: Any) -> None:
        (self.seen,) = state.optimizers


def test_a_function_makes_the_optimizer_after_surgery() -> None:
    shapes: list[Any] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        shapes.extend(tuple(parameter.shape) for parameter in parameters)
        return torch.optim.SGD(parameters, lr=0.1)

    wrapper = Wrapper()
    trainer = trained(algorithms=[wrapper, Surgery()], optimizers=make, metrics=None)

    assert shapes == [(8, 12), (8,), (5, 8), (5,)]
    assert [wrapper.seen] == trainer.state.optimizers
    assert [type(each) for each in trainer.state.algorithms] == [Wrapper, Surgery]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_evaluation_without_metrics_has_the_mean_loss_of_the_labels_that_count(reduction: str) -> None:
    inputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([255, 255, 255, 1, 0, 255])
    net, loss = torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss(ignore_index=255, reduction=reduction)
    loader = list(zip(inputs.split(2), targets.split(2), strict=True))  # 0, 1 and 1 labels
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = Trainer(model=net, loss=loss, optimizers=optimizer, eval_dataloader=loader, progress_bar=False)
    trainer.eval()

    expected = F.cross_entropy(net(inputs), targets, ignore_index=255).detach()
    torch.testing.assert_close(trainer.state.eval_metric_values["Loss"], expected)


def test_an_evaluation_without_metrics_has_the_mean_loss_of_all_examples() -> None:
    batches = torch.utils.data.DataLoader(examples(), batch_size=12)  # 12, 12 and 8 examples
    memory, net = InMemoryLogger(), network()

    def evaluated(**options: Any) -> dict[str, Any]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        trainer = Trainer(
            model=net,
            loss=F.cross_entropy,
            optimizers=optimizer,
            eval_dataloader=batches,
            progress_bar=False,
            **options,
        )
        trainer.eval()
        return trainer.state.eval_metric_values

    images, labels = (torch.stack(part) for part in zip(*examples(), strict=True))
    expected = F.cross_entropy(net.eval()(images), labels)

    torch.testing.assert_close(evaluated(loggers=memory)["Loss"], expected)
    assert "metrics/eval/Loss" in memory.data
    assert {} == evaluated(metrics=[])


def test_several_optimizers_of_a_function() -> None:
    def make(parameters: Any) -> list[torch.optim.Optimizer]:
        first, *others = parameters
        return [torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.optim.SGD(others, lr=0.1, momentum=0.9)]

    deep_compare(weights(trained(optimizers=make)), weights(trained()))
    partial = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    deep_compare(weights(trained(optimizers=partial)), weights(trained()))


@pytest.mark.parametrize("returned", [None, [], "adam", torch.optim.SGD])
def test_a_function_that_returns_no_optimizer(returned: Any) -> None:
    message = r"`optimizers` must be a function that returns one or several `torch\.optim.* returns "
    with pytest.raises(TypeError, match=message + re.escape(f"{returned!r}.")):
        trained(optimizers=lambda parameters: returned)


class Stream(torch.utils.data.IterableDataset[Any]):
    """Yields examples, without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(examples())


def test_a_stream_without_length_has_epochs() -> None:
    stream = torch.utils.data.DataLoader(Stream(), batch_size=8)
    with pytest.warns(UserWarning, match="without a length"):
        trainer = trained(stream)
    assert (trainer.state.timestamp.epoch, trainer.state.timestamp.batch) == ("2ep", "8ba")
    deep_compare(weights(trainer), weights(trained()))


class Sized(torch.utils.data.IterableDataset[Any]):
    """Divides 22 examples between its workers, so that a loader has more batches than its length says."""

    def __len__(self) -> int:
        return 22

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        return iter(examples()[:22][worker.id :: worker.num_workers])


def test_the_length_of_a_stream_is_an_estimate() -> None:
    def make() -> Any:
        return torch.utils.data.DataLoader(Sized(), batch_size=10, num_workers=2)

    assert len(make()) == 3
    with pytest.warns(UserWarning, match=r"more batches than its length, 3\..*Each of its 2 workers may") as caught:
        trainer = trained(make(), max_duration="2ep")
    assert sum("more batches than its length" in str(warning.message) for warning in caught) == 1
    assert (trainer.state.timestamp.batch, trainer.state.timestamp.sample) == ("8ba", "44sp")
    assert sum(len(outputs) for outputs in trainer.predict(make())) == 22
    assert trainer.state.eval_timestamp.sample == 22
    assert len(trainer.predict(make(), subset_num_batches=2)) == 2


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ("max_steps", "max_duration='...ba'"),
        ("check_val_every_n_epoch", "eval_interval='...ep'"),
        ("torch_compile", "compile_config={}"),
    ],
)
def test_arguments_of_other_trainers_are_answered(argument: str, instead: str) -> None:
    with pytest.raises(TypeError, match=f"`{argument}` is not an argument of the `Trainer`. Write `{instead}`"):
        Trainer(model=network(), **{argument: 3})


def test_the_names_of_other_trainers() -> None:
    deep_compare(weights(trained(precision="bf16-mixed")), weights(trained(precision="amp_bf16")))
    with pytest.raises(ValueError, match=r"`precision` must be one of 'fp32', .* got 'bf16-true'"):
        trained(precision="bf16-true")


def test_the_log_has_what_the_run_is() -> None:
    logger = InMemoryLogger()
    trained(loggers=logger, algorithms=[Surgery()], metrics=None)
    logged = logger.hyperparameters

    assert logged["model"] == "Sequential"
    assert logged["parameters"] == logged["trainable_parameters"] == 8 * 12 + 8 + 5 * 8 + 5
    assert (logged["optimizer"], logged["learning_rate"]) == ("SGD", 0.1)
    assert (logged["max_duration"], logged["batch_size"], logged["train_samples"]) == ("2ep", 8, 32)
    assert (logged["rank_zero_seed"], logged["precision"], logged["world_size"]) == (3, "fp32", 1)
    assert logged["algorithms"] == "Surgery"
    assert "schedule" not in logged
    assert logged["eval_samples"] == {"eval": 32}
    assert logged["torch_version"] == torch.__version__


class Rate(Algorithm):
    """Does nothing, at a rate."""

    events = frozenset({Event.INIT})

    def __init__(self, rate: float, other: str = "default") -> None:
        self.rate, self.other = rate, other

    def apply(self, event: Event, state: Any, logger: Any) -> None:
        pass


def test_the_log_has_schedules_evaluations_and_the_arguments_of_algorithms() -> None:
    logger = InMemoryLogger()
    trained(
        loggers=logger,
        algorithms=[Surgery(), Rate(0.25)],
        metrics=None,
        schedulers=CosineAnnealingScheduler(t_max="1ep"),
        eval_dataloader=[Evaluator(label="near", dataloader=loader()), Evaluator(label="far", dataloader=loader())],
    )

    assert logger.hyperparameters["algorithms"] == "Surgery, Rate(rate=0.25)"
    assert logger.hyperparameters["schedule"] == "CosineAnnealingScheduler(t_max=1ep)"
    assert logger.hyperparameters["eval_samples"] == {"near": 32, "far": 32}


def test_the_log_names_the_commit_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("print()\n")

    def run(*command: str) -> str:
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))  # temporary files may be in a repository
    assert _commit() is None
    user = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    run("git", "init", "--quiet")
    run("git", "add", "train.py")
    run("git", *user, "commit", "--quiet", "-m", "First")
    commit = run("git", "rev-parse", "HEAD")
    assert _commit() == commit
    with script.open("a") as file:
        file.write("# changed\n")
    assert _commit() == f"{commit}-dirty"


def test_a_module_without_a_loss_is_told_what_to_pass() -> None:
    with pytest.raises(ValueError, match=r"`loss` must be given .* got a Sequential. Pass a function of outputs"):
        Trainer(model=network(), device="cpu")
    assert isinstance(trained().state.model, ModuleWithLoss)


@pytest.mark.parametrize("metrics", ["accuracy", F.cross_entropy, MulticlassAccuracy])
def test_metrics_are_objects_of_torchmetrics(metrics: Any) -> None:
    with pytest.raises(TypeError, match="`metrics` must be metrics of torchmetrics"):
        ModuleWithLoss(network(), F.cross_entropy, metrics)


def test_a_function_may_return_schedulers_of_torch() -> None:
    def make(parameters: Any) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)

    trainer = trained(optimizers=make)
    assert trainer.state.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.001)  # after two epochs
    net = network()
    optimizer, scheduler = make(net.parameters())
    deep_compare(
        weights(trainer), weights(trained(model=net, loss=F.cross_entropy, optimizers=optimizer, schedulers=scheduler))
    )
    with pytest.raises(ValueError, match="`schedulers` must not be given if the function"):
        trained(optimizers=make, schedulers=scheduler)


def test_a_function_gets_a_list_which_it_may_read_twice() -> None:
    def groups(parameters: Any) -> torch.optim.Optimizer:
        matrices, vectors = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() < 2]
        return torch.optim.SGD([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.1, momentum=0.9)

    deep_compare(weights(trained(optimizers=groups)), weights(trained()))


def test_parameters_without_an_optimizer_are_told() -> None:
    net = network()
    own = torch.optim.SGD(net[1].parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"No optimizer has 2 parameters of the model.*'3\.weight', '3\.bias'"):
        trained(model=net, loss=F.cross_entropy, optimizers=lambda parameters: own)


def test_algorithms_must_mean_the_same_parts_of_a_batch() -> None:
    data = [(x, torch.zeros(len(x)), y) for x, y in loader()]
    keys: dict[str, Any] = {"input_key": 0, "target_key": 2}
    with pytest.raises(ValueError, match=r"`target_key` of Reads must be that of the `Trainer`, 2, got 1"):
        trained(data, algorithms=[Reads()], **keys)
    trained(data, algorithms=[Reads(**keys)], **keys)
    trained(algorithms=[Reads()])


def test_methods_use_the_names_of_the_trainer_and_explain_says_which() -> None:
    data = [{"a": x, "b": y} for x, y in loader()]
    algorithm = Reads()
    trainer = trained(data, algorithms=[algorithm], input_key="a", target_key="b")

    assert (data[-1]["a"].shape[1:], data[-1]["b"].shape[1:]) == tuple(shape[1:] for shape in algorithm.shapes)
    assert "inputs: 'a', targets: 'b'" == trainer.engine.explain().notes["batch"]
    assert (
        "inputs: 'x', targets: 'y'"
        == (trained([{"x": x, "y": y} for x, y in loader()], algorithms=[Reads()]).engine.explain().notes["batch"])
    )


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda x, y: (x, y + 99), "The targets are 99 to "),
        (lambda x, y: (x, y.int()), "The targets are int32"),
        (lambda x, y: (x.double(), y), "The inputs are float64, the parameters float32."),
    ],
)
def test_an_error_of_the_first_step_says_what_the_step_saw(
    change: Any, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises((IndexError, RuntimeError)) as caught:
        trained([change(x, y) for x, y in loader()])
    text = "\n".join(getattr(caught.value, "__notes__", [])) or caplog.text
    assert "batch[1]: int" in text
    assert cause in text


def test_a_model_on_the_meta_device_is_refused() -> None:
    net = torch.nn.Linear(3, 2, device="meta")
    with pytest.raises(ValueError, match="`model` must have values to be trained, but its parameter 'weight' is on"):
        trained(model=net, loss=F.cross_entropy)


class Reads(Algorithm):
    """Notes the shapes of inputs and targets."""

    events = frozenset({Event.BEFORE_FORWARD})

    def __init__(self, input_key: Any = 0, target_key: Any = 1) -> None:
        self.input_key, self.target_key = input_key, target_key

    def apply(self, event: Event, state: Any, logger: Any) -> None:
        self.shapes = tuple(state.batch_get_item(key).shape for key in (self.input_key, self.target_key))


def test_misspelt_arguments() -> None:
    with pytest.raises(TypeError, match=r"`train_dataloder` is not an argument.*Did you mean `train_dataloader`\?"):
        trained(train_dataloder=loader())
    assert repr(trained()).endswith(", 8ba of 2ep>")


def test_a_metric_that_counts_what_the_loss_ignores_is_told() -> None:
    loss = torch.nn.CrossEntropyLoss(ignore_index=2)
    with pytest.warns(
        UserWarning, match="ignores the label 2, but the metric 'MulticlassAccuracy' has `ignore_index` None"
    ):
        ModuleWithLoss(torch.nn.Linear(3, 3), loss, MulticlassAccuracy(num_classes=3))
    ModuleWithLoss(torch.nn.Linear(3, 3), loss, MulticlassAccuracy(num_classes=3, ignore_index=2))
