"""Training inside transformers gives the weights of composer's own `Trainer`, bit for bit."""

from __future__ import annotations

import copy
import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import peft
import pytest
import tiny
import torch
import transformers
from accelerate import DistributedType
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from composer import Trainer
from composer.algorithms.ema import EMA
from composer.algorithms.gradient_clipping import GradientClipping
from composer.algorithms.label_smoothing import LabelSmoothing
from composer.algorithms.layer_freezing import LayerFreezing
from composer.algorithms.mixup import MixUp
from composer.algorithms.sam import SAM, SAMOptimizer
from composer.algorithms.swa import SWA
from composer.algorithms.z_loss import ZLoss
from composer.core import (
    REPLACES_OPTIMIZER,
    TRANSFORMS_BATCH,
    Algorithm,
    Callback,
    ConflictError,
    Event,
    Placement,
    State,
)
from composer.hosts.huggingface import ComposerMixin, ComposerTrainer, _settings_of
from composer.loggers import Logger
from composer.loop.refusals import argument_problems
from composer.models import ComposerModel, HuggingFaceModel
from composer.testing import deep_compare, run_on_ranks

LENGTH, BATCH, EPOCHS, SEED = 5, 8, 2, 3
KEYS = {"input_key": "x", "target_key": "labels"}
ALGORITHMS: dict[str, Any] = {
    "nothing": list,
    "SAM": lambda: [SAM(rho=0.05, interval=2)],
    "EMA and GradientClipping": lambda: [EMA(half_life="2ba"), GradientClipping("norm", 0.1)],
    "LayerFreezing": lambda: [LayerFreezing(freeze_start=0.0)],
    "interpolated": lambda: [MixUp(interpolate_loss=True, **KEYS)],
    "SWA": lambda: [SWA(swa_start="0.2dur", swa_end="0.8dur", update_interval="1ba")],
    "all": lambda: [
        MixUp(**KEYS),
        LabelSmoothing(target_key="labels"),
        SAM(),
        EMA(half_life="2ba"),
        GradientClipping("norm", 0.1),
    ],
}


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """Each `train` collects garbage, which takes long with the objects of all imported modules."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


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
    others = {
        name: options.pop(name) for name in ("callbacks", "eval_dataset", "composer_callbacks") if name in options
    }
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


@cache
def with_our_trainer(label: str, float32_outputs: bool = False, **options: Any) -> dict[str, Any]:
    model = OurModel()
    if float32_outputs:
        model.register_forward_hook(lambda module, args, outputs: outputs.float())
    trainer = Trainer(
        model=model,
        train_dataloader=data(),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        algorithms=ALGORITHMS[label](),
        seed=SEED,
        progress_bar=False,
        **{"max_duration": f"{EPOCHS}ep", "device": "cpu", **options},
    )
    trainer.fit()
    return copy.deepcopy(model.layers.state_dict())


# ---- the weights ----


@pytest.mark.parametrize("label", ALGORITHMS)
def test_the_weights_equal_those_of_our_trainer(label: str) -> None:
    deep_compare(with_our_trainer(label), fit(label))


@pytest.mark.parametrize("label", [label for label in ALGORITHMS if label not in ("all", "interpolated")])
def test_the_weights_are_equal_without_a_function_for_the_loss(label: str) -> None:
    deep_compare(with_our_trainer(label), fit(label, split=False))


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("label", ["SAM", "EMA and GradientClipping"])
def test_two_batches_per_step_equal_microbatches(label: str, split: bool) -> None:
    halves = {"per_device_train_batch_size": BATCH // 2, "gradient_accumulation_steps": 2}

    deep_compare(with_our_trainer(label, device_train_microbatch_size=BATCH // 2), fit(label, split=split, **halves))


@pytest.mark.parametrize("label", ["SAM", "all"])
def test_bfloat16_equals_that_of_our_trainer(label: str) -> None:
    deep_compare(with_our_trainer(label, precision="amp_bf16"), fit(label, bf16=True))


def test_an_interpolated_loss_of_bfloat16_equals_that_of_float32_outputs() -> None:
    """transformers returns outputs in float32, so that the gradients of two losses are rounded once, not each."""
    options = {"precision": "amp_bf16"}
    actual = fit("interpolated", bf16=True)

    deep_compare(with_our_trainer("interpolated", float32_outputs=True, **options), actual)
    with pytest.raises(AssertionError):
        deep_compare(with_our_trainer("interpolated", **options), actual)


@pytest.mark.parametrize("label", ["SAM", "all"])
def test_a_compiled_model_has_the_same_weights(label: str) -> None:
    torch.compiler.reset()
    compiled = trainer_of(label, torch_compile=True, torch_compile_backend="eager")
    compiled.train()

    assert isinstance(compiled.model_wrapped, torch._dynamo.OptimizedModule)
    deep_compare(with_our_trainer(label), weights_of(compiled))


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
    with_our_trainer("nothing", callbacks=(ours,))
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
    "after an evaluation": {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3},
    "last": {"save_strategy": "steps", "save_steps": LENGTH},
    "epoch": {"save_strategy": "epoch"},
}


@cache
def uninterrupted(label: str, **options: Any) -> dict[str, Any]:
    return fit(label, kind=ComposerTrainer, **options)


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
    trainer = trainer_of(
        label,
        ComposerTrainer,
        callbacks=[Death(LENGTH + 2)],
        output_dir=tmp_path,
        eval_dataset=examples(),
        **SAVES[when],
        **options,
    )
    with pytest.raises(Died):
        trainer.train()

    deep_compare(uninterrupted(label, **options), resumed(label, tmp_path, **options))


class Kill(Death):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(folder: str) -> None:
    os.chdir(folder)
    trainer_of("all", ComposerTrainer, callbacks=[Kill(LENGTH + 2)], output_dir=folder, **SAVES["middle"]).train()


def test_a_run_whose_process_is_killed_resumes_exactly(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"SIGKILL|-9|died"):
        run_on_ranks(train_until_killed, 1, str(tmp_path), backend=None)

    deep_compare(fit("all", kind=ComposerTrainer), resumed("all", tmp_path))


def test_checkpoints_hold_averages_and_weights_of_training(tmp_path: Path) -> None:
    trainer = trainer_of("EMA and GradientClipping", output_dir=tmp_path, max_steps=4, **SAVES["middle"])
    trainer.train()
    folder = tmp_path / "checkpoint-3"
    averages = load_file(folder / "model.safetensors")
    saved = dict(torch.load(folder / "composer.pt", weights_only=True)["algorithms"])["EMA"]

    assert saved["ema_weights_active"]
    assert not torch.equal(
        saved["ema_model"]["named_parameters_dict"]["network.layers.0.weight"], averages["layers.0.weight"]
    )
    trainer.save_model(str(tmp_path / "model"))
    assert not (tmp_path / "model" / "composer.pt").exists()
    deep_compare(
        load_file(tmp_path / "model" / "model.safetensors"), {f"layers.{k}": v for k, v in weights_of(trainer).items()}
    )


class NotAtTheEnd(transformers.TrainerCallback):  # type: ignore[misc]
    """Saves nothing after the last step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save &= state.global_step < state.max_steps


