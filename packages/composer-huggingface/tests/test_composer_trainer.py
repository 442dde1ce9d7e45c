"""Training inside transformers gives the weights of composer's own `Trainer`, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

from composer import Trainer
from composer.algorithms.ema import EMA
from composer.algorithms.gradient_clipping import GradientClipping
from composer.algorithms.label_smoothing import LabelSmoothing
from composer.algorithms.layer_freezing import LayerFreezing
from composer.algorithms.mixup import MixUp
from composer.algorithms.sam import SAM
from composer.algorithms.swa import SWA
from composer.algorithms.z_loss import ZLoss
from composer.core import REPLACES_OPTIMIZER, Algorithm, Callback, ConflictError, Event, Placement, State
from composer.hosts.huggingface import ComposerMixin, ComposerTrainer
from composer.loggers import Logger
from composer.models import ComposerModel, HuggingFaceModel
from composer.testing import deep_compare

LENGTH, BATCH, EPOCHS, SEED = 5, 8, 2, 3
KEYS = {"input_key": "x", "target_key": "labels"}
ALGORITHMS: dict[str, Any] = {
    "nothing": list,
    "SAM": lambda: [SAM(rho=0.05, interval=2)],
    "EMA and GradientClipping": lambda: [EMA(half_life="2ba"), GradientClipping("norm", 0.1)],
    "LayerFreezing": lambda: [LayerFreezing(freeze_start=0.0)],
    "SWA": lambda: [SWA(swa_start="0.2dur", swa_end="0.8dur", update_interval="1ba")],
    "all": lambda: [
        MixUp(**KEYS),
        LabelSmoothing(target_key="labels"),
        SAM(),
        EMA(half_life="2ba"),
        GradientClipping("norm", 0.1),
    ],
}


def layers() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 12), torch.nn.BatchNorm1d(12), torch.nn.Dropout(0.5), torch.nn.ReLU(), torch.nn.Linear(12, 4)
    )


class OurModel(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, batch: Any) -> Any:
        return self.layers(batch["x"])

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return cross_entropy(outputs, batch["labels"], **kwargs)


class Net(torch.nn.Module):
    """As models of transformers do, it computes the loss if it gets labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: Any, labels: Any = None) -> Any:
        if not self.training:
            self.seen.append(self.layers[0].weight.detach().clone())  # type: ignore[operator]
        logits = self.layers(x)
        return {"logits": logits} if labels is None else {"loss": cross_entropy(logits, labels), "logits": logits}


def criterion(outputs: Any, labels: Any, num_items_in_batch: Any = None, reduction: str = "mean") -> torch.Tensor:
    return cross_entropy(outputs["logits"], labels, reduction=reduction)


def examples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    count = LENGTH * BATCH
    x, y = torch.randn(count, 6, generator=generator), torch.randint(4, (count,), generator=generator)
    return [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]


def data(batch_size: int = BATCH) -> Any:
    """Batches in a fixed order, drawn with a generator of their own."""
    return DataLoader(examples(), batch_size=batch_size, generator=torch.Generator())  # type: ignore[arg-type]


class InOrder(ComposerTrainer):
    """Iterates over the batches of the other loops, and computes means."""

    loss_is_scaled_for_ga = False

    def get_train_dataloader(self) -> Any:
        return data(self.args.per_device_train_batch_size)


def arguments(output_dir: Any = "out", **options: Any) -> transformers.TrainingArguments:
    defaults = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": BATCH,
        "max_grad_norm": 0.0,
        "seed": SEED,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
    }
    return transformers.TrainingArguments(str(output_dir), **{**defaults, **options})


