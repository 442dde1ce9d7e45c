"""Training in the engines of PyTorch-Ignite gives the weights of composer's own `Trainer`, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Accuracy
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from composer.algorithms.ema import EMA
from composer.algorithms.gradient_clipping import GradientClipping
from composer.algorithms.label_smoothing import LabelSmoothing
from composer.algorithms.layer_freezing import LayerFreezing
from composer.algorithms.mixup import MixUp
from composer.algorithms.muon import Muon
from composer.algorithms.sam import SAM
from composer.core import (
    CHANGES_BATCH_SIZE,
    DISPLACES_WEIGHTS,
    Algorithm,
    Callback,
    ConflictError,
    Event,
    Placement,
    State,
)
from composer.hosts.ignite import IgniteRun
from composer.loggers import Logger
from composer.models import ModuleWithLoss
from composer.testing import HostProblem, deep_compare

LENGTH, BATCH, EPOCHS, SEED = HostProblem.length, HostProblem.batch_size, HostProblem.epochs, HostProblem.seed
layers, criterion, data, sgd = HostProblem.network, HostProblem.loss, HostProblem.loader, HostProblem.optimizer
ALGORITHMS: dict[str, Any] = {
    "nothing": list,
    "SAM": lambda: [SAM(rho=0.05, interval=2)],
    "EMA and GradientClipping": lambda: [EMA(half_life="2ba"), GradientClipping("norm", 0.1)],
    "LayerFreezing": lambda: [LayerFreezing(freeze_start=0.0)],
    "Muon": lambda: [Muon(lr=0.01)],
    "all": lambda: [MixUp(), LabelSmoothing(), SAM(), EMA(half_life="2ba"), GradientClipping("norm", 0.1)],
}


def with_our_trainer(label: str, **options: Any) -> dict[str, Any]:
    return HostProblem.train(ALGORITHMS[label](), **options)


class Died(Exception):
    """The process is lost."""


class Training:
    """Engines of a user, with an evaluation after each epoch."""

    def __init__(self, algorithms: Any, trainer: dict[str, Any] | None = None, **options: Any) -> None:
        device = options.pop("device", None)
        self.layers = layers().to(device)
        settings: dict[str, Any] = {"max_duration": f"{EPOCHS}ep", "loss": criterion, "seed": SEED, **options}
        self.run = IgniteRun(self.layers, algorithms, optimizer=sgd(self.layers), **settings)
        self.trainer = self.run.create_supervised_trainer(**{"device": device, **(trainer or {})})
        self.evaluator = self.run.create_supervised_evaluator(metrics={"accuracy": Accuracy()}, device=device)
        self.seen: list[torch.Tensor] = []
        self.training: list[torch.Tensor] = []

        @self.trainer.on(Events.EPOCH_COMPLETED)
        def evaluate() -> None:
            torch.rand(3)  # drawn by other code
            self.training.append(self.layers[0].weight.detach().clone())
            self.evaluator.run(data())

        @self.evaluator.on(Events.ITERATION_COMPLETED(once=1))
        def see() -> None:
            self.seen.append(self.layers[0].weight.detach().clone())

    def train(self, batch_size: int = BATCH, **options: Any) -> dict[str, Any]:
        self.trainer.run(data(batch_size), **{"max_epochs": EPOCHS, **options})
        return copy.deepcopy(self.layers.state_dict())

    def save_at(self, event: Any, folder: Path, kill: bool) -> None:
        saver: Any = DiskSaver(str(folder), require_empty=False)
        self.trainer.add_event_handler(
            event, Checkpoint(self.run.to_save(self.trainer), saver, filename_pattern="a.pt")
        )
        if kill:
            self.trainer.add_event_handler(event, die)

    def load(self, folder: Path, weights_only: bool = True) -> None:
        with torch.no_grad():
            for parameter in self.layers.parameters():
                parameter.zero_()
        torch.manual_seed(55)
        saved = torch.load(folder / "a.pt", weights_only=weights_only)
        Checkpoint.load_objects(self.run.to_save(self.trainer), saved)


def die() -> None:
    raise Died


# ---- the weights ----


@pytest.mark.parametrize("label", ALGORITHMS)
def test_the_weights_equal_those_of_our_trainer(label: str) -> None:
    deep_compare(with_our_trainer(label), Training(ALGORITHMS[label]()).train())


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_compiled_model_has_the_same_weights(is_wrapped: bool) -> None:
    """Given to the run, or afterwards to the trainer."""
    torch.compiler.reset()
    net = layers()
    compiled: Any = torch.compile(net, backend="eager")
    run = IgniteRun(
        net if is_wrapped else compiled,
        ALGORITHMS["all"](),
        optimizer=sgd(net),
        loss=criterion,
        max_duration=f"{EPOCHS}ep",
        seed=SEED,
    )
    run.create_supervised_trainer(compiled if is_wrapped else None).run(data(), max_epochs=EPOCHS)

    deep_compare(with_our_trainer("all"), copy.deepcopy(net.state_dict()))


def test_a_model_of_composer_needs_no_loss() -> None:
    model = ModuleWithLoss(layers(), cross_entropy)
    run = IgniteRun(
        model, ALGORITHMS["all"](), optimizer=sgd(model), max_duration=f"{EPOCHS}ep", seed=SEED, precision="fp32"
    )
    run.create_supervised_trainer(output_transform=lambda x, y, y_pred, loss: None).run(data(), max_epochs=EPOCHS)

    deep_compare(with_our_trainer("all"), copy.deepcopy(model.module.state_dict()))


@pytest.mark.parametrize("label", ["SAM", "EMA and GradientClipping", "Muon"])
def test_two_batches_per_step_equal_microbatches(label: str) -> None:
    expected = with_our_trainer(label, device_train_microbatch_size=BATCH // 2)
    training = Training(ALGORITHMS[label](), {"gradient_accumulation_steps": 2})

    deep_compare(expected, training.train(BATCH // 2))


@pytest.mark.parametrize("label", ["SAM", "all"])
def test_bfloat16_equals_that_of_our_trainer(label: str) -> None:
    training = Training(ALGORITHMS[label](), precision="amp_bf16")

    deep_compare(with_our_trainer(label, precision="amp_bf16"), training.train())


def test_checkpoints_on_the_way_change_nothing(tmp_path: Path) -> None:
    training = Training(ALGORITHMS["all"]())
    training.save_at(Events.ITERATION_COMPLETED(every=2), tmp_path, kill=False)

    deep_compare(with_our_trainer("all"), training.train())


def test_a_run_may_end_in_mid_epoch() -> None:
    training = Training(ALGORITHMS["EMA and GradientClipping"](), max_duration="7ba")
    training.train(max_epochs=4)
    now = training.run.run.state.timestamp

    assert (now.batch, now.epoch, training.run.run.is_over(), training.trainer.state.iteration) == (7, 1, True, 7)


def test_a_run_may_end_with_an_epoch_before_the_trainer_does() -> None:
    training = Training([], max_duration=f"{LENGTH}ba")
    training.train(max_epochs=4)

    assert (training.trainer.state.epoch, training.run.run.state.timestamp.epoch) == (1, 1)


def test_the_outputs_of_the_trainer_are_those_of_ignite() -> None:
    kept: list[Any] = []
    options = {"output_transform": lambda *parts: kept.append(parts), "device": "cpu", "deterministic": True}
    training = Training([], options)
    training.train(max_epochs=EPOCHS)
    x, y, y_pred, loss = kept[0]

    assert (x.shape, y.shape, y_pred.shape, loss.shape) == ((BATCH, 6), (BATCH,), (BATCH, 4), ())


# ---- events ----


class Recorder(Callback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        self.events.append(event.value)


def test_the_events_come_in_the_order_of_our_trainer() -> None:
    recorder, ours = Recorder(), Recorder()
    with_our_trainer("nothing", callbacks=ours)
    Training([], callbacks=recorder).train()

    # Our own loop announces the end of the loader as well.
    expected = [
        a
        for a, b in zip(ours.events, [*ours.events[1:], ""], strict=True)
        if (a, b) != ("before_dataloader", "epoch_end")
    ]
    assert expected == [name for name in recorder.events if not name.startswith("eval")]


def test_averages_are_evaluated_and_left_in_the_model() -> None:
    training = Training(ALGORITHMS["EMA and GradientClipping"]())
    final = training.train()

    assert len(training.seen) == EPOCHS
    assert not torch.equal(training.seen[0], training.training[0])
    assert torch.equal(training.seen[-1], final["0.weight"])
    assert 0 <= training.evaluator.state.metrics["accuracy"] <= 1


def test_an_engine_of_ones_own_evaluates_averages() -> None:
    training, seen = Training(ALGORITHMS["EMA and GradientClipping"]()), []
    evaluator = Engine(lambda engine, batch: seen.append(training.layers[0].weight.detach().clone()))
    training.run.attach_evaluator(evaluator, "own")
    training.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda: evaluator.run(data()))
    final = training.train()

    assert len(seen) == LENGTH
    deep_compare(with_our_trainer("EMA and GradientClipping"), final)


def test_the_plan_names_what_announces_events() -> None:
    assert "from model_fn" in str(Training(ALGORITHMS["all"]()).run.explain())


# ---- checkpoints ----

# In an epoch; after the last step of an epoch, before its end; after that.
SAVES: dict[str, Any] = {
    "batch": Events.ITERATION_COMPLETED(once=LENGTH + 2),
    "last batch": Events.ITERATION_COMPLETED(once=LENGTH),
    "epoch": Events.EPOCH_COMPLETED(once=1),
}


@pytest.mark.parametrize("when", SAVES)
@pytest.mark.parametrize("label", ["all", "LayerFreezing", "Muon"])
def test_a_killed_run_resumes_exactly(label: str, when: str, tmp_path: Path) -> None:
    training = Training(ALGORITHMS[label]())
    training.save_at(SAVES[when], tmp_path, kill=True)
    with pytest.raises(Died):
        training.train()

    training = Training(ALGORITHMS[label]())
    training.load(tmp_path)
    deep_compare(with_our_trainer(label), training.train())


def test_a_killed_run_with_two_batches_per_step_resumes_exactly(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2}
    expected = Training(ALGORITHMS["all"](), options).train(BATCH // 2)
    training = Training(ALGORITHMS["all"](), options)
    training.save_at(Events.ITERATION_COMPLETED(once=2 * LENGTH + 4), tmp_path, kill=True)
    with pytest.raises(Died):
        training.train(BATCH // 2)
    training = Training(ALGORITHMS["all"](), options)
    training.load(tmp_path)

    deep_compare(expected, training.train(BATCH // 2))


def test_a_killed_run_of_a_deterministic_engine_resumes_exactly(tmp_path: Path) -> None:
    expected = Training(ALGORITHMS["all"](), {"deterministic": True}).train()
    training = Training(ALGORITHMS["all"](), {"deterministic": True})
    training.save_at(SAVES["batch"], tmp_path, kill=True)
    with pytest.raises(Died):
        training.train()
    training = Training(ALGORITHMS["all"](), {"deterministic": True})
    training.load(tmp_path, weights_only=False)  # Ignite saves random states of numpy

    deep_compare(expected, training.train())


def test_samplers_are_told_the_epoch(tmp_path: Path) -> None:
    def loader() -> Any:
        dataset = data().dataset
        return DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset, num_replicas=1, rank=0, seed=7))

    kept: list[Any] = []
    training = Training([], {"output_transform": lambda x, y, y_pred, loss: kept.append(y)})
    training.trainer.run(loader(), max_epochs=EPOCHS)
    expected, batches = [], loader()
    for epoch in range(EPOCHS):
        batches.sampler.set_epoch(epoch)
        expected += [y for _, y in batches]

    deep_compare(expected, kept)

    saver = Training([])
    saver.save_at(SAVES["batch"], tmp_path, kill=True)
    with pytest.raises(Died):
        saver.trainer.run(loader(), max_epochs=EPOCHS)
    kept.clear()
    resumed = Training([], {"output_transform": lambda x, y, y_pred, loss: kept.append(y)})
    resumed.load(tmp_path)
    resumed.trainer.run(loader(), max_epochs=EPOCHS)
    deep_compare(expected[-len(kept) :], kept)


def test_steps_are_not_saved_in_half(tmp_path: Path) -> None:
    training = Training([], {"gradient_accumulation_steps": 2})
    training.save_at(Events.ITERATION_COMPLETED(once=3), tmp_path, kill=False)
    with pytest.raises(RuntimeError, match="must be saved between two steps"):
        training.train(BATCH // 2)


def test_checkpoints_hold_the_averages(tmp_path: Path) -> None:
    training = Training(ALGORITHMS["EMA and GradientClipping"]())
    training.save_at(Events.ITERATION_COMPLETED(once=4), tmp_path, kill=True)
    with pytest.raises(Died):
        training.train()
    saved = torch.load(tmp_path / "a.pt", weights_only=True)
    ema = dict(saved["composer"]["algorithms"])["EMA"]

    assert ema["ema_weights_active"]
    weights = saved["model"]["0.weight"]
    assert not torch.equal(ema["ema_model"]["named_parameters_dict"]["network.0.weight"], weights)


def test_an_evaluation_may_save_the_averages(tmp_path: Path) -> None:
    training = Training(ALGORITHMS["EMA and GradientClipping"]())
    saver: Any = DiskSaver(str(tmp_path), require_empty=False)
    best = Checkpoint(training.run.to_save(training.trainer), saver, filename_pattern="a.pt")
    training.evaluator.add_event_handler(Events.COMPLETED(once=1), best)
    final = training.train()

    assert torch.equal(training.seen[0], torch.load(tmp_path / "a.pt", weights_only=True)["model"]["0.weight"])
    deep_compare(with_our_trainer("EMA and GradientClipping"), final)


def test_a_checkpoint_without_the_trainer_resumes_exactly(tmp_path: Path) -> None:
    training = Training([])
    training.save_at(Events.ITERATION_COMPLETED(once=3), tmp_path, kill=True)
    with pytest.raises(Died):
        training.train()
    saved = torch.load(tmp_path / "a.pt", weights_only=True)
    training, other = Training([]), Training([])
    for each, missing in ((training, "trainer"), (other, "composer")):
        objects = each.run.to_save(each.trainer)
        del objects[missing]
        Checkpoint.load_objects(objects, saved)

    deep_compare(with_our_trainer("nothing"), training.train())
    with pytest.raises(ValueError, match=r"is at iteration 0, and the trainer at 3\. Save and load all"):
        other.train()


# ---- interruptions ----


@pytest.mark.parametrize("during", ["training", "evaluation"])
def test_a_failed_run_leaves_the_weights_of_training(during: str) -> None:
    training = Training(ALGORITHMS["all"]())
    random = torch.get_rng_state()
    engine = training.trainer if during == "training" else training.evaluator
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=3), die)
    with pytest.raises(Died):
        training.train()
    if during == "training":  # before other code has drawn
        assert torch.equal(random, torch.get_rng_state())
    else:
        assert torch.equal(training.training[-1], training.layers[0].weight)
    state = training.run.run.state
    assert state.timestamp.batch == (3 if during == "training" else LENGTH)


def test_an_error_of_the_first_step_says_what_the_step_saw(caplog: pytest.LogCaptureFixture) -> None:
    training = Training([], loss=lambda outputs, batch: criterion(outputs, batch).detach())
    with pytest.raises(RuntimeError, match="does not require grad") as caught:
        training.train()
    text = "\n".join(getattr(caught.value, "__notes__", [])) or caplog.text
    assert 1 == text.count("The loss has no gradient")


@pytest.mark.parametrize("step", [2, LENGTH, LENGTH + 1])
@pytest.mark.parametrize("error", [Died, KeyboardInterrupt])
def test_a_failed_run_goes_on_with_the_next_batch(error: type[BaseException], step: int) -> None:
    def fail(engine: Engine) -> None:
        raise error

    training = Training(ALGORITHMS["all"]())
    training.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=step), fail)
    with pytest.raises(error):
        training.train()
    assert training.run.run.state.timestamp.batch == step

    deep_compare(with_our_trainer("all"), training.train())
    assert (training.trainer.state.iteration, training.trainer.state.epoch) == (EPOCHS * LENGTH, EPOCHS)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_failed_is_trained_again(accumulate: int) -> None:
    calls = 0

    def failing(outputs: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 * accumulate:
            raise Died
        return criterion(outputs, batch)

    training = Training([], {"gradient_accumulation_steps": accumulate}, loss=failing)
    with pytest.raises(Died):
        training.train(BATCH // accumulate)
    assert training.run.run.state.timestamp.batch == 1
    training.train(BATCH // accumulate)

    assert training.run.run.state.timestamp.batch == EPOCHS * LENGTH
    assert training.trainer.state.iteration == EPOCHS * LENGTH * accumulate


def test_a_run_that_is_over_can_be_made_longer() -> None:
    training, whole = (Training(ALGORITHMS["SAM"](), max_duration=f"{EPOCHS + n}ep") for n in (0, 1))
    training.train()
    for epochs in (EPOCHS, EPOCHS + 1):
        with pytest.raises(ValueError, match=r"got '\dep'. To train longer, set `run\.run\.state\.max_duration`"):
            training.train(max_epochs=epochs)
    training.run.run.state.max_duration = f"{EPOCHS + 1}ep"

    deep_compare(whole.train(max_epochs=EPOCHS + 1), training.train(max_epochs=EPOCHS + 1))


def test_an_algorithm_with_a_state_belongs_to_one_run() -> None:
    average = EMA(half_life="2ba")
    first, second = Training([average]), Training([average])
    with pytest.raises(ValueError, match="a run that was created later uses the same `EMA` object"):
        first.train()
    second.train()


def test_a_run_that_ignite_interrupts_goes_on() -> None:
    training = Training(ALGORITHMS["all"]())
    training.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), training.trainer.interrupt)
    training.trainer.run(data(), max_epochs=EPOCHS)
    assert training.run.run.state.timestamp.batch == 3
    torch.rand(3)

    deep_compare(with_our_trainer("all"), training.train())


def test_a_handler_may_end_the_run_within_a_step() -> None:
    training = Training(ALGORITHMS["all"](), {"gradient_accumulation_steps": 2})
    training.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), training.trainer.terminate)
    training.train(BATCH // 2)

    assert training.run.run.state.timestamp.batch == 1


# ---- what is refused ----


class Resizing(Algorithm):
    """Changes the size of batches."""

    events = frozenset({Event.INIT})
    placement = Placement(provides={CHANGES_BATCH_SIZE})

    def apply(self, event: Event, state: State, logger: Logger) -> None: ...


class Ahead(Resizing):
    placement = Placement(provides={DISPLACES_WEIGHTS})


def test_what_ignite_cannot_do_is_refused() -> None:
    with pytest.raises(ConflictError, match=r"`Resizing` changes batch size.*loads and counts batches in advance"):
        Training(Resizing())
    with pytest.raises(ConflictError, match=r"`SAM` wraps optimizer.*The scaler of `amp_mode` steps one plain"):
        Training(SAM(), {"amp_mode": "amp", "scaler": True})
    with pytest.raises(
        ConflictError, match=r"`Ahead` displaces weights.*does not see that the scaler of `amp_mode` skips steps"
    ):
        Training(Ahead(), {"amp_mode": "amp", "scaler": True})


def test_everything_that_is_wrong_is_told_at_once() -> None:
    net, none = layers(), None
    with pytest.raises(ConflictError, match=r"(?s)4 problems.*`loss` must.*'fp7'.*`max_duration` .*`Resizing` changes"):
        IgniteRun(net, Resizing(), optimizer=sgd(net), max_duration=none, precision="fp7")  # type: ignore[arg-type]
    with pytest.raises(ConflictError, match=r"(?s)2 problems.*got 'apex'.*`SAM` wraps optimizer"):
        Training(SAM(), {"amp_mode": "apex", "scaler": True})
    with pytest.raises(ValueError, match=r"(?s)2 problems.*`max_epochs` must be 2.*`epoch_length` must be") as caught:
        Training([], {"gradient_accumulation_steps": 2}).train(max_epochs=3)
    assert not isinstance(caught.value, ConflictError)


def test_wrong_arguments_are_answered() -> None:
    net: Any = layers()
    with pytest.raises(TypeError, match=r"must be a `torch\.nn\.Module`, got object"):
        IgniteRun(object(), optimizer=sgd(net), loss=criterion, max_duration="1ep")  # type: ignore[arg-type]
    for name in ("optimizer", "max_duration"):
        given: Any = {"optimizer": sgd(net), "max_duration": "1ep", "loss": criterion, name: None}
        with pytest.raises(ValueError, match=f"`{name}` must be given, got None"):
            IgniteRun(net, [EMA()], **given)
    with pytest.raises(ValueError, match="must be given for a model that is not a `ComposerModel`, got Sequential"):
        IgniteRun(net, optimizer=sgd(net), max_duration="1ep")
    with pytest.raises(ValueError, match=r"`precision` must not be 'amp_fp16'.*amp_mode='amp'"):
        Training([], precision="amp_fp16")
    with pytest.raises(ValueError, match="`amp_mode` must be 'amp' or None, got 'apex'"):
        Training([], {"amp_mode": "apex"})
    with pytest.raises(ValueError, match="`amp_mode` must be None with `precision='amp_bf16'`"):
        Training([], {"amp_mode": "amp"}, precision="amp_bf16")
    with pytest.raises(RuntimeError, match="`create_supervised_trainer` must be called once"):
        Training([]).run.create_supervised_trainer()


def test_lengths_that_do_not_fit_are_answered() -> None:
    with pytest.raises(ValueError, match="`max_epochs` must be 2, the `max_duration` of the run, got 3"):
        Training([]).train(max_epochs=3)
    with pytest.raises(ValueError, match="`epoch_length` must be a multiple of `gradient_accumulation_steps=2`, got 5"):
        Training([], {"gradient_accumulation_steps": 2}).train()
    training = Training([])
    training.train()
    with pytest.raises(ValueError, match="`max_duration` must be longer than what is trained, got '2ep'"):
        training.train(max_epochs=4)


def test_ddp_must_look_for_unused_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapped(DistributedDataParallel):
        """Without a process group."""

        def __init__(self, find_unused_parameters: bool) -> None:
            torch.nn.Module.__init__(self)
            self.find_unused_parameters = find_unused_parameters

    net = layers()
    run = IgniteRun(net, LayerFreezing(), optimizer=sgd(net), loss=criterion, max_duration="1ep")
    assert run.find_unused_parameters
    with pytest.raises(ValueError, match="`model` must look for unused parameters"):
        run.create_supervised_trainer(Wrapped(False))
    run.create_supervised_trainer(Wrapped(True))


def test_a_duration_in_batches_is_reached() -> None:
    net = layers()
    run = IgniteRun(net, optimizer=sgd(net), loss=criterion, max_duration="7ba")
    with pytest.raises(ValueError, match=r"`max_epochs` must be at least 2.*got 1"):
        run.create_supervised_trainer().run(data())
    net = layers()
    run = IgniteRun(net, optimizer=sgd(net), loss=criterion, max_duration="7ba")
    run.create_supervised_trainer().run(data(), max_epochs=2)
    assert run.run.state.timestamp.batch == 7


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("label", ALGORITHMS)
def test_the_weights_on_a_gpu_equal_those_of_our_trainer(label: str) -> None:
    expected = with_our_trainer(label, device="gpu", precision="fp32")

    deep_compare(expected, Training(ALGORITHMS[label](), device="cuda", precision="fp32").train())