def test_the_best_averages_are_loaded_at_the_end(tmp_path: Path) -> None:
    trainer = trainer_of(
        "EMA and GradientClipping",
        callbacks=[NotAtTheEnd()],
        output_dir=tmp_path,
        eval_dataset=examples(),
        max_steps=LENGTH + 2,  # the last averages are not in the model yet
        eval_strategy="steps",
        eval_steps=LENGTH,
        load_best_model_at_end=True,
        metric_for_best_model="worst",
        greater_is_better=False,
        **SAVES["last"],
    )
    trainer.compute_metrics = lambda prediction: {"worst": trainer.state.global_step}  # the first is the best
    trainer.train()

    assert trainer.state.best_global_step == LENGTH
    saved = load_file(tmp_path / f"checkpoint-{LENGTH}" / "model.safetensors")
    deep_compare(saved, {f"layers.{name}": value for name, value in weights_of(trainer).items()})
    torch.testing.assert_close(trainer.model.seen[LENGTH - 1], saved["layers.0.weight"], rtol=0, atol=0)


def test_a_checkpoint_without_a_state_of_the_run_is_told(tmp_path: Path) -> None:
    trainer_of("nothing", output_dir=tmp_path, save_only_model=True, **SAVES["epoch"]).train()
    assert not list(tmp_path.glob("*/composer.pt"))

    with pytest.warns(UserWarning, match=r"has no composer\.pt, so the algorithms start without their saved state"):
        trainer_of("nothing", output_dir=tmp_path).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{LENGTH}"))


