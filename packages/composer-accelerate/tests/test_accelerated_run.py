"""Training in a loop on Accelerate gives the weights of composer's own `Trainer`, bit for bit."""

from __future__ import annotations

import copy
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, send_to_device
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.functional import cross_entropy

from composer.algorithms.ema import EMA
from composer.algorithms.gradient_clipping import GradientClipping
from composer.algorithms.label_smoothing import LabelSmoothing
from composer.algorithms.layer_freezing import LayerFreezing
from composer.algorithms.mixup import MixUp
from composer.algorithms.muon import Muon
from composer.algorithms.sam import SAM
from composer.core import (
    CHANGES_BATCH_SIZE,
    SCALES_SCHEDULE,
    Algorithm,
    Callback,
    ConflictError,
    Event,
    Placement,
    State,
)
from composer.hosts.accelerate import AcceleratedRun
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


class Loop:
    """A loop of a user, with a checkpoint after some step and an evaluation after each epoch."""

    def __init__(self, algorithms: Any, accumulate: int = 1, precision: str = "no", **options: Any) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.accelerator = Accelerator(
            gradient_accumulation_steps=accumulate,
            mixed_precision=precision,
            **{"cpu": True, **options.pop("accelerator", {})},
        )
        self.layers = layers()
        settings: dict[str, Any] = {"max_duration": f"{EPOCHS}ep", "loss": criterion, "seed": SEED, **options}
        self.run = AcceleratedRun(self.accelerator, self.layers, algorithms, **settings)
        self.net, self.optimizer, self.loader = self.run.prepare(
            self.layers, sgd(self.layers), data(BATCH // accumulate)
        )
        self.seen: list[torch.Tensor] = []
        self.training: list[torch.Tensor] = []

    def train(self, save: tuple[int, Path] | None = None, kill: bool = False) -> dict[str, Any]:
        count = itertools.count(1)
        for batches in self.run.epochs():
            for batch in batches:
                with self.accelerator.accumulate(self.net):
                    self.accelerator.backward(self.run.loss(batch))
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                if save is not None and next(count) == save[0]:
                    self.save(save[1])
                    if kill:
                        raise Died
            self.training.append(self.layers[0].weight.detach().clone())
            with self.run.evaluation(data()):
                torch.rand(3)  # drawn by other code
                for batch in send_to_device(list(data()), self.accelerator.device):
                    assert self.run.eval_forward(batch).shape == (BATCH, 4)
                self.seen.append(self.layers[0].weight.detach().clone())
        return copy.deepcopy(self.layers.state_dict())

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(str(folder))


class Died(Exception):
    """The process is lost."""


# ---- the weights ----


@pytest.mark.parametrize("label", ALGORITHMS)
def test_the_weights_equal_those_of_our_trainer(label: str) -> None:
    deep_compare(with_our_trainer(label), Loop(ALGORITHMS[label]()).train())


def test_a_model_of_composer_needs_no_loss() -> None:
    model, accelerator = ModuleWithLoss(layers(), cross_entropy), Accelerator(cpu=True)
    run = AcceleratedRun(accelerator, model, ALGORITHMS["all"](), max_duration=f"{EPOCHS}ep", seed=SEED)
    _, optimizer, _ = run.prepare(model, sgd(model), data())
    for batches in run.epochs():
        for batch in batches:
            accelerator.backward(run.loss(batch))
            optimizer.step()
            optimizer.zero_grad()

    deep_compare(with_our_trainer("all"), copy.deepcopy(model.module.state_dict()))


@pytest.mark.parametrize("label", ["SAM", "EMA and GradientClipping", "Muon"])
def test_two_batches_per_step_equal_microbatches(label: str) -> None:
    expected = with_our_trainer(label, device_train_microbatch_size=BATCH // 2)

    deep_compare(expected, Loop(ALGORITHMS[label](), accumulate=2).train())


@pytest.mark.parametrize("label", ["SAM", "all"])
def test_bfloat16_equals_that_of_our_trainer(label: str) -> None:
    expected = with_our_trainer(label, precision="amp_bf16")

    deep_compare(expected, Loop(ALGORITHMS[label](), precision="bf16").train())


class Float32Outputs(Callback):
    """Makes the model return float32."""

    def init(self, state: State, logger: Logger) -> None:
        state.model.register_forward_hook(lambda module, args, outputs: outputs.float())


def test_an_interpolated_loss_of_bfloat16_equals_that_of_float32_outputs() -> None:
    """Accelerate returns outputs in float32, so that the gradients of two losses are rounded once, not each."""
    options = {"precision": "amp_bf16"}
    actual = Loop([MixUp(interpolate_loss=True)], precision="bf16").train()

    deep_compare(HostProblem.train([MixUp(interpolate_loss=True)], callbacks=Float32Outputs(), **options), actual)
    with pytest.raises(AssertionError):
        deep_compare(HostProblem.train([MixUp(interpolate_loss=True)], **options), actual)


def test_a_compiled_model_has_the_same_weights() -> None:
    torch.compiler.reset()
    loop = Loop(ALGORITHMS["all"](), accelerator={"dynamo_backend": "eager"})

    assert isinstance(loop.net, torch._dynamo.OptimizedModule)
    deep_compare(with_our_trainer("all"), loop.train())


def test_checkpoints_on_the_way_change_nothing(tmp_path: Path) -> None:
    deep_compare(with_our_trainer("all"), Loop(ALGORITHMS["all"]()).train(save=(3, tmp_path)))


def test_schedulers_of_the_loop_are_scaled_and_stepped() -> None:
    class Scaling(Algorithm):
        """Sees the schedulers before training."""

        events = frozenset({Event.INIT})
        placement = Placement(provides={SCALES_SCHEDULE})
        seen: Any = None

        def apply(self, event: Event, state: State, logger: Logger) -> None:
            self.seen = list(state.schedulers)

    net, accelerator, scaling = layers(), Accelerator(cpu=True), Scaling()
    optimizer: Any = sgd(net)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    run = AcceleratedRun(accelerator, net, scaling, loss=criterion, max_duration="1ep")
    net, optimizer, _, prepared = run.prepare(net, optimizer, data(), scheduler)
    for batches in run.epochs():
        for batch in batches:
            accelerator.backward(run.loss(batch))
            optimizer.step()
            prepared.step()
            optimizer.zero_grad()

    assert scaling.seen == [scheduler]
    assert scheduler.get_last_lr() == [0.1 * 0.5**LENGTH]


def test_a_run_may_end_in_mid_epoch() -> None:
    loop = Loop(ALGORITHMS["EMA and GradientClipping"](), max_duration="7ba")
    loop.train()
    now = loop.run.run.state.timestamp

    assert (now.batch, now.epoch, loop.run.run.is_over()) == (7, 1, True)


# ---- events ----


class Recorder(Callback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        self.events.append(event.value)


def test_the_events_come_in_the_order_of_our_trainer() -> None:
    recorder, ours = Recorder(), Recorder()
    with_our_trainer("nothing", callbacks=ours)
    Loop([], callbacks=recorder).train()

    # Our own loop announces the end of the loader as well.
    expected = [
        a
        for a, b in zip(ours.events, [*ours.events[1:], ""], strict=True)
        if (a, b) != ("before_dataloader", "epoch_end")
    ]
    assert expected == [name for name in recorder.events if not name.startswith("eval")]


def test_averages_are_evaluated_and_left_in_the_model() -> None:
    loop = Loop(ALGORITHMS["EMA and GradientClipping"]())
    final = loop.train()

    assert len(loop.seen) == EPOCHS
    assert not torch.equal(loop.seen[0], loop.training[0])
    assert torch.equal(loop.seen[-1], final["0.weight"])


def test_the_plan_names_the_lines_of_the_loop() -> None:
    assert "from run.loss" in str(Loop(ALGORITHMS["all"]()).run.explain())


def test_ddp_is_told_of_unused_parameters() -> None:
    given = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    loop = Loop(ALGORITHMS["LayerFreezing"](), accelerator={"kwargs_handlers": [given]})
    handler = loop.accelerator.ddp_handler

    assert handler is not None
    assert (handler.find_unused_parameters, handler.gradient_as_bucket_view) == (True, True)
    assert Loop([]).accelerator.ddp_handler is None


# ---- checkpoints ----


@pytest.mark.parametrize("step", [3, LENGTH, LENGTH + 2])
@pytest.mark.parametrize("label", ["all", "LayerFreezing", "Muon"])
def test_a_killed_run_resumes_exactly(label: str, step: int, tmp_path: Path) -> None:
    with pytest.raises(Died):
        Loop(ALGORITHMS[label]()).train(save=(step, tmp_path), kill=True)

    torch.manual_seed(55)
    loop = Loop(ALGORITHMS[label]())
    with torch.no_grad():
        for parameter in loop.layers.parameters():
            parameter.zero_()
    loop.accelerator.load_state(str(tmp_path))
    deep_compare(with_our_trainer(label), loop.train())


def test_a_killed_run_with_two_batches_per_step_resumes_exactly(tmp_path: Path) -> None:
    expected = Loop(ALGORITHMS["all"](), accumulate=2).train()
    with pytest.raises(Died):
        Loop(ALGORITHMS["all"](), accumulate=2).train(save=(2 * LENGTH + 4, tmp_path), kill=True)
    loop = Loop(ALGORITHMS["all"](), accumulate=2)
    loop.accelerator.load_state(str(tmp_path))

    deep_compare(expected, loop.train())


def test_steps_are_not_saved_in_half(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"`save_state` must be called between two steps.*sync_gradients"):
        Loop([], accumulate=2).train(save=(3, tmp_path))


def test_checkpoints_hold_the_averages(tmp_path: Path) -> None:
    loop = Loop(ALGORITHMS["EMA and GradientClipping"]())
    with pytest.raises(Died):
        loop.train(save=(4, tmp_path), kill=True)
    saved = torch.load(tmp_path / "composer_0.pt", weights_only=True)
    ema = dict(saved["algorithms"])["EMA"]

    assert ema["ema_weights_active"]
    weights = load_file(tmp_path / "model.safetensors")["0.weight"]
    assert not torch.equal(ema["ema_model"]["named_parameters_dict"]["network.0.weight"], weights)


def test_checkpoints_of_a_loop_without_algorithms_can_be_loaded(tmp_path: Path) -> None:
    plain = Loop([])
    plain.save(tmp_path)
    (tmp_path / "composer_0.pt").unlink()
    loop = Loop([])
    loop.accelerator.load_state(str(tmp_path))

    assert loop.run.run.state.timestamp.batch == 0


def test_averages_can_be_saved_apart() -> None:
    loop, is_average = Loop(ALGORITHMS["EMA and GradientClipping"]()), False
    for batches in loop.run.epochs():
        for batch in batches:
            loop.accelerator.backward(loop.run.loss(batch))
            loop.optimizer.step()
            before = loop.layers[0].weight.detach().clone()
            with loop.run.saving():
                is_average |= not torch.equal(before, loop.layers[0].weight)
            assert torch.equal(before, loop.layers[0].weight)
            loop.optimizer.zero_grad()

    assert is_average
    deep_compare(with_our_trainer("EMA and GradientClipping"), copy.deepcopy(loop.layers.state_dict()))


# ---- interruptions ----


def test_an_interrupted_loop_can_be_continued() -> None:
    loop = Loop(ALGORITHMS["all"]())
    random = torch.get_rng_state()
    weights: Any = None
    for batches in loop.run.epochs():
        for batch in batches:
            weights = loop.layers[0].weight.detach().clone()
            loop.run.loss(batch)
            break
        break
    loop.run.abort()

    assert torch.equal(random, torch.get_rng_state())
    assert torch.equal(weights, loop.layers[0].weight)
    loop.train()
    assert loop.run.run.is_over()


def test_a_run_that_is_over_tells_it_and_can_be_made_longer() -> None:
    loop = Loop(ALGORITHMS["EMA and GradientClipping"]())
    loop.train()
    with pytest.warns(UserWarning, match=r"`max_duration`, '\dep': nothing is trained. To train longer, set"):
        loop.train()
    loop.run.run.state.max_duration = f"{EPOCHS + 1}ep"
    loop.train()

    assert loop.run.run.state.timestamp.batch == (EPOCHS + 1) * LENGTH


def test_several_runs_of_an_accelerator_have_files_of_their_own(tmp_path: Path) -> None:
    def make() -> tuple[Accelerator, list[AcceleratedRun]]:
        accelerator, runs = Loop([]).accelerator, list[AcceleratedRun]()
        for algorithms in ([EMA(half_life="2ba")], [GradientClipping("norm", 0.1)]):
            net = layers()
            run = AcceleratedRun(accelerator, net, algorithms, max_duration="2ep", loss=criterion)
            run.prepare(net, sgd(net), data())
            runs.append(run)
        return accelerator, runs

    accelerator, (first, second) = make()
    first.run.state.timestamp = first.run.state.timestamp.to_next_batch(8)
    second.run.state.timestamp = second.run.state.timestamp.to_next_batch(4).to_next_batch(4)
    accelerator.save_state(str(tmp_path))
    assert {"composer_0.pt", "composer_1_0.pt", "composer_2_0.pt"} <= {each.name for each in tmp_path.iterdir()}

    accelerator, (first, second) = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.load_state(str(tmp_path))
    assert (first.run.state.timestamp.batch, second.run.state.timestamp.batch) == (1, 2)


def test_what_is_prepared_already_is_refused() -> None:
    loop = Loop([])
    other = AcceleratedRun(loop.accelerator, loop.layers, [], max_duration="1ep", loss=criterion)
    with pytest.raises(ValueError, match="must be given plain optimizers, got one that Accelerate has prepared"):
        other.prepare(loop.layers, loop.optimizer)
    for use in (lambda: other.evaluation(data()), other.saving, lambda: next(iter(other.epochs()))):
        with pytest.raises(RuntimeError, match="must be called after `prepare`"):
            use()


def test_an_algorithm_with_a_state_belongs_to_one_run() -> None:
    average = EMA(half_life="2ba")
    first, second = Loop([average]), Loop([average])
    with pytest.raises(ValueError, match="a run that was created later uses the same `EMA` object"):
        first.train()
    second.train()


@pytest.mark.parametrize("label", ["nothing", "EMA and GradientClipping", "SAM", "Muon"])
def test_an_interruption_after_a_step_repeats_no_batch(label: str) -> None:
    def interrupted() -> None:
        for batches in loop.run.epochs():
            for number, batch in enumerate(batches):
                loop.accelerator.backward(loop.run.loss(batch))
                loop.optimizer.step()
                if number == 2:
                    raise KeyboardInterrupt
                loop.optimizer.zero_grad()

    loop = Loop(ALGORITHMS[label]())
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    loop.optimizer.zero_grad()
    assert loop.run.run.state.timestamp.batch == 3

    deep_compare(with_our_trainer(label), loop.train())


# ---- what is refused ----


class Resizing(Algorithm):
    """Changes the size of batches."""

    events = frozenset({Event.INIT})
    placement = Placement(provides={CHANGES_BATCH_SIZE})

    def apply(self, event: Event, state: State, logger: Logger) -> None: ...


def test_what_accelerate_cannot_do_is_refused() -> None:
    with pytest.raises(ConflictError, match=r"`Resizing` changes batch size.*loads and counts batches in advance"):
        Loop(Resizing())


def test_everything_that_is_wrong_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    with monkeypatch.context() as patch:
        patch.setattr(type(accelerator), "distributed_type", property(lambda self: DistributedType.XLA))
        with pytest.raises(
            ConflictError, match=r"(?s)4 problems.*got XLA.*`loss` must be given.*1 y.*`Resizing` chang"
        ):
            AcceleratedRun(accelerator, layers(), Resizing(), max_duration="1 year")
        with pytest.raises(ValueError, match="2 problems") as caught:
            AcceleratedRun(accelerator, layers(), max_duration="1ep")
    assert not isinstance(caught.value, ConflictError)
    loop = Loop([])
    other = AcceleratedRun(loop.accelerator, layers(), loss=criterion, max_duration="1ep")
    with pytest.raises(ValueError, match=r"(?s)2 problems.*the model of the run.*plain optimizers"):
        other.prepare(loop.optimizer)


def test_clipping_by_the_loop_conflicts() -> None:
    loop = Loop(GradientClipping("norm", 0.1))
    with pytest.raises(ConflictError, match=r"clip_grad_norm_` must not be called, since `GradientClipping` clips as"):
        loop.accelerator.clip_grad_norm_(loop.net.parameters(), 1.0)
    loop = Loop(SAM())
    for batches in loop.run.epochs():
        for _ in batches:
            with pytest.raises(ConflictError, match=r"clip_grad_value_` .* an optimizer computes gradients again"):
                loop.accelerator.clip_grad_value_(loop.net.parameters(), 1.0)
            break
        break


def test_clipping_by_the_loop_equals_the_algorithm() -> None:
    loop = Loop([])
    for batches in loop.run.epochs():
        for batch in batches:
            loop.accelerator.backward(loop.run.loss(batch))
            loop.accelerator.clip_grad_norm_(loop.net.parameters(), 0.1)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    expected = Loop(GradientClipping("norm", 0.1)).train()

    deep_compare(expected, copy.deepcopy(loop.layers.state_dict()))


@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA])
def test_what_keeps_parameters_of_its_own_is_refused(kind: DistributedType, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(type(accelerator), "distributed_type", property(lambda self: kind))
    with pytest.raises(ValueError, match=f"must be on one device, in DDP or sharded by FSDP2, got {kind.name}"):
        AcceleratedRun(accelerator, layers(), loss=criterion, max_duration="1ep")


def test_fsdp1_and_fp8_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    with monkeypatch.context() as patch:
        patch.setattr(type(accelerator), "distributed_type", property(lambda self: DistributedType.FSDP))
        with pytest.raises(ValueError, match=r"must not be sharded by FSDP1.*fsdp_version=2"):
            AcceleratedRun(accelerator, layers(), loss=criterion, max_duration="1ep")
    monkeypatch.setattr(type(accelerator), "mixed_precision", property(lambda self: "fp8"))
    with pytest.raises(ValueError, match="`mixed_precision` must be one of no, bf16, fp16, got 'fp8'"):
        AcceleratedRun(accelerator, layers(), loss=criterion, max_duration="1ep")


def test_scalers_do_not_repeat_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(accelerator, "scaler", torch.amp.GradScaler("cpu"))
    with pytest.raises(ConflictError, match=r"`SAM` wraps optimizer.*mixed_precision='bf16'"):
        AcceleratedRun(accelerator, layers(), SAM(), loss=criterion, max_duration="1ep")


def test_wrong_arguments_are_answered() -> None:
    accelerator, net = Accelerator(cpu=True), layers()
    wrong: Any = object()
    with pytest.raises(TypeError, match=r"`accelerator` must be an `accelerate\.Accelerator`, got object"):
        AcceleratedRun(wrong, net, loss=criterion, max_duration="1ep")
    with pytest.raises(TypeError, match=r"must be a `torch\.nn\.Module`, got object"):
        AcceleratedRun(accelerator, wrong, loss=criterion, max_duration="1ep")
    with pytest.raises(ValueError, match="must be given for a model that is not a `ComposerModel`, got Sequential"):
        AcceleratedRun(accelerator, net, max_duration="1ep")
    run = AcceleratedRun(accelerator, net, loss=criterion, max_duration="1ep")
    with pytest.raises(RuntimeError, match="`epochs` must be called after `prepare`"):
        next(run.epochs())
    for objects in ((), (net,), (sgd(net),), (layers(), sgd(net))):
        with pytest.raises(ValueError, match="`prepare` must be given the model of the run and its optimizers"):
            run.prepare(*objects)
    net, optimizer = run.prepare(net, sgd(net))
    with pytest.raises(RuntimeError, match="`prepare` must be called once"):
        run.prepare(net, optimizer)
    with pytest.raises(ValueError, match="Give the loader to `prepare`"):
        next(run.epochs())


def test_steps_take_no_closure_and_are_not_forgotten() -> None:
    loop = Loop([])
    for batches in loop.run.epochs():
        loop.accelerator.backward(loop.run.loss(next(batches)))
        with pytest.raises(ValueError, match=r"`closure` must not be given.*`optimizer\.step\(\)`"):
            loop.optimizer.step(lambda: None)
        break
    loop = Loop([])
    loop.optimizer.step = lambda: None
    with pytest.raises(RuntimeError, match="finish each step"):
        loop.train()


def test_steps_follow_the_loss_of_the_run() -> None:
    loop = Loop([])
    for batches in loop.run.epochs():
        batch = next(batches)
        loop.accelerator.backward(criterion(loop.net(batch[0]), batch))
        with pytest.raises(RuntimeError, match=r"must follow a backward pass of `run\.loss`"):
            loop.optimizer.step()
        break


@pytest.mark.parametrize("algorithms", [[], [SAM()]])
def test_checkpoints_of_torch_may_create_the_states_of_optimizers(algorithms: list[Algorithm]) -> None:
    """It steps once without gradients, at a rate of 0: no step of training."""
    loop = Loop(algorithms)
    before = copy.deepcopy(loop.net.state_dict())
    get_optimizer_state_dict(loop.net, loop.optimizer)
    deep_compare(loop.net.state_dict(), before)
    assert loop.run.run.state.timestamp.batch == 0
    loop.train()


def test_schedulers_of_optimizers_that_are_replaced_are_refused() -> None:
    class Replacing(Algorithm):
        """Replaces the optimizer."""

        events = frozenset({Event.INIT})

        def apply(self, event: Event, state: State, logger: Logger) -> None:
            state.optimizers = sgd(state.model)

    net, accelerator = layers(), Accelerator(cpu=True)
    optimizer = sgd(net)
    run = AcceleratedRun(accelerator, net, Replacing(), loss=criterion, max_duration="1ep")
    with pytest.raises(ValueError, match="StepLR drives SGD, which an algorithm has replaced"):
        run.prepare(net, optimizer, data(), torch.optim.lr_scheduler.StepLR(optimizer, 1))


def test_the_optimizer_that_repeats_passes_steps_first() -> None:
    class Repeating(torch.optim.SGD):
        needs_closure = True

        def step(self, closure: Any = None) -> Any:
            closure()
            return super().step()

    net, accelerator = layers(), Accelerator(cpu=True)
    run = AcceleratedRun(accelerator, net, loss=criterion, max_duration="1ep")
    first, second = torch.optim.SGD(net[0].parameters(), lr=0.1), Repeating(net[1:].parameters(), lr=0.1)
    net, prepared, other, _ = run.prepare(net, first, second, data())
    for batches in run.epochs():
        accelerator.backward(run.loss(next(batches)))
        prepared.step()
        with pytest.raises(RuntimeError, match="Repeating must be the first optimizer that steps"):
            other.step()
        break


def test_an_epoch_that_the_loop_leaves_early_is_over() -> None:
    loop = Loop([])
    for batches in loop.run.epochs():
        for batch in batches:
            loop.accelerator.backward(loop.run.loss(batch))
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            if loop.run.run.state.timestamp.batch_in_epoch == 1:  # the second is not counted yet
                break
    now = loop.run.run.state.timestamp
    assert (now.epoch, now.batch) == (EPOCHS, 2 * EPOCHS)


def test_a_class_is_no_algorithm() -> None:
    algorithms: Any = [EMA]
    with pytest.raises(TypeError, match=r"got the class `EMA`; pass `EMA\(\.\.\.\)`"):
        AcceleratedRun(Accelerator(cpu=True), layers(), algorithms, loss=criterion, max_duration="1ep")


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("label", ALGORITHMS)
def test_the_weights_on_a_gpu_equal_those_of_our_trainer(label: str) -> None:
    expected = with_our_trainer(label, device="gpu", precision="fp32")

    deep_compare(expected, Loop(ALGORITHMS[label](), accelerator={"cpu": False}).train())