def sgd(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def trainer_of(label: str, kind: Any = InOrder, split: bool = True, **options: Any) -> Any:
    others = {name: options.pop(name) for name in ("callbacks", "eval_dataset", "composer_callbacks") if name in options}
    if split:
        others["compute_loss_func"] = criterion
    net = Net()
    trainer = kind(
        net,
        arguments(**options),
        train_dataset=examples(),
        optimizers=sgd(net),
        algorithms=ALGORITHMS[label](),
        **others,
    )
    return trainer


def weights_of(trainer: Any) -> dict[str, Any]:
    return copy.deepcopy(trainer.model.layers.state_dict())


def fit(label: str, **options: Any) -> dict[str, Any]:
    trainer = trainer_of(label, **options)
    trainer.train()
    return weights_of(trainer)


def with_our_trainer(label: str, **options: Any) -> dict[str, Any]:
    model = OurModel()
    trainer = Trainer(
        model=model,
        train_dataloader=data(),
        max_duration=f"{EPOCHS}ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        algorithms=ALGORITHMS[label](),
        seed=SEED,
        progress_bar=False,
        device="cpu",
        **options,
    )
    trainer.fit()
    return copy.deepcopy(model.layers.state_dict())


# ---- the weights ----


@pytest.mark.parametrize("label", ALGORITHMS)
def test_the_weights_equal_those_of_our_trainer(label: str) -> None:
    deep_compare(with_our_trainer(label), fit(label))


@pytest.mark.parametrize("label", ALGORITHMS.keys() - {"all"})
def test_the_weights_are_equal_without_a_function_for_the_loss(label: str) -> None:
    deep_compare(with_our_trainer(label), fit(label, split=False))


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("label", ["SAM", "EMA and GradientClipping"])
def test_two_batches_per_step_equal_microbatches(label: str, split: bool) -> None:
    halves = {"per_device_train_batch_size": BATCH // 2, "gradient_accumulation_steps": 2}

    deep_compare(
        with_our_trainer(label, device_train_microbatch_size=BATCH // 2), fit(label, split=split, **halves)
    )


@pytest.mark.parametrize("label", ["SAM", "all"])
def test_bfloat16_equals_that_of_our_trainer(label: str) -> None:
    deep_compare(with_our_trainer(label, precision="amp_bf16"), fit(label, bf16=True))


def test_evaluations_on_the_way_change_nothing() -> None:
    actual = fit("all", eval_dataset=examples(), eval_strategy="steps", eval_steps=2, eval_on_start=True)

    deep_compare(with_our_trainer("all"), actual)


def test_a_run_may_end_in_mid_epoch() -> None:
    trainer = trainer_of("EMA and GradientClipping", max_steps=7)
    trainer.train()
    run = trainer.composer_run

    assert (run.state.timestamp.batch, run.state.timestamp.epoch, run.is_over()) == (7, 1, True)


def test_epochs_may_be_a_fraction() -> None:
    trainer = trainer_of("nothing", num_train_epochs=1.4)
    trainer.train()
    run = trainer.composer_run

    assert (run.state.max_duration, run.is_over()) == ("7ba", True)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(examples())


def test_data_may_have_no_length() -> None:
    net = Net()
    trainer = ComposerTrainer(
        net, arguments(max_steps=7), train_dataset=Stream(), optimizers=sgd(net), algorithms=[EMA(half_life="2ba")]
    )
    trainer.train()
    run = trainer.composer_run

    assert (run.state.timestamp.batch, run.state.timestamp.epoch, run.is_over()) == (7, 1, True)


# ---- events ----


class Recorder(Callback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        self.events.append(event.value)


def test_the_events_come_in_the_order_of_our_trainer() -> None:
    recorder, ours = Recorder(), Recorder()
    with_our_trainer("nothing", callbacks=ours)
    fit("nothing", composer_callbacks=recorder)

    # Our own loop announces the end of the loader as well.
    expected = [
        a
        for a, b in zip(ours.events, [*ours.events[1:], ""], strict=True)
        if (a, b) != ("before_dataloader", "epoch_end")
    ]
    assert expected == recorder.events


def test_the_plan_names_hooks() -> None:
    assert "compute_loss_func" in str(trainer_of("all").explain())


# ---- evaluation ----


class Training(transformers.TrainerCallback):  # type: ignore[misc]
    """Records the last weights of training."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weight = kwargs["model"].layers[0].weight.detach().clone()


def test_averages_are_evaluated_and_predicted() -> None:
    recorder = Training()
    trainer = trainer_of(
        "EMA and GradientClipping", callbacks=[recorder], eval_dataset=examples(), eval_strategy="epoch"
    )
    trainer.train()
    seen, averages = trainer.model.seen, trainer.model.layers[0].weight.detach().clone()
    assert len(seen) == EPOCHS * LENGTH
    assert not torch.equal(seen[-1], recorder.weight)
    assert torch.equal(seen[-1], averages)

    trainer.evaluate()
    trainer.predict(examples())
    assert all(torch.equal(weight, averages) for weight in seen[LENGTH * EPOCHS :])
    assert len(seen) == (EPOCHS + 2) * LENGTH


# ---- checkpoints ----


class Died(Exception):
    """The process is lost."""


class Death(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise Died


# In mid-epoch; after the last step of an epoch, before its end is announced; and after that.
SAVES: dict[str, dict[str, Any]] = {
    "middle": {"save_strategy": "steps", "save_steps": 3},
    "last": {"save_strategy": "steps", "save_steps": LENGTH},
    "epoch": {"save_strategy": "epoch"},
}


def resumed(label: str, folder: Path, **options: Any) -> dict[str, Any]:
    torch.manual_seed(55)
    trainer = trainer_of(label, ComposerTrainer, output_dir=folder, **options)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.zero_()
    trainer.train(resume_from_checkpoint=True)
    return weights_of(trainer)


@pytest.mark.parametrize("when", SAVES)
@pytest.mark.parametrize("label", ["all", "LayerFreezing", "SWA"])
def test_a_killed_run_resumes_exactly(label: str, when: str, tmp_path: Path) -> None:
    """The loader of transformers shuffles."""
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": BATCH // 2}
    expected = fit(label, kind=ComposerTrainer, **options)
    trainer = trainer_of(label, ComposerTrainer, callbacks=[Death(LENGTH + 2)], output_dir=tmp_path, **SAVES[when], **options)
    with pytest.raises(Died):
        trainer.train()

    deep_compare(expected, resumed(label, tmp_path, **options))