# ---- several calls of train ----


@pytest.mark.parametrize("error", [Died, KeyboardInterrupt])
@pytest.mark.parametrize("hook", ["on_pre_optimizer_step", "on_step_begin", "on_prediction_step"])
def test_an_interrupted_run_can_be_continued(hook: str, error: type[BaseException], tmp_path: Path) -> None:
    class Failure(Training):
        is_due = True

    def fail(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if failure.is_due and state.global_step > LENGTH:
            raise error

    failure = Failure()
    setattr(failure, hook, fail)
    options = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 2}
    trainer = trainer_of("all", callbacks=[failure], output_dir=tmp_path, eval_dataset=examples(), **options)
    with pytest.raises(error):
        trainer.train()
    run = trainer.composer_run

    assert not torch.equal(run.state_dict()["random"]["cpu"], torch.get_rng_state())
    assert torch.equal(failure.weight, trainer.model.layers[0].weight)
    assert (run.state.timestamp.epoch, run.state.timestamp.batch_in_epoch > 0) == (1, True)

    failure.is_due = False
    trainer.train()
    assert (run.state.timestamp.epoch, run.is_over()) == (2 + EPOCHS, True)
    assert run.state.algorithms[3].ema_weights_active


def test_another_train_continues_the_run() -> None:
    """Of one run of twice the length, and of two: the same steps."""
    once = trainer_of("SAM", num_train_epochs=2 * EPOCHS)
    once.train()
    twice = trainer_of("SAM")
    twice.train()
    twice.train()
    run = twice.composer_run

    deep_compare(weights_of(once), weights_of(twice))
    assert (run.state.timestamp.epoch, run.state.max_duration, run.is_over()) == (2 * EPOCHS, f"{2 * EPOCHS}ep", True)


def test_a_later_train_resumes_exactly(tmp_path: Path) -> None:
    whole = trainer_of("all")
    whole.train()
    whole.train()
    killed = trainer_of("all", output_dir=tmp_path, callbacks=[Death(-1)], **SAVES["middle"])
    killed.train()
    killed.callback_handler.callbacks[-2].step = LENGTH + 2
    with pytest.raises(Died):
        killed.train()
    other = trainer_of("all", output_dir=tmp_path)
    other.train()
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))

    deep_compare(weights_of(whole), weights_of(other))
    assert other.composer_run.state.max_duration == f"{2 * EPOCHS}ep"


def test_each_model_of_a_function_has_a_run_of_its_own() -> None:
    trainer = InOrder(
        model_init=Net,
        args=arguments(),
        train_dataset=examples(),
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}),
        algorithms=ALGORITHMS["all"](),
        compute_loss_func=criterion,
    )
    weights, runs = [], []
    for _ in range(2):
        trainer.train()
        weights.append(weights_of(trainer))
        runs.append(trainer.composer_run)

    assert runs[0] is not runs[1]
    assert [run.state.timestamp.epoch for run in runs] == [EPOCHS, EPOCHS]
    deep_compare(weights[0], weights[1])


def test_a_model_of_a_function_resumes_exactly(tmp_path: Path) -> None:
    def make(**options: Any) -> Any:
        return InOrder(
            model_init=Net,
            args=arguments(tmp_path, **options),
            optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}),
            algorithms=ALGORITHMS["all"](),
            compute_loss_func=criterion,
        )

    whole, other = make(save_strategy="steps", save_steps=3), make()
    whole.train()
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))

    deep_compare(weights_of(whole), weights_of(other))


def test_changed_arguments_are_applied_and_checked() -> None:
    trainer = trainer_of("all")
    trainer.train()
    trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps = BATCH // 2, 2
    trainer.train()
    run = trainer.composer_run
    assert (run.accumulate, run.state.timestamp.batch, run.state.dataloader_len) == (2, 2 * EPOCHS * LENGTH, LENGTH)

    trainer.args.max_grad_norm = 1.0
    with pytest.raises(ConflictError, match=r"`max_grad_norm`, which is 1\.0"):
        trainer.train()


