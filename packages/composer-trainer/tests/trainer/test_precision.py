"""Tests of precision, gradient scaling and compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shared_runs import Overflowing

from composer.core import Algorithm, Event, Precision, State
from composer.devices import DeviceCPU, DeviceGPU
from composer.loggers import Logger
from composer.testing import SimpleModel, deep_compare
from composer.trainer.construction import resolve_precision
from composer.trainer.precision import ClosureGradScaler

MakeTrainer = Any  # the fixture's class, in conftest.py


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("amp_bf16", torch.bfloat16), ("amp_fp16", torch.float16)]
)
def test_forward_and_evaluation_run_in_the_precision(
    make_trainer: MakeTrainer, precision: str, dtype: torch.dtype
) -> None:
    seen: list[torch.dtype] = []

    class Watching(Algorithm):
        events = frozenset({Event.AFTER_FORWARD, Event.EVAL_AFTER_FORWARD})

        def apply(self, event: Event, state: State, logger: Logger) -> None:
            seen.append(state.outputs.dtype)

    trainer = make_trainer(
        precision=precision, algorithms=Watching(), eval_dataloader=make_trainer.loader(4), max_duration="1ep"
    )
    trainer.fit()

    assert {dtype} == set(seen)
    assert {torch.float32} == {p.dtype for p in trainer.state.model.parameters()}
    assert (trainer.state.scaler is not None) == (precision == "amp_fp16")
    assert [dtype] * 4 == [output.dtype for output in trainer.predict(make_trainer.loader())]


@pytest.mark.parametrize(("supported", "precision"), [(True, Precision.AMP_BF16), (False, Precision.AMP_FP16)])
def test_the_default_on_a_gpu_is_bf16_where_there_are_units_for_it(
    monkeypatch: pytest.MonkeyPatch, supported: bool, precision: Precision
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported or including_emulation)

    assert precision is resolve_precision(None, DeviceGPU.__new__(DeviceGPU))
    assert Precision.FP32 is resolve_precision(None, DeviceCPU())


def test_precision_may_change_between_fits(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_duration="1ep")
    trainer.fit()
    assert trainer.state.scaler is None
    trainer.fit(duration="1ep", precision="amp_fp16")

    assert Precision.AMP_FP16 is trainer.state.precision
    assert isinstance(trainer.state.scaler, torch.amp.GradScaler)


def test_gradients_are_unscaled_when_algorithms_see_them(make_trainer: MakeTrainer) -> None:
    norms: list[torch.Tensor] = []

    class Norms(Algorithm):
        events = frozenset({Event.AFTER_TRAIN_BATCH})

        def apply(self, event: Event, state: State, logger: Logger) -> None:
            norms.append(
                torch.nn.utils.get_total_norm([p.grad for p in state.model.parameters() if p.grad is not None])
            )

    for precision in ("fp32", "amp_fp16"):
        make_trainer(precision=precision, algorithms=Norms(), max_duration="1ba").fit()

    # fp16 keeps 11 bits; a scale of 65536 that was left in would be off by that factor.
    torch.testing.assert_close(norms[0], norms[1], rtol=2e-2, atol=0)


def test_a_closure_returns_nothing_when_gradients_overflow(make_trainer: MakeTrainer) -> None:
    class Explodes(SimpleModel):
        def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            return super().loss(outputs, batch).float() * 1e30

    model = Explodes()
    optimizer = Overflowing(model.parameters(), lr=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = make_trainer(model=model, optimizers=optimizer, precision="amp_fp16", max_duration="3ba")
    assert isinstance(trainer.state.scaler, ClosureGradScaler)
    scale = trainer.state.scaler.get_scale()
    trainer.fit()

    assert [None] * 3 == optimizer.losses
    deep_compare(before, {name: p.detach() for name, p in model.named_parameters()})
    assert scale / 8 == trainer.state.scaler.get_scale()


@pytest.mark.parametrize("pass_", [0, 1, 2])
def test_the_step_of_an_optimizer_that_does_not_know_overflows_is_broken_off(
    make_trainer: MakeTrainer, pass_: int
) -> None:
    passes: list[int] = []

    class Explodes(SimpleModel):
        def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            passes.append(len(passes))
            return super().loss(outputs, batch).float() * (1e30 if passes[-1] == pass_ else 1.0)

    model = Explodes()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = make_trainer(
        model=model, optimizers=torch.optim.LBFGS(model.parameters(), lr=0.1), precision="amp_fp16", max_duration="1ba"
    )
    assert trainer.state.scaler is not None
    scale = trainer.state.scaler.get_scale()
    trainer.fit()

    assert pass_ + 1 == len(passes)
    assert scale / 2 == trainer.state.scaler.get_scale()
    deep_compare(before, {name: p.detach() for name, p in model.named_parameters()})


def test_a_closure_scaler_steps_like_torchs_where_nothing_overflows(make_trainer: MakeTrainer) -> None:
    def train(cls: type[torch.optim.Optimizer]) -> dict[str, Any]:
        model = make_trainer.model()
        make_trainer(model=model, optimizers=cls(model.parameters(), lr=0.1), precision="amp_fp16").fit()  # type: ignore[call-arg]
        return dict(model.named_parameters())

    deep_compare(train(torch.optim.SGD), train(Overflowing))


@pytest.mark.parametrize("already", [False, True])
def test_compiled_models_train_like_eager_ones(make_trainer: MakeTrainer, already: bool) -> None:
    eager, compiled = make_trainer.model(), make_trainer.model()
    make_trainer(model=eager).fit()
    given = torch.compile(compiled, backend="eager") if already else compiled
    trainer = make_trainer(
        model=given,
        optimizers=torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.9),
        compile_config={"backend": "eager"},
    )
    trainer.fit()

    assert trainer.state.model is compiled
    assert compiled._compiled_call_impl is not None
    deep_compare(dict(eager.named_parameters()), dict(compiled.named_parameters()), atol=1e-6)


def test_a_layer_that_torch_cannot_train_in_the_layout_that_its_compiler_chooses_warns(
    make_trainer: MakeTrainer,
) -> None:
    def narrow() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Conv2d(4, 2, 1, stride=2))

    with pytest.warns(
        UserWarning, match=r"`module\.1` \(Conv2d\(4, 2, .* or pass `compile_config=\{\"options\""
    ) as caught:
        make_trainer(model=narrow(), loss=torch.nn.functional.cross_entropy, compile_config={})

    assert caught[0].filename.endswith("conftest.py")  # which creates the Trainer
    for config in ({"options": {"layout_optimization": False}}, {"backend": "eager"}):
        make_trainer(model=narrow(), loss=torch.nn.functional.cross_entropy, compile_config=config)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_an_overflow_is_found_in_flags_of_any_shape(shape: tuple[int, ...]) -> None:
    scaler = ClosureGradScaler("cpu")
    scaler.scale(torch.ones(1))

    assert scaler._overflowed([torch.zeros(shape), torch.ones(shape)])
    assert not scaler._overflowed([torch.zeros(shape), torch.zeros(shape)])