def test_training_may_stop_within_a_step() -> None:
    class Stop(transformers.TrainerCallback):  # type: ignore[misc]
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 2

    halves = {"per_device_train_batch_size": BATCH // 2, "gradient_accumulation_steps": 2}
    trainer = trainer_of("SAM", callbacks=[Stop()], **halves)
    trainer.train()

    assert (trainer.composer_run.state.timestamp.batch, trainer.composer_run.in_epoch) == (2, False)


# ---- models of transformers ----


def texts(rows: int = 16) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, 60, (rows, 10), generator=generator)
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row.clone()} for row in ids]


def test_a_decoder_has_the_weights_of_our_trainer() -> None:
    def algorithms() -> list[Any]:
        return [EMA(half_life="2ba"), ZLoss(0.01)]

    model, ours = tiny.gpt2(), tiny.gpt2()
    hosted = InTexts(model, arguments(), optimizers=sgd(model), algorithms=algorithms())
    hosted.model_accepts_loss_kwargs = False  # otherwise, transformers counts a token per row that nothing predicts
    hosted.train()
    trainer = Trainer(
        model=HuggingFaceModel(ours, tiny.gpt2_tokenizer(), use_logits=True),
        train_dataloader=hosted.get_train_dataloader(),
        max_duration=f"{EPOCHS}ep",
        optimizers=sgd(ours)[0],
        algorithms=algorithms(),
        seed=SEED,
        progress_bar=False,
        device="cpu",
    )
    trainer.fit()

    deep_compare(model.state_dict(), ours.state_dict())


class InTexts(InOrder):
    def get_train_dataloader(self) -> Any:
        return DataLoader(texts(), batch_size=BATCH, generator=torch.Generator())  # type: ignore[arg-type]


def test_changed_lengths_are_counted() -> None:
    """The loss is divided by the number of tokens of the batch as the algorithm has changed it."""
    counts: list[int] = []

    class Counting(ComposerMixin, transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            counts.append(int(num_items_in_batch))
            assert inputs["input_ids"].shape[1] == 4
            return super().training_step(model, inputs, num_items_in_batch)

    class Shortening(Algorithm):
        events = frozenset({Event.AFTER_DATALOADER})

        def apply(self, event: Event, state: State, logger: Logger) -> None:
            state.batch = {name: value[:, :4] for name, value in state.batch.items()}

    model = tiny.gpt2()
    short = [{name: value[:4] for name, value in row.items()} for row in texts()]
    Counting(model, arguments(num_train_epochs=1), train_dataset=short).train()
    Counting(model, arguments(num_train_epochs=1), train_dataset=texts(), algorithms=Shortening()).train()
    assert counts[:2] == counts[2:]


def test_generation_uses_averages(tmp_path: Path) -> None:
    model = tiny.t5()

    class Generating(ComposerMixin, transformers.Seq2SeqTrainer):
        pass

    args = transformers.Seq2SeqTrainingArguments(
        str(tmp_path),
        predict_with_generate=True,
        generation_max_length=4,
        max_steps=3,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="no",
        learning_rate=0.1,
    )
    seen = []
    generate = model.generate

    def recorded(*inputs: Any, **options: Any) -> Any:
        seen.append(model.shared.weight.detach().clone())
        return generate(*inputs, **options)

    model.generate = recorded
    rows = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in texts(8)]
    trainer = Generating(
        model,
        args,
        train_dataset=rows,
        eval_dataset=rows,
        algorithms=[EMA(half_life="2ba")],
        compute_metrics=lambda prediction: {},
    )
    trainer.train()
    assert len(seen) == 3
    assert torch.equal(seen[-1], model.shared.weight)  # the averages, after training


def test_an_image_classifier_of_transformers() -> None:
    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        image_size=8,
        patch_size=4,
        num_labels=4,
    )
    model = transformers.ViTForImageClassification(config)
    rows = [{"pixel_values": torch.randn(3, 8, 8), "labels": torch.tensor(i % 4)} for i in range(8)]
    trainer = ComposerTrainer(
        model,
        arguments(max_steps=2),
        train_dataset=rows,
        compute_loss_func=criterion,
        algorithms=[MixUp(), LabelSmoothing()],
    )
    trainer.train()
    assert trainer.composer_run.state.batch["labels"].is_floating_point()
    assert {"batch": "inputs: 'pixel_values', targets: 'labels'"} == trainer.explain().notes


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_resumes_exactly(tmp_path: Path) -> None:
    def make(folder: Path, **options: Any) -> Any:
        model = peft.get_peft_model(
            tiny.gpt2(), peft.LoraConfig(task_type="CAUSAL_LM", r=2, fan_in_fan_out=True, target_modules=["c_attn"])
        )
        return ComposerTrainer(
            model,
            arguments(folder, learning_rate=0.1, **options),
            train_dataset=texts(40),
            algorithms=[EMA(half_life="2ba"), SAM()],
        )

    whole = make(tmp_path / "a")
    whole.train()
    make(tmp_path / "b", save_strategy="steps", save_steps=3, max_steps=-1).train()
    torch.manual_seed(9)
    other = make(tmp_path / "b")
    other.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-3"))

    deep_compare(dict(whole.model.named_parameters()), dict(other.model.named_parameters()))


# ---- several processes ----


ON_TWO_RANKS = ("SAM", "LayerFreezing", "interpolated", "all")


def synchronized(algorithm: Algorithm) -> Algorithm:
    """Return `SAM` as it is in transformers, which exchanges the gradients of both passes."""
    return SAM(interval=algorithm.interval, sync_ascent=True) if isinstance(algorithm, SAM) else algorithm


def on_two_ranks(folder: str) -> list[str]:
    """Return the labels of the runs that do not end like those of our trainer."""
    os.chdir(folder)
    different: list[str] = []
    sampler: Any = DistributedSampler(examples(), shuffle=False)  # type: ignore[arg-type]
    own = torch.Generator()  # otherwise, a loader draws random numbers of training
    mine = DataLoader(examples(), batch_size=BATCH // 2, sampler=sampler, generator=own)  # type: ignore[arg-type]
    for label in ON_TWO_RANKS:
        ours, net = OurModel(), Net()
        trainer = Trainer(
            model=ours,
            train_dataloader=mine,
            max_duration=f"{EPOCHS}ep",
            optimizers=sgd(ours)[0],
            algorithms=[synchronized(each) for each in ALGORITHMS[label]()],
            seed=SEED,
            progress_bar=False,
            device="cpu",
        )
        trainer.fit()
        hosted = InOrder(
            net,
            arguments(average_tokens_across_devices=False),
            optimizers=sgd(net),
            algorithms=ALGORITHMS[label](),
            compute_loss_func=criterion,
        )
        hosted.get_train_dataloader = lambda: mine
        hosted.train()
        try:
            deep_compare(ours.layers.state_dict(), net.layers.state_dict())
        except AssertionError as error:
            different.append(f"{label}: {error}")
    return different


def test_two_ranks_have_the_weights_of_our_trainer(tmp_path: Path) -> None:
    assert run_on_ranks(on_two_ranks, 2, str(tmp_path), timeout=180) == [[], []]


@contextmanager
def sharding(kind: str = "FULL_STATE_DICT") -> Iterator[None]:
    """Shard models in the body: Accelerate uses FSDP2 on GPUs only, and is told that it does."""
    create = transformers.Trainer.create_accelerator_and_postprocess
    states: tuple[Any, ...] = (AcceleratorState, PartialState)

    def create_sharded(self: Any) -> None:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        create(self)
        AcceleratorState._shared_state["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="size_based_wrap",
            min_num_params=0,
            reshard_after_forward=True,
            state_dict_type=kind,
        )
        for state in states:
            state._shared_state["distributed_type"] = DistributedType.FSDP
        self.is_fsdp_enabled = True

    with mock.patch.object(transformers.Trainer, "create_accelerator_and_postprocess", create_sharded):
        yield
    for state in states:
        state._shared_state["distributed_type"] = DistributedType.MULTI_CPU
    AcceleratorState._reset_state()
    GradientState._reset_state()


def on_a_rank(label: str, folder: str, **options: Any) -> Any:
    """A trainer that reads its part of the batches."""
    sampler: Any = DistributedSampler(examples(), shuffle=False)  # type: ignore[arg-type]
    size = BATCH // 2 // options.get("gradient_accumulation_steps", 1)
    defaults = {"average_tokens_across_devices": False, "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    trainer: Any = InOrder(
        Net(),
        arguments(folder, **defaults, **options),
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        algorithms=ALGORITHMS[label](),
        compute_loss_func=criterion,
        eval_dataset=examples(),
    )
    own = torch.Generator()
    trainer.get_train_dataloader = lambda: DataLoader(examples(), batch_size=size, sampler=sampler, generator=own)  # type: ignore[arg-type]
    return trainer


def whole_weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {
        name: (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().clone()
        for name, weight in trainer.model.named_parameters()
    }


def unsharded_and_sharded() -> dict[str, Any]:
    """Of each run, the weights without and with sharding."""
    found: dict[str, Any] = {}
    for label, accumulate in [*((label, 1) for label in ON_TWO_RANKS), ("all", 2)]:
        trainers = []
        for context in (nullcontext(), sharding()):
            with context:
                trainer = on_a_rank(label, "out", gradient_accumulation_steps=accumulate, eval_strategy="epoch")
                trainer.train()
                trainers.append(trainer)
        assert isinstance(trainers[1].model, FSDPModule)
        found[f"{label}, {accumulate}"] = tuple(map(whole_weights, trainers))
    return found


def whole_and_resumed(folder: str) -> dict[str, Any]:
    """Of each run, the weights at the end, and those of a resumed run."""
    found: dict[str, Any] = {}
    for kind, labels in (
        ("FULL_STATE_DICT", ("SAM", "LayerFreezing")),
        ("SHARDED_STATE_DICT", ("all",)),
    ):
        for label in labels:
            with sharding(kind):
                at = f"{folder}/{kind} {label}"
                whole = on_a_rank(label, at, save_strategy="steps", save_steps=3)
                whole.train()
                resumed = on_a_rank(label, f"{at} again", save_strategy="no")
                for weight in resumed.model.parameters():
                    torch.nn.init.zeros_(weight)
                torch.manual_seed(9)
                resumed.train(resume_from_checkpoint=f"{at}/checkpoint-6")
                found[f"{kind}, {label}"] = whole_weights(whole), whole_weights(resumed)
    return found


def continued_after_a_failure() -> list[dict[str, torch.Tensor]]:
    """The averages of a run that fails and is continued, and those in its file."""

    class Fails(transformers.TrainerCallback):  # type: ignore[misc]
        """Fails once."""

        has_failed = False

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3 and not self.has_failed:
                self.has_failed = True
                raise Died

    with sharding():
        trainer = on_a_rank("EMA and GradientClipping", "out")
        trainer.add_callback(Fails())
        with pytest.raises(Died):
            trainer.train()
        trainer.train()
        assert trainer.composer_run.state.timestamp.batch == 3 + EPOCHS * LENGTH
        trainer.save_model("saved")
        torch.distributed.barrier()
        return [whole_weights(trainer), load_file("saved/model.safetensors")]


def sharded_on_two_ranks(folder: str) -> tuple[Any, Any, Any]:
    """All of these, because it takes long to start the ranks."""
    os.chdir(folder)
    return unsharded_and_sharded(), whole_and_resumed(folder), continued_after_a_failure()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, Any, Any]]:
    """The results of `sharded_on_two_ranks`, by rank."""
    if not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("`fully_shard` of this torch needs a GPU")
    return run_on_ranks(sharded_on_two_ranks, 2, str(tmp_path_factory.mktemp("sharded")), timeout=180)


def test_two_ranks_that_share_the_weights_have_those_of_two_that_do_not(sharded: Any) -> None:
    for found, _, _ in sharded:
        assert len(ON_TWO_RANKS) + 1 == len(found)
        for label, (whole, parts) in found.items():
            # Norms of shards are summed in another order.
            atol = 1e-7 if "all" in label else 0
            torch.testing.assert_close(parts, whole, rtol=0, atol=atol, msg=lambda text, at=label: f"{at}: {text}")


def test_two_ranks_that_share_the_weights_resume_exactly(sharded: Any) -> None:
    for _, found, _ in sharded:
        for whole, resumed in found.values():
            deep_compare(whole, resumed)


def test_a_sharded_run_goes_on_after_a_failure_and_saves_averages(sharded: Any) -> None:
    for _, _, (weights, saved) in sharded:
        deep_compare(weights, {name: saved[name] for name in weights})


# ---- what is refused ----


class Replacing(Algorithm):
    """Replaces the optimizer."""

    events = frozenset({Event.INIT})
    placement = Placement(provides={REPLACES_OPTIMIZER})

    def apply(self, event: Event, state: State, logger: Logger) -> None: ...


class Evaluating(Replacing):
    """Acts on batches of an evaluation."""

    events = frozenset({Event.EVAL_BATCH_START})
    placement = Placement()


def refused(algorithms: Any, split: bool = True, kind: Any = InOrder, **options: Any) -> None:
    kind(Net(), arguments(**options), compute_loss_func=criterion if split else None, algorithms=algorithms)


def test_what_transformers_cannot_do_is_refused() -> None:
    with pytest.raises(ConflictError, match=r"`MixUp` acts at BEFORE_LOSS.*Pass `compute_loss_func="):
        refused(MixUp(**KEYS), split=False)
    with pytest.raises(ConflictError, match=r"`Replacing` replaces optimizer.*pass it as `optimizers="):
        refused(Replacing())
    with pytest.raises(ConflictError, match=r"`Evaluating` acts at EVAL_BATCH_START.*runs the model itself"):
        refused(Evaluating())
    with pytest.raises(
        ConflictError, match=r"`GradientClipping` clips gradients.*`max_grad_norm`, which is 1\.0, clips"
    ):
        refused(GradientClipping("norm", 1.0), max_grad_norm=1.0)
    with pytest.raises(ConflictError, match=r"`LabelSmoothing` smooths targets.*`label_smoothing_factor` smooths as"):
        ComposerTrainer(
            tiny.bert(),
            arguments(label_smoothing_factor=0.1),
            compute_loss_func=criterion,
            algorithms=LabelSmoothing(target_key="labels"),
        )


def test_inputs_without_a_usual_name_are_asked_for_before_the_first_forward_pass() -> None:
    rows = [{**row, "series": row["x"]} for row in data()]
    for row in rows:
        del row["x"]
    with pytest.raises(KeyError, match=r"'labels', 'series', and has no 0. Pass the keys to use, for example"):
        ComposerTrainer(Net(), arguments(remove_unused_columns=False), train_dataset=rows, algorithms=Scaling()).train()


def test_an_error_of_the_first_step_says_what_the_step_saw(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{**row, "labels": row["labels"] + 99} for row in data().dataset]
    with pytest.raises(IndexError) as caught:
        ComposerTrainer(Net(), arguments(), train_dataset=rows, algorithms=[]).train()
    text = "\n".join(getattr(caught.value, "__notes__", [])) or caplog.text
    assert 1 == text.count("The first step saw:\n  batch['x']: float32")


class Scaling(Algorithm):
    """Doubles the inputs."""

    events = frozenset({Event.AFTER_DATALOADER})
    placement = Placement(provides={TRANSFORMS_BATCH})
    input_key = 0

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        state.batch_set_item(self.input_key, 2 * state.batch_get_item(self.input_key))


def test_a_trainer_with_a_loss_of_its_own_may_have_other_batches() -> None:
    class OfTuples(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            x, labels = inputs
            loss, outputs = model(x, labels).values()
            return (loss, outputs) if return_outputs else loss

        def get_train_dataloader(self) -> Any:
            return [(row["x"], row["labels"]) for row in data()]

    class Composed(ComposerMixin, OfTuples):
        pass

    trainer = Composed(Net(), arguments(), algorithms=Scaling())
    trainer.train()
    assert trainer.composer_run.state.timestamp.batch == EPOCHS * LENGTH


def test_terms_of_a_loss_are_refused_where_losses_are_added_up() -> None:
    class Sums(ComposerTrainer):
        pass

    with pytest.raises(ConflictError, match=r"`ZLoss` adds loss.*set `loss_is_scaled_for_ga = False` in your class"):
        refused(ZLoss(), kind=Sums, gradient_accumulation_steps=2)
    refused(ZLoss(), gradient_accumulation_steps=2)


def test_a_search_for_the_batch_size_is_refused() -> None:
    with pytest.raises(ValueError, match="`auto_find_batch_size` must be False, got True"):
        refused([], auto_find_batch_size=True)


def problems_of(trainer: Any, *algorithms: Algorithm) -> str:
    given = _settings_of(trainer, algorithms)
    return "\n".join(map(str, [*given.pop("problems"), *argument_problems(algorithms, **given)]))


def test_models_that_are_not_in_one_piece_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of("nothing")
    with monkeypatch.context() as patch:
        patch.setattr(trainer.accelerator.state, "distributed_type", DistributedType.DEEPSPEED)
        assert "or sharded by FSDP2, got DEEPSPEED, which steps or changes parameters itself" in problems_of(trainer)
        patch.setattr(trainer.accelerator.state, "distributed_type", DistributedType.FSDP)
        patch.setattr(type(trainer.accelerator), "is_fsdp2", property(lambda self: False))
        assert "must not be sharded by FSDP1" in problems_of(trainer)
    assert not problems_of(trainer)
    monkeypatch.setattr(trainer, "is_distributed_loading_by_transformers", True, raising=False)
    monkeypatch.setattr(trainer, "is_model_parallel", True)
    assert "sharded when it is loaded" in problems_of(trainer)
    assert "one device, got several" in problems_of(trainer)


def test_a_scaler_cannot_repeat_steps() -> None:
    """transformers has no fp16 on CPU; the arguments are those of another device."""
    trainer = trainer_of("nothing")
    trainer.args.fp16 = True
    found = problems_of(trainer, SAM(), GradientClipping("norm", 1.0))

    assert "`SAM` wraps optimizer" in found
    assert "`GradientClipping` clips gradients" in found
    assert 2 == found.count("bf16=True")


def test_unused_parameters_must_be_expected() -> None:
    trainer = trainer_of("nothing", ddp_find_unused_parameters=False)
    assert not problems_of(trainer, LayerFreezing())
    trainer.args = SimpleNamespace(**{**vars(trainer.args), "world_size": 2, "n_gpu": 1})
    assert "`ddp_find_unused_parameters` must not be False" in problems_of(trainer, LayerFreezing())


def test_everything_that_is_wrong_is_told_at_once() -> None:
    wrong: Any = [MixUp(**KEYS), GradientClipping("norm", 1.0), Replacing(), EMA]
    with pytest.raises(ConflictError, match="4 problems") as caught:
        refused(wrong, False, max_grad_norm=1.0)
    for part in ("`MixUp` acts at BEFORE_LOSS", "`max_grad_norm`, which is 1.0", "`Replacing` replaces", "`EMA(...)`"):
        assert part in str(caught.value)


def test_a_loss_that_is_never_called_is_told() -> None:
    class Hiding(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            return model(**inputs)["loss"]

    class Both(ComposerMixin, Hiding):
        pass

    trainer = Both(
        Net(), arguments(), train_dataset=examples(), compute_loss_func=criterion, algorithms=ALGORITHMS["all"]()
    )
    with pytest.raises(
        RuntimeError, match=r"loss of Both was computed without the algorithms.*call `compute_loss_func`"
    ):
        trainer.train()


def test_a_method_that_hides_that_of_the_mixin_is_told() -> None:
    class OwnLoss(InOrder):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            return model(**inputs)["loss"]

    class OwnStep(InOrder):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            return loss.detach()

    kinds: tuple[Any, ...] = (OwnLoss, OwnStep)
    for kind in kinds:
        trainer = kind(Net(), arguments(), train_dataset=examples(), algorithms=EMA())
        with pytest.raises(RuntimeError, match=rf"loss of {kind.__name__} was .*hides.*\(ComposerMixin, MyTrainer\)"):
            trainer.train()


def test_a_checkpoint_of_transformers_alone_is_continued(tmp_path: Path) -> None:
    steps = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    transformers.Trainer(Net(), arguments(tmp_path, **steps), train_dataset=examples()).train()
    trainer = ComposerTrainer(Net(), arguments(tmp_path, **steps), train_dataset=examples(), algorithms=EMA())
    with pytest.warns(UserWarning, match=r"has no composer\.pt"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))

    state = trainer.composer_run.state
    assert state.timestamp.batch == state.max_duration == "2ba"


def test_methods_may_be_called_outside_training() -> None:
    trainer = trainer_of("all", eval_dataset=examples())
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.create_optimizer()
    trainer.create_optimizer()  # wraps once
    batch = next(iter(data()))
    loss = trainer.compute_loss(trainer.model, dict(batch))

    assert isinstance(trainer.optimizer, SAMOptimizer)
    assert isinstance(trainer.optimizer.base_optimizer, torch.optim.SGD)
    assert loss.isfinite()


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("label", ALGORITHMS)
def test_the_weights_on_a_gpu_equal_those_of_our_trainer(label: str) -> None:
    expected = with_our_trainer(label, device="gpu", precision="fp32")

    deep_compare(expected, fit(label, use_cpu=False))
